"""Attention over parts of the keys in training: partial results that may be reshaped before they
are merged, with gradients through all of it.

    parts = [memory_efficient_attention_partial_autograd(q, k, v) for k, v in blocks]
    out = merge_attentions_autograd(*parts)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .... import merge
from ....attn_bias import AttentionBias
from . import memory_efficient_attention_partial
from .common import AttentionFwOpBase, AttentionOp


class Partial:
    """Attention over a part of the keys: (attn, lse), both differentiable.

    Shapes: attn [B, M, H, K] with lse [B, H, M], or [B, M, G, H, K] with [B, G, H, M].
    placeholder is xFormers' and not used: lse has a gradient of its own here.
    """

    def __init__(self, attn: Tensor, lse: Tensor, placeholder: Tensor | None = None) -> None:
        self._attn = attn
        self._lse = lse
        self._placeholder = placeholder

    def is_bmghk(self) -> bool:
        """Whether it is in groups."""
        return self._attn.dim() == 5

    def apply(self, fn: Callable[[Tensor], Tensor]) -> Partial:
        """`fn` of attn, and of lse as if that were attn with K = 1.

        fn: anything on batch, length and heads (slices, padding, reshapes) that leaves K alone.
        """
        lse = fn(self._lse.movedim(-1, 1).unsqueeze(-1)).squeeze(-1).movedim(1, -1)
        spare = None if self._placeholder is None else fn(self._placeholder)
        return type(self)(fn(self._attn), lse, spare)

    def _tuple(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._attn, self._lse, self._placeholder


def memory_efficient_attention_partial_autograd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> Partial:
    """`memory_efficient_attention_partial` as a `Partial`."""
    attn, lse = memory_efficient_attention_partial(
        query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype
    )
    return Partial(attn, lse)


def merge_attentions_autograd(*partials: Partial) -> Tensor:
    """The output over all keys from parts of them, differentiable.

    Raises: ValueError without a part.
    """
    if not partials:
        raise ValueError("No partials to merge")
    if len(partials) == 1:
        return partials[0]._attn
    attns, sums = [x._attn for x in partials], [x._lse for x in partials]
    return merge.merge_attentions(attns, sums, write_lse=False)[0]
