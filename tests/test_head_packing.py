"""Few queries, several heads a key head: (query, head) are the rows of one tile. Whatever lies
where, the result is attention's; every operand that packing touches (query, out, lse, bias, masks)
has a case of its own."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import mask_runs
import pytest
import torch
from cases import Case
from companions import scores
from tolerance import Checker
from torch import Tensor

import memeff_attn
from memeff_attn import attn_bias as ab
from memeff_attn import dispatch

_C = pytest.importorskip("memeff_attn._C")

REQUEST: dict[str, Any] = {"dtype": "f16", "sm": 90, "any_build": True, "alignment": 16}
attention = memeff_attn.memory_efficient_attention
with_lse = memeff_attn.memory_efficient_attention_forward_requires_grad


def tensors(heads: int, kv_heads: int, M: int, N: int = 900, K: int = 64) -> list[Tensor]:
    return [torch.zeros(1, n, h, K).half() for n, h in ((M, heads), (N, kv_heads), (N, kv_heads))]


# ---- without a GPU: what the plan is told and what it makes of it ----


def test_packed_requests() -> None:
    """M becomes rows, H key heads; not for many queries, nor for a few over few keys."""
    sizes = {"B": 1, "H": 32, "K": 128, "Kv": 128, "heads_per_key": 8}
    for M, N, rows in ((1, 64, 8), (1, 8192, 8), (4, 8192, 32), (16, 4096, 128)):
        told = {**REQUEST, **sizes, "M": M, "N": N}
        same = {**REQUEST, **sizes, "M": rows, "N": N, "H": 4, "heads_per_key": 1}
        same["partial"] = True  # only rows that write parts take packed heads
        assert _C.forward_plan(told) == _C.forward_plan(same)
        assert f"8 heads of a key head are the rows of one tile: to kernels M is {rows}, H 4" in (
            _C.explain(told)
        )
    for M, N in ((2, 4095), (17, 8192)):
        told = {**REQUEST, **sizes, "M": M, "N": N}
        assert _C.forward_plan(told) == _C.forward_plan({**told, "heads_per_key": 1})
        assert "rows of one tile" not in _C.explain(told)
    assert "rows of one tile" not in _C.explain({**REQUEST, **sizes, "pass": "bwd", "N": 8192})


@pytest.mark.parametrize("sm", [80, 86, 90])
def test_backward_computes_the_forwards_scores(sm: int) -> None:
    """fp32: rows of packed heads are few, or not, for both passes alike: P = exp(S - LSE) needs S
    by one arithmetic (FAULTS B06)."""
    table = {row["name"]: row for row in _C.variants()}
    told: dict[str, Any] = {**REQUEST, "sm": sm, "dtype": "f32", "B": 1, "H": 32}
    seen = set()
    for M, N, heads, k in itertools.product(
        (1, 2, 3, 4, 8, 15, 16, 17), (300, 4096, 16384), (1, 2, 8, 32), (8, 40, 64)
    ):
        sizes = {**told, "M": M, "N": N, "heads_per_key": heads, "K": k, "Kv": k}
        forward = table[_C.select(sizes)]
        for sharing in {1, heads}:
            backward = table[_C.select({**sizes, "pass": "bwd", "heads_per_kv": sharing})]
            assert scores(backward) == scores(forward), (M, N, heads, k)
        seen.add((scores(forward), M <= 16))
    assert seen == {("compensated", True), ("split", True), ("split", False)}


def test_which_calls_are_packable() -> None:
    """As packable_heads of csrc/forward_plan.cpp: what explain and the variants' coverage see."""

    def heads(d: dispatch.Inputs) -> Any:
        return dispatch.request_of(d, {"sm": 90})["heads_per_key"]

    def call(M: int, heads_: int = 8, bias: Any = None, p: float = 0.0) -> Any:
        return heads(dispatch.Inputs(*tensors(heads_, 2, M), bias, p))

    assert call(1) == call(5) == 4 and call(5, 6) == 3
    assert call(5, p=0.5) == 1 == call(5, 2)
    for shape, one, several in (
        ((1, 1, 1, 900), 4, 4), ((1, 8, 1, 900), 4, 1), ((1, 1, "M", 900), 4, 1),
        ((1, 8, "M", 900), 4, 1),
    ):  # fmt: skip
        for M, want in ((1, one), (5, several)):
            given = torch.zeros([M if n == "M" else n for n in shape]).half()  # type: ignore[misc]
            assert call(M, bias=given) == want, (shape, M)
    by_query = torch.zeros(1, 5, 8, 900).half().transpose(1, 2)  # a head is a row, of 8 heads
    assert call(5, bias=by_query) == 1
    q, k, v = tensors(8, 1, 5)
    assert heads(dispatch.Inputs(q, k, v, by_query)) == 8
    expanded = [x.expand(-1, -1, 8, -1) for x in (k, v)]
    assert heads(dispatch.Inputs(q, *expanded)) == 8
    assert heads(dispatch.Inputs(q, expanded[0], v.repeat(1, 1, 8, 1))) == 1
    five = [x.unflatten(2, (2, 4)) for x in (q, *expanded)]
    assert heads(dispatch.Inputs(*five)) == 4
    flat = dispatch.Inputs(*(x[:, :, 0] for x in (q, k, v)))
    assert heads(flat) == 1
    mask = ab.BlockDiagonalMask.from_seqlens([2, 3], [500, 400], device="cpu")
    assert heads(dispatch.Inputs(q, k, v, mask)) == 8


# ---- on a GPU: against the oracle ----

MASKS = ("none", "top_left", "bottom_right")
HEADS = [(8, 2), (6, 2), (7, 1), (4, 1), (10, 2), (8, 1)]  # 4, 3, 7, 4, 5, 8 heads a key head


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_oracle(dtype: str) -> None:
    """Powers of two and others, one key head and several, one query and more, short keys too."""
    lengths = ((1, 70), (1, 3000), (2, 8200), (3, 9000), (5, 8192), (16, 8209))  # M, N
    dims = itertools.cycle(((128, 128), (64, 64), (40, 72), (256, 256), (320, 33)))
    cases.run(
        [
            Case(dtype, B=2, M=M, N=N, H=H, Hkv=Hkv, K=k, Kv=kv, mask=mask)
            for (M, N), (H, Hkv), mask, (k, kv) in zip(
                *zip(*itertools.product(lengths, HEADS, MASKS), strict=True), dims, strict=False
            )
        ],
        "cuda",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_more_rows_than_keys(dtype: str) -> None:
    """One query is packed over any keys, also over fewer than it has heads."""
    cases.run(
        [
            Case(dtype, B=2, M=1, N=n, H=8, Hkv=2, K=64, mask=mask)
            for n in (1, 2, 63, 64, 65) for mask in MASKS
        ],
        "cuda",
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_what_packing_touches(dtype: str) -> None:
    """Strides of the inputs and biases of every broadcast, for several queries."""
    biases = [
        "".join(dims) + rest
        for dims in itertools.product("b1", "h1", "m1", "n1")
        for rest in ("", ":bool", ":f32", ":padded")
    ]
    strides = ("heads_first", "padded8", "padded1", "offset1", "batch0", "last_dim")
    for heads in ({"H": 8, "Hkv": 2}, {"H": 4, "Hkv": 1}, {"H": 3, "Hkv": 1}):
        sizes = {"B": 3, "M": 3, "N": 5777, **heads}
        cases.run(
            [Case(dtype, bias=bias, **sizes) for bias in biases]
            + [Case(dtype, strides=name, mask="bottom_right", **sizes) for name in strides]
            + [Case(dtype, rank="bmghk", strides="heads0", M=m, N=n, H=4, mask="bottom_right")
               for m in (2, 7) for n in (9000, 16400)],
            "cuda",
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", ["gqa", "gqa4", "mqa", "mqa5"])
def test_windows(dtype: str, layout: str) -> None:
    checker = Checker()
    masks = [ab.LocalAttentionFromBottomRightMask(left, right) for left, right in (
        (0, 0), (100, 0), (63, 1), (6000, 5)
    )]  # fmt: skip
    for mask, (m, n) in itertools.product(masks, ((1, 700), (4, 8300), (16, 9000))):
        with checker.case((layout, mask, m, n)), torch.no_grad():
            run = mask_runs.make(mask, "cuda", dtype, layout, (64, 64), (m, n), batch=2)
            mask_runs.check(checker, f"{layout} {mask} {m} {n}", run, backward=False)
    checker.finish()


QUERIES = {"decode": [1] * 6, "mixed": [1, 0, 5, 1, 30, 2], "none": [0, 1, 0, 1, 0, 0]}
KEYS = [700, 3, 1100, 0, 640, 2000]  # 4443; 6 tables of 2048


def sequence_masks(queries: list[int], device: str) -> dict[str, ab.AttentionBias]:
    """Of mean length up to 16; keys in blocks, padded, with gaps, in pages."""
    padding = 2048
    padded = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        queries, padding, KEYS, device=device
    )
    found: dict[str, ab.AttentionBias] = {
        "blocks": ab.BlockDiagonalMask.from_seqlens(queries, KEYS, device=device),
        "padded causal": padded,
        "padded": ab.BlockDiagonalPaddedKeysMask.from_seqlens(
            queries, padding, KEYS, device=device
        ),
        "padded local": ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
            queries, padding, KEYS, 100, 0, device=device
        ),
    }
    kind = ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    for page in (128, 256, 16):
        count = padding // page
        order = torch.randperm(len(KEYS) * count, generator=torch.Generator().manual_seed(3))
        tables = order.view(len(KEYS), count).int().to(device)
        found[f"paged {page}"] = padded.make_paged(tables, page, kind)
    starts = [5, 800, 810, 2000, 2050, 2700, 4800]
    found["gappy"] = ab.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        queries, starts, KEYS, device=device
    )
    return found


@pytest.mark.parametrize("dtype", mask_runs.DTYPES)
@pytest.mark.parametrize("kind", QUERIES)
def test_sequences(device: str, kind: str, dtype: str) -> None:
    """Decoding as mistral and vLLM call it, and sequences of several lengths beside; the grid knows
    no length."""
    checker = Checker()
    layouts = ("gqa", "gqa4", "mqa", "mqa5") if device == "cuda" else ("gqa4",)
    dims = itertools.cycle(((64, 64), (128, 128), (128, 72)))
    for (name, mask), layout in itertools.product(
        sequence_masks(QUERIES[kind], device).items(), layouts
    ):
        label = f"{kind} {name} {layout}"
        with checker.case(label), torch.no_grad():
            run = mask_runs.make(mask, device, dtype, layout, next(dims))
            mask_runs.check(checker, label, mask_runs.poisoned(run), backward=False)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", mask_runs.DTYPES)
def test_biases_over_sequences(dtype: str) -> None:
    """Broadcast over queries and heads: packed; anything else: not; both right."""
    checker = Checker()
    mask = sequence_masks(QUERIES["mixed"], "cuda")["padded causal"]
    for layout, own in itertools.product(("gqa", "gqa4", "mqa"), (False, True)):
        run = mask_runs.make(mask, "cuda", dtype, layout)
        heads, (m, n) = run.query.shape[2], run.visible.shape
        if own:
            m, n = mask.q_seqinfo.max_seqlen, mask.k_seqinfo.max_seqlen  # type: ignore[attr-defined]
        for shape in ((1, 1, 1, n), (1, heads, 1, n), (1, heads, m, n)):
            label = f"{layout} {own} {shape}"
            with checker.case(label), torch.no_grad():
                biased = mask_runs.with_bias(run, shape, mask_runs.DTYPES[dtype], own)
                mask_runs.check(checker, label, biased, backward=False)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bits_and_gradients(dtype: torch.dtype) -> None:
    """The same bits in every run, with and without lse, whatever out's dtype; the backward pass
    takes what a packed forward saved."""
    for heads, kv_heads in ((8, 2), (6, 2), (4, 1)):
        q, k, v = (
            torch.randn(2, n, h, 64, device="cuda", dtype=dtype)
            for n, h in ((5, heads), (8200, kv_heads), (8200, kv_heads))
        )
        mask = ab.LowerTriangularFromBottomRightMask()
        out, lse = with_lse(q, k, v, mask)
        for _ in range(5):
            again, sums = with_lse(q, k, v, mask)
            assert torch.equal(out, again) and torch.equal(lse, sums)
        assert torch.equal(out, attention(q, k, v, mask))
        wide = attention(q, k, v, mask, output_dtype=torch.float32)
        assert torch.equal(wide.to(dtype), out)
        checker = Checker()
        run = mask_runs.make(mask, "cuda", "f16" if dtype == torch.float16 else "f32", "gqa4",
                             sizes=(5, 8200))  # fmt: skip
        mask_runs.check(checker, f"{heads}/{kv_heads}", run)
        checker.finish()
        for rows in (1, 3):  # each query by itself is the same attention
            part = attention(q[:, -rows:], k, v, mask)
            torch.testing.assert_close(part, out[:, -rows:], atol=2e-3, rtol=2e-3)
