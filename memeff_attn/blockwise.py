"""Attention on views of any layout, forward and backward, a block of rows at a time: what the
reference and the CPU path run on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .dropout import dropout_rows, keep_scale
from .masks_base import UNLIMITED, Window
from .tensor_bias import bias_of_rank


class Views(NamedTuple):
    """Inputs of any layout as [B, groups, heads per group, M or N, K or Kv]."""

    query: Tensor  # [B, G, R, M, K]
    key: Tensor  # [B, G, 1 or R, N, K]
    value: Tensor  # [B, G, 1 or R, N, Kv]
    bias: Tensor | None  # [B|1, G|1, R|1, M|1, N|1]
    groups: int
    window: Window
    first_head: int  # as dropout counts them: b * H + h of the first one here

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


def views_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    window: Window,
    first_head: int = 0,
) -> Views:
    groups = max(1, key.shape[2]) if query.dim() == 4 else 1
    if query.dim() == 4 and query.shape[2] % groups != 0:
        raise ValueError(
            f"query has {query.shape[2]} heads, which {groups} key heads do not divide"
        )
    if bias is not None:
        bias = _bias_view(bias, query, groups)
    q, k, v = (grouped(x, groups) for x in (query, key, value))
    return Views(q, k, v, bias, groups, window, first_head)


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


_Place = tuple[slice, slice, slice]  # batch, group, rows


def _blocks(view: Views, size: int) -> Iterator[_Place]:
    """Slices of (batch, group, rows) whose scores are at most `size` (one row where none are)."""
    batch, groups, heads, rows, _ = view.query.shape

    def steps(total: int, cost: int) -> Iterator[slice]:
        step = max(1, size // max(1, cost))
        return (slice(i, min(i + step, total)) for i in range(0, total, step))

    row_cost = heads * view.keys
    group_cost = row_cost * min(rows, max(1, size // max(1, row_cost)))
    batch_cost = group_cost * min(groups, max(1, size // max(1, group_cost)))
    for b in steps(batch, batch_cost):
        for g in steps(groups, group_cost):
            for m in steps(rows, row_cost):
                yield b, g, m


def _limits(view: Views, m: slice) -> tuple[slice, slice]:
    """(keys that some row of the block sees, those of them that every row sees)."""
    offset = view.window.offset(view.rows, view.keys)
    first, last = m.start + offset, m.stop - 1 + offset  # whose keys the rows have in the middle
    left, right = view.window.left, view.window.right

    def within(start: int, stop: int, outer: slice) -> slice:
        start = min(max(start, outer.start), outer.stop)
        return slice(start, min(max(stop, start), outer.stop))

    some = within(
        0 if left == UNLIMITED else first - left,
        view.keys if right == UNLIMITED else last + right + 1,
        slice(0, view.keys),
    )
    every = within(
        0 if left == UNLIMITED else last - left,
        view.keys if right == UNLIMITED else first + right + 1,
        some,
    )
    return some, every


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
    """Scores of some rows with all keys from the first to the last that any of them sees."""

    query: Tensor  # [b, g, R, m, K]
    key: Tensor  # [b, g, 1 or R, n, K]
    value: Tensor  # [b, g, 1 or R, n, Kv]
    weights: Tensor  # [b, g, R, m, n], exp(score - shift)
    shift: Tensor  # [b, g, R, m, 1], the largest score, 0 where that is infinite
    total: Tensor  # [b, g, R, m, 1], the weights' sum, 0 where no key is visible
    keys: slice  # the n of N


def _block(view: Views, scale: float, compute: torch.dtype, at: _Place) -> Block | None:
    """None where no row of the block sees a key."""
    b, g, m = at
    some, every = _limits(view, m)
    if some.start == some.stop:
        return None
    q, k, v = view.query[b, g, :, m], view.key[b, g, :, some], view.value[b, g, :, some]
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if view.bias is not None:
        part = _part(view.bias, b, g, m, some)
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, -math.inf)
        else:
            scores += part.to(compute)
    for edge in (slice(some.start, every.start), slice(every.stop, some.stop)):
        if edge.start < edge.stop:
            seen = view.window.visible(view.rows, view.keys, q.device, m, edge)
            inside = slice(edge.start - some.start, edge.stop - some.start)
            scores[..., inside].masked_fill_(~seen, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    shift = largest.masked_fill(largest.isinf(), 0.0)
    weights = scores.sub_(shift).exp_()  # where no key is visible: exp(-inf) = 0
    return Block(q, k, v, weights, shift, weights.sum(-1, keepdim=True), some)


def _dropped(view: Views, p: float, seed: Tensor | None, keys: slice, at: _Place) -> Tensor:
    """[b, g, R, m, n], True where dropout drops a weight."""
    if seed is None:
        raise ValueError(f"p is {p}: dropout needs seed, see memeff_attn.dropout.new_seed")
    b, g, m = at
    batch, groups, heads = view.query.shape[:3]
    every = torch.arange(batch * groups * heads, device=seed.device).view(batch, groups, heads)
    every = every[b, g] + view.first_head
    return ~dropout_rows(seed, p, every, m.start, m.stop, keys.stop)[..., keys.start :]


def forward_into(
    out: Tensor,
    lse: Tensor,
    view: Views,
    scale: float,
    compute: torch.dtype,
    size: int,
    p: float,
    seed: Tensor | None,
) -> None:
    """Writes out [B, G, R, M, Kv] and lse [B, G, R, M] of the rows that see a key, `size`
    scores at a time."""
    if 0 in view.query.shape[:4] or view.keys == 0:
        return
    for at in _blocks(view, size):
        block = _block(view, scale, compute, at)
        if block is None:
            continue
        b, g, m = at
        dead = block.total == 0
        if p > 0:
            _drop(block.weights, _dropped(view, p, seed, block.keys, at), p)
        rows = torch.matmul(block.weights, block.value) / block.total.masked_fill(dead, 1.0)
        out[b, g, :, m] = rows.masked_fill_(dead, 0.0).to(out.dtype)
        # Where no key is visible: log 0.
        lse[b, g, :, m] = (block.shift + block.total.log()).squeeze(-1)


class Outer(NamedTuple):
    """What the backward pass takes beside the inputs."""

    grad_out: Tensor  # [B, G, R, M, Kv]
    out: Tensor | None  # [B, G, R, M, Kv]
    lse: Tensor | None  # [B, G, R, M]
    grad_lse: Tensor | None  # [B, G, R, M]


def backward_into(
    to: Views,
    view: Views,
    outer: Outer,
    scale: float,
    compute: torch.dtype,
    size: int,
    p: float,
    seed: Tensor | None,
    needs: Sequence[bool],
) -> None:
    """Adds the gradients to `to`, where needed (query: writes them)."""
    if 0 in view.query.shape[:4] or view.keys == 0:
        return
    of_q, of_k, of_v, of_bias = needs
    for at in _blocks(view, size):
        block = _block(view, scale, compute, at)
        if block is None:
            continue
        b, g, m = at
        dead = block.total == 0
        weights = block.weights.div_(block.total.masked_fill(dead, 1.0))
        if outer.lse is not None:
            weights *= _share(block, outer.lse[b, g, :, m].unsqueeze(-1).to(compute))
        grad = outer.grad_out[b, g, :, m].to(compute).masked_fill(dead, 0.0)
        dropped = _dropped(view, p, seed, block.keys, at) if p > 0 else None
        if of_v:
            kept = weights if dropped is None else _drop(weights.clone(), dropped, p)
            _add_heads(to.value[b, g, :, block.keys], kept, grad)
        if not (of_q or of_k or of_bias):
            continue
        grad_weights = torch.matmul(grad, block.value.transpose(-1, -2))
        if dropped is not None:
            _drop(grad_weights, dropped, p)
        delta = _delta(weights, grad_weights, grad, outer, at)
        grad_scores = grad_weights.sub_(delta).mul_(weights).masked_fill_(dead, 0.0)
        if of_bias and to.bias is not None:
            part = _part(to.bias, b, g, m, block.keys)
            part += grad_scores.sum_to_size(part.shape)
        grad_scores *= scale
        if of_q:
            to.query[b, g, :, m] = torch.matmul(grad_scores, block.key)
        if of_k:
            _add_heads(to.key[b, g, :, block.keys], grad_scores, block.query)


def _delta(weights: Tensor, grad_weights: Tensor, grad: Tensor, outer: Outer, at: _Place) -> Tensor:
    """[b, g, R, m, 1]: what dS = P * (dP - delta) takes from dP; d lse / d score is P."""
    b, g, m = at
    if outer.out is None:
        delta = (weights * grad_weights).sum(-1, keepdim=True)
    else:
        delta = (grad * outer.out[b, g, :, m].to(grad.dtype)).sum(-1, keepdim=True)
    if outer.grad_lse is not None:
        delta = delta - outer.grad_lse[b, g, :, m].unsqueeze(-1).to(grad.dtype)
    return delta


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
