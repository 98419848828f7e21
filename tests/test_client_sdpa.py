"""torch's own modules on activate_sdpa(): trained and evaluated, compiled, checkpointed, under
autocast. Every test says how many calls were ours; one call at a time: test_integration_sdpa.py.

Exact is the module in fp64 on torch's attention, eager the module in its dtype on attention with
the scores whole (SDPBackend.MATH)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from tolerance import FORWARD, GRADIENT, Checker
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memeff_attn import integrations

WIDTH, HEADS, ROWS, LAYERS = 64, 4, 40, 2


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    torch._dynamo.reset()
    integrations.sdpa_calls(reset=True)
    found = functional.scaled_dot_product_attention
    yield
    assert functional.scaled_dot_product_attention is found
    torch._dynamo.reset()


class Mha(nn.MultiheadAttention):
    """Self-attention that asks for no weights, as it must to reach SDPA."""

    def forward(self, x: Tensor, **rest: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False, **rest)[0]


def encoder(p: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, p, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS)


class Translator(nn.Transformer):
    """Encoder and decoder of one input: causal, and over the encoder's output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, x + 1, tgt_mask=causal, tgt_is_causal=True)


def padding(device: str) -> Tensor:
    """nn's: True = hidden."""
    lengths = torch.tensor([ROWS, ROWS - 9], device=device)[:, None]
    return torch.arange(ROWS, device=device) >= lengths


def causal(device: str) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(ROWS, device)


# module, what it is called with, its calls of attention
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[str], dict[str, Any]], int]] = {
    "MultiheadAttention": (lambda: Mha(WIDTH, HEADS, batch_first=True), lambda _: {}, 1),
    "MultiheadAttention, sequence first": (lambda: Mha(WIDTH, HEADS), lambda _: {}, 1),
    "MultiheadAttention, padding": (
        lambda: Mha(WIDTH, HEADS, batch_first=True),
        lambda device: {"key_padding_mask": padding(device)},
        1,
    ),
    "MultiheadAttention, bias_kv": (
        lambda: Mha(WIDTH, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        lambda _: {},
        1,
    ),
    "TransformerEncoder": (encoder, lambda _: {}, LAYERS),
    "TransformerEncoder, padding": (
        encoder,
        lambda device: {"src_key_padding_mask": padding(device)},
        LAYERS,
    ),
    "TransformerEncoder, causal": (
        encoder,
        lambda device: {"mask": causal(device), "is_causal": True},
        LAYERS,
    ),
    "Transformer": (
        lambda: Translator(WIDTH, HEADS, 1, 1, 2 * WIDTH, 0.0, batch_first=True),
        lambda _: {},
        3,
    ),
}


def run(
    module: nn.Module, x: Tensor, rest: dict[str, Any], kind: torch.dtype, training: bool
) -> dict[str, Tensor]:
    """The result where it counts and, in training, the gradients by name, computed in `kind`."""
    module = copy.deepcopy(module).to(kind).train(training)
    rest = {
        name: y.to(kind) if isinstance(y, Tensor) and y.is_floating_point() else y
        for name, y in rest.items()
    }
    x = x.detach().to(kind).requires_grad_(training)
    with torch.set_grad_enabled(training):
        out = module(x, **rest)
    hidden = rest.get("key_padding_mask", rest.get("src_key_padding_mask"))
    if hidden is not None:
        out = out.masked_fill(hidden[..., None], 0.0)
    found = {"out": out.detach()}
    if training:
        out.square().mean().backward()
        assert x.grad is not None
        found["x"] = x.grad
        found |= {name: w.grad for name, w in module.named_parameters() if w.grad is not None}
    return found


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(device: str, name: str, training: bool) -> None:
    """In eval mode without gradients, too, where nn's fast path would pass SDPA by."""
    make, arguments, count = MODULES[name]
    module, rest = make().to(device), arguments(device)
    x = torch.randn(2, ROWS, WIDTH, device=device)
    x = x.transpose(0, 1) if "sequence first" in name else x
    torch.backends.mha.set_fastpath_enabled(False)  # of the baselines: it rounds in its own way
    try:
        with sdpa_kernel(SDPBackend.MATH):
            exact = run(module, x, rest, torch.float64, training)
            eager = run(module, x, rest, torch.float32, training)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with integrations.activate_sdpa():
        mine = run(module, x, rest, torch.float32, training)
    assert integrations.sdpa_calls() == (count, 0, 0, "")
    assert mine.keys() == exact.keys() and (len(mine) > 1) == training
    checker = Checker()
    for key, value in mine.items():
        factors = FORWARD if key == "out" else GRADIENT
        figures = value, exact[key], eager[key], eager[key]
        checker.close(f"{name} {key}", *figures, factors=factors, terms=terms(key, exact))
    checker.finish()


def terms(name: str, exact: dict[str, Tensor]) -> Tensor | None:
    """The size of what cancels in a gradient that is 0 in exact arithmetic, part of which the bias
    of the projections is: the same number added to all scores of a query changes nothing."""
    if not name.endswith("in_proj_bias"):
        return None
    return exact[name.replace("bias", "weight")].abs().amax()


def test_weights_asked_for_never_reach_sdpa() -> None:
    """What docs/integrations.md says of need_weights=True, which is nn's default."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(2, ROWS, WIDTH)
    with integrations.activate_sdpa():
        assert module(x, x, x)[1] is not None
    assert integrations.sdpa_calls() == (0, 0, 0, "")


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing(device: str, reentrant: bool) -> None:
    """The recomputed forward is ours, too, and draws the same dropout."""
    module = encoder(0.2).to(device)
    found = []
    for again in (False, True):
        x = torch.ones(2, ROWS, WIDTH, device=device, requires_grad=True)
        torch.manual_seed(5)
        with integrations.activate_sdpa():
            out = checkpoint(module, x, use_reentrant=reentrant) if again else module(x)
            out.square().mean().backward()
        found.append((out.detach(), x.grad))
        expected = LAYERS * (2 if again else 1)
        assert integrations.sdpa_calls(reset=True) == (expected, 0, 0, "")
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_autocast(device: str) -> None:
    module = encoder().to(device)
    x = torch.randn(2, ROWS, WIDTH, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        with sdpa_kernel(SDPBackend.MATH):
            eager = module(x)
        with integrations.activate_sdpa():
            mine = module(x)
    assert integrations.sdpa_calls() == (LAYERS, 0, 0, "")
    exact = copy.deepcopy(module).double()(x.double())
    checker = Checker()
    checker.close("autocast", mine, exact, eager, module(x), unit=torch.bfloat16)
    checker.finish()


# ---- torch.compile ----


class Recorder:
    """A backend that keeps how often each operator is in the graphs, and runs them as they are."""

    def __init__(self) -> None:
        self.forward: list[int] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        def count(graph: Any, inputs: Any) -> Any:
            targets = [node.target for node in graph.graph.nodes]
            self.forward.append(targets.count(torch.ops.memeff_attn.forward.default))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=count)(module, inputs)


def test_compile_without_a_break(device: str) -> None:
    """The operator is in the graph once a layer; the same numbers as without compiling."""
    module = encoder().to(device)
    x = torch.randn(2, ROWS, WIDTH, device=device, requires_grad=True)
    recorder = Recorder()
    with integrations.activate_sdpa():
        plain = module(x)
        compiled = torch.compile(module, backend=recorder, fullgraph=True)(x)
    calls = integrations.sdpa_calls()
    assert calls.served == LAYERS and calls.traced >= LAYERS and calls.refused == 0
    assert recorder.forward[0] == LAYERS
    assert torch.equal(plain, compiled)
    gradients = [torch.autograd.grad(y.square().mean(), x)[0] for y in (plain, compiled)]
    assert torch.equal(*gradients)


def test_a_compiled_call_follows_activation(device: str) -> None:
    """A graph made before is traced again when the function in torch's place changes."""
    recorder = Recorder()

    @torch.compile(backend=recorder, fullgraph=True)
    def call(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 4, 9, 16, device=device)
    before = call(x)
    with integrations.activate_sdpa():
        inside = call(x)
        plain = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    after = call(x)
    assert recorder.forward == [0, 1]  # after is the first graph again
    assert torch.equal(before, after) and torch.equal(inside, plain)


def test_a_refusal_while_compiling_is_counted(device: str) -> None:
    x = torch.randn(2, 4, 9, 16, device=device).double()
    with integrations.activate_sdpa():
        call = torch.compile(functional.scaled_dot_product_attention, backend="eager")
        assert torch.equal(call(x, x, x), functional.scaled_dot_product_attention(x, x, x))
    calls = integrations.sdpa_calls()
    assert calls.traced == calls.refused == 1 and "float64" in calls.last_refusal


# ---- what else acts between a program and SDPA ----


def test_vmap_and_grad(device: str) -> None:
    q = torch.randn(3, 2, 4, 9, 16, device=device)
    x = q[0].detach().requires_grad_()
    with integrations.activate_sdpa():
        sdpa = functional.scaled_dot_product_attention
        mapped = torch.vmap(sdpa)(q, q, q)
        gradient = torch.func.grad(lambda x: sdpa(x, q[1], q[2]).square().sum())(q[0])
        one_by_one = [sdpa(y, y, y) for y in q]
        expected = torch.autograd.grad(sdpa(x, q[1], q[2]).square().sum(), x)[0]
    assert integrations.sdpa_calls()[:2] == (6, 0)
    assert torch.equal(mapped, torch.stack(one_by_one)) and torch.equal(gradient, expected)


def test_forward_mode_is_torchs(device: str) -> None:
    q = torch.randn(2, 4, 9, 16, device=device)
    with integrations.activate_sdpa(), sdpa_kernel(SDPBackend.MATH):
        sdpa = functional.scaled_dot_product_attention
        _, tangent = torch.func.jvp(lambda x: sdpa(x, q, q), (q,), (q,))
    assert tangent.abs().max() > 0 and "forward-mode" in integrations.sdpa_calls().last_refusal


def test_default_device(device: str) -> None:
    """torch.set_default_device is a mode that sees every call: it changes nothing here."""
    with torch.device(device), integrations.activate_sdpa():
        q = torch.randn(2, 4, 9, 16)
        assert functional.scaled_dot_product_attention(q, q, q).device.type == device
    assert integrations.sdpa_calls().served == 1
