"""Attention as its definition, to compare with: `attention` and `attention_backward` in fp64 (the
oracle), `eager` in the inputs' own dtype.

All take what `memory_efficient_attention` takes (3-D, 4-D and 5-D inputs, fewer key heads, every
mask, bias and `MaskRule`), go through the sequences one by one and work block by block over the
queries, so that the oracle is usable at M = 4096 and beyond.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .blockwise import Outer, Views, backward_into, forward_into, grouped, new_output, views_of
from .inputs import default_scale, lse_shape
from .mask_rule import MaskRule, mask_rule, tensor_of
from .masks_base import ANCHOR_NONE, UNLIMITED, AttentionBias
from .masks_paged import paged_rows

# Scores held at once: 4 MB in fp32. Measured on a CPU at M = N = 4096: smaller blocks pay for their
# count, larger ones leave the caches.
SCORES_PER_BLOCK = 1 << 20


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | MaskRule | None = None,
    scale: float | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scale * Q K^T + bias)) V and its log-sum-exp, in fp64: the oracle of the
    whole project.

    Shapes: as `memory_efficient_attention`; log-sum-exp [B, H, M] ([B, 1, M] for 3-D, [B, G, H, M]
        for 5-D inputs), with sequences thus [1, H, all queries].
    Dtypes: any floating dtype, both results are float64.
    Args: as `memory_efficient_attention`; the default scale is K ** -0.5. p > 0 needs seed, the
        call's {seed, offset} (memeff_attn.dropout); sequence s of a packed batch counts as batch
        entry s, rows and columns within it.
    Memory: O(M + N) and one block of scores.
    Numerics: the log-sum-exp knows no dropout; a query that sees no key gives 0 and -inf; a finite
        bias is a number, however negative.
    Raises: ValueError where shapes disagree.
    Source: the contract in docs/design.md.
    """
    with torch.autocast(query.device.type, enabled=False):
        return blockwise(query, key, value, attn_bias, scale, torch.float64, p=p, seed=seed)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | MaskRule | None = None,
    scale: float | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    compute: torch.dtype = torch.float64,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of sum(grad_out * attention(...)), where given plus sum(grad_lse * lse), for query,
    key, value and bias, in fp64: the oracle of the backward pass.

    With D the kept weights' scale (0 where dropped) and dO = grad_out:
    dV = (P * D)^T dO, dP = D * (dO V^T), dS = P * (dP - rowsum(P * dP) + dLSE),
    dQ = scale * dS K, dK = scale * dS^T Q, dBias = dS.

    Shapes: those of the inputs. What one row serves in many places (shared key heads, a broadcast
        bias) has the sum of its gradients.
    Dtypes: any floating dtype; results, and every step, in `compute`. No gradient (None) for a bool
        bias or a mask that adds no tensor; the shape of the tensor where it adds one.
    Args: as `attention`; grad_lse: of the log-sum-exp's shape, its rows that see no key are not
        read.
    Memory: the gradients and a few blocks of scores.
    Numerics: a query that sees no key adds exactly 0 to every gradient, whatever its grad_out.
    Raises: ValueError where shapes disagree.
    Source: the contract in docs/design.md.
    """
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        grads = backward_blockwise(
            grad_out,
            query,
            key,
            value,
            attn_bias,
            scale,
            compute,
            p=p,
            seed=seed,
            grad_lse=grad_lse,
        )
    grad_query, grad_key, grad_value, grad_bias = grads
    assert grad_query is not None and grad_key is not None and grad_value is not None
    return grad_query, grad_key, grad_value, grad_bias


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | MaskRule | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * Q K^T + bias) V in plain PyTorch, every step in the inputs' dtype: what a
    user would write.

    Shapes: as `memory_efficient_attention`.
    Dtypes: that of the query, results too.
    Args: as there.
    Memory: O(B * H * M * N), on purpose.
    Numerics: rounds after each step; a query that sees no key gives 0.
    Raises: ValueError where shapes disagree.
    Source: the baseline of the tolerance rule, tests/tolerance.py.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _eager(query, key, value, attn_bias, scale)


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | MaskRule | None,
    scale: float | None,
) -> Tensor:
    rule = mask_rule(attn_bias, query, key)
    scale = default_scale(query) if scale is None else scale
    out = new_output(query, value.shape[-1], query.dtype)
    for part in _parts(rule, key):
        view = _views(rule, part, query, key, value, rule.bias)
        rows = _eager_part(view, scale, rule)
        grouped(_rows(out, part.queries), view.groups).copy_(rows)
    return out


def _eager_part(view: Views, scale: float, rule: MaskRule) -> Tensor:
    scores = torch.matmul(view.query, view.key.transpose(-1, -2)) * scale
    if view.bias is not None and view.bias.dtype == torch.bool:
        scores = scores.masked_fill(~view.bias, -math.inf)
    elif view.bias is not None:
        scores = scores + view.bias
    if rule.anchor != ANCHOR_NONE:
        seen = rule.window.visible(view.rows, view.keys, view.query.device)
        scores = scores.masked_fill(~seen, -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    # Zero before the product: oneDNN's bf16 product spreads NaN to the row beside it.
    weights = torch.softmax(scores, -1).to(view.query.dtype).masked_fill(dead, 0.0)
    return torch.matmul(weights, view.value)


# ---- sequences: each is a call of its own on rows of the inputs ----


_WHOLE = slice(None)


class _Part(NamedTuple):
    """One sequence, or the whole call where there are none."""

    number: int
    queries: slice
    keys: slice | Tensor  # rows of key and value; of paged keys int64


def _parts(rule: MaskRule, key: Tensor) -> Iterator[_Part]:
    """Reads the lengths from the device."""
    if rule.query_starts is None:
        yield _Part(0, _WHOLE, _WHOLE)
        return
    starts = rule.query_starts.tolist()
    firsts = [0] * rule.sequences if rule.key_starts is None else rule.key_starts.tolist()
    if rule.key_lengths is None:
        ends = firsts[1:]
    else:
        lengths = rule.key_lengths.tolist()
        ends = [first + length for first, length in zip(firsts, lengths, strict=False)]
    for s in range(rule.sequences):
        rows: slice | Tensor = slice(firsts[s], ends[s])
        if rule.block_tables is not None:
            rows = paged_rows(rule.block_tables[s], rule.page_size, firsts[s], ends[s])
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < key.shape[1]:
                raise ValueError(
                    f"block_tables[{s}] names a page that key, {key.shape[1]} rows in pages of "
                    f"{rule.page_size}, does not have"
                )
        yield _Part(s, slice(starts[s], starts[s + 1]), rows)


def _rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """A sequence's rows of any operand: a view, of paged keys and values a copy."""
    return x if rows is _WHOLE else x[:, rows]


def _bias_of(bias: Tensor | None, rule: MaskRule, part: _Part) -> Tensor | None:
    """The sequence's part of a tensor of the bias's shape: a view."""
    if bias is None or not rule.varlen:
        return bias
    queries, keys = part.queries, part.keys
    if isinstance(keys, Tensor):
        keys = slice(0, keys.numel())
    if rule.bias_per_sequence:
        if bias.shape[0] > 1:
            bias = bias[part.number : part.number + 1]
        queries = slice(0, queries.stop - queries.start)
        keys = slice(0, keys.stop - keys.start)
    if bias.shape[-2] > 1:
        bias = bias[..., queries, :]
    return bias[..., keys] if bias.shape[-1] > 1 else bias


def _views(
    rule: MaskRule, part: _Part, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Views:
    q, k, v = _rows(query, part.queries), _rows(key, part.keys), _rows(value, part.keys)
    first_head = part.number * math.prod(query.shape[2:-1])
    return views_of(q, k, v, _bias_of(bias, rule, part), rule.window, first_head)


def _rule(
    attn_bias: Tensor | AttentionBias | MaskRule | None,
    causal: int | None,
    query: Tensor,
    key: Tensor,
) -> MaskRule:
    rule = mask_rule(attn_bias, query, key)
    if causal is None or causal == rule.causal:
        return rule
    return dataclasses.replace(rule, anchor=causal, right=0 if causal else UNLIMITED)


def blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | MaskRule | None,
    scale: float | None,
    compute: torch.dtype,
    out_dtype: torch.dtype | None = None,
    causal: int | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse): everything in `compute`, out rounded once to `out_dtype`; memory O(M + N) and one
    block of scores.

    causal: overrides what a mask object says, for callers that hold the number already.
    """
    rule = _rule(attn_bias, causal, query, key)
    scale = default_scale(query) if scale is None else scale
    out = new_output(query, value.shape[-1], out_dtype or compute)
    lse = torch.full(lse_shape(query), -math.inf, dtype=compute, device=query.device)
    for part in _parts(rule, key):
        view = _views(rule, part, query, key, value, rule.bias)
        rows = grouped(_rows(out, part.queries), view.groups)
        sums = _lse_view(lse, view, part)
        forward_into(rows, sums, view, scale, compute, SCORES_PER_BLOCK, p, seed)
    return out, lse


def _lse_view(lse: Tensor, view: Views, part: _Part) -> Tensor:
    own = lse if part.queries is _WHOLE else lse[..., part.queries]
    return own.view(view.query.shape[:4])


def backward_blockwise(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | MaskRule | None,
    scale: float | None,
    compute: torch.dtype,
    causal: int | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    needs: Sequence[bool] = (True, True, True, True),
    grad_lse: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of query, key, value and bias, contiguous, everything in `compute`; None for what
    is not needed and for a bias that has none.

    out, lse: of the forward pass, where it saw more keys than these (its sums go over all of them);
    left out: those of these keys.
    """
    rule = _rule(attn_bias, causal, query, key)
    scale = default_scale(query) if scale is None else scale
    needs = (*needs[:3], needs[3] and rule.bias is not None and rule.bias.dtype != torch.bool)

    def zeros(x: Tensor, needed: bool) -> Tensor:  # not needed: of the shape, without the memory
        return x.new_zeros(x.shape if needed else (), dtype=compute).expand(x.shape)

    into = [zeros(x, n) for x, n in zip((query, key, value), needs[:3], strict=True)]
    into_bias = None if rule.bias is None else zeros(rule.bias, needs[3])
    for part in _parts(rule, key):
        view = _views(rule, part, query, key, value, rule.bias)
        to = _targets(rule, part, into, into_bias)
        outer = Outer(
            grouped(_rows(grad_out, part.queries), view.groups),
            None if out is None else grouped(_rows(out, part.queries), view.groups),
            None if lse is None else _lse_view(lse, view, part),
            None if grad_lse is None else _lse_view(grad_lse, view, part),
        )
        backward_into(to, view, outer, scale, compute, SCORES_PER_BLOCK, p, seed, needs)
        if isinstance(part.keys, Tensor):
            _add_pages(into, to, part.keys, needs)
    if into_bias is not None and needs[3]:
        given = tensor_of(attn_bias)
        assert given is not None
        into_bias = into_bias.view(given.shape)
    found = (*into, into_bias)
    return [x if n else None for x, n in zip(found, needs, strict=True)]


def _targets(rule: MaskRule, part: _Part, into: list[Tensor], into_bias: Tensor | None) -> Views:
    """Where a sequence's gradients are added: views; for paged keys zeros of their own."""
    query, key, value = into
    if isinstance(part.keys, Tensor):
        rows = part.keys.numel()
        key, value = (x.new_zeros((1, rows, *x.shape[2:])) for x in (key, value))
        part = part._replace(keys=slice(0, rows))
    return _views(rule, part, query, key, value, into_bias)


def _add_pages(into: list[Tensor], to: Views, rows: Tensor, needs: Sequence[bool]) -> None:
    """Adds the gradients of one sequence's paged keys and values to those of the pool."""
    for x, part, needed in ((into[1], to.key, needs[1]), (into[2], to.value, needs[2])):
        if needed:
            grouped(x, to.groups).index_add_(3, rows, part)
