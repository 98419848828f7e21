"""Attention as its definition, to compare with: `attention` and `attention_backward` in fp64 (the
oracle), `eager` in the inputs' own dtype.

All take what `memory_efficient_attention` takes (3-D, 4-D and 5-D inputs, fewer key heads, every
mask and bias) and work block by block over the queries, so that the oracle is usable at M = 4096
and beyond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attn_bias import (
    CAUSAL_BOTTOM_RIGHT,
    CAUSAL_NONE,
    AttentionBias,
    bias_of_rank,
    split_bias,
)
from .dropout import dropout_rows, keep_scale
from .inputs import default_scale, lse_shape

# Scores held at once: 4 MB in fp32. Measured on a CPU at M = N = 4096: smaller blocks pay for their
# count, larger ones leave the caches.
SCORES_PER_BLOCK = 1 << 20


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    scale: float | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scale * Q K^T + bias)) V and its log-sum-exp, in fp64: the oracle of the
    whole project.

    Shapes: as `memory_efficient_attention`; log-sum-exp [B, H, M] ([B, 1, M] for 3-D, [B, G, H, M]
        for 5-D inputs).
    Dtypes: any floating dtype, both results are float64.
    Args: as `memory_efficient_attention`; the default scale is K ** -0.5. p > 0 needs seed, the
        call's {seed, offset} (memeff_attn.dropout).
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
    attn_bias: Tensor | AttentionBias | None = None,
    scale: float | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of sum(grad_out * attention(...)) for query, key, value and bias, in fp64: the
    oracle of the backward pass.

    With D the kept weights' scale (0 where dropped) and dO = grad_out:
    dV = (P * D)^T dO, dP = D * (dO V^T), dS = P * (dP - rowsum(P * dP)),
    dQ = scale * dS K, dK = scale * dS^T Q, dBias = dS.

    Shapes: those of the inputs. What one row serves in many places (shared key heads, a broadcast
        bias) has the sum of its gradients.
    Dtypes: any floating dtype; results, and every step, in `compute`. No gradient (None) for a bool
        bias or a mask object.
    Args: as `attention`.
    Memory: the gradients and a few blocks of scores.
    Numerics: a query that sees no key adds exactly 0 to every gradient, whatever its grad_out.
    Raises: ValueError where shapes disagree.
    Source: the contract in docs/design.md.
    """
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        grads = backward_blockwise(
            grad_out, query, key, value, attn_bias, scale, compute, p=p, seed=seed
        )
    grad_query, grad_key, grad_value, grad_bias = grads
    assert grad_query is not None and grad_key is not None and grad_value is not None
    return grad_query, grad_key, grad_value, grad_bias


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * Q K^T + bias) V in plain PyTorch, every step in the inputs' dtype: what a
    user would write.

    Shapes, Args: as `memory_efficient_attention`.
    Dtypes: that of the query, results too.
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
    attn_bias: Tensor | AttentionBias | None,
    scale: float | None,
) -> Tensor:
    bias, causal = split_bias(attn_bias)
    view = views_of(query, key, value, bias)
    scale = default_scale(query) if scale is None else scale
    scores = torch.matmul(view.query, view.key.transpose(-1, -2)) * scale
    if view.bias is not None and view.bias.dtype == torch.bool:
        scores = scores.masked_fill(~view.bias, -math.inf)
    elif view.bias is not None:
        scores = scores + view.bias
    if causal != CAUSAL_NONE:
        scores = scores.masked_fill(~_visible(view, causal, 0, view.rows), -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    # Zero before the product: oneDNN's bf16 product spreads NaN to the row beside it.
    weights = torch.softmax(scores, -1).to(query.dtype).masked_fill(dead, 0.0)
    out = new_output(query, value.shape[-1], query.dtype)
    grouped(out, view.groups).copy_(torch.matmul(weights, view.value))
    return out


class Views(NamedTuple):
    """Inputs of any layout as [B, groups, heads per group, M or N, K or Kv]."""

    query: Tensor  # [B, G, R, M, K]
    key: Tensor  # [B, G, 1 or R, N, K]
    value: Tensor  # [B, G, 1 or R, N, Kv]
    bias: Tensor | None  # [B|1, G|1, R|1, M|1, N|1]
    groups: int

    @property
    def rows(self) -> int:
        return self.query.shape[3]

    @property
    def keys(self) -> int:
        return self.key.shape[3]


def grouped(x: Tensor, groups: int) -> Tensor:
    """A view of any layout as [B, groups, heads per group, L, D]."""
    if x.dim() == 3:
        return x[:, None, None]
    if x.dim() == 4:
        batch, length, heads, depth = x.shape
        x = x.view(batch, length, groups, heads // groups, depth)
    return x.permute(0, 2, 3, 1, 4)


def views_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Views:
    groups = max(1, key.shape[2]) if query.dim() == 4 else 1
    if query.dim() == 4 and query.shape[2] % groups != 0:
        raise ValueError(
            f"query has {query.shape[2]} heads, which {groups} key heads do not divide"
        )
    if bias is not None:
        bias = _bias_view(bias, query, groups)
    return Views(grouped(query, groups), grouped(key, groups), grouped(value, groups), bias, groups)


def _bias_view(bias: Tensor, query: Tensor, groups: int) -> Tensor:
    bias = bias_of_rank(bias, query)
    if bias.dim() == 3:
        return bias[:, None, None]
    if bias.dim() == 4 and bias.shape[1] == 1:
        return bias.unsqueeze(1)
    if bias.dim() == 4:
        return bias.view(bias.shape[0], groups, bias.shape[1] // groups, *bias.shape[2:])
    return bias


def new_output(query: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Contiguous, in the query's layout, zero."""
    return query.new_zeros((*query.shape[:-1], width), dtype=dtype)


def _visible(view: Views, causal: int, first: int, last: int) -> Tensor:
    """[last - first, N], True where the causal rule lets row (from `first` on) see the key."""
    rows = torch.arange(first, last, device=view.query.device)
    if causal == CAUSAL_BOTTOM_RIGHT:
        rows = rows + (view.keys - view.rows)
    return torch.arange(view.keys, device=view.query.device) <= rows[:, None]


_Place = tuple[slice, slice, slice]  # batch, group, rows


def _blocks(view: Views) -> Iterator[_Place]:
    """Slices of (batch, group, rows) whose scores fit SCORES_PER_BLOCK (one row where none do)."""
    batch, groups, heads, rows, _ = view.query.shape

    def steps(total: int, cost: int) -> Iterator[slice]:
        step = max(1, SCORES_PER_BLOCK // max(1, cost))
        return (slice(i, min(i + step, total)) for i in range(0, total, step))

    row_cost = heads * view.keys
    group_cost = row_cost * min(rows, max(1, SCORES_PER_BLOCK // max(1, row_cost)))
    batch_cost = group_cost * min(groups, max(1, SCORES_PER_BLOCK // max(1, group_cost)))
    for b in steps(batch, batch_cost):
        for g in steps(groups, group_cost):
            for m in steps(rows, row_cost):
                yield b, g, m


def _limits(view: Views, causal: int, m: slice) -> tuple[int, int]:
    """(first key that a row of the block does not see, first key that none sees)."""
    if causal == CAUSAL_NONE:
        return view.keys, view.keys
    offset = view.keys - view.rows if causal == CAUSAL_BOTTOM_RIGHT else 0
    ends = (m.start + offset + 1, m.stop + offset)
    some, none = (min(max(end, 0), view.keys) for end in ends)
    return some, none


def _part(bias: Tensor, b: slice, g: slice, m: slice, n: slice) -> Tensor:
    """The block of a broadcast bias."""
    every = slice(None)
    return bias[
        b if bias.shape[0] > 1 else every,
        g if bias.shape[1] > 1 else every,
        :,
        m if bias.shape[3] > 1 else every,
        n if bias.shape[4] > 1 else every,
    ]


class Block(NamedTuple):
    """Scores of some rows with all keys that any of them sees."""

    query: Tensor  # [b, g, R, m, K]
    key: Tensor  # [b, g, 1 or R, n, K]
    value: Tensor  # [b, g, 1 or R, n, Kv]
    weights: Tensor  # [b, g, R, m, n], exp(score - shift)
    shift: Tensor  # [b, g, R, m, 1], the largest score, 0 where that is infinite
    total: Tensor  # [b, g, R, m, 1], the weights' sum, 0 where no key is visible


def _block(
    view: Views, scale: float, rule: int, compute: torch.dtype, b: slice, g: slice, m: slice
) -> Block | None:
    """None where no row of the block sees a key."""
    # Keys from `some` on are hidden from some rows of the block, keys from `none` on from all.
    some, none = _limits(view, rule, m)
    if none == 0:
        return None
    q, k, v = view.query[b, g, :, m], view.key[b, g, :, :none], view.value[b, g, :, :none]
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if view.bias is not None:
        part = _part(view.bias, b, g, m, slice(none))
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, -math.inf)
        else:
            scores += part.to(compute)
    if some < none:
        hidden = ~_visible(view, rule, m.start, m.stop)[:, some:none]
        scores[..., some:none].masked_fill_(hidden, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    shift = largest.masked_fill(largest.isinf(), 0.0)
    weights = scores.sub_(shift).exp_()  # where no key is visible: exp(-inf) = 0
    return Block(q, k, v, weights, shift, weights.sum(-1, keepdim=True))


def _dropped(view: Views, p: float, seed: Tensor | None, keys: int, at: _Place) -> Tensor:
    """[b, g, R, m, n], True where dropout drops a weight."""
    if seed is None:
        raise ValueError(f"p is {p}: dropout needs seed, see memeff_attn.dropout.new_seed")
    b, g, m = at
    batch, groups, heads = view.query.shape[:3]
    every = torch.arange(batch * groups * heads, device=seed.device).view(batch, groups, heads)
    return ~dropout_rows(seed, p, every[b, g], m.start, m.stop, keys)


def blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None,
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
    bias, rule = split_bias(attn_bias)
    rule = rule if causal is None else causal
    view = views_of(query, key, value, bias)
    scale = default_scale(query) if scale is None else scale
    out = new_output(query, value.shape[-1], out_dtype or compute)
    lse = torch.full(lse_shape(query), -math.inf, dtype=compute, device=query.device)
    if out.numel() == lse.numel() == 0 or view.keys == 0:
        return out, lse
    out_view = grouped(out, view.groups)
    lse_view = lse.view(view.query.shape[:4])
    for b, g, m in _blocks(view):
        block = _block(view, scale, rule, compute, b, g, m)
        if block is None:
            continue
        dead = block.total == 0
        if p > 0:
            dropped = _dropped(view, p, seed, block.key.shape[3], (b, g, m))
            _drop(block.weights, dropped, p)
        rows = torch.matmul(block.weights, block.value) / block.total.masked_fill(dead, 1.0)
        out_view[b, g, :, m] = rows.masked_fill_(dead, 0.0).to(out.dtype)
        # Where no key is visible: log 0.
        lse_view[b, g, :, m] = (block.shift + block.total.log()).squeeze(-1)
    return out, lse


def backward_blockwise(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None,
    scale: float | None,
    compute: torch.dtype,
    causal: int | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    needs: Sequence[bool] = (True, True, True, True),
) -> list[Tensor | None]:
    """Gradients of query, key, value and bias, contiguous, everything in `compute`; None for what
    is not needed and for a bias that has none.

    out, lse: of the forward pass, where it saw more keys than these (its sums go over all of them);
    left out: those of these keys.
    """
    bias, rule = split_bias(attn_bias)
    rule = rule if causal is None else causal
    view = views_of(query, key, value, bias)
    scale = default_scale(query) if scale is None else scale
    of_q, of_k, of_v, of_bias = needs
    of_bias = of_bias and bias is not None and bias.dtype != torch.bool

    def zeros(x: Tensor, needed: bool) -> Tensor:  # not needed: of the shape, without the memory
        return x.new_zeros(x.shape if needed else (), dtype=compute).expand(x.shape)

    into = [zeros(x, n) for x, n in ((query, of_q), (key, of_k), (value, of_v))]
    into_bias = None if bias is None else zeros(bias, of_bias)
    grads = [
        x if n else None
        for x, n in zip((*into, into_bias), (of_q, of_k, of_v, of_bias), strict=True)
    ]
    if 0 in view.query.shape[:4] or view.keys == 0:
        return grads
    to = views_of(into[0], into[1], into[2], into_bias)
    outer = grouped(grad_out, view.groups)
    inner = None if out is None else grouped(out, view.groups)
    sums = None if lse is None else lse.view(view.query.shape[:4]).unsqueeze(-1)
    for b, g, m in _blocks(view):
        block = _block(view, scale, rule, compute, b, g, m)
        if block is None:
            continue
        keys = block.key.shape[3]
        dead = block.total == 0
        weights = block.weights.div_(block.total.masked_fill(dead, 1.0))
        if sums is not None:
            weights *= _share(block, sums[b, g, :, m].to(compute))
        grad = outer[b, g, :, m].to(compute).masked_fill(dead, 0.0)
        dropped = _dropped(view, p, seed, keys, (b, g, m)) if p > 0 else None
        if of_v:
            kept = weights if dropped is None else _drop(weights.clone(), dropped, p)
            _add_heads(to.value[b, g, :, :keys], kept, grad)
        if not (of_q or of_k or of_bias):
            continue
        grad_weights = torch.matmul(grad, block.value.transpose(-1, -2))
        if dropped is not None:
            _drop(grad_weights, dropped, p)
        if inner is None:
            delta = (weights * grad_weights).sum(-1, keepdim=True)
        else:
            delta = (grad * inner[b, g, :, m].to(compute)).sum(-1, keepdim=True)
        grad_scores = grad_weights.sub_(delta).mul_(weights).masked_fill_(dead, 0.0)
        if of_bias and to.bias is not None:
            part = _part(to.bias, b, g, m, slice(keys))
            part += grad_scores.sum_to_size(part.shape)
        grad_scores *= scale
        if of_q:
            to.query[b, g, :, m] = torch.matmul(grad_scores, block.key)
        if of_k:
            _add_heads(to.key[b, g, :, :keys], grad_scores, block.query)
    return grads


def _drop(weights: Tensor, dropped: Tensor, p: float) -> Tensor:
    """In place: 0 where dropped, the others scaled."""
    return weights.masked_fill_(dropped, 0.0).mul_(keep_scale(p))


def _share(block: Block, lse: Tensor) -> Tensor:
    """exp(own log-sum-exp - the given one), at most 1: exactly 1 where they are the same number,
    however large."""
    own = block.shift + block.total.log()
    return torch.where(own == lse, 0.0, own - lse).clamp_(max=0.0).exp_()


def _add_heads(to: Tensor, weights: Tensor, rows: Tensor) -> None:
    """to [b, g, 1 or R, n, D] += weights [b, g, R, m, n]^T rows [b, g, R, m, D], summed over the
    heads that share a key head."""
    if to.shape[2] == 1:
        weights, rows = weights.flatten(2, 3).unsqueeze(2), rows.flatten(2, 3).unsqueeze(2)
    to += torch.matmul(weights.transpose(-1, -2), rows)
