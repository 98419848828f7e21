"""Masks of every class at sizes that cross tiles, and one check of a call under a mask: forward and
every gradient against the fp64 oracle on the dense picture of the mask, by the rule of
tolerance.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import gradients
import torch
from tolerance import GRADIENT, Checker, Drop, head_count, tf32_allowed
from torch import Tensor

import memeff_attn
from memeff_attn import attn_bias as ab
from memeff_attn import dropout
from memeff_attn.masks_blocks import SequenceMask

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
LAYOUTS = ("bmhk", "gqa", "bmghk", "bmk")
# Queries and keys of each sequence: empty ones, M far above N and below, edges of tiles.
Q = [37, 0, 130, 1, 300, 64, 5]
KV = [130, 5, 0, 65, 40, 64, 301]
LONG = [max(q, k) for q, k in zip(Q, KV, strict=True)]  # keys, never fewer than queries
PADDING = 304
Make = Callable[[str], ab.AttentionBias]  # of a device


def _blocks(keys: Sequence[int], device: str) -> ab.BlockDiagonalMask:
    return ab.BlockDiagonalMask.from_seqlens(Q, keys, device=device)


def _gappy(device: str) -> tuple[list[int], list[int]]:
    """First rows with gaps before, between and behind the sequences; lengths."""
    ends = itertools.accumulate(n + 3 for n in KV)
    return [end - n for end, n in zip(ends, KV, strict=True)] + [sum(KV) + 3 * len(KV) + 70], KV


def tables(page: int, device: str, length: int = PADDING) -> Tensor:
    """[sequences, pages]: every page of the pool is somebody's, in no order; entries behind the
    last key are out of range."""
    pages = -(-length // page)
    order = torch.randperm(len(Q) * pages, generator=torch.Generator().manual_seed(5))
    found = order.view(len(Q), pages).int()
    for s, n in enumerate(KV):
        found[s, -(-n // page) :] = 1 << 20
    return found.to(device)


def _paged(name: str, page: int) -> Make:
    def make(device: str) -> ab.AttentionBias:
        return getattr(ab, name).from_seqlens(Q, KV, tables(page, device), page)

    return make


def _paged_gappy(name: str, page: int) -> Make:
    def make(device: str) -> ab.AttentionBias:
        firsts = [s % 3 for s in range(len(Q))]
        wide = tables(page, device, PADDING + 2)
        rows = torch.arange(wide.numel(), device=device).int().view(wide.shape)
        return getattr(ab, name).from_seqlens(Q, firsts, KV, rows, page)

    return make


def _padded(name: str, maker: str = "from_seqlens", *windows: int) -> Make:
    return lambda device: getattr(getattr(ab, name), maker)(Q, PADDING, KV, *windows, device=device)


SEQUENCES: dict[str, Make] = {
    "blocks": lambda d: _blocks(KV, d),
    "blocks_same": lambda d: _blocks(Q, d),
    "blocks_causal": lambda d: _blocks(KV, d).make_causal(),
    "blocks_bottom_right": lambda d: _blocks(LONG, d).make_causal_from_bottomright(),
    "blocks_local": lambda d: _blocks(LONG, d).make_local_attention(33),
    "blocks_local_1": lambda d: _blocks(LONG, d).make_local_attention(1),
    "blocks_local_bottom_right": lambda d: _blocks(LONG, d).make_local_attention_from_bottomright(
        64
    ),
    "padded": _padded("BlockDiagonalPaddedKeysMask"),
    "padded_causal": _padded("BlockDiagonalCausalWithOffsetPaddedKeysMask"),
    "padded_band": _padded("BlockDiagonalLocalAttentionPaddedKeysMask", "from_seqlens_local", 9, 4),
    "padded_local": _padded(
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "from_seqlens_local", 64
    ),
    "gappy": lambda d: ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, *_gappy(d), device=d),
    "gappy_causal": lambda d: ab.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        Q, *_gappy(d), device=d
    ),
}
PAGES: dict[str, Make] = {
    "paged_128": _paged("PagedBlockDiagonalPaddedKeysMask", 128),
    "paged_256": _paged("PagedBlockDiagonalPaddedKeysMask", 256),
    "paged_16": _paged("PagedBlockDiagonalPaddedKeysMask", 16),
    "paged_causal_128": _paged("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", 128),
    "paged_gappy": _paged_gappy("PagedBlockDiagonalGappyKeysMask", 128),
    "paged_gappy_causal": _paged_gappy("PagedBlockDiagonalCausalWithOffsetGappyKeysMask", 32),
}


def _fixed(make: Callable[[], ab.AttentionBias]) -> Make:
    return lambda device: make().to(device)


DENSE: dict[str, Make] = {
    "causal": _fixed(ab.LowerTriangularMask),
    "bottom_right": _fixed(ab.LowerTriangularFromBottomRightMask),
    **{
        f"local_{w}": _fixed(lambda w=w: ab.LowerTriangularFromBottomRightLocalAttentionMask(w))
        for w in (1, 2, 65, 1000)
    },
    **{
        f"band_{left}_{right}": _fixed(
            lambda left=left, right=right: ab.LocalAttentionFromBottomRightMask(left, right)
        )
        for left, right in itertools.product((0, 1, 64, 1000), repeat=2)
    },
}
SIZES = [(1, 1), (65, 65), (300, 77), (77, 300), (1, 500), (257, 129), (700, 650)]  # M, N


@dataclasses.dataclass
class Run:
    """One call under a mask, with what the oracle needs."""

    mask: Any
    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor  # bool [M, N]
    bias: Tensor | None = None  # a leaf that `mask` adds
    spread: Callable[[Tensor], Tensor] | None = None  # the bias as one of the full shape
    p: float = 0.0
    seed: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Bool, or the bias where visible and -inf elsewhere; of the query's rank."""
        lead = (1,) * (self.query.dim() - 2)
        if self.bias is None:
            return self.visible.view(*lead, *self.visible.shape)
        assert self.spread is not None
        full = self.spread(self.bias.detach())
        if full.dtype == torch.bool:
            return full & self.visible
        return full.masked_fill(~self.visible, -math.inf)

    def drop(self) -> Drop | None:
        """Rows and columns count within the sequence, which counts as a batch entry."""
        if self.seed is None:
            return None
        batch, heads = self.query.shape[0], head_count(self.query)
        scale = float(dropout.keep_scale(self.p))
        sizes = self.visible.shape
        mask = self.mask.mask if isinstance(self.mask, ab.MaskWithTensorBias) else self.mask
        if not isinstance(mask, SequenceMask):
            return Drop(dropout.dropout_mask(self.seed, self.p, batch, heads, *sizes), scale)
        keep = torch.ones(1, heads, *sizes, dtype=torch.bool, device=self.query.device)
        rows = mask._key_rows(self.query.device)
        count, lengths = mask.q_seqinfo.count, mask._lengths()
        for s, (m, n) in enumerate(lengths):
            if m and n:
                own = dropout.dropout_mask(self.seed, self.p, count, heads, m, n)[s]
                start = mask.q_seqinfo.seqstart_py[s]
                keep[0, :, start : start + m, rows[s]] = own
        return Drop(keep, scale)


def heads_of(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of queries and of keys."""
    return {
        "bmhk": ((2,), (2,)),
        "gqa": ((6,), (2,)),
        "gqa4": ((8,), (2,)),
        "mqa": ((4,), (1,)),
        "mqa5": ((5,), (1,)),
        "bmghk": ((2, 2), (2, 2)),
        "bmk": ((), ()),
    }[layout]


def shape_of(mask: ab.AttentionBias) -> tuple[int, int]:
    """(rows of query, rows of key) of a mask with sequences."""
    assert isinstance(mask, SequenceMask)
    queries = mask.q_seqinfo.seqstart_py[-1]
    if isinstance(mask, ab.PagedBlockDiagonalPaddedKeysMask | ab.PagedBlockDiagonalGappyKeysMask):
        return queries, mask.block_tables.numel() * mask.page_size
    return queries, mask.k_seqinfo.seqstart_py[-1]


def make(
    mask: ab.AttentionBias,
    device: str,
    dtype: str = "f16",
    layout: str = "bmhk",
    dims: tuple[int, int] = (64, 64),
    sizes: tuple[int, int] | None = None,
    batch: int = 1,
) -> Run:
    """Random inputs; what no query can see of the keys is NaN in key and value, so that a look at
    it shows. sizes: M and N where the mask has no sequences."""
    rows, keys = shape_of(mask) if sizes is None else sizes
    heads, kv_heads = heads_of(layout)
    k, kv = dims
    kind = DTYPES[dtype]
    query = torch.randn(batch, rows, *heads, k, device=device).to(kind)
    key = torch.randn(batch, keys, *kv_heads, k, device=device).to(kind)
    value = torch.randn(batch, keys, *kv_heads, kv, device=device).to(kind)
    visible = mask.materialize((rows, keys), torch.bool, device)
    return Run(mask, query, key, value, visible)


def poisoned(run: Run) -> Run:
    """The same with NaN in rows of key and value that belong to no sequence."""
    owned = torch.zeros(run.key.shape[1], dtype=torch.bool, device=run.key.device)
    for rows in run.mask._key_rows(run.key.device):
        owned[rows] = True
    gone = ~owned.view(1, -1, *(1,) * (run.key.dim() - 2))
    key, value = (x.masked_fill(gone, math.nan) for x in (run.key, run.value))
    return dataclasses.replace(run, key=key, value=value)


def clean(run: Run) -> Run:
    """What the oracle takes: it multiplies unseen rows by 0."""
    key, value = (x.nan_to_num(0.0) for x in (run.key, run.value))
    return dataclasses.replace(run, key=key, value=value)


def with_bias(run: Run, shape: tuple[int, ...], dtype: torch.dtype, own: bool) -> Run:
    """The mask and a random tensor, within each sequence or over all tokens, with a gradient."""
    bias = torch.randn(shape, device=run.query.device).to(dtype).requires_grad_()
    mask = run.mask.add_bias(bias, True) if own else run.mask.add_bias(bias)
    full = (run.query.shape[0], *run.query.shape[2:-1], *run.visible.shape)

    def spread(x: Tensor) -> Tensor:
        if not own:
            return x.expand(full)
        whole = x.new_zeros(full)
        rows = run.mask._key_rows(x.device)
        for s, (m, n) in enumerate(run.mask._lengths()):
            part = x if x.dim() == 2 else x[s if x.shape[0] > 1 else 0]
            part = part[..., : m if part.shape[-2] > 1 else 1, : n if part.shape[-1] > 1 else 1]
            start = run.mask.q_seqinfo.seqstart_py[s]
            part = part.expand(*full[1:-2], m, n)
            whole[0, ..., start : start + m, rows[s]] = part
        return whole

    return dataclasses.replace(run, mask=mask, bias=bias, spread=spread)


def check(checker: Checker, label: str, run: Run, op: Any = None, backward: bool = True) -> None:
    """One call forward, and backward where asked, by the rule."""
    inputs = [x.detach().requires_grad_(backward) for x in run.inputs]
    if run.bias is not None:
        run.bias.requires_grad_(backward and run.bias.dtype != torch.bool)
    call = memeff_attn.memory_efficient_attention_forward_requires_grad
    out, lse = call(*inputs, run.mask, run.p, op=op, seed=run.seed)
    sight, dense = clean(run), run.dense()
    checker.attention(label, out, lse, *sight.inputs, bias=dense, drop=run.drop())
    if not backward:
        return
    grad_out = torch.randn_like(out)
    leaves = inputs if run.bias is None or not run.bias.requires_grad else [*inputs, run.bias]
    grads = torch.autograd.grad(out, leaves, grad_out)
    checker.true(f"{label}: no NaN", torch.stack([x.isfinite().all() for x in grads]))
    four: gradients.Four = (grads[0], grads[1], grads[2], None)
    gradients.check(checker, label, four, grad_out, *sight.inputs, bias=dense, drop=run.drop())
    if len(grads) == 4:
        check_bias(checker, f"{label} dbias", grads[3], grad_out, sight)


def check_bias(checker: Checker, label: str, got: Tensor, grad_out: Tensor, run: Run) -> None:
    """The gradient of the dense bias, of the oracle and of eager, put back through `spread`."""
    assert run.bias is not None and run.spread is not None
    leaf = run.bias.detach().double().requires_grad_()
    full = run.spread(leaf)

    def back(dense: Tensor | None) -> Tensor:
        assert dense is not None
        return torch.autograd.grad(full, leaf, dense.double(), retain_graph=True)[0]

    arguments = (grad_out, *run.inputs, run.dense(), 0, None, run.drop())
    exact = gradients.oracle(*arguments)
    in_tf32 = run.query.dtype == torch.float32 and run.query.is_cuda and tf32_allowed()
    rounded = gradients.eager(*arguments, dtype=torch.float32, in_tf32=in_tf32)[3]
    plain = gradients.eager(*arguments, dtype=run.query.dtype)[3]
    again = gradients.recomputed(*arguments, in_tf32=in_tf32)[3]
    wanted = back(exact.gradients[3])
    others = [gradients._worse(back(x), back(again), wanted) for x in (plain, rounded)]
    assert others[0] is not None and others[1] is not None
    checker.that(f"{label}: {got.dtype} {tuple(got.shape)}", got.dtype == run.bias.dtype)
    checker.close(
        label, got, wanted, others[0], others[1],
        zero=back((~exact.zeros[3]).double()) == 0 if exact.zeros[3] is not None else None,
        factors=GRADIENT, terms=exact.terms[3], unit=run.query.dtype,
    )  # fmt: skip
