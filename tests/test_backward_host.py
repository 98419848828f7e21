"""The GPU's implementation of the backward operator on CPU tensors, with a pretended compiled
module: what is launched, with what, and what needs no launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backward_cases import deterministic
from torch import Tensor

import memeff_attn
from memeff_attn import backward, cpu, dispatch, ops
from memeff_attn.dispatch import ChainedBwOp
from memeff_attn.inputs import two_part_lse_shape
from memeff_attn.mask_arguments import rule_of

attention = memeff_attn.memory_efficient_attention
NAMES = (
    "grad_out", "query", "key", "value", "bias", "out", "lse", "seed", "delta",
    "grad_query", "grad_key", "grad_value", "grad_bias",
)  # fmt: skip


class Module:
    """Computes on the CPU what the compiled module would; keeps what it was asked."""

    is_cuda_build = True

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []  # that were launched
        self.refused = 0
        self.workspace = 100
        self.failure: ops.Failure | None = None

    def refusal(self, call: dict[str, Any]) -> ops.Failure | None:
        for name in ("query", "key", "value", "out", "grad_out"):
            x = call[name]
            if x.numel() == 0:
                return ops.INVALID, f"{name} is empty"
            if x.shape[-1] != 1 and x.stride(-1) != 1:
                return ops.INVALID, f"{name} has last stride {x.stride(-1)}, expected 1"
        return self.failure

    def backward(self, *arguments: Any) -> ops.Failure | None:
        assert len(arguments) == 22
        call = dict(zip(NAMES, arguments, strict=False))
        allocate, fixed_order, scale, p, causal, _tf32, variant, mask, stream = arguments[13:]
        if failure := self.refusal(call):
            self.refused += 1
            return failure
        workspace = allocate(self.workspace) if self.workspace else None
        call |= {"workspace": workspace, "variant": variant, "p": p, "mask": mask, "stream": stream}
        call["fixed_order"] = fixed_order
        self.calls.append(call)
        query, lse = call["query"], call["lse"]
        assert lse.shape == two_part_lse_shape(query) and lse.is_contiguous()
        needs = [call[name] is not None for name in NAMES[9:]]
        given = [call[name] for name in NAMES[:6]]
        rule = None
        if mask is not None:
            rule = rule_of(query, call["key"], call["bias"], causal, mask)
        grads = cpu.backward(*given, lse[0], scale, causal, needs, p, call["seed"], rule)
        for name, grad in zip(NAMES[9:], grads, strict=True):
            if grad is not None:
                assert call[name].is_contiguous() and call[name].shape == grad.shape
                call[name].copy_(grad)
        return None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    pretended = Module()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "native", lambda: (pretended, ""))
        monkeypatch.setattr(ops, "has_exchange", lambda: True)  # the module takes tensors alone
        monkeypatch.setattr(backward, "_launch", backward.launcher())
    monkeypatch.setattr(ops, "_current_stream", None)
    library = torch.library.Library("memeff_backward_test", "DEF")
    library.define(backward._SCHEMA)
    library.impl("backward", backward._backward_cuda, "CPU")
    monkeypatch.setattr(backward, "backward", torch.ops.memeff_backward_test.backward.default)
    yield pretended
    library._destroy()


def qkv(**sizes: int) -> list[Tensor]:
    s = {"B": 2, "M": 5, "N": 7, "H": 4, "K": 8, "Kv": 8} | sizes
    shapes = (
        (s["B"], s["M"], s["H"], s["K"]),
        (s["B"], s["N"], s["H"], s["K"]),
        (s["B"], s["N"], s["H"], s["Kv"]),
    )
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def test_what_is_launched(module: Module) -> None:
    inputs = qkv(Kv=3)
    bias = torch.nn.Parameter(torch.randn(1, 4, 5, 1))
    out = attention(*inputs, bias, 0.25)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (*inputs, bias), grad)
    (call,) = module.calls
    assert call["grad_out"].data_ptr() == grad.data_ptr() and call["p"] == 0.25
    assert call["seed"].shape == (2,) and call["seed"].dtype == torch.int64
    assert call["workspace"].shape == (100,) and call["workspace"].dtype == torch.float32
    assert module.refused == 0
    expected = memeff_attn.reference.attention_backward(
        grad, *inputs, bias, p=0.25, seed=call["seed"]
    )
    for mine, other in zip(grads, expected, strict=True):
        assert other is not None
        torch.testing.assert_close(mine, other.float(), atol=1e-5, rtol=1e-4)


def test_no_work_for_what_needs_none(module: Module) -> None:
    """Any subset of the inputs (B48l), and no workspace where none is asked for."""
    module.workspace = 0
    inputs = [x.detach() for x in qkv()]
    for i in range(3):
        tensors = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        attention(*tensors).sum().backward()
        call = module.calls[-1]
        assert [call[name] is not None for name in NAMES[9:]] == [i == 0, i == 1, i == 2, False]
        assert call["workspace"] is None and call["seed"] is None


def test_gradients_of_any_strides(module: Module) -> None:
    """A stride of 0 or a last stride other than 1 is mended by a copy of that tensor (B24)."""
    inputs = qkv()
    shape = (2, 5, 4, 8)
    for grad in (
        torch.ones(()).expand(shape),
        torch.randn(2, 5, 4, 16)[..., ::2],
        torch.randn(2, 4, 5, 8).transpose(1, 2),
        torch.randn(1, 1, 1, 8).expand(shape),
        torch._neg_view(torch.randn(shape)),
    ):
        out = attention(*inputs)
        mine = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        other = torch.autograd.grad(out, inputs, grad.clone(memory_format=torch.contiguous_format))
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    strided = [torch.randn(*x.shape[:-1], 16)[..., ::2].requires_grad_() for x in inputs]
    for grad_of in torch.autograd.grad(attention(*strided).sum(), strided):
        assert grad_of.is_contiguous()


def test_a_gradient_is_copied_only_for_alignment() -> None:
    """Copied: what would force the unaligned kernels. Not: what no copy mends, strides of 0 and of
    dimensions of one element."""
    flat = torch.randn(4000)
    shape = (2, 5, 4, 8)
    copied = {
        "padded by one": flat[:360].view(2, 5, 4, 9)[..., :8],
        "contiguous, at an odd address": flat[1:321].view(shape),
        "rows of an odd stride": flat[:3000].as_strided(shape, (600, 33, 8, 1)),
        "half, by 8 bytes": flat.half()[:480].view(2, 5, 4, 12)[..., :8],
    }
    kept = {
        "dense": flat[:320].view(shape),
        "heads first": flat[:320].view(2, 4, 5, 8).transpose(1, 2),
        "padded by 16 bytes": flat[:480].view(2, 5, 4, 12)[..., :8],
        "expanded": flat[:8].expand(shape),
        "odd stride of one batch": flat[:320].as_strided((1, 5, 4, 8), (33, 32, 8, 1)),
        "odd width": flat[:280].view(2, 5, 4, 7),
        "odd width, padded": flat[:360].view(2, 5, 4, 9)[..., :7],
        "half, odd width": flat.half()[:160].view(2, 5, 4, 4),
    }
    for name, x in copied.items():
        y = backward.aligned(x)
        assert y is not x and y.is_contiguous() and y.data_ptr() % 16 == 0, name
        assert torch.equal(x, y), name
    for name, x in kept.items():
        assert backward.aligned(x) is x, name


def test_an_unaligned_gradient_is_launched_as_a_copy(module: Module) -> None:
    inputs = qkv()
    out = attention(*inputs)
    grad = torch.randn(2, 5, 4, 9)[..., :8]
    mine = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    assert module.calls[-1]["grad_out"].is_contiguous()
    other = torch.autograd.grad(out, inputs, grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("empty", ["B", "M", "N", "H", "K", "Kv"])
def test_empty(module: Module, empty: str) -> None:
    """Zeros without a launch; K = 0 leaves the gradients of value and bias (B39)."""
    inputs = qkv(**{empty: 0})
    bias = torch.randn(1, 1, inputs[0].shape[1], inputs[1].shape[1], requires_grad=True)
    out = attention(*inputs, bias)
    grads = torch.autograd.grad(out.sum(), (*inputs, bias))
    for grad, x in zip(grads, (*inputs, bias), strict=True):
        assert grad.shape == x.shape
    assert len(module.calls) == (empty == "K") and module.refused == 1
    if empty == "K":
        assert module.calls[0]["grad_query"] is None and bool(grads[2].any())
    else:
        assert not any(bool(grad.any()) for grad in grads)


def test_forced_kernels(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = qkv()
    named = type("named", (ChainedBwOp,), {"VARIANT": "chained_bwd_x"})
    monkeypatch.setattr(named, "not_supported_reasons", classmethod(lambda cls, d: []))
    attention(*inputs, op=(None, named)).sum().backward()
    assert module.calls[-1]["variant"] == "chained_bwd_x"
    monkeypatch.setenv("MEMEFF_FORCE_BACKWARD_VARIANT", "chained_bwd_y")
    attention(*inputs).sum().backward()
    assert module.calls[-1]["variant"] == "chained_bwd_y"


def test_failures_become_exceptions(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChainedBwOp, "not_supported_reasons", classmethod(lambda cls, d: []))
    inputs = qkv()
    for answer, error, text in (
        ((ops.CUDA_ERROR, "grid 1x2x3"), RuntimeError, r"(?s)backward kernel.*grid 1x2x3.*query"),
        ((ops.UNSUPPORTED, "no code for sm_90"), NotImplementedError, r"(?s)_backward`.*no code"),
        ((ops.INVALID, "no kernel variant is named"), ValueError, "no kernel variant"),
    ):
        module.failure = answer
        with pytest.raises(error, match=text):
            attention(*inputs).sum().backward()
    assert not module.calls


def test_without_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native", lambda: (None, "memeff_attn was not compiled here"))
    given, wanted = (torch.ones(1),) * 9, (torch.ones(1),) * 4
    missing = ops.UNSUPPORTED, "memeff_attn was not compiled here"
    assert backward.launcher()(given, wanted, (1.0, 0.0, 0, False, "", None), 0) == missing


def test_scalars_where_torch_has_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace too is described, and lives as long as the call."""

    class Described:
        is_cuda_build = True

        def backward_scalars(self, *arguments: Any) -> ops.Failure | None:
            assert len(arguments) == 23 and arguments[-1] == -1
            assert arguments[4] is None and arguments[1] == ops.numbers(inputs[0])
            seen.append(arguments[13](40))
            return None

    inputs, seen = [x.detach() for x in qkv()], []
    monkeypatch.setattr(dispatch, "native", lambda: (Described(), ""))
    monkeypatch.setattr(ops, "has_exchange", lambda: False)
    given = (inputs[2], *inputs, None, inputs[0], torch.zeros(2, 2, 4, 5), None, None)
    settings = ops.Settings(1.0, 0.0, 0, False, "")
    assert backward.launcher()(given, [*inputs, None], settings, 7) is None
    ((address, dtype, shape, strides),) = seen
    assert address % 16 == 0 and (dtype, shape, strides) == (2, (40,), (1,))


def test_deterministic_mode_asks_for_a_fixed_order(module: Module) -> None:
    inputs = qkv()
    for warn_only in (None, False, True):
        mode = contextlib.nullcontext() if warn_only is None else deterministic(warn_only)
        with mode:
            torch.autograd.grad(attention(*inputs).sum(), inputs)
    assert [call["fixed_order"] for call in module.calls] == [False, True, True]


def test_an_output_without_a_gradient(module: Module) -> None:
    """A later function may hand back no gradient at all: nothing is launched."""

    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    inputs = qkv()
    loss = Drops.apply(attention(*inputs)) + inputs[0].sum()
    loss.backward()
    assert not module.calls and bool((inputs[0].grad == 1).all()) and inputs[1].grad is None
