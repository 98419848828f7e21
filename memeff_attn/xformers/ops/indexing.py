"""Rows picked out of tensors and added back: stochastic depth of vision transformers (DINOv2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scaled_index_add(
    input: Tensor,
    index: Tensor,
    source: Tensor,
    scaling: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """input[index[i]] += alpha * scaling * source[i], in place; returns input.

    Shapes: input [B, M, D], index [I], source [I, M, D], scaling [D].
    Args: index: no number twice.
    Source: interface of xFormers.
    """
    update = source if scaling is None else source * scaling
    return input.index_add_(0, index, update.to(input.dtype), alpha=alpha)


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """The rows sources[s][indices[s]] of all s, one after the other in one dimension.

    Shapes: sources[s] [rows, columns], indices[s] [picked] -> [sum of picked * columns].
    Source: interface of xFormers.
    """
    picked = (x.index_select(0, i) for x, i in zip(sources, indices, strict=True))
    return torch.cat([x.flatten() for x in picked])
