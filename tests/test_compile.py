"""The operator under torch.compile, FakeTensor, opcheck, export and vmap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import memeff_attn
from memeff_attn import backward, ops
from memeff_attn.attn_bias import (
    CAUSAL_BOTTOM_RIGHT,
    CAUSAL_TOP_LEFT,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
)
from memeff_attn.dispatch import ChainedFwOp, CpuFwOp, variant
from memeff_attn.dropout import new_seed

attention = memeff_attn.memory_efficient_attention
with_lse = memeff_attn.memory_efficient_attention_forward_requires_grad
DTYPES = [torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(
    device: str, dtype: torch.dtype = torch.float32, rank: int = 4, rows: int = 9, width: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    heads = (3, 2)[: rank - 3]
    query = torch.randn(2, rows, *heads, 16, device=device).to(dtype)
    key = torch.randn(2, 12, *heads, 16, device=device).to(dtype)
    return query, key, torch.randn(2, 12, *heads, width, device=device).to(dtype)


def whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


# ---- torch.compile ----


@pytest.mark.parametrize(
    "bias",
    [None, LowerTriangularMask(), LowerTriangularFromBottomRightMask(), "tensor", "2-D", "bool"],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_graph(device: str, bias: Any, dtype: torch.dtype) -> None:
    """Masks as arguments and biases of any rank do not break the graph (B48b)."""
    qkv = make(device, dtype)
    if isinstance(bias, str):
        shape = (9, 12) if bias == "2-D" else (2, 1, 9, 12)
        bias = torch.randn(shape, device=device).to(dtype) if bias != "bool" else None
        bias = torch.rand(shape, device=device) > 0.3 if bias is None else bias

    def function(q: Tensor, k: Tensor, v: Tensor, b: Any) -> Tensor:
        return attention(q * 2, k, v, b) + 1

    assert torch.equal(whole(function)(*qkv, bias), function(*qkv, bias))


def test_masks_made_inside() -> None:
    qkv = make("cpu")
    for mask in (LowerTriangularMask, LowerTriangularFromBottomRightMask):

        def function(q: Tensor, k: Tensor, v: Tensor, mask: Any = mask) -> Any:
            return with_lse(q, k, v, mask(), scale=0.3)

        for mine, other in zip(whole(function)(*qkv), function(*qkv), strict=True):
            assert torch.equal(mine, other)


def test_another_mask_is_another_graph() -> None:
    compiled = whole(attention)
    qkv = make("cpu")
    for bias in (None, LowerTriangularMask(), LowerTriangularFromBottomRightMask(), None):
        assert torch.equal(compiled(*qkv, bias), attention(*qkv, bias))


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("width", [16, 5])
def test_layouts(device: str, rank: int, width: int) -> None:
    qkv = make(device, rank=rank, width=width)
    assert torch.equal(whole(attention)(*qkv), attention(*qkv))


def test_changing_sizes(device: str) -> None:
    """One graph for every length, and a scale that changes."""
    compiled = whole(attention, dynamic=True)
    for rows in (9, 10, 33, 1):
        qkv = make(device, rows=rows)
        assert torch.equal(compiled(*qkv), attention(*qkv))
        mask = LowerTriangularFromBottomRightMask()
        assert torch.equal(compiled(*qkv, mask), attention(*qkv, mask))
        scale = 0.1 * rows
        assert torch.equal(compiled(*qkv, scale=scale), attention(*qkv, scale=scale))


def test_empty() -> None:
    compiled = whole(attention, dynamic=False)
    for rows in (0, 3):
        q, k, v = make("cpu", rows=rows)
        assert torch.equal(compiled(q, k, v), attention(q, k, v))
        assert torch.equal(compiled(q, k[:, :0], v[:, :0]), torch.zeros_like(q))


def test_strides_a_compiler_may_choose(device: str) -> None:
    """Size-1 dimensions of any stride, expanded biases, padded rows (B22)."""
    compiled = whole(attention)
    q, k, v = make(device, rows=1)
    wide = torch.randn(2, 1, 1, 16, device=device)[..., :12].expand(2, 3, 1, 12)
    odd = q.as_strided(q.shape, (48, 7, 16, 1))
    for query, bias in itertools.product((q, odd), (None, wide)):
        assert torch.equal(compiled(query, k, v, bias), attention(q, k, v, bias))


def test_autocast_inside_a_graph(device: str) -> None:
    q, k, v = make(device)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return attention(q, k.bfloat16(), v)

    out = whole(function)(q, k, v)
    assert out.dtype == torch.bfloat16 and torch.equal(out, function(q, k, v))


def test_tf32_setting_is_guarded() -> None:
    """The flag is read at trace time; another setting is another graph."""
    seen = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(n.args[6] for n in graph.graph.nodes if "memeff" in str(n.target))
        return graph

    qkv = make("cpu")
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    saved = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            compiled(*qkv)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = saved
    assert seen == [False, True]


def test_errors_inside_a_graph() -> None:
    """Dynamo wraps them; the text arrives. Without fullgraph they arrive as they are."""
    q, k, v = make("cpu")
    for function, arguments, error, text in (
        (attention, (q, k, v[:, :3]), ValueError, "one length N"),
        (attention, (q, k.half(), v), ValueError, "must have one dtype"),
        (lambda *x: with_lse(*x, p=0.5), (q, k, v), NotImplementedError, "no dropout state"),
        (lambda *x: attention(*x, op=ChainedFwOp), (q, k, v), ValueError, "it takes cuda"),
    ):
        with pytest.raises(Exception, match=text):
            whole(function)(*arguments)
        if function is not attention:
            with pytest.raises(error, match=text):
                torch.compile(function, backend="aot_eager")(*arguments)


@pytest.mark.parametrize("op", [CpuFwOp, (CpuFwOp, None)], ids=["class", "tuple"])
def test_a_named_operator_in_a_graph(op: Any) -> None:
    qkv = make("cpu")
    compiled = whole(lambda q, k, v: attention(q, k, v, op=op))
    assert torch.equal(compiled(*qkv), attention(*qkv))


@pytest.mark.gpu
def test_a_forced_kernel_in_a_graph() -> None:
    qkv = make("cuda", torch.float16)
    name = memeff_attn.explain(*qkv).split("chosen: ")[1].split()[0]
    for op in (ChainedFwOp, variant(name)):
        compiled = whole(lambda q, k, v, op=op: attention(q, k, v, op=op))
        assert torch.equal(compiled(*qkv), attention(*qkv))


def test_a_gradient_asked_of_a_graph() -> None:
    """Forward and backward compile whole, for one input and for all, the same tensor twice too."""
    qkv = make("cpu")

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v).sin()

    for which in ([0], [1], [2], [0, 1, 2]):
        tensors = [x.clone() for x in qkv]
        wanted = [tensors[i].requires_grad_() for i in which]
        out = whole(function)(*tensors)
        assert torch.equal(out, function(*qkv))
        expected = torch.autograd.grad(function(*tensors).sum(), wanted)
        for mine, other in zip(torch.autograd.grad(out.sum(), wanted), expected, strict=True):
            assert torch.equal(mine, other) and mine.stride() == other.stride()
    x = qkv[0].clone().requires_grad_()
    (expected_x,) = torch.autograd.grad(function(x, x, x).sum(), x)
    torch.testing.assert_close(
        torch.autograd.grad(whole(function)(x, x, x).sum(), x)[0], expected_x
    )


def test_dropout_in_a_graph() -> None:
    """The seed is drawn in the graph, outside the operator; backward uses the same one."""
    qkv = [x.requires_grad_() for x in make("cpu")]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, LowerTriangularMask(), 0.3)

    results = []
    for call in (function, whole(function)):
        torch.manual_seed(7)
        out = call(*qkv)
        results.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.gpu
def test_inductor() -> None:
    for dtype in (torch.float16, torch.float32):
        qkv = make("cuda", dtype)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q + 1, k, v, LowerTriangularMask()).transpose(1, 2) * 2

        compiled = torch.compile(function, fullgraph=True)
        assert torch.equal(compiled(*qkv), function(*qkv))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    q, k, v = make("cuda", torch.float16)
    attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, attention(q, k, v))


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, LowerTriangularMask())

    qkv = make("cpu")
    program = torch.export.export(Module(), qkv)
    assert torch.equal(program.module()(*qkv), attention(*qkv, LowerTriangularMask()))


# ---- the operator ----


def op_arguments(device: str) -> Iterator[tuple[Any, ...]]:
    for rank, dtype, width in itertools.product((3, 4, 5), DTYPES, (16, 5)):
        qkv = make(device, dtype, rank, width=width)
        bias = torch.randn((1,) * (rank - 2) + (9, 12), device=device).to(dtype)
        yield (*qkv, None, 0.25, 0, False, True, "")
        yield (*qkv, bias, 0.25, 0, False, False, "")
        yield (*qkv, None, 0.25, CAUSAL_TOP_LEFT, False, True, "")
        yield (*qkv, None, 0.25, CAUSAL_BOTTOM_RIGHT, False, False, "")


def test_opcheck(device: str) -> None:
    for arguments in op_arguments(device):
        torch.library.opcheck(torch.ops.memeff_attn.forward.default, arguments)


def test_opcheck_of_backward(device: str) -> None:
    seed = new_seed(device)
    for i, arguments in enumerate(op_arguments(device)):
        q, k, v, bias, scale, causal = arguments[:6]
        for p in (0.0, 0.3):
            dropout = (p, seed if p else None)
            out, lse = ops.forward(*arguments[:7], True, "", *dropout)
            needs = [True, i % 2 == 0, i % 3 != 0, bias is not None]
            given = (torch.randn_like(out), q, k, v, bias, out, lse)
            torch.library.opcheck(
                torch.ops.memeff_attn.backward.default,
                (*given, scale, causal, False, needs, "", *dropout),
            )


def layouts(device: str) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor]]]:
    for rank, dtype in itertools.product((3, 4, 5), DTYPES):
        for rows, width in itertools.product((0, 1, 9), (16, 5)):
            q, k, v = make(device, dtype, rank, rows, width)
            name = f"rank {rank} {dtype} M {rows} Kv {width}"
            yield f"{name} dense", (q, k, v)
            yield f"{name} padded", (torch.cat([q, q], -1)[..., :16], k, v)
            yield f"{name} last stride", (torch.cat([q, q], -1)[..., ::2], k, v)
            yield f"{name} swapped", (q.transpose(0, 1).contiguous().transpose(0, 1), k, v)
            yield f"{name} expanded", (q[:1].expand_as(q), k[:1].expand_as(k), v)
            yield f"{name} no key", (q, k[:, :0], v[:, :0])
            yield f"{name} no batch", (q[:0], k[:0], v[:0])


def facts(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device.type, x.storage_offset()


def test_fake_equals_real(device: str) -> None:
    """Sizes, strides, dtypes on every branch, size-1 and empty dimensions too (B18)."""
    wrong = []
    for name, qkv in layouts(device):
        for need_lse in (False, True):
            arguments = (None, 0.25, 0, False, need_lse, "")
            real = ops.forward(*qkv, *arguments)
            with FakeTensorMode() as mode:
                fake = ops.forward(*map(mode.from_tensor, qkv), *arguments)
            if list(map(facts, real)) != list(map(facts, fake)):
                wrong.append(f"{name}: {list(map(facts, real))} != {list(map(facts, fake))}")
    assert not wrong, "\n".join(wrong)


def test_fake_gradients_equal_real(device: str) -> None:
    """Contiguous whatever the inputs' strides; [0] where not needed (B18, B31)."""
    wrong = []
    for name, qkv in layouts(device):
        out, lse = ops.forward(*qkv, None, 0.25, 0, False, True, "")
        for needs in ([True, True, True, False], [False, True, False, False]):
            tensors = (torch.ones_like(out), *qkv, None, out, lse)
            settings = (0.25, 0, False, needs, "")
            real = backward.backward(*tensors, *settings)
            with FakeTensorMode() as mode:
                given = [None if x is None else mode.from_tensor(x) for x in tensors]
                fake = backward.backward(*given, *settings)
            if list(map(facts, real)) != list(map(facts, fake)):
                wrong.append(f"{name}: {list(map(facts, real))} != {list(map(facts, fake))}")
            for grad, x, needed in zip(real, qkv, needs, strict=False):
                assert grad.shape == (x.shape if needed else (0,)) and grad.is_contiguous()
    assert not wrong, "\n".join(wrong)


def test_gpu_implementation_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it allocates is what the fake promises."""
    monkeypatch.setattr(ops, "_launch", lambda *arguments: None)
    monkeypatch.setattr(backward, "_launch", lambda *arguments: None)
    monkeypatch.setattr(ops, "_current_stream", None)
    for name, qkv in layouts("cpu"):
        out, lse = ops._forward_fake(*qkv, None, 0.25, 0, False, True, "")
        given = (out, *qkv, None, out, lse, 0.25, 0, False, [True, True, False, False], "")
        real, fake = backward._backward_cuda(*given), backward._backward_fake(*given)
        assert list(map(facts, real)) == list(map(facts, fake)), name
        for need_lse in (False, True):
            arguments = (None, 0.25, 0, False, need_lse, "")
            real = ops._forward_cuda(*qkv, *arguments)
            fake = ops._forward_fake(*qkv, *arguments)
            assert list(map(facts, real)) == list(map(facts, fake)), name


def test_fake_refuses_what_the_real_refuses() -> None:
    q, k, v = make("cpu")
    v = v[:, :3]
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="one length N"):
        attention(*map(mode.from_tensor, (q, k, v)))


def test_meta_tensors() -> None:
    out, lse = with_lse(*(x.to("meta") for x in make("cpu")))
    assert out.is_meta and out.shape == (2, 9, 3, 16) and lse.shape == (2, 3, 9)


def test_vmap(device: str) -> None:
    """Equals a loop (B48f)."""
    q, k, v = (torch.stack([x, x * 2, x - 1]) for x in make(device))
    for arguments, dims in (((q, k, v), (0, 0, 0)), ((q, k[0], v[0]), (0, None, None))):
        with_vmap = torch.vmap(attention, in_dims=dims)(*arguments)
        for i, out in enumerate(with_vmap):
            one = [x if d is None else x[i] for x, d in zip(arguments, dims, strict=True)]
            assert torch.equal(out, attention(*one))


# ---- the short way around the dispatcher ----


class PlainCuda:
    """What goes_direct asks of a plain CUDA tensor."""

    is_cuda = True

    def is_neg(self) -> bool:
        return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_short_way_is_left_where_something_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = PlainCuda()
    seen: dict[str, bool] = {}

    def look(name: str) -> Callable[[Any], Any]:
        def looked(anything: Any = None) -> Any:
            seen[name] = ops.goes_direct(x, x, x, None)
            return anything

        return looked

    assert not ops.goes_direct(x, x, x, None)  # a subclass, as far as types tell
    monkeypatch.setattr(ops, "_plain_types", (PlainCuda,))
    assert ops.goes_direct(x, x, x, None) and ops.goes_direct(x, x, x, x)
    assert not ops.goes_direct(x, x, x, torch.ones(1))
    one = torch.ones(2)
    with FakeTensorMode():
        look("dispatch mode")()
    with torch.overrides.BaseTorchFunctionMode():
        look("function mode")()
    torch.vmap(look("vmap"))(one)
    torch.func.grad(lambda t: look("grad")(t).sum())(one)
    torch.jit.trace(look("jit.trace"), one, check_trace=False)
    with torch.autograd.profiler.profile():
        look("profiler")()
    assert seen == dict.fromkeys(
        ("dispatch mode", "function mode", "vmap", "grad", "jit.trace", "profiler"), False
    )
    assert not ops.goes_direct(*make("cpu"), None)


@pytest.mark.gpu
def test_the_short_way_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, width in itertools.product((3, 4, 5), (16, 5)):
        qkv = make("cuda", torch.float16, rank, width=width)
        assert ops.goes_direct(*qkv, None)
        short = with_lse(*qkv, LowerTriangularMask())
        with monkeypatch.context() as patch:
            patch.setattr(ops, "goes_direct", lambda *arguments: False)
            long = with_lse(*qkv, LowerTriangularMask())
        for mine, other in zip(short, long, strict=True):
            assert torch.equal(mine, other) and facts(mine) == facts(other)


@pytest.mark.filterwarnings("ignore")  # it is deprecated, and says that sizes become constants
def test_jit_trace(device: str) -> None:
    qkv = make(device)
    traced = torch.jit.trace(lambda q, k, v: attention(q, k, v), qkv)
    others = tuple(x + 1 for x in qkv)
    assert torch.equal(traced(*others), attention(*others))
