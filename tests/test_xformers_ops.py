"""The operators of memeff_attn.xformers: forms of the log-sum-exp, named operators, low-level
calls, parts, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tolerance import Checker
from torch import Tensor

import memeff_attn
from memeff_attn import dropout, reference
from memeff_attn.xformers import ops as xops
from memeff_attn.xformers import rand_uniform
from memeff_attn.xformers.ops import fmha
from memeff_attn.xformers.ops.fmha import merge_training

HALF = torch.float16
Q_LENS, KV_LENS = [7, 40, 1], [20, 41, 33]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def three(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for _ in range(3)]


def packed_call(device: str) -> tuple[Tensor, Tensor, Tensor, Any]:
    mask = fmha.BlockDiagonalMask.from_seqlens(Q_LENS, KV_LENS, device=device)
    q = torch.randn(1, sum(Q_LENS), 2, 16, device=device)
    k, v = (torch.randn(1, sum(KV_LENS), 2, 16, device=device) for _ in range(2))
    return q, k, v, mask


# ---- the log-sum-exp ----


@pytest.mark.parametrize("rows", [1, 31, 32, 33])
@pytest.mark.parametrize("heads", [(), (3,), (2, 3)], ids=["bmk", "bmhk", "bmghk"])
def test_padded_lse(device: str, rows: int, heads: tuple[int, ...]) -> None:
    q = torch.randn(2, rows, *heads, 8, device=device)
    k, v = (torch.randn(2, 9, *heads, 8, device=device) for _ in range(2))
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v)
    exact, exact_lse = reference.attention(q, k, v)
    assert lse.shape == (2, *(heads or (1,)), -(-rows // 32) * 32) and lse.dtype == torch.float32
    assert bool((lse[..., rows:] == math.inf).all())
    torch.testing.assert_close(lse[..., :rows].double(), exact_lse, **CLOSE)
    torch.testing.assert_close(out.double(), exact, **CLOSE)
    grad = torch.randn_like(out)
    wanted = reference.attention_backward(grad, q, k, v)
    for form in (lse, lse[..., :rows], torch.cat([lse, lse], -1)):  # clients cut it
        found = xops.memory_efficient_attention_backward(grad, out, form, q, k, v)
        for got, want in zip(found, wanted, strict=False):
            assert want is not None
            torch.testing.assert_close(got.double(), want, **CLOSE)


def test_lse_of_sequences(device: str) -> None:
    q, k, v, mask = packed_call(device)
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, mask)
    _, own = memeff_attn.memory_efficient_attention_forward_requires_grad(q, k, v, mask)
    assert lse.shape == (3, 2, 64) and own.shape == (1, 2, sum(Q_LENS))
    start = 0
    for s, rows in enumerate(Q_LENS):
        assert torch.equal(lse[s, :, :rows], own[0, :, start : start + rows])
        assert bool((lse[s, :, rows:] == math.inf).all())
        start += rows
    grad = torch.randn_like(out)
    wanted = reference.attention_backward(grad, q, k, v, mask)
    for form in (lse, own):
        found = xops.memory_efficient_attention_backward(grad, out, form, q, k, v, mask)
        for got, want in zip(found, wanted, strict=False):
            assert want is not None
            torch.testing.assert_close(got.double(), want, **CLOSE)
    with pytest.raises(ValueError, match="lse should be"):
        xops.memory_efficient_attention_backward(grad, out, lse[:2], q, k, v, mask)


def test_no_query_and_no_key(device: str) -> None:
    for rows, keys in ((0, 5), (5, 0), (0, 0)):
        q = torch.randn(2, rows, 2, 8, device=device, requires_grad=True)
        k, v = (torch.randn(2, keys, 2, 8, device=device, requires_grad=True) for _ in range(2))
        out = xops.memory_efficient_attention(q, k, v)
        out.sum().backward()
        assert out.shape == (2, rows, 2, 8) and not out.any()
        for x in (q, k, v):
            assert x.grad is not None and not x.grad.any()
    mask = fmha.BlockDiagonalMask.from_seqlens([0, 0], [3, 2], device=device)
    q, k, v = (torch.randn(1, n, 2, 8, device=device) for n in (0, 5, 5))
    assert xops.memory_efficient_attention_forward_requires_grad(q, k, v, mask)[1].numel() == 0


def test_context_pads(device: str) -> None:
    lse = torch.zeros(1, 2, 40, device=device)
    context = fmha.Context(lse=lse, out=torch.zeros(1, 33, 2, 8, device=device))
    assert context.get_padded_lse(32).shape == (1, 2, 64)
    forced = context.get_padded_lse(32, force_pad_inf=True)
    assert bool((forced[..., 33:] == math.inf).all()) and not forced[..., :33].any()
    assert not context.lse.any()  # the client's tensor is left alone


# ---- operators ----

NAMED = [
    (fmha.cutlass.FwOp, fmha.cutlass.BwOp),
    (fmha.flash.FwOp, fmha.flash.BwOp),
    (fmha.flash3.FwOp, fmha.flash3.BwOp),
    (fmha.flash3.FwOp_KVSplit, fmha.flash3.BwOp),
    (fmha.cutlass_blackwell.FwOp, fmha.cutlass_blackwell.BwOp),
    (fmha.triton_splitk.FwOp_S8, fmha.cutlass.BwOp),
    (fmha.memeff.FwOp, fmha.memeff.BwOp),
]


@pytest.mark.parametrize("pair", NAMED, ids=lambda pair: pair[0].NAME)
def test_apply(device: str, pair: Any) -> None:
    """`FwOp().apply(Inputs)` and back, as benchmarks and ring attention call them."""
    forward, backward = pair
    q, k, v, mask = packed_call(device)
    if forward in (fmha.flash3.FwOp_KVSplit, fmha.triton_splitk.FwOp_S8):
        mask = None
    inp = fmha.Inputs(q, k, v, mask)
    out, context = forward().apply(inp, needs_gradient=True)
    assert forward.apply(inp, needs_gradient=False)[1] is None
    exact, exact_lse = reference.attention(q, k, v, mask)
    torch.testing.assert_close(out.double(), exact, **CLOSE)
    rows = exact_lse.shape[-1]
    if forward.VARLEN_LSE_PACKED:
        torch.testing.assert_close(context.lse.double(), exact_lse, **CLOSE)
    else:
        assert context.lse.shape[0] == (1 if mask is None else 3)
    assert context.rng_state is None and context.op_bw is None and rows
    grad = torch.randn_like(out)
    found = backward.apply(context, inp, grad)
    wanted = reference.attention_backward(grad, q, k, v, mask)
    for got, want in zip((found.dq, found.dk, found.dv), wanted, strict=False):
        assert want is not None
        torch.testing.assert_close(got.double(), want, **CLOSE)
    assert found.db is None


def test_apply_with_dropout_and_bias(device: str) -> None:
    q, k, v = three(2, 20, 2, 16, device=device)
    bias = torch.randn(1, 2, 20, 20, device=device, requires_grad=True)
    inp = fmha.Inputs(q, k, v, bias, p=0.4)
    op = fmha.memeff.CpuFwOp if device == "cpu" else fmha.cutlass.FwOp
    out, context = op.apply(inp, needs_gradient=True)
    assert context is not None and context.op_bw is op.BACKWARD
    grad = torch.randn_like(out)
    found = context.op_bw.apply(context, inp, grad)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    again, _ = memeff_attn.memory_efficient_attention_forward_requires_grad(
        *leaves, 0.4, seed=context.rng_state
    )
    assert torch.equal(again, out)
    wanted = torch.autograd.grad(again, leaves, grad)
    for got, want in zip((found.dq, found.dk, found.dv, found.db), wanted, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, *ops: Any) -> None:
    """Operators of other backends refuse CPU tensors first; what else they say is seen without."""
    for op in ops:
        monkeypatch.setattr(op, "SUPPORTED_DEVICES", frozenset({"cpu", "cuda"}))


def test_flash_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs our kernels where Flash-Attention would run, and refuses where that refuses."""
    tuple_ = xops.MemoryEfficientAttentionFlashAttentionOp
    q, k, v = three(2, 20, 2, 64, device=device, dtype=HALF)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"fa2F@0.0.0` is not supported[\s\S]*device=cpu"):
            xops.memory_efficient_attention(q, k, v, op=tuple_)
        as_on_a_gpu(monkeypatch, *tuple_)
    assert tuple_[0].supports(fmha.Inputs(q, k, v)) and not tuple_[0].is_available()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = xops.memory_efficient_attention(*leaves, op=tuple_)
    assert torch.equal(out, xops.memory_efficient_attention(*leaves))
    out.float().sum().backward()
    assert all(x.grad is not None for x in leaves)
    q, k, v = (x.detach() for x in leaves)
    causal = fmha.LowerTriangularMask()
    for arguments, reason in (
        ((q.float(), k.float(), v.float()), "dtype=torch.float32"),
        ((q, k, v[..., :32]), r"query.shape\[-1\] != value.shape\[-1\]"),
        ((q, k[:, :7], v[:, :7], causal), "equal number of keys and queries"),
        ((q, k, v, torch.zeros(2, 2, 20, 20, dtype=HALF, device=device)), "attn_bias type is"),
        ((*(x.repeat(1, 1, 1, 5) for x in (q, k, v)),), "> 256"),
        ((q[..., :36], k[..., :36], v[..., :36]), r"query.shape\[-1\] % 8"),
    ):
        with pytest.raises(ValueError, match=reason):
            xops.memory_efficient_attention(*arguments, op=tuple_)
    spread = torch.zeros(2, 20, 3, 2, 64, dtype=HALF, device=device).transpose(2, 3)
    with pytest.raises(ValueError, match="G/H dimensions are contiguous"):
        xops.memory_efficient_attention(spread, spread, spread, op=tuple_)


def test_pairs_that_do_not_go_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flash, cutlass = fmha.flash, fmha.cutlass
    if device == "cpu":
        as_on_a_gpu(monkeypatch, flash.FwOp, flash.BwOp, cutlass.FwOp, cutlass.BwOp)
    q, k, v = (x.requires_grad_() for x in three(1, 4, 1, 16, device=device, dtype=HALF))
    for pair in ((cutlass.FwOp, flash.BwOp), (flash.FwOp, cutlass.BwOp)):
        with pytest.raises(ValueError, match="op_bw=None"):
            xops.memory_efficient_attention(q, k, v, p=0.1, op=pair)
        xops.memory_efficient_attention(q, k, v, op=pair)
        mask = fmha.BlockDiagonalMask.from_seqlens([3, 1], device=device)
        with pytest.raises(ValueError, match="format of logsumexp"):
            xops.memory_efficient_attention(q, k, v, mask, op=pair)
    for op in ((cutlass.FwOp, None), (None, cutlass.BwOp), (cutlass.FwOp,), cutlass.FwOp()):
        xops.memory_efficient_attention(q, k, v, p=0.1, op=op).sum().backward()


def test_cutlass_takes_what_xformers_refuses(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any head dimension and alignment, any bias, every mask: no reason against them."""
    op = fmha.cutlass.FwOp, fmha.cutlass.BwOp
    if device == "cpu":
        as_on_a_gpu(monkeypatch, *op)
    q, k, v = (x[..., 1:].requires_grad_() for x in three(1, 7, 2, 38, device=device, dtype=HALF))
    bias = torch.randn(1, 1, 7, 7, device=device).to(HALF).mT.requires_grad_()
    out = xops.memory_efficient_attention(q, k, v, bias, op=op)
    assert len(torch.autograd.grad(out.float().sum(), (q, k, v, bias))) == 4
    mask = fmha.attn_bias.LocalAttentionFromBottomRightMask(2, 1)
    xops.memory_efficient_attention(q, k, v, mask, op=op).float().sum().backward()
    q, k, v = (x.unsqueeze(2).detach().requires_grad_() for x in (q, k, v))  # 5-D
    xops.memory_efficient_attention(q, k, v, op=op).float().sum().backward()


class Mine(fmha.AttentionFwOpBase):
    """An operator that a program brings."""

    NAME, RUNS_HERE, SUPPORTED_MAX_K = "mine", True, 512
    SUPPORTED_DEVICES = frozenset({"cpu", "cuda"})
    SUPPORTED_DTYPES = frozenset({torch.float32})
    SUPPORTS_CUSTOM_SCALE = True
    calls = 0

    @classmethod
    def apply(cls, inp: Any, needs_gradient: bool) -> Any:
        cls.calls += 1
        out, lse = memeff_attn.memory_efficient_attention_forward_requires_grad(
            inp.query, inp.key, inp.value, inp.attn_bias, scale=inp.scale
        )
        return out, fmha.Context(lse=lse, out=out)


@pytest.mark.parametrize("layout", ["bmk", "bmhk"])
def test_operator_of_a_program(device: str, layout: str) -> None:
    shape = (2, 9, 16) if layout == "bmk" else (2, 9, 3, 16)
    q, k, v = (x.requires_grad_() for x in three(*shape, device=device))
    before = Mine.calls
    out = xops.memory_efficient_attention(q, k, v, scale=0.3, op=(Mine, None))
    with torch.no_grad():
        assert torch.equal(xops.memory_efficient_attention(q, k, v, scale=0.3, op=Mine), out)
    assert Mine.calls == before + 2
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    plain = [x.detach() for x in (q, k, v)]
    for got, want in zip(
        found, reference.attention_backward(grad, *plain, scale=0.3), strict=False
    ):
        assert want is not None
        torch.testing.assert_close(got.double(), want, **CLOSE)


def test_default_is_what_dispatch_says(device: str) -> None:
    """memeff.default, which runs, and _dispatch_fw, which explains, agree."""
    q, k, v, blocks = packed_call(device)
    masks = [None, fmha.LowerTriangularMask(), blocks, torch.zeros(1, 2, 48, 94, device=device)]
    masks += [fmha.attn_bias.LocalAttentionFromBottomRightMask(3, 3)]
    for mask in masks:
        for partial in (False, True):
            inp = fmha.Inputs(q, k, v, mask, is_partial=partial)
            chosen = fmha._dispatch_fw(inp, True)
            assert chosen is fmha.memeff.default(inp), (mask, partial)
            assert fmha._dispatch_bw(inp, None).is_available()


# ---- low-level calls, parts ----


def test_inputs(device: str) -> None:
    q, k, v = three(2, 5, 8, device=device)
    inp = fmha.Inputs(q, k, v, torch.zeros(2, 5, 5, device=device))
    assert inp.device == q.device and inp.scale_float == 8**-0.5
    assert inp.nbytes == 3 * q.numel() * 4
    assert [x.shape for x in inp.get_qkv_in_bmghk()] == [(2, 5, 1, 1, 8)] * 3
    assert inp.normalize_bmhk() == (2, 5, 8)
    assert inp.query.shape == (2, 5, 1, 8) and inp.attn_bias.shape == (2, 1, 5, 5)  # type: ignore[union-attr]
    inp.validate_inputs()
    half = fmha.Inputs(q.half(), k.half(), v.half())
    assert half.get_output_dtype() == HALF
    half.is_partial = True
    assert half.get_output_dtype() == torch.float32
    assert fmha.bmk2bmhk(torch.zeros(6, 4, 8), 3).shape == (2, 4, 3, 8)


def test_ring_attention(device: str) -> None:
    """Private calls: the keys in two parts, the sum of both lse given back to each backward."""
    q, k, v = three(1, 40, 2, 16, device=device)
    parts = []
    for half in (slice(0, 15), slice(15, 40)):
        inp = fmha.Inputs(q, k[:, half], v[:, half])
        out, context = fmha._memory_efficient_attention_forward_requires_grad(inp, None)
        parts.append((out, context.lse[:, :, :40]))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [(part - lse).exp().transpose(1, 2)[..., None] for _, part in parts]
    out = sum(w * x for w, (x, _) in zip(weights, parts, strict=True))
    exact, _ = reference.attention(q, k, v)
    torch.testing.assert_close(out.double(), exact, **CLOSE)
    grad = torch.randn_like(out)
    dq = torch.zeros_like(q)
    found = []
    for half in (slice(0, 15), slice(15, 40)):
        context = fmha.Context(lse=lse, out=out)
        inp = fmha.Inputs(q, k[:, half], v[:, half])
        grads = fmha._memory_efficient_attention_backward(context, inp, grad, None)
        dq += grads.dq
        found.append((grads.dk, grads.dv))
    wanted = reference.attention_backward(grad, q, k, v)
    got = (dq, *(torch.cat(x, 1) for x in zip(*found, strict=True)))
    for one, want in zip(got, wanted, strict=False):
        assert want is not None
        torch.testing.assert_close(one.double(), want, **CLOSE)


@pytest.mark.parametrize("stacked", [False, True])
def test_parts(device: str, stacked: bool) -> None:
    q, k, v = three(2, 9, 2, 16, device=device)
    cuts = (slice(0, 11), slice(11, 30))
    k, v = (torch.randn(2, 30, 2, 16, device=device) for _ in range(2))
    outs, sums = zip(
        *(fmha.memory_efficient_attention_partial(q, k[:, c], v[:, c]) for c in cuts), strict=True
    )
    assert sums[0].shape == (2, 2, 9)  # as Flash-Attention's, not padded
    if stacked:
        outs, sums = torch.stack(outs), torch.stack(sums)  # type: ignore[assignment]
    out, lse = fmha.merge_attentions(outs, sums)
    exact, exact_lse = reference.attention(q, k, v)
    torch.testing.assert_close(out.double(), exact, **CLOSE)
    assert lse is not None and fmha.merge_attentions(outs, sums, write_lse=False)[1] is None
    torch.testing.assert_close(lse.double(), exact_lse, **CLOSE)
    into, into_lse = torch.empty(2, 9, 1, 2, 16, device=device), torch.empty(2, 1, 2, 9)
    split = torch.stack(list(outs)).unsqueeze(3).permute(1, 3, 4, 0, 2, 5)
    fmha.triton_splitk.merge_attentions(
        into,
        into_lse.to(device),
        split,
        torch.stack(list(sums)).unsqueeze(2).permute(1, 2, 3, 0, 4),
    )
    assert torch.equal(into[:, :, 0], out)


@pytest.mark.parametrize("groups", [False, True])
def test_parts_in_training(device: str, groups: bool) -> None:
    """Partials that are reshaped on their way: padded and sliced."""
    shape = (1, 20, 2, 2, 16) if groups else (1, 20, 2, 16)
    q, k, v = (x.requires_grad_() for x in three(*shape, device=device))
    partials = []
    for half in (slice(0, 8), slice(8, 20)):
        part = merge_training.memory_efficient_attention_partial_autograd(q, k[:, half], v[:, half])
        assert part.is_bmghk() is groups
        pads = (0, 0) * (len(shape) - 2)
        part = part.apply(lambda x, p=pads: torch.nn.functional.pad(x, (*p, 2, 1)))
        partials.append(part.apply(lambda x: x[:, 2:-1]))
    out = merge_training.merge_attentions_autograd(*partials)
    plain = [x.detach() for x in (q, k, v)]
    torch.testing.assert_close(out.double(), reference.attention(*plain)[0], **CLOSE)
    grad = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), grad),
        reference.attention_backward(grad, *plain),
        strict=False,
    ):
        assert want is not None
        torch.testing.assert_close(got.double(), want, **CLOSE)
    with pytest.raises(ValueError, match="No partials to merge"):
        merge_training.merge_attentions_autograd()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_dtype(device: str, dtype: torch.dtype) -> None:
    """The sums in float32, rounded once; parts of the keys are float32 where nothing is said."""
    q, k, v = three(2, 9, 2, 16, device=device, dtype=HALF)
    k, v = (x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v))
    bias = torch.randn(1, 2, 9, 9, device=device).to(HALF)
    for call in (xops.memory_efficient_attention, xops.memory_efficient_attention_forward):
        out = call(q, k, v, bias, output_dtype=dtype)
        assert out.dtype == dtype
        wide = memeff_attn.memory_efficient_attention(q, k, v, bias, output_dtype=torch.float32)
        assert torch.equal(out, wide.to(dtype))
        checker = Checker()
        checker.attention(str(dtype), out.to(HALF), None, q, k, v, bias)
        checker.finish()
    part, _ = fmha.triton_splitk.FwOp.apply(fmha.Inputs(q, k, v, is_partial=True), False)
    assert part.dtype == torch.float32
    checker = Checker()
    checker.attention("partial", part.to(HALF), None, q, k, v)
    checker.finish()


# ---- errors ----


def test_errors_of_arguments(device: str) -> None:
    q, k, v = three(2, 5, 2, 8, device=device)
    blocks = fmha.BlockDiagonalMask.from_seqlens([5, 5], device=device)
    local = fmha.attn_bias.LocalAttentionFromBottomRightMask(1, 1)
    call = xops.memory_efficient_attention
    for arguments, options, text in (
        ((q, k[0], v), {}, "BMGHK, BMHK or BMK shape"),
        ((q, k.double(), v), {}, "should all have the same dtype"),
        ((q, k[:, :, :1], v[:, :, :1]), {}, "HINT: nothing is broadcast"),
        ((q, k, v[:, :3]), {}, "Incompatible shapes for attention inputs"),
        ((q, k, v, q.new_zeros(2, 2, 5, 4)), {}, "Invalid shape for attention bias"),
        ((q, k, v, q.new_zeros(3, 5, 5)), {}, "Invalid shape for attention bias"),
        ((q, k, v, q.new_zeros(2, 2, 5, 5).double()), {}, "Invalid dtype for attention bias"),
        ((q, k, v, blocks), {}, "Expected batch_size=1"),
        ((q[:, :, 0], k[:, :, 0], v[:, :, 0], local), {}, "provide inputs in BMHK format"),
        ((q, k, v), {"p": 1.5}, "Invalid dropout probability"),
    ):
        with pytest.raises(ValueError, match=text):
            call(*arguments, **options)
    if device == "cuda":
        with pytest.raises(ValueError, match="on the same device"):
            call(q, k.cpu(), v)
        with pytest.raises(ValueError, match="Attention bias and Query"):
            call(q[:1], k[:1], v[:1], fmha.BlockDiagonalMask.from_seqlens([5], device="cpu"))


def test_errors_of_operators(device: str) -> None:
    q, k, v = three(2, 5, 2, 8, device=device)
    wide = [x.double() for x in (q, k, v)]
    with pytest.raises(NotImplementedError) as error:
        xops.memory_efficient_attention(*wide)
    text = str(error.value)
    assert text.startswith("No operator found for `memory_efficient_attention_forward` with inputs")
    assert "query       : shape=(2, 5, 2, 8) (torch.float64)" in text
    assert "`cutlassF-pt` is not supported because:\n    " in text and "`fa2F@0.0.0` is not" in text
    assert "operator wasn't built" in text
    with pytest.raises(ValueError, match=r"does not support inputs:\n +query"):
        xops.memory_efficient_attention(q, k, v, op=fmha.MemoryEfficientAttentionCkOp)
    with pytest.raises(NotImplementedError, match="ckF"):
        fmha.ck.FwOp.apply(fmha.Inputs(q, k, v), needs_gradient=False)
    quantised = [x.to(torch.int32) for x in (k, v)]
    with pytest.raises(NotImplementedError, match="quantised keys and values"):
        xops.memory_efficient_attention(q, *quantised)
    for low in (
        xops.memory_efficient_attention_forward_requires_grad,
        fmha.memory_efficient_attention_partial,
    ):
        with pytest.raises(NotImplementedError, match="dropout is not supported"):
            low(q, k, v, p=0.1)
    lse = q.new_zeros(2, 2, 32)
    with pytest.raises(NotImplementedError, match="dropout is not supported"):
        xops.memory_efficient_attention_backward(q, q, lse, q, k, v, p=0.1)
    with pytest.raises(ValueError, match=r"BMK, in BMHK or in BMGHK"):
        xops.memory_efficient_attention_backward(q[:, :, 0], q, lse, q, k, v)


def test_second_backward_is_refused(device: str) -> None:
    q, k, v = (x.requires_grad_() for x in three(1, 4, 1, 8, device=device))
    out = xops.memory_efficient_attention(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        grad.sum().backward()


@pytest.mark.gpu
def test_named_cutlass_on_the_gpu() -> None:
    q, k, v = three(2, 33, 2, 64, device="cuda", dtype=HALF)
    out = xops.memory_efficient_attention(q, k, v, op=xops.MemoryEfficientAttentionCutlassOp)
    assert fmha.cutlass.FwOp.supports(fmha.Inputs(q, k, v))
    assert torch.equal(out, memeff_attn.memory_efficient_attention(q, k, v))


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.3, 0.5, 0.7, 0.999999, 1.0])
def test_numbers_behind_dropout(device: str, p: float) -> None:
    """u > p exactly where the call with torch's seed keeps a weight: V = 1 shows the mask."""
    rand_uniform.register()
    shape = (2, 3, 20, 33)
    torch.manual_seed(5)
    u = torch.ops.xformers._cutlass_rand_uniform(p, torch.empty(shape, device=device))
    assert u.dtype == torch.float32 and float(u.min()) > 0 and float(u.max()) < 1
    torch.manual_seed(5)
    seed = dropout.new_seed(device)
    assert torch.equal(u > p, dropout.dropout_mask(seed, p, *shape))
    q, k = (torch.zeros(2, n, 3, 8, device=device) for n in (20, 33))
    v = torch.eye(33, device=device)[None, :, None].expand(2, -1, 3, -1)
    torch.manual_seed(5)
    out = xops.memory_efficient_attention(q, k, v, p=p)
    assert torch.equal(out.movedim(2, 1) > 0, u > p)
