"""Gradients, chosen automatically, against the fp64 oracle: every group of tests/backward_cases.py
on every device; and the rule that judges them."""

from __future__ import annotations

import math
from typing import Any

import backward_cases
import cases
import gradients
import pytest
import torch
from backward_cases import BackwardCase, by_autograd, by_operators, make_grad
from cases import Case, Inputs
from tolerance import GRADIENT, Checker, Drop, judge, tf32, ulp
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("group", backward_cases.GROUPS)
def test_oracle(device: str, group: str, dtype: str) -> None:
    backward_cases.run(backward_cases.group(group, dtype, device), device)


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["head_dims", "biases", "dropout", "sizes"])
def test_oracle_tf32(group: str) -> None:
    """With TF32 allowed, against eager in TF32."""
    with tf32(True):
        backward_cases.run(backward_cases.group(group, "f32", "cuda"), "cuda")


# --- one result, whichever way it is asked for


WAYS = [
    {},
    {"K": 33, "Kv": 65, "mask": "top_left"},
    {"H": 6, "Hkv": 2, "mask": "bottom_right"},
    {"rank": "bmghk", "bias": "1h1n"},
    {"rank": "bmk", "H": 1, "bias": "bhmn:f32"},
]


@pytest.mark.parametrize("fields", WAYS, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_autograd_is_the_operators(device: str, dtype: str, fields: dict[str, Any]) -> None:
    """The public call under autograd and the two operators: the same bits, dropout too."""
    checker = Checker()
    for p in (0.0, 0.3):
        case = BackwardCase(dtype, p=p, **fields)
        with checker.case(case):
            inputs = cases.make(case, device)
            grad_out = make_grad(case, device, inputs.query)
            seed = backward_cases.new_seed(5, device) if p else None
            wants = backward_cases.usable(case, inputs)
            out, _, four = by_autograd(inputs, grad_out, p, wants)
            again, _, others = by_operators(inputs, grad_out, p, seed, wants)
            checker.same_bits(f"{case} out", again, out)
            for name, mine, other in zip(gradients.NAMES, four, others, strict=True):
                if mine is not None and other is not None:
                    checker.same_bits(f"{case} d{name}", mine, other)
    checker.finish()


@pytest.mark.parametrize("fields", WAYS, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_explicit_backward(device: str, dtype: str, fields: dict[str, Any]) -> None:
    """memory_efficient_attention_backward: (dq, dk, dv) of what ..._requires_grad returned. By the
    rule, for its lse has no low part, which autograd keeps; the bits of the operator given the
    same lse."""
    case = BackwardCase(dtype, **fields)
    inputs = cases.make(case, device)
    grad_out = make_grad(case, device, inputs.query)
    bias = inputs.bias if inputs.bias is not None else backward_cases.mask_object(inputs.causal)
    three = (inputs.query, inputs.key, inputs.value)
    out, lse = memeff_attn.memory_efficient_attention_forward_requires_grad(*three, bias)
    found = memeff_attn.memory_efficient_attention_backward(grad_out, out, lse, *three, bias)
    checker = Checker()
    assert len(found) == 3
    gradients.check(checker, case, (*found, None), grad_out, *inputs.tuple())
    settings = inputs.query.shape[-1] ** -0.5, inputs.causal, False, [True] * 3 + [False], ""
    operator = torch.ops.memeff_attn.backward
    others = operator(grad_out, *three, inputs.bias, out, lse, *settings)
    for name, mine, other in zip(gradients.NAMES, found, others, strict=False):
        checker.same_bits(f"{case} d{name}", mine, other)
    checker.finish()


# --- relations that need no reference


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_metamorphic(device: str, dtype: str) -> None:
    """Slices, permuted heads, strided copies, hidden keys: what must not change a gradient."""
    checker = Checker()
    for case in (
        BackwardCase(dtype, B=3, M=130, N=141, H=4, K=64),
        BackwardCase(dtype, B=3, M=65, N=33, H=2, K=40, Kv=72),
    ):
        inputs = cases.make(case, device)
        grad_out = make_grad(case, device, inputs.query)
        three = (inputs.query, inputs.key, inputs.value)
        _, _, whole = by_autograd(inputs, grad_out, 0.0, "qkv")
        limits = twice_the_rule(inputs, grad_out)

        def grads(tensors: Any, grad: Tensor, bias: Tensor | None = None) -> gradients.Four:
            return by_autograd(Inputs(*tensors, bias, 0, None), grad, 0.0, "qkv")[2]

        with checker.case(f"{case} batch slice"):
            some = grads([x[1:2] for x in three], grad_out[1:2])
            for mine, other, limit in zip(some[:3], whole[:3], limits, strict=True):
                assert mine is not None and other is not None
                error = (mine.double() - other[1:2].double()).abs()
                checker.true(f"{case} batch slice", error <= limit)
        with checker.case(f"{case} heads"):
            order = torch.randperm(case.H, device=device)
            some = grads([x[:, :, order] for x in three], grad_out[:, :, order])
            for mine, other in zip(some[:3], whole[:3], strict=True):
                assert mine is not None and other is not None
                checker.same_bits(f"{case} heads", mine, other[:, :, order].contiguous())
        with checker.case(f"{case} strides"):
            moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*three, grad_out)]
            some = grads(moved[:3], moved[3])
            for mine, other in zip(some[:3], whole[:3], strict=True):
                assert mine is not None and other is not None
                checker.same_bits(f"{case} strides", mine, other)
        with checker.case(f"{case} hidden keys"):
            more = [
                torch.cat([x, torch.randn_like(x[:, :1]).expand(-1, 50, -1, -1)], 1)
                for x in three[1:]
            ]
            bias = torch.zeros(1, 1, 1, case.N + 50, dtype=grad_out.dtype, device=device)
            bias[..., case.N :] = -math.inf
            some = grads([three[0], *more], grad_out, bias)
            for mine, other, limit in zip(some[:3], whole[:3], limits, strict=True):
                assert mine is not None and other is not None
                rows = other.shape[1]
                error = (mine[:, :rows].double() - other.double()).abs()
                checker.true(f"{case} hidden keys", error <= limit)
                checker.true(f"{case} hidden keys: zero", mine[:, rows:] == 0)
    checker.finish()


def twice_the_rule(inputs: Inputs, grad_out: Tensor) -> list[Tensor]:
    """How far two results of other tilings may be apart: each is off by what the rule allows."""
    exact = gradients.oracle(grad_out, *inputs.tuple()).gradients
    plain = gradients.eager(grad_out, *inputs.tuple(), dtype=inputs.query.dtype)
    limits = []
    for want, got in zip(exact[:3], plain[:3], strict=True):
        assert want is not None and got is not None
        u = ulp(want.abs().amax(), inputs.query.dtype)
        limits.append(2 * (GRADIENT[0] * (got.double() - want).abs().amax() + 2 * u))
    return limits


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_linear_in_the_gradient_of_out(device: str, dtype: str) -> None:
    """Twice the gradient of out is twice each gradient, bit for bit; zero gives zero."""
    checker = Checker()
    for case in (BackwardCase(dtype, bias="1hmn:f32"), BackwardCase(dtype, K=33, p=0.3)):
        inputs = cases.make(case, device)
        grad_out = make_grad(case, device, inputs.query)
        seed = backward_cases.new_seed(1, device) if case.p else None
        wants = backward_cases.usable(case, inputs)
        _, _, once = by_operators(inputs, grad_out, case.p, seed, wants)
        _, _, twice = by_operators(inputs, grad_out * 2, case.p, seed, wants)
        _, _, none = by_operators(inputs, grad_out * 0, case.p, seed, wants)
        for name, a, b, c in zip(gradients.NAMES, once, twice, none, strict=True):
            if a is None or b is None or c is None:
                continue
            # Subnormal halves round; all else doubles exactly.
            normal = a.abs() >= 2 * torch.finfo(a.dtype).tiny
            if dtype != "f16":
                checker.true(f"{case} d{name} doubles", (b == a * 2) | ~normal)
            checker.true(f"{case} d{name} of zero", c == 0)
    checker.finish()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_backward_through_views(device: str, dtype: str) -> None:
    """Expanded key and value heads: autograd's sum over the expansion equals grouped heads by the
    rule."""
    checker = Checker()
    for hkv in (1, 2):
        case = BackwardCase(dtype, H=4, Hkv=hkv, K=40)
        inputs = cases.make(case, device)
        grad_out = make_grad(case, device, inputs.query)
        key, value = (x.detach().requires_grad_() for x in (inputs.key, inputs.value))
        query = inputs.query.detach().requires_grad_()
        wide = [
            x[:, :, :, None].expand(-1, -1, -1, 4 // hkv, -1).flatten(2, 3) for x in (key, value)
        ]
        out = memeff_attn.memory_efficient_attention(query, *wide)
        four = (*torch.autograd.grad(out, [query, key, value], grad_out), None)
        gradients.check(checker, f"{case} expanded", four, grad_out, *inputs.tuple())
    checker.finish()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_visible_nan_shows(device: str, dtype: str) -> None:
    """A NaN in the gradient of one output row reaches that row's dQ, and no other batch entry."""
    case = BackwardCase(dtype, M=70, N=133, K=64)
    inputs = cases.make(case, device)
    grad_out = make_grad(case, device, inputs.query)
    grad_out[1, 5, 0, 3] = math.nan
    _, _, four = by_autograd(inputs, grad_out, 0.0, "qkv")
    dq, dk, dv = (x for x in four[:3] if x is not None)
    assert bool(dq[1, 5, 0].isnan().all()) and bool(dk[1, :, 0].isnan().all())
    assert bool(dv[1, :, 0, 3].isnan().all()) and not bool(dv[1, :, 0, :3].isnan().any())
    others = torch.ones_like(dq[..., 0], dtype=torch.bool)
    others[1, 5, 0] = False
    if (device, dtype) == ("cpu", "bf16"):  # torch.matmul's own: a NaN there reaches the row beside
        others[1, 4, 0] = False
    assert not bool(dq.isnan().any(-1)[others].any())
    assert not bool(dk[0].isnan().any()) and not bool(dv[0].isnan().any())


# --- the rule itself


class TestTheRule:
    """It accepts what is right, refuses what is wrong."""

    @staticmethod
    def problem(**fields: Any) -> tuple[Inputs, Tensor, Drop]:
        case = BackwardCase("f32", M=40, N=50, **fields)
        inputs = cases.make(case, "cpu")
        keep = torch.rand(2, case.H * (2 if case.rank == "bmghk" else 1), 40, 50) > 0.3
        return inputs, make_grad(case, "cpu", inputs.query), Drop(keep, 1 / 0.7)

    @pytest.mark.parametrize(
        "fields",
        [
            {"bias": "bhmn"},
            {"H": 4, "Hkv": 2, "bias": "1h1n", "mask": "bottom_right"},
            {"rank": "bmghk", "bias": "b11n:f32"},
            {"rank": "bmk", "H": 1, "bias": "11mn", "mask": "top_left"},
            {"bias": "bhm1"},
            {"bias": "bhmn:bool", "K": 33, "Kv": 5},
        ],
        ids=str,
    )
    def test_the_oracle_is_autograd_in_fp64(self, fields: dict[str, Any]) -> None:
        inputs, grad_out, drop = self.problem(**fields)
        for dropout in (None, drop):
            exact = gradients.oracle(grad_out, *inputs.tuple(), dropout)
            other = gradients.eager(grad_out, *inputs.tuple(), dropout, dtype=torch.float64)
            for mine, autograd in zip(exact.gradients, other, strict=True):
                assert (mine is None) == (autograd is None)
                if mine is not None and autograd is not None:
                    torch.testing.assert_close(mine, autograd, rtol=1e-11, atol=1e-12)

    def test_the_oracle_is_a_finite_difference(self) -> None:
        """Independent of any formula: the change of sum(out * dO) along a direction."""
        from tolerance import plain_attention

        inputs, grad_out, drop = self.problem(bias="1hmn:f32")
        exact = gradients.oracle(grad_out, *inputs.tuple(), drop)
        for i, grad in enumerate(exact.gradients):
            assert grad is not None
            direction, values = torch.randn_like(grad), []
            for step in (1e-6, -1e-6):
                moved = [x.double() if isinstance(x, Tensor) else x for x in inputs.tuple()]
                moved[i] = moved[i] + step * direction
                out, _ = plain_attention(*moved, drop=drop)
                values.append(float((out * grad_out.double()).sum()))
            slope = (values[0] - values[1]) / 2e-6
            assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-6)

    @pytest.mark.parametrize("blocks", [1, 40])
    def test_the_oracle_in_blocks(self, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        inputs, grad_out, drop = self.problem(bias="1hmn", mask="bottom_right")
        whole = gradients.oracle(grad_out, *inputs.tuple(), drop)
        monkeypatch.setitem(gradients.MAX_SCORES, "cpu", 2 * 2 * 50 * 40 // blocks)
        parts = gradients.oracle(grad_out, *inputs.tuple(), drop)
        for a, b in zip(whole, parts, strict=True):
            for x, y in zip(a, b, strict=True):
                if x is not None and y is not None:
                    torch.testing.assert_close(x, y)

    @pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
    def test_accepts_fp64_rounded_once(self, kind: torch.dtype) -> None:
        inputs, grad_out, drop = self.problem(bias="1hmn", H=4, Hkv=2)
        given = Inputs(*(x.to(kind) for x in inputs.tuple()[:4]), 1, None)
        exact = gradients.oracle(grad_out.to(kind), *given.tuple(), drop)
        four = tuple(x.to(kind) for x in exact.gradients if x is not None)
        checker = Checker()
        gradients.check(checker, "x", four, grad_out.to(kind), *given.tuple(), drop)
        checker.finish()

    @pytest.mark.parametrize("which", range(4))
    @pytest.mark.parametrize(
        "fault", ["shifted", "one wrong", "nan", "strides", "dtype", "mask", "scale", "dust"]
    )
    def test_refuses(self, fault: str, which: int) -> None:
        inputs, grad_out, drop = self.problem(bias="bhmn")
        given = Inputs(*(x.half() for x in inputs.tuple()[:4]), 1, None)
        grad_out = grad_out.half()
        used = drop
        if fault == "mask":
            keep = drop.keep.clone()
            keep[:, :, 30:, 20:30] ^= True
            used = Drop(keep, drop.scale)
        exact = gradients.oracle(grad_out, *given.tuple()[:5], 0.126 if fault == "scale" else None,
                                 used)  # fmt: skip
        four = [x.half() for x in exact.gradients if x is not None]
        x = four[which]
        if fault == "shifted":
            x += 0.02 * float(x.abs().max())
        if fault == "one wrong":
            x[1, 1, 1, 1] += 0.05 * float(x.abs().max())
        if fault == "nan":
            x[1, 1, 1, 1] = math.nan
        if fault == "strides":
            four[which] = x.transpose(1, 2).contiguous().transpose(1, 2)
        if fault == "dtype":
            four[which] = x.float()
        if fault == "dust":  # where nothing visible reaches: keys beyond the diagonal
            if which == 0:
                return
            x[(0, 0, 0, -1) if which == 3 else (0, -1, 0, 0)] = 1e-7
        checker = Checker()
        gradients.check(checker, fault, tuple(four), grad_out, *given.tuple(), drop)
        with pytest.raises(AssertionError, match="failures in"):
            checker.finish()

    def test_what_cancels_is_measured_by_its_terms(self) -> None:
        """One visible key: dQ and dK are 0; rounding noise of the terms passes, more does not."""
        inputs, grad_out, _ = self.problem()
        given = Inputs(inputs.query, inputs.key[:, :1], inputs.value[:, :1], None, 0, None)
        exact = gradients.oracle(grad_out, *given.tuple())
        assert float(exact.gradients[0].abs().max()) == 0 and float(exact.terms[0]) > 1
        for noise, passes in ((1e-7, True), (1e-4, False)):
            four = [None if x is None else x.float() for x in exact.gradients]
            four[0] = four[0] + noise
            checker = Checker()
            gradients.check(checker, "x", tuple(four), grad_out, *given.tuple())
            if passes:
                checker.finish()
            else:
                with pytest.raises(AssertionError, match="max error"):
                    checker.finish()

    def test_limits(self) -> None:
        assert judge("x", [3.0, 2.0, 1.0, 1.0, 0.0, 0.0], 0.0, GRADIENT) == []
        assert len(judge("x", [3.1, 2.1, 1.0, 1.0, 0.0, 0.0], 0.0, GRADIENT)) == 2


def test_the_matrix_is_large_enough() -> None:
    """What the groups promise is in them: sizes, dims, broadcasts, strides, dropout."""
    every: list[Case] = []
    for name in backward_cases.GROUPS:
        every += backward_cases.group(name, "f16", "cuda")
    assert {c.K for c in every} >= set(cases.HEAD_DIMS)
    assert {(c.K, c.Kv) for c in every} >= set(cases.UNEQUAL_HEAD_DIMS)
    assert {(c.M, c.N) for c in every} >= {(m, n) for m in cases.EDGES for n in cases.EDGES}
    assert {c.strides for c in every} >= {*cases.STRIDES, "mixed"}
    assert {c.grad for c in every} >= set(backward_cases.GRAD_STRIDES)
    assert {c.p for c in every} >= set(backward_cases.DROPOUTS)
    assert {c.bias.partition(":")[0] for c in every} >= {
        b + h + m + n for b in "b1" for h in "h1" for m in "m1" for n in "n1"
    }
    assert {c.wants for c in every} >= set(backward_cases.SUBSETS)
