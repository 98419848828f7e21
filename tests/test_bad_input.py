"""Bad input: each an error before any launch: what was expected, what was got, what to do.

The GPU's implementation is tried without a GPU too: the fixture `launches` runs it on CPU tensors,
with a pretended compiled module."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memeff_attn
from memeff_attn import autograd, dispatch, ops
from memeff_attn.attn_bias import BlockDiagonalMask, LowerTriangularMask
from memeff_attn.dispatch import ChainedBwOp, ChainedFwOp, CpuBwOp, CpuFwOp, Inputs

attention = memeff_attn.memory_efficient_attention
CALLS = [
    attention,
    memeff_attn.memory_efficient_attention_forward,
    memeff_attn.memory_efficient_attention_forward_requires_grad,
]


def qkv(
    query: tuple[int, ...] = (2, 5, 4, 8),
    key: tuple[int, ...] = (2, 7, 4, 8),
    value: tuple[int, ...] = (2, 7, 4, 8),
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(query), torch.randn(key), torch.randn(value)


# Text the message must have: what was expected, what was got, what to do.
DISAGREEING: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "rank 2": (lambda: qkv((5, 8), (7, 8), (7, 8)), r"\[B, M, H, K\].*\(5, 8\)"),
    "rank 0": (lambda: qkv((), (), ()), r"\[B, M, H, K\]"),
    "rank 6": (lambda: qkv((1,) * 6, (1,) * 6, (1,) * 6), r"\[B, M, G, H, K\]"),
    "ranks differ": (lambda: qkv(key=(2, 7, 8)), r"must all be.*unsqueeze.*\(2, 7, 8\)"),
    "batch": (lambda: qkv(key=(3, 7, 4, 8)), r"one batch size, got 2, 3 and 2.*Expand"),
    "lengths": (lambda: qkv(value=(2, 6, 4, 8)), r"one length N, got 7 and 6"),
    "head dims": (lambda: qkv(query=(2, 5, 4, 9)), r"one head dimension K, got 9 and 8"),
    "value heads": (lambda: qkv(value=(2, 7, 2, 8)), r"same heads, got \(4,\) and \(2,\)"),
    "heads": (
        lambda: qkv((2, 5, 4, 8), (2, 7, 3, 8), (2, 7, 3, 8)),
        r"multiple.*got 4 and 3.*\[B, M, H, K\], not \[B, H, M, K\]",
    ),
    "more key heads": (
        lambda: qkv((2, 5, 2, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
        r"multiple.*got 2 and 4",
    ),
    "no key heads": (lambda: qkv((2, 5, 2, 8), (2, 7, 0, 8), (2, 7, 0, 8)), r"multiple.*2 and 0"),
    "groups": (
        lambda: qkv((2, 5, 2, 3, 8), (2, 7, 2, 1, 8), (2, 7, 2, 1, 8)),
        r"same G and H, got \(2, 3\) and \(2, 1\).*expand",
    ),
    "dtypes": (
        lambda: (torch.randn(2, 5, 4, 8).half(), *qkv()[1:]),
        r"one dtype, got torch.float16, torch.float32.*autocast",
    ),
    "integers": (
        lambda: [torch.ones(2, 5, 4, 8, dtype=torch.int32)] * 3,
        r"floating-point.*float\(\).*torch.int32",
    ),
    "complex": (lambda: [torch.ones(2, 5, 4, 8, dtype=torch.complex64)] * 3, r"floating-point"),
    "devices": (lambda: (*qkv()[:2], torch.empty(2, 7, 4, 8, device="meta")), r"one device.*meta"),
    "bias device": (
        lambda: (*qkv(), torch.empty(5, 7, device="meta")),
        r"one device.*attn_bias on meta",
    ),
    "bias shape": (lambda: (*qkv(), torch.zeros(2, 4, 5, 6)), r"\(2, 4, 5, 7\).*\(2, 4, 5, 6\)"),
    "bias heads": (lambda: (*qkv(), torch.zeros(2, 2, 5, 7)), r"broadcast to \(2, 4, 5, 7\)"),
    "bias 2-D": (lambda: (*qkv(), torch.zeros(7, 5)), r"broadcast to \(2, 4, 5, 7\).*7, 5\)"),
    "bias dtype": (lambda: (*qkv(), torch.zeros(5, 7).half()), r"attn_bias must be torch.float32"),
    "bias integers": (lambda: (*qkv(), torch.ones(5, 7).long()), r"torch.bool \(True = visible\)"),
    "mask class": (lambda: (*qkv(), LowerTriangularMask), r"Did you mean LowerTriangularMask\(\)"),
    "mask list": (lambda: (*qkv(), [1.0]), r"None, a tensor, or a mask.*got list"),
    "p above": (lambda: (*qkv(), None, 1.5), r"0 <= p <= 1, got 1.5"),
    "p below": (lambda: (*qkv(), None, -0.1), r"0 <= p <= 1, got -0.1"),
    "p nan": (lambda: (*qkv(), None, math.nan), r"0 <= p <= 1, got nan"),
    "scale nan": (lambda: (*qkv(), None, 0.0, math.nan), r"finite.*nan.*K \*\* -0.5"),
    "scale inf": (lambda: (*qkv(), None, 0.0, -math.inf), r"finite.*-inf"),
    "scale 1e39": (lambda: (*qkv(), None, 0.0, 1e39), r"finite float32"),
    "scale tensor": (lambda: (*qkv(), None, 0.0, torch.tensor(0.1)), r"a number, got a tensor"),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_disagreeing_inputs(name: str) -> None:
    make, text = DISAGREEING[name]
    arguments = make()
    for call in CALLS:
        with pytest.raises(ValueError) as caught:
            call(*arguments)
        assert re.search(text, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize("name", DISAGREEING)
def test_disagreeing_inputs_with_a_gradient(name: str) -> None:
    make, text = DISAGREEING[name]
    arguments = list(make())
    if arguments[0].is_floating_point():
        arguments[0].requires_grad_()
    with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
        attention(*arguments)


def test_negative_sizes_do_not_exist() -> None:
    with pytest.raises(RuntimeError, match="negative dimension"):
        attention(*qkv((2, -5, 4, 8)))


def test_scale_of_other_number_types() -> None:
    import numpy

    inputs = qkv()
    expected = attention(*inputs, scale=2.0)
    for scale in (2, numpy.float32(2), numpy.float64(2)):
        assert torch.equal(attention(*inputs, scale=scale), expected)


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "float64": (lambda: attention(*(x.double() for x in qkv())), r"dtype is torch.float64"),
    "output_dtype": (
        lambda: attention(*qkv(), output_dtype=torch.float64),
        r"output_dtype is torch.float64, it writes torch.bfloat16, torch.float16, torch.float32",
    ),
    "float8": (
        lambda: attention(*(x.to(torch.float8_e4m3fn) for x in qkv())),
        r"dtype is torch.float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name: str) -> None:
    """Legal, but no operator: the inputs, and the reasons of each candidate (B46)."""
    call, text = UNSUPPORTED[name]
    with pytest.raises(NotImplementedError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(
        "No operator found for `memory_efficient_attention_forward` with inputs:"
    )
    assert re.search(text, message), message
    assert "query: shape (2, 5, 4, 8)" in message
    assert "cpu is not supported because" in message
    assert "cuda is not supported because" in message


def test_output_dtype_under_a_mask() -> None:
    mask = BlockDiagonalMask.from_seqlens([5], [7], device="cpu")
    one = [x[:1] for x in qkv()]
    with pytest.raises(NotImplementedError, match=r"output_dtype is torch\.float64, it writes"):
        attention(*one, mask, output_dtype=torch.float64)


def test_what_fits_by_chance() -> None:
    inputs = qkv()
    expected = attention(*inputs)
    assert torch.equal(attention(*inputs, output_dtype=torch.float32), expected)
    assert torch.equal(attention(*inputs, p=0), expected)
    assert torch.equal(attention(*inputs, op=(None, None)), expected)
    assert torch.equal(attention(*inputs, op=()), expected)


# ---- op= ----


def test_named_operators() -> None:
    inputs = qkv()
    expected = attention(*inputs)
    for op in (CpuFwOp, CpuFwOp(), (CpuFwOp, None), (CpuFwOp,)):
        assert torch.equal(attention(*inputs, op=op), expected)
    with pytest.raises(ValueError, match=r"(?s)Operator chained.*device is cpu, it takes cuda"):
        attention(*inputs, op=ChainedFwOp)
    for op in (int, "chained", 3, (int, None), autograd.Forward, CpuBwOp):
        with pytest.raises(ValueError, match=r"op must be a forward operator.*ChainedFwOp"):
            attention(*inputs, op=op)


def test_named_backward_operators() -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    (expected,) = torch.autograd.grad(attention(*inputs).sum(), inputs[0])
    for op in ((CpuFwOp, CpuBwOp), (None, CpuBwOp()), (None, CpuBwOp)):
        (grad,) = torch.autograd.grad(attention(*inputs, op=op).sum(), inputs[0])
        assert torch.equal(grad, expected)
    with pytest.raises(ValueError, match=r"(?s)Operator chained_bwd.*device is cpu, it takes cuda"):
        attention(*inputs, op=(None, ChainedBwOp))
    with torch.no_grad():  # asks for no gradient
        attention(*inputs, op=(None, ChainedBwOp))
    with pytest.raises(ValueError, match=r"op must be a backward operator.*ChainedBwOp"):
        attention(*inputs, op=(None, CpuFwOp))


def test_dropout_without_a_state() -> None:
    for call in CALLS[1:]:
        with pytest.raises(NotImplementedError, match=r"p is 0.5.*no dropout state.*new_seed"):
            call(*qkv(), p=0.5)
    for p in (-0.1, 1.1, float("nan")):
        for call in CALLS:
            with pytest.raises(ValueError, match="expected 0 <= p <= 1"):
                call(*qkv(), p=p)
    with pytest.raises(ValueError, match="p must be a number"):
        attention(*qkv(), p=torch.tensor(0.5))
    with pytest.raises(ValueError, match="seed must be int64"):
        CALLS[2](*qkv(), p=0.5, seed=torch.zeros(2))


def test_backward_call_refuses_what_disagrees() -> None:
    inputs = qkv()
    out, lse = CALLS[2](*inputs)
    backward = memeff_attn.memory_efficient_attention_backward
    for arguments, text in (
        ((out[:, :4], out, lse), "grad must have shape"),
        ((out.half(), out, lse), "grad must have shape"),
        ((out, out[..., :4], lse), "output must have shape"),
        ((out, out, lse[..., :4]), "lse must have shape"),
        ((out, out, lse.half()), "lse must have shape"),
    ):
        with pytest.raises(ValueError, match=text):
            backward(*arguments, *inputs)
    with pytest.raises(ValueError, match="one length N"):
        backward(out, out, lse, *inputs[:2], inputs[2][:, :3])
    with pytest.raises(ValueError, match="op must be a backward operator"):
        backward(out, out, lse, *inputs, op=CpuFwOp)
    with pytest.raises(NotImplementedError, match="no dropout state"):
        backward(out, out, lse, *inputs, p=0.5)


def test_unknown_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no kernel 'nonesuch'"):
        dispatch.variant("nonesuch")


# ---- the GPU's implementation on pretended hardware ----


class Launches:
    """What the compiled module was asked for; answers are popped from `failures`, else success."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures: list[tuple[int, str]] = []

    def __call__(self, *arguments: Any) -> tuple[int, str] | None:
        self.calls.append(arguments)
        query, key, value, _, out, lse = arguments[:6]
        for x in (query, key, value, out):  # as csrc/tensor_desc.cpp
            if x.numel() == 0:
                return ops.INVALID, f"{tuple(x.shape)} is empty"
            if x.shape[-1] != 1 and x.stride(-1) != 1:
                return ops.INVALID, f"a tensor has last stride {x.stride(-1)}, expected 1"
        if self.failures:
            return self.failures.pop()
        out.fill_(7.0)
        if lse is not None:
            lse.fill_(7.0)
        return None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    recorded = Launches()
    library = torch.library.Library("memeff_host_test", "DEF")
    library.define(ops._SCHEMA)
    library.impl("forward", ops._forward_cuda, "CPU")
    torch.library.register_fake("memeff_host_test::forward", ops._forward_fake, lib=library)
    monkeypatch.setattr(ops, "forward", torch.ops.memeff_host_test.forward.default)
    monkeypatch.setattr(ops, "_launch", recorded)
    monkeypatch.setattr(ops, "_current_stream", None)
    yield recorded
    library._destroy()


call = memeff_attn.memory_efficient_attention_forward_requires_grad


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("width", [8, 12])
def test_launch(launches: Launches, rank: int, width: int) -> None:
    heads = (4, 2)[: rank - 3]
    q = torch.randn(2, 5, *heads, 8)
    k, v = torch.randn(2, 7, *heads, 8), torch.randn(2, 7, *heads, width)
    out, lse = call(q, k, v, LowerTriangularMask(), scale=0.5)
    assert out.shape == (2, 5, *heads, width) and out.is_contiguous()
    assert lse.shape == (2, *(heads or (1,)), 5) and lse.dtype == torch.float32
    (seen,) = launches.calls
    assert seen[0] is not None and [x.data_ptr() for x in seen[:3]] == [
        x.data_ptr() for x in (q, k, v)
    ]
    assert seen[5].shape == (2, *lse.shape) and seen[5].data_ptr() == lse.data_ptr()
    assert seen[3] is None and seen[6:12] == (None, 0.5, 0.0, 1, False, "")
    attention(q, k, v, torch.zeros(5, 7))
    seen = launches.calls[-1]
    assert seen[3].dim() == rank and seen[5] is None
    assert seen[7] == pytest.approx(8**-0.5)


def test_only_the_strided_tensor_is_copied(launches: Launches) -> None:
    q, _, v = qkv()
    wide = torch.randn(2, 7, 4, 16)[..., ::2]
    out = attention(q, wide, v)
    first, second = launches.calls
    assert bool((out == 7).all())
    assert second[0].data_ptr() == q.data_ptr() and second[2].data_ptr() == v.data_ptr()
    assert first[1].stride(-1) == 2 and second[1].stride(-1) == 1
    assert torch.equal(second[1], wide)


@pytest.mark.parametrize("empty", ["B", "M", "N", "H", "K", "Kv"])
def test_empty(launches: Launches, empty: str) -> None:
    sizes = {"B": 2, "M": 5, "N": 7, "H": 4, "K": 8, "Kv": 8, empty: 0}
    b, m, n, h, depth, width = (sizes[x] for x in ("B", "M", "N", "H", "K", "Kv"))
    out, lse = call(*qkv((b, m, h, depth), (b, n, h, depth), (b, n, h, width)))
    assert out.shape == (b, m, h, width) and lse.shape == (b, h, m)
    if empty == "N":
        assert not out.any() and bool((lse == -math.inf).all())
        assert not launches.calls[0][5][1].any()  # its low part
    if empty in ("K", "Kv"):  # one column of zeros stands for none
        again = launches.calls[1]
        assert len(launches.calls) == 2 and again[0].shape[-1] in (1, 8)
        assert bool((lse == 7).all())
    else:
        assert len(launches.calls) == 1  # refused, not launched


def test_failures_become_exceptions(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChainedFwOp, "not_supported_reasons", classmethod(lambda cls, d: []))
    launches.failures = [(ops.CUDA_ERROR, "cudaLaunchKernel failed in k: grid 1x2x3")]
    with pytest.raises(RuntimeError, match=r"(?s)grid 1x2x3.*query.*CUDA_LAUNCH_BLOCKING"):
        attention(*qkv())
    launches.failures = [(ops.UNSUPPORTED, "chosen: none; this build has no code for sm_90")]
    with pytest.raises(NotImplementedError) as caught:
        attention(*qkv(), LowerTriangularMask())
    assert "cuda is not supported because" in str(caught.value)
    assert "no code for sm_90" in str(caught.value)
    assert "attn_bias: LowerTriangularMask" in str(caught.value)
    launches.failures = [(ops.INVALID, "no kernel variant is named")]
    monkeypatch.setenv("MEMEFF_FORCE_VARIANT", "nonesuch")
    with pytest.raises(ValueError, match="no kernel variant is named"):
        attention(*qkv())
    assert launches.calls[-1][11] == "nonesuch"
    with pytest.raises(NotImplementedError, match=r"torch.float64"):
        attention(*(x.double() for x in qkv((0, 5, 4, 8), (0, 7, 4, 8), (0, 7, 4, 8))))


@pytest.mark.parametrize("name", DISAGREEING)
def test_disagreeing_inputs_of_a_launch(launches: Launches, name: str) -> None:
    """The compiled code refuses; the long message is the same as on the CPU."""
    make, text = DISAGREEING[name]
    launches.failures = [(ops.INVALID, "short message")] * 2
    with pytest.raises(ValueError) as caught:
        attention(*make())
    assert re.search(text, str(caught.value), re.DOTALL), str(caught.value)


# ---- what the installation cannot do ----


def test_without_compiled_module(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "memeff_attn was not compiled here. Install it with nvcc in reach"
    monkeypatch.setattr(dispatch, "native", lambda: (None, reason))
    monkeypatch.setattr(ops, "_launch", ops.launcher())
    with pytest.raises(NotImplementedError) as caught:
        attention(*qkv())
    assert reason in str(caught.value)
    q = torch.randn(2, 0, 4, 8)
    assert attention(q, q, q).shape == q.shape  # an empty result needs no kernel
    assert reason in memeff_attn.explain(*qkv(), device="sm_90")
    assert not ChainedFwOp.is_available()
    with pytest.raises(ValueError, match="nvcc in reach"):
        dispatch.variant.__wrapped__("chained_sm80_f16_k64")


class HostOnly:
    is_cuda_build = False

    @staticmethod
    def variants() -> list[dict[str, str]]:
        return [{"name": "chained_x", "family": "chained"}]

    @staticmethod
    def explain(request: dict[str, Any]) -> str:
        return f"chosen: chained_x on sm_{request['sm']}, alignment {request['alignment']}"


def test_host_only_build(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native", lambda: (HostOnly, ""))
    monkeypatch.setattr(ops, "_launch", ops.launcher())
    with pytest.raises(NotImplementedError, match=r"host-only build.*MEMEFF_CUDA_ARCHS"):
        attention(*qkv())
    text = memeff_attn.explain(*qkv(), device="sm_70")
    assert text == "chosen: chained_x on sm_70, alignment 8"
    op = dispatch.variant.__wrapped__("chained_x")
    assert issubclass(op, ChainedFwOp) and op.VARIANT == op.NAME == "chained_x"


def test_scalars_where_torch_has_no_exchange() -> None:
    seen: list[Any] = []
    launch = ops.by_scalars(lambda *arguments: seen.append(arguments), 7)
    q, k, v = (x.half() for x in qkv())
    out = torch.empty_like(q)
    rest = (None, 0.5, 0.0, 1, True, "name", None, 3)
    assert launch(q, k[:, :, :2], v, None, out, None, *rest) is None
    (arguments,) = seen
    assert arguments[0] == (q.data_ptr(), 0, (2, 5, 4, 8), (160, 32, 8, 1))
    assert arguments[1] == (k.data_ptr(), 0, (2, 7, 2, 8), (224, 32, 8, 1))
    assert arguments[3] is None and arguments[5] is None
    assert arguments[6:] == (*rest, -1)
    refused = launch(q, torch.empty(1, device="meta"), v, None, out, None, *rest)
    assert refused is not None and refused[0] == ops.INVALID


# ---- explain ----


def test_explain() -> None:
    q, k, v = qkv()
    assert "flash kernel" in memeff_attn.explain(q, k, v)
    assert "blockwise" in memeff_attn.explain(q, k, v[..., :4])
    assert "no dropout" in memeff_attn.explain(q, k, v, p=0.5)
    assert "chosen: cpu_bwd" in memeff_attn.explain(q, k, v, backward=True)
    assert "does not run on the CPU" in memeff_attn.explain(q, k, v, op=ChainedBwOp, backward=True)
    assert "does not run on the CPU" in memeff_attn.explain(q, k, v, op=ChainedFwOp)
    assert "does not run on a GPU" in memeff_attn.explain(q, k, v, op=CpuFwOp, device="sm_80")
    with pytest.raises(ValueError, match="one length N"):
        memeff_attn.explain(q, k, v[:, :3])
    with pytest.raises(ValueError, match="sm_70"):
        dispatch.gpu_named("V100")
    for name in ("sm_90", "sm90", (9, 0), 90, "90a"):
        assert dispatch.gpu_named(name) == {"sm": 90}


def test_inputs() -> None:
    q, k, v = qkv()
    d = Inputs(q, k, v)
    assert d.scale_float == 8**-0.5 and d.device == q.device
    assert d.nbytes == 4 * (q.numel() + 2 * k.numel())
    assert d.get_output_dtype() == torch.float32
    assert CpuFwOp.supports(d) and not ChainedFwOp.supports(d)
    assert dispatch._dispatch_fw(d) is CpuFwOp
    assert dispatch._dispatch_bw(d) is CpuBwOp
    for choose in (dispatch._dispatch_fw, dispatch._dispatch_bw):
        with pytest.raises(NotImplementedError, match="No operator found"):
            choose(Inputs(q, k, v, output_dtype=torch.float64))
