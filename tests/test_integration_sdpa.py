"""activate_sdpa(): one call of torch's SDPA after the other. Modules on top of it:
test_client_sdpa.py.

Exact is torch's own SDPA in fp64, which is never ours; eager is the definition in the inputs'
dtype; the rule is that of tolerance.py. Every test says how many calls were ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradients
import pytest
import torch
from tolerance import FORWARD, GRADIENT, Checker
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import memeff_attn
from memeff_attn import integrations
from memeff_attn.integrations import sdpa

TORCH = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Every test starts and ends with torch's own function in its place, and no counts."""
    torch._dynamo.reset()
    integrations.sdpa_calls(reset=True)
    assert functional.scaled_dot_product_attention is TORCH
    yield
    assert functional.scaled_dot_product_attention is TORCH
    torch._dynamo.reset()


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    if device == "cpu":
        return (torch.float32,)
    return torch.float32, torch.float16, torch.bfloat16


class Recomputed(torch.autograd.Function):
    """softmax(scores + bias) V and its gradients in fp32 as the contract defines them: the weights
    again from the log-sum-exp, delta from the rounded output (tests/gradients.py says why)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, s: float) -> Any:
        scores = (query.float() @ key.float().transpose(-1, -2) * s + bias).float()
        lse = torch.logsumexp(scores, -1, keepdim=True)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
        out = (weights @ value.float()).to(query.dtype)
        ctx.save_for_backward(query, key, value, bias, weights, out)
        ctx.scale = s
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, bias, weights, out = ctx.saved_tensors
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        ds = weights * (grad.float() @ value.float().transpose(-1, -2) - delta)
        dq, dk = ds @ key.float() * ctx.scale, ds.transpose(-1, -2) @ query.float() * ctx.scale
        dv = weights.transpose(-1, -2) @ grad.float()
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), ds.to(bias.dtype), None


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    again: bool = False,
) -> Tensor:
    """What one writes: the scores whole, in the inputs' dtype; with `again` by Recomputed."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    bias = query.new_zeros(*lead, query.shape[-2], key.shape[-2])
    if is_causal:
        attn_mask = torch.ones_like(bias, dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        bias = bias + attn_mask
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if again:
        return Recomputed.apply(query, key, value, bias, scale)
    scores = query @ key.transpose(-1, -2) * scale + bias
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    return (torch.softmax(scores.masked_fill(dead, 0.0), -1) @ value).masked_fill(dead, 0.0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


HIDDEN = torch.arange(33) < torch.tensor([33, 20])[:, None]  # padding of two entries; 33 keys

# query, key, value and what else is passed; made with one seed.
CASES: dict[str, Callable[[], tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]]] = {
    "plain": lambda: ((2, 4, 19, 16), (2, 4, 33, 16), 16, {}),
    "K 40, Kv 24": lambda: ((2, 4, 19, 40), (2, 4, 33, 40), 24, {}),
    "causal": lambda: ((2, 4, 33, 16), (2, 4, 33, 16), 16, {"is_causal": True}),
    "causal, from the top left": lambda: ((2, 4, 19, 16), (2, 4, 33, 16), 16, {"is_causal": True}),
    "scale": lambda: ((2, 4, 19, 16), (2, 4, 33, 16), 16, {"scale": 0.1}),
    "grouped heads": lambda: ((2, 4, 19, 16), (2, 2, 33, 16), 16, {"enable_gqa": True}),
    "one head of keys": lambda: ((2, 4, 19, 16), (2, 1, 33, 16), 16, {}),
    "one head of queries": lambda: ((2, 1, 19, 16), (2, 4, 33, 16), 16, {}),
    "one batch entry of queries": lambda: ((1, 4, 19, 16), (2, 4, 33, 16), 16, {}),
    "[M, K]": lambda: ((19, 16), (33, 16), 8, {}),
    "[H, M, K]": lambda: ((4, 19, 16), (4, 33, 16), 8, {}),
    "[B, C, H, M, K]": lambda: ((3, 2, 4, 19, 16), (3, 2, 4, 33, 16), 8, {}),
    "[1, C, H, M, K]": lambda: ((1, 2, 4, 19, 16), (3, 2, 4, 33, 16), 8, {}),
    "bool [B, 1, 1, N]": lambda: (
        (2, 4, 19, 16), (2, 4, 33, 16), 16, {"attn_mask": HIDDEN[:, None, None]}
    ),
    "bool with rows that see nothing": lambda: (
        (2, 4, 19, 16), (2, 4, 33, 16), 16,
        {"attn_mask": torch.arange(33) < torch.arange(19)[:, None]},
    ),
    "float [M, N]": lambda: ((2, 4, 19, 16), (2, 4, 33, 16), 16, {"attn_mask": randn(19, 33)}),
    "float [B, H, M, N]": lambda: (
        (2, 4, 19, 16), (2, 4, 33, 16), 16, {"attn_mask": randn(2, 4, 19, 33)}
    ),
    "float [H, 1, N], three dimensions": lambda: (
        (4, 19, 16), (4, 33, 16), 16, {"attn_mask": randn(4, 1, 33)}
    ),
    "float [M, N], two dimensions": lambda: ((19, 16), (33, 16), 16, {"attn_mask": randn(19, 33)}),
    "float [B, C, 1, 1, N]": lambda: (
        (3, 2, 4, 19, 16), (3, 2, 4, 33, 16), 16, {"attn_mask": randn(3, 2, 1, 1, 33)}
    ),
    "float [1, 1, H, M, N]": lambda: (
        (3, 2, 4, 19, 16), (3, 2, 4, 33, 16), 16, {"attn_mask": randn(1, 1, 4, 19, 33)}
    ),
    "grouped heads, bool [H, M, N]": lambda: (
        (2, 4, 19, 16), (2, 2, 33, 16), 16,
        {"enable_gqa": True, "attn_mask": torch.randn(4, 19, 33) > -1},
    ),
}  # fmt: skip


def leaves_of(case: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """query, key, value and a float mask as leaves of `dtype`; everything else."""
    query, key, width, rest = CASES[case]()
    shapes = (query, key, (*key[:-1], width))
    leaves = [torch.randn(x).to(device, dtype).requires_grad_() for x in shapes]
    mask = rest.pop("attn_mask", None)
    if mask is not None and mask.dtype != torch.bool:
        leaves.append(mask.to(device, dtype).requires_grad_())
    elif mask is not None:
        rest["attn_mask"] = mask.to(device)
    return leaves, rest


def computed(
    function: Callable[..., Tensor], leaves: list[Tensor], rest: dict[str, Any], kind: torch.dtype
) -> list[Tensor]:
    """The result and the gradients of every leaf, computed in `kind` from the same numbers."""
    mine = [x.detach().to(kind).requires_grad_() for x in leaves]
    masks = {"attn_mask": mine[3]} if len(mine) == 4 else {}
    out = function(*mine[:3], **masks, **rest)
    weights = torch.linspace(-1.0, 1.0, out.numel(), device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, mine, weights.to(leaves[0].dtype).to(kind))]


@pytest.mark.parametrize("case", CASES)
def test_what_sdpa_takes(device: str, case: str) -> None:
    """Result and gradients as torch's own, each computed by ours."""
    checker = Checker()
    for dtype in dtypes(device):
        leaves, rest = leaves_of(case, device, dtype)
        exact = computed(TORCH, leaves, rest, torch.float64)
        eager, eager32 = (computed(definition, leaves, rest, x) for x in (dtype, torch.float32))
        again = computed(definition, leaves, rest | {"again": True}, dtype)
        for baseline in (eager, eager32):
            baseline[1:] = map(gradients._worse, baseline[1:], again[1:], exact[1:])
        with integrations.activate_sdpa():
            mine = computed(functional.scaled_dot_product_attention, leaves, rest, dtype)
        assert integrations.sdpa_calls(reset=True) == (1, 0, 0, "")
        for i, figures in enumerate(zip(mine, exact, eager, eager32, strict=True)):
            factors = GRADIENT if i else FORWARD
            checker.close(f"{case} {dtype} {i}", *figures, factors=factors)
    checker.finish()


def test_causal_bias(device: str) -> None:
    """torch's CausalBias: both corners, without a tensor; what is refused is right, too."""
    q, k, v = (torch.randn(2, 4, n, 16, device=device) for n in (5, 7, 7))
    checker = Checker()
    for make in (causal_upper_left, causal_lower_right):
        mask = make(5, 7)
        seen = mask._materialize(torch.device(device))
        with integrations.activate_sdpa():
            mine = functional.scaled_dot_product_attention(q, k, v, mask)
            wide = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
        assert integrations.sdpa_calls(reset=True)[:2] == (1, 1)
        exact = TORCH(q.double(), k.double(), v.double(), seen)
        assert torch.equal(wide, exact)
        eager = definition(q, k, v, seen)
        checker.close(make.__name__, mine, exact, eager, eager)
    checker.finish()


def test_dropout_is_that_of_the_call(device: str) -> None:
    q, k, v = (torch.randn(2, 4, 33, 16, device=device) for _ in range(3))
    with integrations.activate_sdpa():
        torch.manual_seed(3)
        mine = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(
        mine, memeff_attn.memory_efficient_attention(*swapped, p=0.3).transpose(1, 2)
    )
    assert not torch.allclose(mine, TORCH(q, k, v))
    assert integrations.sdpa_calls().served == 1


def test_autocast(device: str) -> None:
    """As SDPA: everything in autocast's dtype, fp32 inputs too."""
    q, k, v, mask = (torch.randn(2, 4, 9, n, device=device) for n in (16, 16, 16, 9))
    low = torch.bfloat16
    checker = Checker()
    with torch.autocast(device, dtype=low), integrations.activate_sdpa():
        plain = functional.scaled_dot_product_attention(q, k, v)
        masked = functional.scaled_dot_product_attention(q, k.to(low), v, mask.to(torch.float16))
        assert TORCH(q, k, v).dtype == low
    assert plain.dtype == masked.dtype == low and integrations.sdpa_calls().served == 2
    for mine, bias in ((plain, None), (masked, mask.half().to(low))):
        given = [x.to(low) for x in (q, k, v)] + ([] if bias is None else [bias])
        exact = TORCH(*(x.double() for x in given))
        eager, eager32 = definition(*given), definition(*(x.float() for x in given))
        checker.close(f"mask {bias is not None}", mine, exact, eager, eager32)
    checker.finish()


# ---- what it does not take ----


def double(device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 4, 5, 16, device=device).double() for _ in range(3))


def jagged(device: str) -> tuple[Tensor, ...]:
    parts = [torch.randn(n, 4, 16, device=device) for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    return x, x, x


REFUSED: dict[str, tuple[Callable[[str], tuple[Tensor, ...]], str]] = {
    "fp64": (double, "float64"),
    "jagged": (jagged, "NestedTensor"),
    "a mask shared by some leading entries": (
        lambda device: (
            *(torch.randn(3, 2, 4, 5, 16, device=device) for _ in range(3)),
            torch.randn(2, 1, 1, 5, device=device),
        ),
        "shared by some",
    ),
}


@pytest.mark.filterwarnings("ignore")  # nested tensors call themselves a prototype
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_goes_to_torch(device: str, case: str) -> None:
    make, reason = REFUSED[case]
    given = make(device)
    with integrations.activate_sdpa():
        mine = functional.scaled_dot_product_attention(*given)
    calls = integrations.sdpa_calls()
    assert (calls.served, calls.refused) == (0, 1) and reason in calls.last_refusal
    if case == "jagged":
        pairs = zip(mine.unbind(), TORCH(*given).unbind(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    else:
        assert torch.equal(mine, TORCH(*given))


def outcome(function: Callable[..., Tensor], *given: Tensor, **rest: Any) -> Tensor | str:
    try:
        return function(*given, **rest)
    except RuntimeError as error:
        return str(error)


def test_what_does_not_go_together_is_left_to_torch(device: str) -> None:
    """Its error, or what it makes of it: of a mask with is_causal, say, either, by device and
    version."""
    q, k, v = (torch.randn(2, 4, 5, 16, device=device) for _ in range(3))
    mask = torch.zeros(5, 5, device=device)
    wrong: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        ((q, k, v, mask), {"is_causal": True}, "together"),
        ((q, k[:, :2], v[:, :2]), {}, "heads"),
        ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}, "heads"),
        ((q, k[:, :2], v), {"enable_gqa": True}, "heads"),
        ((q, k.half(), v), {}, "dtypes"),
        ((q, k, v, mask[:3]), {}, "does not broadcast"),
        ((q, k, v), {"dropout_p": 1.5}, "0 to 1"),
    ]
    for given, rest, reason in wrong:
        torchs = outcome(TORCH, *given, **rest)
        with integrations.activate_sdpa():
            ours = outcome(functional.scaled_dot_product_attention, *given, **rest)
        assert reason in integrations.sdpa_calls().last_refusal
        if isinstance(torchs, Tensor):
            assert isinstance(ours, Tensor) and torch.equal(ours, torchs)
        else:
            assert ours == torchs
    assert integrations.sdpa_calls()[:2] == (0, len(wrong))


def test_without_a_kernel_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Tensor:
        raise NotImplementedError("no kernel takes this: told so")

    monkeypatch.setattr(sdpa, "memory_efficient_attention", refuse)
    q = torch.randn(2, 4, 5, 16)
    with integrations.activate_sdpa():
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q), TORCH(q, q, q))
    calls = integrations.sdpa_calls()
    assert calls == (0, 1, 0, "no kernel takes this: told so")


# ---- activation ----


def call() -> None:
    q = torch.randn(1, 2, 3, 16)
    functional.scaled_dot_product_attention(q, q, q)


def test_nested_activation() -> None:
    integrations.activate_sdpa()
    with integrations.activate_sdpa() as inner:
        call()
        inner.__exit__(None, None, None)  # once only
    call()
    integrations.restore_sdpa()
    call()
    assert integrations.sdpa_calls().served == 2
    with pytest.raises(RuntimeError, match="none is active"):
        integrations.restore_sdpa()


def test_an_error_inside_restores() -> None:
    with pytest.raises(KeyError), integrations.activate_sdpa():
        raise KeyError
    assert functional.scaled_dot_product_attention is TORCH


def test_another_program_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before is what refused calls get; what came later stays."""
    seen: list[str] = []

    def before(*given: Any, **rest: Any) -> Tensor:
        seen.append("before")
        return TORCH(*given, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", before)
        integrations.activate_sdpa()
        ours = functional.scaled_dot_product_attention

        def later(*given: Any, **rest: Any) -> Tensor:
            seen.append("later")
            return ours(*given, **rest)

        functional.scaled_dot_product_attention = later
        call()
        integrations.restore_sdpa()
        assert functional.scaled_dot_product_attention is later
        call()
    assert seen == ["later", "later", "before"] and integrations.sdpa_calls().served == 1


def test_the_fast_path_comes_back() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    with integrations.activate_sdpa():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
