"""The public surface: names, layouts, results against the oracle, what travels with a call."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import backward_cases
import cases
import gradients
import pytest
import torch
from tolerance import BOTTOM_RIGHT, NONE, TOP_LEFT, Checker, check

import memeff_attn
from memeff_attn import attention as attention_module
from memeff_attn import cpu, dispatch, ops
from memeff_attn.attn_bias import LowerTriangularFromBottomRightMask, LowerTriangularMask
from memeff_attn.dispatch import AttentionFwOpBase, ChainedFwOp, CpuFwOp

attention = memeff_attn.memory_efficient_attention
with_lse = memeff_attn.memory_efficient_attention_forward_requires_grad
CALLS = [attention, memeff_attn.memory_efficient_attention_forward, with_lse]
MASKS: dict[int, Any] = {
    NONE: None,
    TOP_LEFT: LowerTriangularMask(),
    BOTTOM_RIGHT: LowerTriangularFromBottomRightMask(),
}
ROOT = str(Path(memeff_attn.__file__).parent.parent)


def test_signatures() -> None:
    for call in CALLS:
        parameters = inspect.signature(call).parameters
        assert list(parameters) == [
            "query", "key", "value", "attn_bias", "p", "scale", "op", "output_dtype",
            *(["seed"] if call is with_lse else []),
        ]  # fmt: skip
        defaults = {name: x.default for name, x in parameters.items()}
        assert defaults["p"] == 0.0
        assert all(defaults[x] is None for x in ("attn_bias", "scale", "op", "output_dtype"))
        assert all(
            parameters[x].kind is inspect.Parameter.KEYWORD_ONLY for x in ("op", "output_dtype")
        )
    assert list(inspect.signature(memeff_attn.memory_efficient_attention_backward).parameters) == [
        "grad", "output", "lse", "query", "key", "value", "attn_bias", "p", "scale", "op", "seed",
    ]  # fmt: skip
    for name in memeff_attn.__all__:
        assert hasattr(memeff_attn, name)


def test_docstrings_have_their_parts() -> None:
    for call in (
        attention,
        memeff_attn.memory_efficient_attention_backward,
        memeff_attn.explain,
        memeff_attn.reference.attention,
        memeff_attn.reference.attention_backward,
    ):
        parts = ["Shapes", "Dtypes", "Args", "Memory", "Raises", "Source"]
        text = inspect.getdoc(call) or ""
        places = [text.find(part) for part in parts]
        assert -1 not in places and places == sorted(places), call


def make(
    device: str, rank: int, dtype: torch.dtype, width: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (3, 2)[: rank - 3]
    torch.manual_seed(rank)
    query = torch.randn(2, 33, *heads, 16, device=device).to(dtype)
    key = torch.randn(2, 47, *heads, 16, device=device).to(dtype)
    return query, key, torch.randn(2, 47, *heads, width, device=device).to(dtype)


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layouts(device: str, rank: int, causal: int, dtype: torch.dtype) -> None:
    for width in (16, 24):
        qkv = make(device, rank, dtype, width)
        out, lse = with_lse(*qkv, MASKS[causal])
        assert out.shape == (*qkv[0].shape[:-1], width) and out.is_contiguous()
        assert lse.shape == {3: (2, 1, 33), 4: (2, 3, 33), 5: (2, 3, 2, 33)}[rank]
        check(out, lse, *qkv, causal=causal)
        for call in CALLS[:2]:
            assert torch.equal(call(*qkv, MASKS[causal]), out)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_grouped_heads(device: str, key_heads: int) -> None:
    query = torch.randn(2, 33, 6, 16, device=device).half()
    key, value = torch.randn(2, 2, 47, key_heads, 16, device=device).half().unbind()
    bias = torch.randn(2, 6, 33, 47, device=device).half()  # each head its own (B26)
    check(*with_lse(query, key, value, bias), query, key, value, bias)
    assert torch.equal(
        attention(query, key, value, bias),
        attention(query, *(x.repeat_interleave(6 // key_heads, 2) for x in (key, value)), bias),
    )


def test_default_scale(device: str) -> None:
    qkv = make(device, 4, torch.float16)
    assert torch.equal(attention(*qkv), attention(*qkv, scale=0.25))
    assert torch.equal(attention(*qkv), attention(*qkv, None, 0.0, 0.25))
    uniform = attention(*qkv, scale=0.0)
    mean = qkv[2].float().mean(1, keepdim=True).half().expand_as(uniform)
    torch.testing.assert_close(uniform, mean, atol=2e-3, rtol=0.0)


def test_views_that_are_not_what_memory_says(device: str) -> None:
    """Negative and conjugate views are resolved before any kernel sees them."""
    q, k, v = make(device, 4, torch.float32)
    negative = torch._neg_view(k)
    assert negative.is_neg()
    assert torch.equal(attention(q, negative, v), attention(q, -k, v))
    pair = torch.view_as_complex(torch.randn(2, 33, 3, 16, 2, device=device)).conj()
    assert pair.imag.is_neg()
    assert torch.equal(attention(pair.imag, k, v), attention(pair.imag.clone(), k, v))


def test_inputs_are_not_written(device: str) -> None:
    qkv = make(device, 4, torch.float16)
    bias = torch.rand(2, 3, 33, 47, device=device) > 0.5
    copies = [x.clone() for x in (*qkv, bias)]
    attention(*qkv, bias)
    assert all(torch.equal(a, b) for a, b in zip(copies, (*qkv, bias), strict=True))


def test_a_parameter_is_a_bias(device: str) -> None:
    qkv = make(device, 4, torch.float16)
    bias = torch.nn.Parameter(torch.randn(1, 3, 33, 47, device=device).half())
    with torch.no_grad():
        assert torch.equal(attention(*qkv, bias), attention(*qkv, bias.detach()))


# ---- autocast ----


def test_autocast(device: str) -> None:
    """Mixed dtypes are cast to the autocast dtype; equal ones stay (B48a)."""
    q, k, v = make(device, 4, torch.float32)
    low = [x.bfloat16() for x in (q, k, v)]
    bias = torch.randn(2, 1, 33, 47, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert attention(q, k, v).dtype == torch.float32
        assert torch.equal(attention(q, low[1], low[2]), attention(*low))
        assert torch.equal(attention(low[0], k, low[2], bias), attention(*low, bias))
        visible = bias > 0
        assert torch.equal(attention(q, low[1], v, visible), attention(*low, visible))
        mixed = attention(q, k, v, bias.bfloat16())
        assert torch.equal(mixed, attention(*low, bias.bfloat16()))
        with pytest.raises(ValueError, match="one dtype"):
            attention(q.double(), k, v)
    with pytest.raises(ValueError, match="one dtype"):
        attention(q, low[1], low[2])


# ---- gradients ----


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_gradient_of_one_input(device: str, which: int, call: Any) -> None:
    """Of the one that requires it, and no work for the others (B48l)."""
    tensors = [*make(device, 4, torch.float32), torch.randn(1, 1, 33, 47, device=device)]
    plain = call(*tensors)
    tensors[which].requires_grad_()
    result = call(*tensors)
    if isinstance(result, tuple):
        assert torch.equal(result[1], plain[1]) and not result[1].requires_grad
        result, plain = result[0], plain[0]
    assert torch.equal(result, plain) and result.requires_grad
    grad = torch.randn_like(result)
    result.backward(grad)
    expected = memeff_attn.reference.attention_backward(grad, *tensors)[which]
    torch.testing.assert_close(tensors[which].grad, expected.float(), atol=1e-5, rtol=1e-4)
    assert all(x.grad is None for i, x in enumerate(tensors) if i != which)
    with torch.no_grad():
        assert not attention(*tensors).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_backward_call(device: str, dtype: torch.dtype) -> None:
    """Right by the rule, dropout's seed given (autograd's lse has a low part that this one has not:
    other bits); compiled, the same bits."""
    torch._dynamo.reset()  # each rank is a compilation, and there is a limit on them a function
    backward = memeff_attn.memory_efficient_attention_backward
    compiled = torch.compile(backward, fullgraph=True, backend="aot_eager")
    checker = Checker()
    for rank, causal in ((3, NONE), (4, TOP_LEFT), (5, NONE)):
        qkv = [x.requires_grad_() for x in make(device, rank, dtype)]
        seed = memeff_attn.dropout.new_seed(device)
        out, lse = with_lse(*qkv, MASKS[causal], 0.2, seed=seed)
        grad = torch.randn_like(out)
        grads, again = (
            call(grad, out, lse, *qkv, MASKS[causal], 0.2, seed=seed)
            for call in (backward, compiled)
        )
        assert not any(x.requires_grad for x in (*grads, *again))
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
        inputs = cases.Inputs(*(x.detach() for x in qkv), None, causal, None)
        drop = backward_cases.drop_of(inputs, 0.2, seed)
        gradients.check(checker, rank, (*grads, None), grad, *inputs.tuple(), drop)
    checker.finish()


def test_backward_call_of_a_part_of_the_keys(device: str) -> None:
    """With output and lse of all keys, gradients are those of the whole (ring attention)."""
    q, k, v = make(device, 4, torch.float32)
    out, lse = with_lse(q, k, v)
    grad = torch.randn_like(out)
    whole = memeff_attn.memory_efficient_attention_backward(grad, out, lse, q, k, v)
    parts = [
        memeff_attn.memory_efficient_attention_backward(grad, out, lse, q, k[:, part], v[:, part])
        for part in (slice(0, 20), slice(20, None))
    ]
    joined = parts[0][0] + parts[1][0], *(torch.cat([a[i] for a in parts], 1) for i in (1, 2))
    for mine, other in zip(joined, whole, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


# ---- operators and forced kernels ----


def test_operator_attributes() -> None:
    assert all(issubclass(op, AttentionFwOpBase) for op in dispatch.ALL_FW_OPS)
    assert all(issubclass(op, dispatch.AttentionBwOpBase) for op in dispatch.ALL_BW_OPS)
    assert all(op.SUPPORTS_ATTN_BIAS_GRAD for op in dispatch.ALL_BW_OPS)
    for op in (*dispatch.ALL_FW_OPS, *dispatch.ALL_BW_OPS):
        assert op.NAME
        assert {torch.float16, torch.bfloat16, torch.float32} == op.SUPPORTED_DTYPES
        for name in (
            "OPERATOR_CATEGORY", "SUPPORTED_DEVICES", "SUPPORTED_MAX_K", "SUPPORTED_MIN_K",
            "SUPPORTED_ATTN_BIAS_TYPES", "SUPPORTS_DROPOUT", "SUPPORTS_CUSTOM_SCALE",
            "SUPPORTS_DIFFERENT_VALUE_EMBED", "SUPPORTS_OUTPUT_DTYPE", "SUPPORTS_PARTIAL",
            "IS_DETERMINISTIC", "SUPPORTS_BMGHK", "CUDA_MINIMUM_COMPUTE_CAPABILITY",
        ):  # fmt: skip
            assert hasattr(op, name)
        assert op.shape_not_supported_reasons(1, 1, 1, 1) == []
    assert {"cuda"} == ChainedFwOp.SUPPORTED_DEVICES and {"cpu"} == CpuFwOp.SUPPORTED_DEVICES


@pytest.mark.gpu
def test_named_operators_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = make("cuda", 4, torch.float16)
    expected = attention(*qkv)
    for op in (ChainedFwOp, ChainedFwOp(), (ChainedFwOp, None)):
        assert torch.equal(attention(*qkv, op=op), expected)
    with pytest.raises(ValueError, match=r"(?s)Operator cpu.*device is cuda"):
        attention(*qkv, op=CpuFwOp)
    name = memeff_attn.explain(*qkv).split("chosen: ")[1].split()[0]
    assert torch.equal(attention(*qkv, op=dispatch.variant(name)), expected)
    monkeypatch.setenv("MEMEFF_FORCE_VARIANT", name)
    assert torch.equal(attention(*qkv), expected)
    monkeypatch.setenv("MEMEFF_FORCE_VARIANT", "nonesuch")
    with pytest.raises(ValueError, match="nonesuch"):
        attention(*qkv)


@pytest.mark.gpu
def test_scalars_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a torch without the DLPack exchange."""
    module, _ = dispatch.native()
    assert module is not None
    for rank in (3, 4, 5):
        qkv = make("cuda", rank, torch.float16)
        bias = torch.randn(33, 47, device="cuda")
        expected = with_lse(*qkv, bias)
        monkeypatch.setattr(
            ops, "_launch", ops.with_workspace(ops.by_scalars(module.forward_scalars, 7))
        )
        for mine, other in zip(with_lse(*qkv, bias), expected, strict=True):
            assert torch.equal(mine, other)
        monkeypatch.undo()


@pytest.mark.gpu
def test_current_stream_and_device() -> None:
    qkv = make("cuda", 4, torch.float16)
    expected = attention(*qkv)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        doubled = attention(*(x * 2 for x in qkv), scale=0.0625)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(doubled, expected * 2, atol=2e-3, rtol=2e-3)


def test_forced_variant_is_read_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.forced_variant() == "" and ops._FORCED not in ops._environ
    monkeypatch.setenv("MEMEFF_FORCE_VARIANT", "name")
    assert ops.forced_variant() == "name" and ops._FORCED in ops._environ
    qkv = make("cpu", 4, torch.float16)
    assert attention(*qkv).shape == qkv[0].shape  # GPU kernels are no matter of the CPU


# ---- TF32 ----


def test_tf32_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        ops, "forward", lambda *arguments: seen.append(arguments[6]) or (None, None)
    )
    qkv = make("cpu", 4, torch.float32)
    saved = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert dispatch.tf32_allowed() is allowed
            attention(*qkv)
            attention(*(x.half() for x in qkv))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = saved
    assert seen == [False, False, True, False, False, False]


def test_tf32_of_the_newer_setting() -> None:
    """allow_tf32 raises once fp32_precision is set: it must not be read then."""
    code = (
        "import torch\n"
        "from memeff_attn.dispatch import tf32_allowed\n"
        "matmul = torch.backends.cuda.matmul\n"
        "if hasattr(matmul, 'fp32_precision'):\n"
        "    for value in ('tf32', 'ieee', 'tf32'):\n"
        "        matmul.fp32_precision = value\n"
        "        assert tf32_allowed() == (value == 'tf32'), value\n"
    )
    environment = os.environ | {"PYTHONPATH": ROOT}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# ---- information, cost ----


def test_info() -> None:
    environment = os.environ | {"PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-m", "memeff_attn.info"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"memeff_attn {memeff_attn.__version__}, torch {torch.__version__}" in done.stdout
    assert "compiled part" in done.stdout and done.stderr == ""


def test_explain_names_what_runs() -> None:
    q, k, v = make("cpu", 4, torch.float16)
    assert "PyTorch's flash kernel for the CPU" in memeff_attn.explain(q, k, v)
    assert cpu.route(q, k, v, None, 0.25, BOTTOM_RIGHT)[1] in memeff_attn.explain(q, k, v, MASKS[2])
    module, _ = dispatch.native()
    if module is not None and module.variants():
        text = memeff_attn.explain(q, k, v, device="sm_80")
        assert "chosen: " in text and "on sm_80" in text


def test_host_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own part, without launch and allocation, stays a handful of cheap checks.

    Counted in calls of a trivial function, so that a slow machine does not matter."""
    q, k, v = make("cpu", 4, torch.float16)
    mask = LowerTriangularMask()
    monkeypatch.setattr(ops, "forward", lambda *arguments: arguments)

    def trivial() -> int:
        return q.dim()

    def cost(function: Any) -> float:
        return min(timeit.repeat(function, number=2000, repeat=15))

    assert attention_module._attention.__code__.co_argcount == 11
    assert cost(lambda: attention(q, k, v, mask)) < 60 * cost(trivial)
