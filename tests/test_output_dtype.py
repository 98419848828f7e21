"""out in another dtype than the inputs: what the sums in float32 come to, rounded once to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backward_cases import deterministic
from tolerance import Checker, plain_attention
from torch import Tensor

import memeff_attn
from memeff_attn import attn_bias as ab
from memeff_attn import dispatch, ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = [(a, b) for a, b in itertools.product(DTYPES, DTYPES) if a is not b]
attention = memeff_attn.memory_efficient_attention
with_lse = memeff_attn.memory_efficient_attention_forward_requires_grad
partial = memeff_attn.memory_efficient_attention_partial
Call = tuple[Tensor, Tensor, Tensor, Any]


def make(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def qkv(
    device: str, dtype: torch.dtype, B: int, M: int, N: int, H: int, Hkv: int, K: int, Kv: int
) -> list[Tensor]:
    shapes = (B, M, H, K), (B, N, Hkv, K), (B, N, Hkv, Kv)
    return [make(*s, device=device, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


def calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    """Direct kernels, parts of the keys, packed heads, every path of masks, all layouts."""
    few = qkv(device, dtype, 1, 5, 1500, 4, 2, 64, 64)
    one = qkv(device, dtype, 2, 1, 700, 8, 2, 128, 40)
    many = qkv(device, dtype, 2, 150, 133, 4, 4, 64, 64)
    wide = qkv(device, dtype, 1, 40, 70, 2, 2, 33, 300)
    row = qkv(device, dtype, 1, 90, 120, 2, 1, 32, 32)
    packed = ab.BlockDiagonalMask.from_seqlens([30, 1, 59], [50, 0, 70], device=device)
    ends = ab.BlockDiagonalMask.from_seqlens([30, 60], [50, 70], device=device)
    bias = make(1, 4, 150, 133, device=device, dtype=dtype)
    return {
        "few": (*few, None),
        "one": (*one, ab.LowerTriangularFromBottomRightMask()),
        "many": (*many, ab.LowerTriangularMask()),
        "bias": (*many, bias),
        "window": (*many, ab.LocalAttentionFromBottomRightMask(20, 0)),
        "wide": (*wide, None),
        "packed": (*row, packed),
        "packed causal": (*row, ends.make_causal_from_bottomright()),
        "bmk": (*(x[:, :, 0] for x in many), None),
        "bmghk": (*(x.unflatten(2, (2, 2)) for x in many), None),
    }


@pytest.mark.parametrize(("dtype", "other"), PAIRS)
def test_rounded_once(device: str, dtype: torch.dtype, other: torch.dtype) -> None:
    """The float32 output rounds to every other bit by bit, that of no output_dtype included; the
    log-sum-exp is the same. On a GPU by one family: which kernel runs depends on the dtype."""
    op: Any = {"op": dispatch.ChainedFwOp} if device == "cuda" else {}
    for name, (q, k, v, mask) in calls(device, dtype).items():
        out, lse = with_lse(q, k, v, mask, output_dtype=other, **op)
        wide, wide_lse = with_lse(q, k, v, mask, output_dtype=torch.float32, **op)
        plain, plain_lse = with_lse(q, k, v, mask, **op)
        assert out.dtype == other and plain.dtype == dtype, name
        assert out.shape == wide.shape == plain.shape and out.is_contiguous(), name
        assert torch.equal(out, wide.to(other)), name
        if device == "cuda" or dtype == torch.float32:  # the CPU's flash kernel is another one
            assert torch.equal(plain, wide.to(dtype)), name
            assert torch.equal(lse, plain_lse), name
        assert torch.equal(lse, wide_lse), name
        assert torch.equal(out, attention(q, k, v, mask, output_dtype=other, **op)), name
        if dtype != torch.float32:
            assert not torch.equal(wide, wide.to(dtype).float()), name  # it is not rounded before
        for mine, also in zip(
            partial(q, k, v, mask, output_dtype=other, **op), (out, lse), strict=True
        ):
            assert torch.equal(mine, also), name


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_float32_is_closer_than_16_bits(device: str, dtype: torch.dtype) -> None:
    """Rounded to the inputs' dtype it is within the rule, and it is closer to the oracle."""
    checker = Checker()
    for name in ("few", "one", "many", "wide"):
        q, k, v, mask = calls(device, dtype)[name]
        causal = {"one": 2, "many": 1}.get(name, 0)
        out = attention(q, k, v, mask, output_dtype=torch.float32)
        checker.attention(name, out.to(dtype), None, q, k, v, None, causal)
        exact, _ = plain_attention(q, k, v, None, causal, None)
        errors = [(x.double() - exact).square().mean().sqrt() for x in (out, out.to(dtype))]
        assert errors[0] < 0.9 * errors[1], (name, errors)
    checker.finish()


@pytest.mark.parametrize(("dtype", "other"), PAIRS)
def test_gradients_go_through_the_inputs_dtype(
    device: str, dtype: torch.dtype, other: torch.dtype
) -> None:
    """As those of the backward call on grad and output in the inputs' dtype, bit by bit where that
    has the same log-sum-exp (kernels save it in two parts), the forward pass is one family's (which
    kernel runs depends on the output's dtype) and sums have a fixed order."""
    with deterministic():
        check_gradients(device, dtype, other)


def check_gradients(device: str, dtype: torch.dtype, other: torch.dtype) -> None:
    op = (dispatch.ChainedFwOp, None) if device == "cuda" else None
    for name, (q, k, v, mask) in calls(device, dtype).items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask, op=op, output_dtype=other)
        grad = make(*out.shape, device=device, dtype=dtype, seed=9).to(other)
        mine = torch.autograd.grad(out, leaves, grad)
        assert all(a.dtype == dtype for a in mine), name
        if device == "cuda" and other == torch.float32:  # what is saved rounds to the plain call's
            plain = attention(*leaves, mask, op=op)
            theirs = torch.autograd.grad(plain, leaves, grad.to(dtype))
        else:
            out, lse = with_lse(q, k, v, mask, output_dtype=other)
            given = grad.to(dtype), out.to(dtype), lse, q, k, v, mask
            theirs = memeff_attn.memory_efficient_attention_backward(*given)
        for a, b in zip(mine, theirs, strict=True):
            if device == "cuda" and other != torch.float32:
                torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
            else:
                assert torch.equal(a, b), name


def test_gradient_of_a_partial(device: str) -> None:
    q, k, v = qkv(device, torch.float32, 1, 9, 30, 2, 2, 16, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for other in (None, torch.float16):
        out, lse = partial(*leaves, output_dtype=other)
        results.append(torch.autograd.grad(out.float().sum() + lse.square().sum(), leaves))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-3)


def test_dropout_and_empty_inputs(device: str) -> None:
    q, k, v = qkv(device, torch.bfloat16, 2, 70, 90, 2, 2, 32, 32)
    seed = memeff_attn.dropout.new_seed(q.device)
    out, _ = with_lse(q, k, v, None, 0.3, seed=seed, output_dtype=torch.float32)
    plain, _ = with_lse(q, k, v, None, 0.3, seed=seed)
    assert torch.equal(out.to(torch.bfloat16), plain) or device == "cpu"
    torch.testing.assert_close(out, plain.float(), atol=2e-2, rtol=1e-2)
    for empty in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0]), (q[:0], k[:0], v[:0])):
        none = attention(*empty, output_dtype=torch.float32)
        assert none.dtype == torch.float32 and not none.any()
        assert none.shape == (*empty[0].shape[:-1], 32)
    narrow = attention(q, k, v[..., :0], output_dtype=torch.float16)
    assert narrow.dtype == torch.float16 and narrow.shape == (2, 70, 2, 0)
    flat = attention(q[..., :0], k[..., :0], v, output_dtype=torch.float32)
    torch.testing.assert_close(flat, v.float().mean(1, True).expand_as(flat), atol=1e-2, rtol=0)


def test_compiled_vmapped_and_checked(device: str) -> None:
    q, k, v = qkv(device, torch.float16, 3, 20, 30, 2, 2, 16, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, output_dtype=torch.float32)

    expected = call(q, k, v)
    compiled: Callable[..., Tensor] = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    assert torch.equal(compiled(q, k, v), expected)
    out = compiled(*leaves)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    mine = torch.autograd.grad(out.sum(), leaves)
    theirs = torch.autograd.grad(call(*leaves).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    several = torch.vmap(call)(*(x[:, None] for x in (q, k, v)))
    assert several.dtype == torch.float32
    torch.testing.assert_close(several[:, 0], expected)
    arguments = q, k, v, None, 0.25, 1, False, True, "", 0.0, None
    torch.library.opcheck(ops.forward, arguments, {"output_dtype": torch.float32})


def test_refused(device: str) -> None:
    q, k, v = qkv(device, torch.float16, 1, 4, 6, 2, 2, 8, 8)
    for mask in (None, ab.LocalAttentionFromBottomRightMask(2, 0)):
        for other in (torch.float64, torch.int32):
            with pytest.raises(NotImplementedError, match=f"output_dtype is {other}, it writes"):
                attention(q, k, v, mask, output_dtype=other)
    op = dispatch.CpuFwOp if device == "cpu" else dispatch.ChainedFwOp
    assert attention(q, k, v, op=op, output_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match=r"(?s)output_dtype is torch.float64"):
        attention(q, k, v, op=op, output_dtype=torch.float64)


@pytest.mark.gpu
def test_strides_of_an_output_that_kernels_write() -> None:
    """The compiled call, into float32 views of any strides: between what must not change."""
    import memeff_attn._C as _C

    for M in (3, 200):
        q, k, v = qkv("cuda", torch.bfloat16, 2, M, 300, 4, 2, 64, 64)
        expected = attention(q, k, v, output_dtype=torch.float32)
        around = torch.full((2, 4, M, 2 * 64 + 3), 7.0, device="cuda")
        out = around[..., 3:67].transpose(1, 2)
        stream = torch.cuda.current_stream().cuda_stream
        settings = 0.125, 0.0, 0, False, "", None, stream
        assert _C.forward(q, k, v, None, out, None, None, *settings) is None
        assert torch.equal(out, expected)
        assert bool((around[..., :3] == 7).all()) and bool((around[..., 67:] == 7).all())
