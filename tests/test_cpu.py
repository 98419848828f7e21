"""The CPU path against the oracle, by the one rule, on both of its routes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tolerance import BOTTOM_RIGHT, NONE, TOP_LEFT, Checker, check

import memeff_attn
from memeff_attn import cpu, reference
from memeff_attn.attn_bias import LowerTriangularFromBottomRightMask, LowerTriangularMask

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MASKS = {NONE: None, TOP_LEFT: LowerTriangularMask(), BOTTOM_RIGHT: None}
MASKS[BOTTOM_RIGHT] = LowerTriangularFromBottomRightMask()
attention = memeff_attn.memory_efficient_attention_forward_requires_grad
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    dtype: torch.dtype,
    rows: int = 37,
    keys: int = 53,
    heads: int = 4,
    key_heads: int | None = None,
    depth: int = 24,
    width: int | None = None,
) -> Tensors:
    torch.manual_seed(0)
    key_heads = key_heads or heads
    return (
        torch.randn(2, rows, heads, depth).to(dtype),
        torch.randn(2, keys, key_heads, depth).to(dtype),
        torch.randn(2, keys, key_heads, width or depth).to(dtype),
    )


def route(
    qkv: Tensors, bias: torch.Tensor | None = None, causal: int = NONE, scale: float = 0.2
) -> str:
    return cpu.route(*qkv, bias, scale, causal)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("width", [24, 40])
def test_sizes(dtype: torch.dtype, causal: int, key_heads: int, width: int) -> None:
    for rows, keys in [(1, 1), (1, 33), (33, 1), (37, 53), (53, 37), (64, 64)]:
        qkv = inputs(dtype, rows, keys, key_heads=key_heads, width=width)
        check(*attention(*qkv, MASKS[causal]), *qkv, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.25, 1.0, 7.0])
@pytest.mark.parametrize("width", [24, 40])
def test_scale(dtype: torch.dtype, scale: float, width: int) -> None:
    qkv = inputs(dtype, width=width)
    for causal, mask in MASKS.items():
        check(*attention(*qkv, mask, scale=scale), *qkv, causal=causal, scale=scale)


def dead_rows(bias: torch.Tensor) -> torch.Tensor:
    bias[0, 0, 5] = -math.inf
    bias[1, 2, :] = -math.inf
    return bias


def dead_head(bias: torch.Tensor) -> torch.Tensor:
    bias[..., :40] = -math.inf
    return bias


def lowest(bias: torch.Tensor) -> torch.Tensor:
    bias[:, :, 5] = torch.finfo(bias.dtype).min
    bias[..., :9] = torch.finfo(bias.dtype).min
    return bias


def special(bias: torch.Tensor) -> torch.Tensor:
    bias[0, 0, 3, 4] = math.nan
    bias[1, 1, 7, 3] = math.inf
    return dead_rows(bias)


BIASES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda bias: bias,
    dead_rows,
    dead_head,
    lowest,
    special,
    lambda bias: bias > 0.3,
    lambda bias: dead_rows(bias) > 0.3,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", range(len(BIASES)))
@pytest.mark.parametrize("width", [24, 40])
@pytest.mark.parametrize("wide_bias", [False, True])
def test_bias(dtype: torch.dtype, change: int, width: int, wide_bias: bool) -> None:
    """Dead rows give 0 and -inf; finfo.min is a number; NaN and +inf arrive (B01, B02, B03)."""
    qkv = inputs(dtype, width=width)
    bias = torch.randn(2, 4, 37, 53).to(torch.float32 if wide_bias else dtype)
    bias = BIASES[change](bias)
    check(*attention(*qkv, bias), *qkv, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_rows_of_broadcast_biases(dtype: torch.dtype) -> None:
    for shape in [(2, 1, 1, 53), (1, 4, 37, 1), (2, 4, 37, 1), (1, 1, 1, 1), (2, 1, 37, 53)]:
        qkv = inputs(dtype)
        bias = torch.zeros(shape, dtype=dtype)
        bias[-1:] = -math.inf
        check(*attention(*qkv, bias), *qkv, bias=bias)


@pytest.mark.skipif(
    not cpu._FLASH_IS_RIGHT, reason="PyTorch's flash kernel is not used under this torch"
)
def test_an_lse_of_zero_is_no_dead_row() -> None:
    zeros = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    bias = torch.zeros(1, 1, 1, 1, dtype=torch.float16)
    out, lse = attention(zeros, zeros, zeros, bias)
    assert route((zeros, zeros, zeros), bias) == "flash"
    assert lse.item() == 0.0 and not out.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_does_not_reach_inside(dtype: torch.dtype) -> None:
    for width in (24, 40):
        qkv = inputs(dtype, width=width)
        plain = attention(*qkv)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = attention(*qkv)
            oracle = reference.attention(*qkv)[0]
            eager = reference.eager(*qkv)
        assert all(torch.equal(a, b) for a, b in zip(inside, plain, strict=True))
        assert torch.equal(oracle, reference.attention(*qkv)[0])
        assert torch.equal(eager, reference.eager(*qkv))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 40])
def test_nan_in_inputs(dtype: torch.dtype, width: int) -> None:
    for which in range(3):
        qkv = inputs(dtype, width=width)
        qkv[which][0, 3, 1] = math.nan
        check(*attention(*qkv), *qkv)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype: torch.dtype) -> None:
    checker = Checker()
    for width in (24, 40):
        q, k, v = inputs(dtype, heads=6, width=width)
        bias = torch.randn(2, 6, 37, 53).to(dtype)
        flat = (q[:, :, 0], k[:, :, 1], v[:, :, 2])
        out, lse = attention(*flat, bias[:, 0])
        assert out.shape == (2, 37, width) and lse.shape == (2, 1, 37)
        checker.attention("bmk", out, lse, *flat, bias[:, 0])
        grouped = tuple(x.unflatten(2, (2, 3)) for x in (q, k, v))
        out, lse = attention(*grouped, bias.unflatten(1, (2, 3)))
        assert out.shape == (2, 37, 2, 3, width) and lse.shape == (2, 2, 3, 37)
        checker.attention("bmghk", out, lse, *grouped, bias.unflatten(1, (2, 3)))
        shared = (grouped[0], *(x[:, :, :, :1].expand(-1, -1, -1, 3, -1) for x in grouped[1:]))
        checker.attention("bmghk shared", *attention(*shared), *shared)
        # last stride 2; heads before rows; batch and heads expanded
        strided = tuple(x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v))
        checker.attention("last stride", *attention(*strided), *strided)
        swapped = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        checker.attention("bhmk", *attention(*swapped), *swapped)
        expanded = (q, *(x[:1, :, :1].expand(2, -1, 6, -1) for x in (k, v)))
        checker.attention("stride 0", *attention(*expanded), *expanded)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_contiguous(dtype: torch.dtype) -> None:
    for width in (24, 40):
        for rows in (1, 37):  # strides of size-1 dimensions too: the fake promises them
            out, lse = attention(*inputs(dtype, rows, width=width))
            assert out.dtype == dtype and lse.dtype == torch.float32
            assert out.stride() == torch.empty(out.shape).stride()
            assert lse.stride() == torch.empty(lse.shape).stride()


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("empty", ["B", "M", "N", "H", "K", "Kv"])
def test_empty(empty: str, width: int) -> None:
    sizes = {"B": 2, "M": 3, "N": 5, "H": 4, "K": 8, "Kv": width, empty: 0}
    b, m, n, h, depth, kv = (sizes[x] for x in ("B", "M", "N", "H", "K", "Kv"))
    q, k, v = torch.randn(b, m, h, depth), torch.randn(b, n, h, depth), torch.randn(b, n, h, kv)
    bias = torch.randn(1, 1, m, n)
    for attn_bias in (None, LowerTriangularMask(), LowerTriangularFromBottomRightMask(), bias):
        out, lse = attention(q, k, v, attn_bias)
        assert out.shape == (b, m, h, kv) and lse.shape == (b, h, m)
        assert out.isfinite().all() and not lse.isnan().any()
        if empty == "N":
            assert not out.any() and bool((lse == -math.inf).all())
    if empty == "K":  # no score but the bias
        weights = torch.softmax(bias, -1).expand(b, h, m, n)
        expected = torch.einsum("bhmn,bnhk->bmhk", weights, v)
        torch.testing.assert_close(out, expected)


def test_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to cut the work gives the same rows."""
    q, k, v = inputs(torch.float32, heads=6, key_heads=3, width=40)
    bias = dead_rows(torch.randn(2, 6, 37, 53))
    whole = cpu.forward(q, k, v, bias, 0.2, BOTTOM_RIGHT)
    for size in (1, 53, 53 * 2 * 4, 53 * 2 * 37, 53 * 6 * 37, 1 << 20):
        monkeypatch.setattr(reference, "SCORES_PER_BLOCK", size)
        monkeypatch.setattr(cpu, "SCORES_PER_BLOCK", size)
        for mine, other in zip(cpu.forward(q, k, v, bias, 0.2, BOTTOM_RIGHT), whole, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
        flash = cpu.forward(q, k, v[..., :24], bias, 0.2, NONE)
        check(*flash, q, k, v[..., :24], bias, scale=0.2)


@pytest.mark.skipif(
    not cpu._FLASH_IS_RIGHT, reason="PyTorch's flash kernel is not used under this torch"
)
def test_routes() -> None:
    qkv = inputs(torch.float16)
    assert route(qkv) == "flash"
    assert route(qkv, causal=TOP_LEFT) == "flash"
    assert route(qkv, causal=TOP_LEFT, scale=0.0) == "blockwise"  # it would give NaN
    assert route(qkv, causal=NONE, scale=-1.0) == "flash"
    assert route(qkv, causal=BOTTOM_RIGHT) == "blockwise"
    assert route(inputs(torch.float16, 1, 53), causal=BOTTOM_RIGHT) == "flash"
    assert route(inputs(torch.float16, 53, 53), causal=BOTTOM_RIGHT) == "flash"
    assert route(inputs(torch.float16, width=40)) == "blockwise"
    assert route(inputs(torch.float32)) == "blockwise"  # its exp is too coarse there
    for value in (math.nan, math.inf):
        assert route(qkv, torch.full((1, 1, 1, 1), value)) == "blockwise"


def test_no_dense_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blockwise holds one block of scores, not M x N."""
    largest = 0
    matmul = torch.matmul

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        result = matmul(a, b)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch, "matmul", watched)
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 1 << 16)
    q, k, v = inputs(torch.float32, 700, 600, width=8)
    attention(q, k, v)
    assert 0 < largest <= 1 << 16


def test_reference_is_the_oracle_of_the_rule() -> None:
    """memeff_attn.reference and tests/tolerance.py were written apart and agree."""
    from tolerance import plain_attention

    for causal, mask in MASKS.items():
        q, k, v = inputs(torch.bfloat16, 41, 29, heads=6, key_heads=2, width=40)
        bias = dead_rows(torch.randn(2, 6, 41, 29))
        for b, attn_bias in ((bias, bias), (None, mask)):
            rule = NONE if b is not None else causal
            mine, mine_lse = reference.attention(q, k, v, attn_bias)
            other, other_lse = plain_attention(q, k, v, b, rule)
            torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(mine_lse, other_lse, atol=1e-12, rtol=1e-12)
            eager = reference.eager(q, k, v, attn_bias)
            torch.testing.assert_close(eager.double(), other, atol=0.03, rtol=0.03)


def test_needs_no_compiled_module() -> None:
    code = (
        "import sys; sys.modules['memeff_attn._C'] = None\n"
        "import torch, memeff_attn\n"
        "q = torch.randn(1, 5, 2, 8)\n"
        "assert memeff_attn.memory_efficient_attention(q, q, q).shape == q.shape\n"
        "print(memeff_attn.explain(q, q, q))\n"
        "print(memeff_attn.explain(q, q, q, device='sm_70'))\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(memeff_attn.__file__)))
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "chosen: cpu" in done.stdout and "chosen: none" in done.stdout
