"""The forward pass, chosen automatically, against the fp64 oracle: every group of tests/cases.py on
every device."""

from __future__ import annotations

import math

import cases
import pytest
import torch
from cases import Case
from tolerance import Checker, judge, plain_attention, round_tf32, tf32, ulp

memeff_attn = pytest.importorskip("memeff_attn")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("group", cases.GROUPS)
def test_oracle(device: str, group: str, dtype: str) -> None:
    cases.run(cases.group(group, dtype, device), device)


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["head_dims", "edges", "sizes"])
def test_oracle_tf32(group: str) -> None:
    """With TF32 allowed, against eager in TF32."""
    with tf32(True):
        cases.run(cases.group(group, "f32", "cuda"), "cuda")


def test_public_reference_agrees(device: str) -> None:
    """memeff_attn.reference is the same function as the tests' own oracle."""
    checker = Checker()
    for case in [
        Case("f16", bias="1hmn"),
        Case("f32", M=5, N=3, mask="top_left"),
        Case("f32", M=7, N=3, mask="bottom_right"),
        Case("bf16", H=6, Hkv=2, K=40, Kv=72, bias="bhmn:bool"),
        Case("f32", H=1, rank="bmk", bias="b11n"),
        Case("f32", rank="bmghk", bias="bhmn", scale=-0.3),
    ]:
        with checker.case(case):
            query, key, value, bias, causal, scale = inputs = cases.make(case, device).tuple()
            mask = {
                1: memeff_attn.LowerTriangularMask,
                2: memeff_attn.LowerTriangularFromBottomRightMask,
            }
            attn_bias = mask[causal]() if causal else bias
            out, lse = memeff_attn.reference.attention(query, key, value, attn_bias, scale)
            exact, exact_lse = plain_attention(*inputs)
            checker.that(f"{case}: fp64", out.dtype == torch.float64)
            torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    checker.finish()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_without_lse_the_same_bits(device: str, dtype: str) -> None:
    checker = Checker()
    for case in [
        Case(dtype, bias="bhmn"),
        Case(dtype, K=33, mask="top_left"),
        Case(dtype, H=4, Hkv=1, K=128),
    ]:
        with checker.case(case):
            inputs = cases.make(case, device)
            bias = memeff_attn.LowerTriangularMask() if inputs.causal else inputs.bias
            args = (inputs.query, inputs.key, inputs.value, bias)
            both = memeff_attn.memory_efficient_attention_forward_requires_grad(*args)[0]
            checker.same_bits(case, memeff_attn.memory_efficient_attention(*args), both)
            checker.same_bits(case, memeff_attn.memory_efficient_attention_forward(*args), both)
    checker.finish()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_repeats_are_bit_equal(device: str, dtype: str) -> None:
    """The forward pass is bit-deterministic."""
    repeats = 20 if device == "cuda" else 3
    checker = Checker()
    for case in [
        Case(dtype, B=1, M=1024, N=1024, H=2, K=64),
        Case(dtype, B=1, M=300, N=700, H=2, K=136, mask="bottom_right"),
        Case(dtype, M=129, N=257, K=320, bias="bhmn"),
        Case(dtype, M=1, N=999, H=8, Hkv=1, K=128),
    ]:
        with checker.case(case):
            inputs = cases.make(case, device)
            out, lse = cases.attention(inputs)
            for _ in range(repeats):
                again, lse_again = cases.attention(inputs)
                checker.same_bits(f"{case} out", again, out)
                checker.same_bits(f"{case} lse", lse_again, lse)
    checker.finish()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_metamorphic(device: str, dtype: str) -> None:
    """Slices, permuted heads, contiguous copies and keys masked by -inf change no result (docs: the
    oracle, rule 7)."""
    checker = Checker()
    for case in [
        Case(dtype, B=3, M=130, N=141, H=4, K=64),
        Case(dtype, B=3, M=65, N=33, H=2, K=40, Kv=72),
    ]:
        with checker.case(case):
            inputs = cases.make(case, device)
            query, key, value = inputs.query, inputs.key, inputs.value
            out, lse = cases.attention(inputs)

            def call(q, k, v, bias=None):
                return cases.attention(cases.Inputs(q, k, v, bias, 0, None))

            limit = twice_the_rule(inputs)

            def close(label: str, mine: torch.Tensor, other: torch.Tensor) -> None:
                checker.true(label, (mine.double() - other.double()).abs() <= limit)  # noqa: B023

            part = slice(1, 2)
            close("batch slice", call(query[part], key[part], value[part])[0], out[part])
            close("last rows", call(query[:, -32:], key, value)[0], out[:, -32:])
            order = torch.randperm(case.H, device=device)
            permuted, lse_permuted = call(query[:, :, order], key[:, :, order], value[:, :, order])
            checker.same_bits(f"{case} heads", permuted, out[:, :, order])
            checker.same_bits(f"{case} lse heads", lse_permuted, lse[:, order])
            strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
            checker.same_bits(f"{case} strides", call(*strided)[0], out)
            more = [
                torch.cat([x, torch.randn_like(x[:, :1]).expand(-1, 50, -1, -1)], 1)
                for x in (key, value)
            ]
            bias = torch.zeros(1, 1, 1, case.N + 50, dtype=query.dtype, device=device)
            bias[..., case.N :] = -math.inf
            close("keys hidden by -inf", call(query, *more, bias)[0], out)
    checker.finish()


def twice_the_rule(inputs: cases.Inputs) -> torch.Tensor:
    """How far two results of other tilings may be apart: each is off by what the rule allows."""
    exact, _ = plain_attention(*inputs.tuple())
    eager, _ = plain_attention(*inputs.tuple(), dtype=inputs.query.dtype)
    u = ulp(exact.abs().amax(), inputs.query.dtype)
    return 2 * (2 * (eager.double() - exact).abs().amax() + 2 * u)


class TestTheRule:
    """The rule itself refuses what it must refuse."""

    @staticmethod
    def problem() -> tuple[torch.Tensor, ...]:
        return cases.make(Case("f16", M=40, N=50), "cpu").tuple()[:3]

    def test_accepts_fp32_rounded_once(self) -> None:
        query, key, value = self.problem()
        out, lse = plain_attention(query, key, value, dtype=torch.float32)
        checker = Checker()
        checker.attention("fp32", out.half(), lse, query, key, value)
        checker.finish()

    @pytest.mark.parametrize("fault", ["shifted", "one wrong", "nan", "lse", "scale", "shape"])
    def test_refuses(self, fault: str) -> None:
        query, key, value = self.problem()
        scale = 0.126 if fault == "scale" else None
        out, lse = plain_attention(query, key, value, scale=scale)
        if fault == "shifted":
            out = out + 4e-3
        if fault == "one wrong":
            out[0, 3, 1, 5] += 0.02
        if fault == "nan":
            out[0, 3, 1, 5] = math.nan
        if fault == "lse":
            lse = lse + 5e-4
        if fault == "shape":
            out = out[:, :-1]
        checker = Checker()
        checker.attention(fault, out.half(), lse.float(), query, key, value)
        with pytest.raises(AssertionError, match="failures in"):
            checker.finish()

    def test_refuses_a_number_where_the_oracle_is_nan(self) -> None:
        query, key, value = self.problem()
        out, lse = plain_attention(query, key, value)
        query[0, 7, 0, 3] = math.nan
        checker = Checker()
        checker.attention("nan", out.half(), lse.float(), query, key, value)
        with pytest.raises(AssertionError, match="NaN"):
            checker.finish()

    def test_refuses_dust_in_an_empty_row(self) -> None:
        query, key, value = self.problem()
        bias = torch.zeros(40, 50)
        bias[3] = -math.inf
        out, lse = plain_attention(query, key, value, bias)
        out[:, 3] = 1e-7
        checker = Checker()
        checker.attention("dust", out.half(), lse.float(), query, key, value, bias)
        with pytest.raises(AssertionError, match="empty-row"):
            checker.finish()

    def test_tf32_rounding(self) -> None:
        ulp_of_one = 2.0**-10
        given = torch.tensor([1.0, 1 + 0.49 * ulp_of_one, 1 + 0.5 * ulp_of_one, -1 - ulp_of_one])
        expected = torch.tensor([1.0, 1.0, 1 + ulp_of_one, -1 - ulp_of_one])
        assert torch.equal(round_tf32(given), expected)
        query, key, value = cases.make(Case("f32"), "cpu").tuple()[:3]
        exact, _ = plain_attention(query, key, value)
        errors = [
            (plain_attention(query, key, value, dtype=torch.float32, in_tf32=t)[0] - exact)
            .abs()
            .max()
            for t in (False, True)
        ]
        assert errors[0] < 2e-6 < errors[1] < 3e-3

    def test_limits(self) -> None:
        assert judge("x", [2.0, 1.0, 1.0, 1.0, 0.0, 0.0], 0.0) == []
        assert len(judge("x", [2.1, 1.6, 1.0, 1.0, 0.0, 0.0], 0.0)) == 2
        assert len(judge("x", [math.nan, math.nan, 1.0, 1.0, 0.0, 0.0], 0.0)) == 2
