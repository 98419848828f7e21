"""Attention over parts of the keys, put together: out and log-sum-exp of each part are enough.

lse = log sum_s exp(lse_s),  out = sum_s exp(lse_s - lse) out_s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over a part of the keys."""

    attn: Tensor  # [B, M, H, Kv], [B, M, G, H, Kv] or [B, M, Kv]
    lse: Tensor  # [B, H, M], [B, G, H, M] or [B, 1, M]


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) over all keys from S parts of them: lse = log sum_s exp(lse_s),
    out = sum_s exp(lse_s - lse) out_s; differentiable for every out_s and lse_s.

    Shapes: attn_split [S, B, M, H, Kv] or [S, B, M, G, H, Kv] with lse_split [S, B, H, M] or
        [S, B, G, H, M], or both as sequences of S tensors without the S, of any strides and shared
        memory; also [B, M, Kv] with [B, 1, M]. Packed sequences are B = 1. out and lse without S.
    Dtypes: out_s any floating one, out is output_dtype or theirs; lse float32, float64 where the
        parts' is.
    Args: write_lse: False: lse is not computed, None takes its place.
    Memory: out in float32 and one part's product at a time; where a gradient is asked for, all
        parts' products.
    Numerics: sums in float32 (float64 where an input is), relative to the largest lse_s. A part
        with lse_s = -inf has weight zero, its out_s is not looked at, NaN or not. A query of which
        all parts say -inf has out 0 and lse -inf, and its gradients are 0.
    Raises: ValueError where there is no part, or shapes disagree.
    Source: FlashAttention's merge of key blocks; interface of xFormers.
    """
    parts, sums = _unstacked("attn_split", attn_split), _unstacked("lse_split", lse_split)
    _check(parts, sums)
    compute = torch.promote_types(_common_dtype([*parts, *sums]), torch.float32)
    with torch.autocast(parts[0].device.type, enabled=False):
        lse = torch.stack([x.to(compute) for x in sums])  # [S, B, H, M]
        largest = lse.detach().amax(0)
        shift = largest.masked_fill(largest == -math.inf, 0.0)
        weights = torch.exp(lse - shift)
        total = weights.sum(0)
        dead = total == 0
        total = total.masked_fill(dead, 1.0)
        out = _weighted_sum(parts, weights / total, compute)
        merged = (shift + total.log()).masked_fill(dead, -math.inf) if write_lse else None
    return out.to(output_dtype or _common_dtype(parts)), merged


def merge_attentions_autograd(*partials: Partial) -> Tensor:
    """out over all keys from parts of them, as `merge_attentions`; gradients reach the parts'
    log-sum-exp too.

    Raises: ValueError without a part.
    """
    if not partials:
        raise ValueError("merge_attentions_autograd needs at least one Partial")
    attns, sums = zip(*partials, strict=True)
    return merge_attentions(attns, sums, write_lse=False)[0]


def _weighted_sum(parts: Sequence[Tensor], weights: Tensor, compute: torch.dtype) -> Tensor:
    """sum_s weights_s out_s in `compute`; weights [S, B, H, M]."""
    total: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        weight = weight.movedim(-1, 1)  # [B, M, H]; of 3-D parts [B, M, 1]
        if part.dim() > 3:
            weight = weight.unsqueeze(-1)
        product = part.to(compute).masked_fill(weight == 0, 0.0) * weight
        total = product if total is None else total + product
    assert total is not None
    return total


def _unstacked(name: str, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    parts = x.unbind() if isinstance(x, Tensor) else tuple(x)
    if not parts:
        raise ValueError(f"{name} holds no part")
    return parts


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _check(parts: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    if len(parts) != len(sums):
        raise ValueError(f"{len(parts)} parts of attn_split, {len(sums)} of lse_split")
    shape = tuple(parts[0].shape)
    if not 3 <= len(shape) <= 5:
        raise ValueError(
            f"a part must be [B, M, H, Kv], [B, M, G, H, Kv] or [B, M, Kv], got {shape}"
        )
    heads = (1,) if len(shape) == 3 else shape[2:-1]
    expected = (shape[0], *heads, shape[1])
    for s, (part, lse) in enumerate(zip(parts, sums, strict=True)):
        if tuple(part.shape) != shape or tuple(lse.shape) != expected:
            raise ValueError(
                f"part {s}: expected attn {shape} and lse {expected}, got {tuple(part.shape)} and "
                f"{tuple(lse.shape)}"
            )
