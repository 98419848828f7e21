"""The oracle of the gradients and eager's, for the rule of tolerance.py.

`oracle` is the definition in fp64, block by block over the queries:

    dV = (P*D)^T dO;  dP = D * (dO V^T);  dS = P * (dP - rowsum(P * dP));
    dQ = scale * dS K;  dK = scale * dS^T Q;  dBias = dS summed over what the bias broadcasts.

`eager` is what a user would write: PyTorch's autograd through matmul and softmax in one dtype, with
rows that see no key taken out before the softmax. It is the baseline of the rule. Only where few
keys may carry a row (`few_keys`: FEW keys in all, a diagonal, dropout) the baseline is the worse of
eager and `recomputed`, the contract's own form in plain fp32 with out rounded once: autograd's
softmax reuses the very dP it subtracts, so that its rounding errors cancel where one or two keys
carry a row; with delta taken from out, as the contract prescribes, they cannot. None uses anything
of memeff_attn (docs/decisions.md, "The baseline of the gradient rule")."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tolerance import (
    BOTTOM_RIGHT,
    GRADIENT,
    MAX_SCORES,
    NONE,
    Checker,
    Drop,
    bias_to_bhmn,
    head_count,
    round_tf32,
    tf32_allowed,
    to_bhmk,
)
from torch import Tensor

NAMES = ("query", "key", "value", "bias")
FEW = 16  # keys
Four = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Exact(NamedTuple):
    """Each in the order of NAMES; bias is None where there is none that has a gradient."""

    gradients: Four  # fp64
    zeros: Four  # bool: what must be exactly 0, for nothing visible reaches it
    terms: Four  # fp64 scalars: the size of what the largest element sums


def has_gradient(bias: Tensor | None) -> bool:
    return bias is not None and bias.dtype != torch.bool


def to_input(x: Tensor, like: Tensor) -> Tensor:
    """[B, H, L, D] of all query heads, summed and laid out as an input with fewer heads."""
    if like.dim() == 3:
        return x.squeeze(1)
    x = x.transpose(1, 2)
    if like.dim() == 5:
        return x.unflatten(2, like.shape[2:4])
    if like.shape[2] != x.shape[2]:
        x = x.unflatten(2, (like.shape[2], -1)).sum(3)
    return x


def _summed(x: Tensor, bias: Tensor, query: Tensor) -> Tensor:
    """[B, H, rows, N] summed over what the bias broadcasts, in the bias' rank; its M stays 1 or
    rows."""
    if query.dim() == 3:
        x = x.squeeze(1)
    elif query.dim() == 5:
        x = x.unflatten(1, query.shape[2:4])
    shape = (1,) * (x.dim() - bias.dim()) + tuple(bias.shape)
    dims = [d for d in range(x.dim()) if shape[d] == 1 and x.shape[d] != 1]
    return x.sum(dims, keepdim=True) if dims else x


def hidden(m: slice, rows: int, keys: int, causal: int, device: torch.device) -> Tensor:
    """bool [m, N]: what the diagonal hides from the queries `m` of `rows`."""
    diagonal = keys - rows if causal == BOTTOM_RIGHT else 0
    limits = torch.arange(rows, device=device)[m] + diagonal
    return torch.arange(keys, device=device) > limits[:, None]


def masked(scores: Tensor, bias: Tensor | None, causal: int, m: slice, rows: int) -> Tensor:
    """Scores [B, H, m, N] of the queries `m` of `rows`, with bias and diagonal."""
    if bias is not None:
        part = bias if bias.shape[2] == 1 else bias[:, :, m]
        a_mask = part.dtype == torch.bool
        scores = scores.masked_fill(~part, -math.inf) if a_mask else scores + part
    if causal != NONE:
        unseen = hidden(m, rows, scores.shape[-1], causal, scores.device)
        scores = scores.masked_fill(unseen, -math.inf)
    return scores


def oracle(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: int = NONE,
    scale: float | None = None,
    drop: Drop | None = None,
) -> Exact:
    """Gradients of sum(out * grad_out) in fp64."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = head_count(query)
    q, k, v, g = (to_bhmk(x.double(), heads) for x in (query, key, value, grad_out))
    rank4 = bias_to_bhmn(bias, query)
    if rank4 is not None and rank4.dtype != torch.bool:
        rank4 = rank4.double()
    wants_bias = bias is not None and has_gradient(bias)
    batch, _, rows, _ = q.shape
    keys = k.shape[2]
    dq, dq_size, dk, dk_size, dv = (torch.zeros_like(x) for x in (q, q, k, k, v))
    seen_q = torch.zeros(batch, heads, rows, dtype=torch.bool, device=q.device)
    seen_k, seen_v = (torch.zeros_like(k[..., 0], dtype=torch.bool) for _ in range(2))
    db: list[tuple[Tensor, Tensor, Tensor]] = []  # of each block: gradient, size, visible
    step = max(1, MAX_SCORES[q.device.type] // max(1, batch * heads * keys))
    for first in range(0, rows if keys and batch and heads else 0, step):
        m = slice(first, first + step)
        scores = torch.matmul(q[:, :, m], k.transpose(-1, -2)) * scale
        scores = masked(scores, rank4, causal, m, rows)
        visible = scores != -math.inf
        alive = visible.any(-1, keepdim=True)
        p = torch.softmax(scores.masked_fill(~alive, 0.0), -1).masked_fill(~visible, 0.0)
        dropped, kept = p, visible
        dp = torch.matmul(g[:, :, m], v.transpose(-1, -2))
        if drop is not None:
            keep = drop.keep[:, :, m]
            dropped = p.masked_fill(~keep, 0.0) * drop.scale
            dp = dp.masked_fill(~keep, 0.0) * drop.scale
            kept = visible & keep if drop.scale else torch.zeros_like(visible)
        dp = dp.masked_fill(~visible, 0.0)
        delta = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - delta)
        size = dropped * torch.matmul(g[:, :, m].abs(), v.abs().transpose(-1, -2))
        size = size + p * size.sum(-1, keepdim=True)  # of dP and of delta, with all their terms
        dv += torch.matmul(dropped.transpose(-1, -2), g[:, :, m])
        dq[:, :, m] = torch.matmul(ds, k) * scale
        dq_size[:, :, m] = torch.matmul(size, k.abs()) * abs(scale)
        dk += torch.matmul(ds.transpose(-1, -2), q[:, :, m]) * scale
        dk_size += torch.matmul(size.transpose(-1, -2), q[:, :, m].abs()) * abs(scale)
        seen_q[:, :, m] = alive.squeeze(-1)
        seen_k |= visible.any(2)
        seen_v |= kept.any(2)
        if wants_bias:
            parts = (_summed(x, bias, query) for x in (ds, size, visible.double()))
            db.append(tuple(parts))  # type: ignore[arg-type]
    found = (to_input(dq, query), to_input(dk, key), to_input(dv, value))
    zeros = tuple(
        (to_input(seen[..., None].double(), x) == 0).expand(x.shape)
        for seen, x in ((seen_q, query), (seen_k, key), (seen_v, value))
    )
    sizes = tuple(
        to_input(size, x).amax() if size.numel() else None
        for size, x in ((dq_size, query), (dk_size, key))
    )
    last: tuple[Any, Any, Any] = (None, None, None)
    if wants_bias:
        grad, size, seen = _bias_gradient(db, bias)
        last = (grad, seen == 0, size.amax() if size.numel() else None)
    return Exact((*found, last[0]), (*zeros, last[1]), (*sizes, None, last[2]))  # type: ignore[arg-type]


def _bias_gradient(
    blocks: list[tuple[Tensor, Tensor, Tensor]], bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of queries, put together or summed, in the shape of the bias."""
    if not blocks:
        zero = bias.double() * 0
        return zero, zero, zero
    results = []
    for parts in zip(*blocks, strict=True):
        one_row = bias.shape[-2] == 1
        whole = torch.stack(parts).sum(0) if one_row else torch.cat(parts, -2)
        results.append(whole.reshape(bias.shape))
    return results[0], results[1], results[2]


class _Tf32Matmul(torch.autograd.Function):
    """A product that rounds its operands to TF32, both ways."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.matmul(round_tf32(a), round_tf32(b))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = round_tf32(grad)
        left = torch.matmul(grad, round_tf32(b).transpose(-1, -2))
        return left, torch.matmul(round_tf32(a).transpose(-1, -2), grad)


def _shared(x: Tensor, heads: int) -> Tensor:
    """As to_bhmk; key heads are expanded, so that autograd sums their gradients once."""
    if x.dim() == 4 and x.shape[2] != heads:
        batch, rows, kv_heads, dim = x.shape
        x = x.unsqueeze(3).expand(-1, -1, -1, heads // kv_heads, -1)
        x = x.reshape(batch, rows, heads, dim)
    return to_bhmk(x, heads)


def eager(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: int = NONE,
    scale: float | None = None,
    drop: Drop | None = None,
    *,
    dtype: torch.dtype,
    in_tf32: bool = False,
) -> Four:
    """Gradients by autograd, everything in `dtype`."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = head_count(query)
    product = _Tf32Matmul.apply if in_tf32 else torch.matmul
    leaves = [x.detach().to(dtype).requires_grad_() for x in (query, key, value)]
    wants_bias = bias is not None and has_gradient(bias)
    if wants_bias:
        kind = torch.promote_types(bias.dtype, dtype)
        bias = bias.detach().to(kind).requires_grad_()
        leaves.append(bias)
    with torch.enable_grad():
        q, k, v = (_shared(x, heads) for x in leaves[:3])
        scores = product(q, k.transpose(-1, -2)) * scale
        scores = masked(scores, bias_to_bhmn(bias, query), causal, slice(None), q.shape[2])
        dead = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(dead, 0), dim=-1).to(dtype)
        if drop is not None:
            weights = weights.masked_fill(~drop.keep, 0) * drop.scale
        out = product(weights, v).masked_fill(dead, 0)
        grad = to_bhmk(grad_out.to(dtype), heads)
        found = torch.autograd.grad(out, leaves, grad)
    four = (*found, None) if len(found) == 3 else tuple(found)
    return four  # type: ignore[return-value]


def recomputed(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: int = NONE,
    scale: float | None = None,
    drop: Drop | None = None,
    *,
    in_tf32: bool = False,
) -> Four:
    """Gradients in fp32 as the contract defines them: P = exp(S - LSE), delta = rowsum(dO * out),
    out in the query's dtype."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = head_count(query)
    product = _Tf32Matmul.apply if in_tf32 else torch.matmul
    q, k, v, g = (_shared(x.float(), heads) for x in (query, key, value, grad_out))
    scores = product(q, k.transpose(-1, -2)) * scale
    scores = masked(scores, bias_to_bhmn(bias, query), causal, slice(None), q.shape[2])
    lse = torch.logsumexp(scores, -1, keepdim=True)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0))
    dropped, dp = p, product(g, v.transpose(-1, -2))
    if drop is not None:
        dropped, dp = (x.masked_fill(~drop.keep, 0) * drop.scale for x in (p, dp))
    out = product(dropped, v).to(query.dtype).float()
    delta = (g * out).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    dk, dv = (product(x.transpose(-1, -2), y) for x, y in ((ds, q), (dropped, g)))
    four = [to_input(product(ds, k) * scale, query), to_input(dk * scale, key), to_input(dv, value)]
    db = _summed(ds, bias, query).reshape(bias.shape) if bias is not None else None
    return (*four, db if has_gradient(bias) else None)  # type: ignore[return-value]


def few_keys(keys: int, causal: int, drop: Drop | None, bias: Tensor | None, in_tf32: bool) -> bool:
    """Whether the baseline includes `recomputed`: one or two keys may carry a row, also where a
    bias hides the others; or dP is rounded to TF32 and delta is not."""
    if keys <= FEW or causal != NONE or drop is not None or in_tf32:
        return True
    hidden = bias is not None and (bias.dtype == torch.bool or bool((bias == -math.inf).any()))
    return hidden


def _worse(one: Tensor | None, other: Tensor | None, exact: Tensor | None) -> Tensor | None:
    """The one that is further from exact at its worst."""
    if one is None or other is None or exact is None or not exact.numel():
        return one
    errors = [(x.double() - exact).abs().amax() for x in (one, other)]
    return torch.where(errors[1] > errors[0], other, one)


def check(
    checker: Checker,
    label: object,
    mine: Four,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: int = NONE,
    scale: float | None = None,
    drop: Drop | None = None,
) -> None:
    """Every gradient that is not None against the oracle, by the rule; shape, dtype and layout
    too. The rule's dtype is the query's, also for an fp32 bias: its gradient comes of 16-bit
    numbers (out)."""
    inputs = (grad_out, query, key, value, bias, causal, scale, drop)
    exact = oracle(*inputs)
    in_tf32 = query.dtype == torch.float32 and query.is_cuda and tf32_allowed()
    rounded = eager(*inputs, dtype=torch.float32, in_tf32=in_tf32)
    plain = rounded if query.dtype == torch.float32 else eager(*inputs, dtype=query.dtype)
    if few_keys(key.shape[1], causal, drop, bias, in_tf32):
        others = recomputed(*inputs, in_tf32=in_tf32)
        plain, rounded = (tuple(map(_worse, x, others, exact.gradients)) for x in (plain, rounded))
    for i, (name, input_) in enumerate(zip(NAMES, (query, key, value, bias), strict=True)):
        got = mine[i]
        if got is None or input_ is None:
            continue
        checker.that(f"{label} d{name}: {got.dtype}", got.dtype == input_.dtype)
        checker.that(f"{label} d{name}: strides {got.stride()}", got.is_contiguous())
        checker.close(
            f"{label} d{name}",
            got,
            exact.gradients[i],
            plain[i],
            rounded[i],
            zero=exact.zeros[i],
            factors=GRADIENT,
            terms=exact.terms[i],
            unit=query.dtype,
        )
