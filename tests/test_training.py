"""Training as torch users do it: compile, checkpointing, autocast, transforms, parameters. B48 of
tests/faults.py, the backward halves; streams, devices and processes: test_training_devices.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import backward_cases
import cases
import gradients
import pytest
import torch
from backward_cases import BackwardCase, by_autograd, make_grad
from tolerance import NONE, Checker
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

memeff_attn = pytest.importorskip("memeff_attn")

attention = memeff_attn.memory_efficient_attention
TESTS = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves_of(device: str, dtype: torch.dtype = torch.float32, **sizes: int) -> list[Tensor]:
    size = {"B": 2, "M": 33, "N": 33, "H": 2, "K": 16} | sizes
    kv = size.get("Kv", size["K"])
    shapes = (("M", size["K"]), ("N", size["K"]), ("N", kv))
    return [
        torch.randn(size["B"], size[n], size["H"], k, device=device).to(dtype).requires_grad_()
        for n, k in shapes
    ]


def low(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def same_gradients(
    checker: Checker, label: str, one: Callable[..., Tensor], other: Callable[..., Tensor],
    leaves: list[Tensor], number: int = 0,
) -> None:  # fmt: skip
    """Both functions from one state of the generator: results and gradients bit-equal."""
    found = []
    for function in (one, other):
        torch.manual_seed(number)
        out = function(*leaves)
        grad_out = torch.ones_like(out) / 7
        found.append((out.detach(), *torch.autograd.grad(out, leaves, grad_out)))
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        checker.same_bits(f"{label} {i}", a, b)


class Calls(TorchDispatchMode):
    """The arguments of each call of one operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator
        self.arguments: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is self.operator:
            self.arguments.append(args)
        return op(*args, **(kwargs or {}))


# --- compile


COMPILED: dict[str, tuple[dict[str, int], Any, float]] = {
    "plain": ({}, None, 0.0),
    "causal, Kv": ({"Kv": 24}, "causal", 0.0),  # B48c
    "odd": ({"K": 33, "M": 7, "N": 9}, None, 0.0),  # B48d
    "bias": ({}, (1, 2, 33, 33), 0.0),
    "broadcast bias": ({}, (2, 1, 1, 33), 0.0),
    "one query": ({"M": 1, "N": 1}, (2, 1, 1, 1), 0.0),  # B22
    "dropout": ({}, None, 0.3),
    "bias and dropout": ({}, (1, 2, 1, 33), 0.3),
}


@pytest.mark.parametrize("name", COMPILED)
def test_b48b_compiled_training(device: str, name: str) -> None:
    """fullgraph forward and backward: the bits of eager, dropout's mask too; strides and shapes as
    the fakes promised (inductor and aot_eager would fail otherwise)."""
    sizes, bias, p = COMPILED[name]
    leaves = leaves_of(device, low(device), **sizes)
    if isinstance(bias, tuple):
        leaves.append(torch.randn(bias, device=device).to(low(device)).requires_grad_())

    def function(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None = None) -> Tensor:
        mask = memeff_attn.LowerTriangularMask() if bias == "causal" else given
        return attention(q * 2, k, v, mask, p).transpose(1, 2)

    checker = Checker()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    same_gradients(checker, name, compiled, function, leaves)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED)
def test_b48d_inductor_training(name: str) -> None:
    """Inductor lays tensors out as it likes; right by the rule, dropout aside."""
    sizes, bias, p = COMPILED[name]
    leaves = leaves_of("cuda", torch.bfloat16, **sizes)
    if isinstance(bias, tuple):
        leaves.append(torch.randn(bias, device="cuda", dtype=torch.bfloat16).requires_grad_())

    def function(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None = None) -> Tensor:
        mask = memeff_attn.LowerTriangularMask() if bias == "causal" else given
        return attention(q, k, v, mask, p).transpose(1, 2)

    compiled = torch.compile(function, fullgraph=True)
    out = compiled(*leaves)
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad_out)
    assert all(bool(x.isfinite().all()) for x in found)
    if p == 0:
        checker = Checker()
        causal = 1 if bias == "causal" else 0
        plain = [x.detach() for x in leaves]
        given = plain[3] if len(plain) > 3 else None
        four = tuple(x.contiguous() for x in found) + (None,) * (4 - len(found))
        grad_out = grad_out.transpose(1, 2)
        gradients.check(checker, name, four, grad_out, *plain[:3], given, causal)
        checker.finish()


def test_b18_dynamic_shapes(device: str) -> None:
    """One graph for many sizes, the size-1 ones apart."""
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    checker = Checker()
    for m, n in ((33, 47), (64, 5), (2, 130)):
        same_gradients(
            checker, f"{m, n}", compiled, attention, leaves_of(device, M=m, N=n), number=m
        )
    checker.finish()


# --- k: activation checkpointing


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_b48k_checkpoint(device: str, reentrant: bool, p: float) -> None:
    """The recomputed forward drops what the first one dropped: the bits of the plain call."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, memeff_attn.LowerTriangularMask(), p).sin()

    def checkpointed(*leaves: Tensor) -> Tensor:
        return checkpoint.checkpoint(function, *leaves, use_reentrant=reentrant)

    leaves = leaves_of(device)
    found = []
    for one in (checkpointed, function):
        torch.manual_seed(4)
        for x in leaves:
            x.grad = None
        one(*leaves).sum().backward()
        found.append([x.grad for x in leaves])
    checker = Checker()
    for a, b in zip(*found, strict=True):
        checker.same_bits(f"p={p}", a, b)
    checker.finish()


def random_operators_in_compiled_checkpoints() -> bool:
    """Whether this torch traces a CUDA random operator inside a selectively checkpointed region: it
    wraps it in graphsafe_run_with_rng_state, for which the region's mode needs a rule."""
    from torch._prims import rng_prims

    wrapper = getattr(rng_prims, "graphsafe_run_with_rng_state", None)
    mode = getattr(checkpoint, "_CachingTorchDispatchMode", None)
    return wrapper is None or mode is None or mode in wrapper.python_key_table


@pytest.mark.skipif(
    not hasattr(checkpoint, "CheckpointPolicy"), reason="this torch has no selective checkpointing"
)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["save", "recompute"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_b48k_selective_checkpoint(device: str, mode: str, p: float, compiled: bool) -> None:
    """Selective checkpointing sees the operator and saves or recomputes it: the same bits, and
    without dropout nothing in it counts as random."""
    if compiled and p and device == "cuda" and not random_operators_in_compiled_checkpoints():
        pytest.skip("this torch has no rule for a random operator (aten.randint too) there")
    policy = checkpoint.CheckpointPolicy
    operator = torch.ops.memeff_attn.forward.default
    seen: list[bool] = []

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is operator:
            seen.append(context.is_recompute)
            return policy.MUST_SAVE if mode == "save" else policy.PREFER_RECOMPUTE
        return policy.PREFER_RECOMPUTE

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k, v, p=p).sin()

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts(decide)

    def selective(*leaves: Tensor) -> Tensor:
        return checkpoint.checkpoint(function, *leaves, use_reentrant=False, context_fn=contexts)

    one = torch.compile(selective, fullgraph=True, backend="aot_eager") if compiled else selective
    other = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    checker = Checker()
    leaves = leaves_of(device)
    same_gradients(checker, f"{mode} p={p}", one, other, leaves)
    checker.finish()
    assert seen, "the policy was never asked about the operator"
    if not compiled:
        with Calls(operator) as calls:
            out = selective(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert len(calls.arguments) == (1 if mode == "save" else 2)
    assert torch.Tag.nondeterministic_seeded not in operator.tags
    assert torch.Tag.nondeterministic_seeded not in torch.ops.memeff_attn.backward.default.tags


# --- a: autocast


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_b48a_autocast_training(device: str, kind: torch.dtype) -> None:
    """Mixed inputs are cast by autocast's rule; gradients have the dtypes of the inputs, and the
    values of the cast call."""
    query, key, value = leaves_of(device)
    low_key, low_value = (x.detach().to(kind).requires_grad_() for x in (key, value))
    bias = torch.randn(1, 2, 1, 33, device=device, requires_grad=True)
    checker = Checker()
    for given in (None, bias):
        with torch.autocast(device, dtype=kind):
            out = attention(query, low_key, low_value, given)
        assert out.dtype == kind
        leaves = [query, low_key, low_value] + ([] if given is None else [given])
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, grad_out)
        assert [x.dtype for x in found] == [x.dtype for x in leaves]
        four = (found[0].to(kind), *found[1:], *[None] * (4 - len(found)))
        plain = [x.detach().to(kind) for x in (query, low_key, low_value)]
        detached = None if given is None else given.detach()
        gradients.check(checker, given is None, four, grad_out, *plain, detached)
    linear = torch.nn.Linear(16, 48, device=device)  # as in a model: linear gives the low dtype
    x = torch.randn(2, 33, 2, 16, device=device)
    with torch.autocast(device, dtype=kind):
        q, k, v = linear(x).chunk(3, -1)
        loss = attention(q, k, v, p=0.1).float().square().mean()
    loss.backward()
    assert linear.weight.grad.dtype == torch.float32
    assert bool(linear.weight.grad.isfinite().all())
    checker.finish()


# --- f, g: transforms


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_b48f_vmap_of_gradients(device: str, with_bias: bool) -> None:
    """vmap over forward and backward equals the loop, M = 5, the bias batched or not; or says that
    it is not supported."""
    stacked = [torch.stack([x.detach(), x.detach() * 2]) for x in leaves_of(device, M=5, N=7)]
    bias = torch.randn(2, 1, 2, 5, 7, device=device)

    def loss(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return attention(q, k, v, b if with_bias else None).square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2, 3) if with_bias else (0, 1, 2))
    for dims in ((0, 0, 0, 0), (0, None, 0, None)):
        args = [x if d == 0 else x[0] for x, d in zip((*stacked, bias), dims, strict=True)]
        try:
            mine = torch.vmap(grad, in_dims=dims)(*args)
        except (RuntimeError, NotImplementedError) as error:
            assert "vmap" in str(error) or "batching rule" in str(error), error
            continue
        for i in range(2):
            one = [x[i] if d == 0 else x for x, d in zip(args, dims, strict=True)]
            for a, b in zip(mine, grad(*one), strict=True):
                torch.testing.assert_close(a[i], b, rtol=1e-5, atol=1e-5)


def test_vmap_with_dropout_is_no_silent_fault(device: str) -> None:
    """Each entry has a mask, or the error says so (torch's rule: vmap's randomness)."""
    three = [torch.stack([x.detach()] * 3) for x in leaves_of(device)]
    for randomness in ("error", "different", "same"):
        torch.manual_seed(0)
        try:
            out = torch.vmap(lambda q, k, v: attention(q, k, v, p=0.5), randomness=randomness)(
                *three
            )
        except (RuntimeError, NotImplementedError) as error:
            assert "vmap" in str(error) or "random" in str(error), error
            continue
        assert randomness != "error"
        assert torch.equal(out[0], out[1]) == (randomness == "same")


def test_b48g_double_backward_is_an_error(device: str) -> None:
    """Never silent zeros."""
    for p in (0.0, 0.2):
        leaves = leaves_of(device)
        out = attention(*leaves, p=p)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=r"gradient|differentiable"):
            torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    with pytest.raises(RuntimeError, match=r"gradient|differentiable|jvp"):
        torch.func.hessian(lambda q: attention(q, q, q).square().sum())(leaves[0].detach())


def test_forward_mode_is_an_error(device: str) -> None:
    query, key, value = (x.detach() for x in leaves_of(device))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        torch.func.jvp(lambda q: attention(q, key, value), (query,), (query,))


# --- l: who requires a gradient


@pytest.mark.parametrize("wants", backward_cases.SUBSETS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_b48l_every_subset_requires_grad(device: str, wants: str, p: float) -> None:
    """Those that require a gradient get it, by the operator called once with just these needs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Needs(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if op is torch.ops.memeff_attn.backward.default:
                asked.append(list(args[10]))
            return op(*args, **(kwargs or {}))

    asked: list[list[bool]] = []
    case = BackwardCase("f32", bias="1h1n", wants=wants, p=p)
    inputs = cases.make(case, device)
    grad_out = make_grad(case, device, inputs.query)
    seed = backward_cases.new_seed(2, device) if p else None
    with Calls(torch.ops.memeff_attn.backward.default) as calls:
        _, _, four = by_autograd(inputs, grad_out, p, wants)
    assert [x is not None for x in four] == [x in wants for x in "qkvb"]
    assert [list(args[10]) for args in calls.arguments] == [[x in wants for x in "qkvb"]]
    checker = Checker()
    drop = backward_cases.drop_of(inputs, p, seed)
    gradients.check(checker, case, four, grad_out, *inputs.tuple(), drop)
    checker.finish()


def test_b48l_no_gradient_no_graph(device: str) -> None:
    leaves = leaves_of(device)
    for given in ([x.detach() for x in leaves], leaves):
        with torch.no_grad():
            assert not attention(*given).requires_grad
        with torch.inference_mode():
            assert not attention(*given, p=0.1).requires_grad
    assert not attention(*(x.detach() for x in leaves)).requires_grad
    mask = torch.rand(33, 33, device=device) > 0.2
    out = attention(*leaves, mask)
    assert out.requires_grad
    out.sum().backward()
    assert mask.grad is None and all(x.grad is not None for x in leaves)


def test_a_parameter_as_bias(device: str) -> None:
    """nn.Parameter, alone and beside frozen inputs; an optimiser moves it towards the target."""
    query, key, value = (x.detach() for x in leaves_of(device))
    bias = torch.nn.Parameter(torch.zeros(1, 2, 33, 33, device=device))
    wish = attention(query, key, value, torch.randn(1, 2, 33, 33, device=device))
    optimiser = torch.optim.Adam([bias], lr=0.1)
    losses = []
    for _ in range(30):
        loss = (attention(query, key, value, bias) - wish).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0], losses


def test_a_model_learns_as_with_torch(device: str) -> None:
    """Fifty steps in fp32, p = 0: the losses of scaled_dot_product_attention within 1e-3."""
    from torch.nn.functional import scaled_dot_product_attention as torch_attention

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch_attention(q, k, v, is_causal=True).transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, memeff_attn.LowerTriangularMask())

    losses = []
    for function in (torchs, ours):
        torch.manual_seed(0)
        qkv, head = (torch.nn.Linear(32, n, device=device) for n in (96, 32))
        optimiser = torch.optim.Adam([*qkv.parameters(), *head.parameters()], lr=3e-3)
        x = torch.randn(4, 40, 32, device=device)
        found = []
        for _ in range(50):
            q, k, v = qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
            loss = (head(function(q, k, v).flatten(2))[:, :-1] - x[:, 1:]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.detach())
        losses.append(torch.stack(found).double())
    assert float(losses[0][-1]) < 0.97 * float(losses[0][0])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)


def test_the_generator_decides_the_mask(device: str) -> None:
    """torch.manual_seed reproduces, calls differ, the state moves by one draw of two numbers."""
    leaves = leaves_of(device)
    torch.manual_seed(9)
    one, two = attention(*leaves, p=0.5), attention(*leaves, p=0.5)
    torch.manual_seed(9)
    again = attention(*leaves, p=0.5)
    after = torch.rand(4, device=device)
    torch.manual_seed(9)
    backward_cases.new_seed(9, device)
    torch.randint(0, 2**63 - 1, (2,), device=device)
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert torch.equal(after, torch.rand(4, device=device))
    with torch.random.fork_rng():
        torch.manual_seed(9)
        assert torch.equal(attention(*leaves, p=0.5), one)


# --- m, and what must be refused


def test_b48m_gradients_that_disagree(device: str) -> None:
    """The explicit backward call names what is wrong, and reads nothing beyond an end."""
    query, key, value = (x.detach() for x in leaves_of(device))
    forward = memeff_attn.memory_efficient_attention_forward_requires_grad
    out, lse = forward(query, key, value)
    call = memeff_attn.memory_efficient_attention_backward
    grad = torch.ones_like(out)
    for wrong in (
        (grad[:, :-1], out, lse, query, key, value),
        (grad, out[..., :-1], lse, query, key, value),
        (grad, out, lse[..., :-1], query, key, value),
        (grad.double(), out, lse, query, key, value),
        (grad, out, lse.half(), query, key, value),
        (grad, out, lse, query, key[:, :-1], value),
        (grad, out, lse, query, key, value[..., :-1]),
    ):
        with pytest.raises((ValueError, NotImplementedError)):
            call(*wrong)
    assert NONE == 0 and len(call(grad, out, lse, query, key, value)) == 3
