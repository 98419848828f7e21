"""fp32 on wgmma (csrc/hopper/f32_*.h): when it is chosen, and that operands whose fp16 parts would
lose something are multiplied by another kernel."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import cases
import pytest
import torch
from cases import Case
from test_memory import MIB, peak_increase
from tolerance import Checker, tf32

memeff_attn = pytest.importorskip("memeff_attn")
_C = pytest.importorskip("memeff_attn._C", reason="memeff_attn is not compiled")

ROWS = {row["name"]: row for row in _C.variants() if row["name"].startswith("hopper_sm90_f32")}
BUILT = [name for name, row in ROWS.items() if row["built"]]
each_row = pytest.mark.parametrize("name", BUILT or ["none built"])


def request(**fields: Any) -> dict[str, Any]:
    base = {"sm": 90, "dtype": "f32", "B": 2, "M": 1024, "N": 1024, "H": 16, "K": 64, "Kv": 64}
    return base | {"alignment": 4, "any_build": True} | fields


def chosen(**fields: Any) -> str:
    return str(_C.select(request(**fields)))


def test_it_is_chosen_without_a_gradient_on_long_sequences_of_sm90() -> None:
    assert len(ROWS) == 4
    assert chosen() == "hopper_sm90_f32_k64" and chosen(K=68) == "hopper_sm90_f32_k128"
    assert chosen(math="tf32") == "hopper_sm90_f32_tf32_k64"
    assert chosen(K=32, Kv=32) == "hopper_sm90_f32_k64"  # 1.45 times as fast as the row of K = 32
    assert chosen(B=32, M=197, N=197, K=72) == "hopper_sm90_f32_k128"
    for fields in ({}, {"K": 32, "Kv": 32}, {"M": 200, "N": 200, "K": 128}):
        assert chosen(**({"math": "tf32", "M": 300, "N": 300} | fields)) not in ROWS, fields
    others = [
        {"lse": True},
        {"M": 256, "N": 256},
        {"M": 64},
        {"K": 132},
        {"alignment": 2},
    ]
    others += [{"sm": 80}, {"has_bias": True}, {"dropout": True}, {"partial": True}]
    for fields in others:
        assert chosen(**fields) not in ROWS, fields
    assert "no gradient" in _C.explain(request(lse=True))


def test_explain_names_both_kernels_and_knows_calls_that_return_the_lse() -> None:
    three = [torch.empty(8, 2048, 8, 128, device="meta") for _ in range(3)]
    text = memeff_attn.explain(*three, device="sm_90")
    head = text.split("the others:")[0]
    assert "chosen: hopper_sm90_f32_k128" in head and "register_sm80_f32_k128" in head
    text = memeff_attn.explain(*three, device="sm_90", return_lse=True)
    assert "chosen: register_sm80_f32_k128" in text and "very much in size" not in text


def mode(name: str) -> contextlib.AbstractContextManager[None]:
    return tf32(ROWS[name]["math"] == "tf32")


def make(name: str, **fields: Any) -> cases.Inputs:
    k = ROWS[name]["max_k"]
    return cases.make(Case("f32", **({"M": 300, "N": 450, "H": 3, "K": k} | fields)), "cuda")


def out_of(inputs: cases.Inputs, name: str = "") -> torch.Tensor:
    with cases.forced(name):
        return cases.attention(inputs)[0]


@pytest.mark.gpu
@each_row
def test_numbers_far_apart_take_the_kernel_of_whole_operands(name: str) -> None:
    """Columns of Q and K at 2^x and 2^-x: scores are of ordinary size, small numbers count."""
    checker = Checker()
    with mode(name):
        for exponent in (10, 30):
            inputs = make(name, B=8, H=16)  # so many blocks that no row cuts the keys into parts
            columns = torch.arange(inputs.query.shape[-1], device="cuda") % (2 * exponent + 1)
            factors = torch.exp2((columns - exponent).float())
            inputs.query *= factors
            inputs.key /= factors
            out = out_of(inputs, name)
            checker.attention(f"2^{exponent}", out, None, *inputs.tuple())
            if exponent == 30:  # with a log-sum-exp another row is chosen: that which has to answer
                checker.same_bits("the kernel that answers", out, out_of(inputs))
    checker.finish()


@pytest.mark.gpu
@each_row
def test_sizes_near_the_ends_of_fp32(name: str) -> None:
    checker = Checker()
    with mode(name):
        for q, k, v in (
            (1e8, 1e-8, 1e30),
            (1e33, 1e-33, 1e-30),
            (1e-30, 1e30, 1.0),
            (0.0, 1.0, 1.0),
        ):
            inputs = make(name)
            inputs.query *= q
            inputs.key *= k
            inputs.value *= v
            checker.attention(f"{q} {k} {v}", out_of(inputs, name), None, *inputs.tuple())
        inputs = make(name)
        rows = inputs.value.shape[1]
        exponents = (torch.arange(rows, device="cuda") * 37 % 41 - 20).float()
        inputs.value *= torch.exp2(exponents)[:, None, None]
        inputs.key[:, ::7] = 0.0
        checker.attention("rows of V, keys of zeros", out_of(inputs, name), None, *inputs.tuple())
    checker.finish()


@pytest.mark.gpu
@each_row
@pytest.mark.parametrize("size", [1e5, 1e12, 1e30])
def test_a_large_row_of_value_costs_those_that_do_not_see_it_nothing(
    name: str, size: float
) -> None:
    """Weights are kept in units of the largest row of V so far, hidden ones too."""
    tolerance = 2e-3 if "tf32" in name else 2e-6
    with mode(name):
        inputs = make(name, mask="top_left")
        plain = out_of(inputs, name)
        inputs.value[:, 299] = size
        out = out_of(inputs, name)
    torch.testing.assert_close(out[:, :299], plain[:, :299], atol=tolerance, rtol=tolerance)
    assert torch.isfinite(out).all()


@pytest.mark.gpu
@each_row
def test_a_nan_or_an_infinity_reaches_those_that_see_it(name: str) -> None:
    with mode(name):
        for bad in (math.nan, math.inf):
            inputs = make(name, mask="top_left")
            inputs.key[0, 299, 0, 1] = bad
            inputs.value[1, 298:, 1, 2] = bad
            lost = ~out_of(inputs, name).isfinite()
            expected = torch.zeros_like(lost)
            expected[0, 299, 0] = math.isnan(bad)  # a score of -inf is one that is not seen
            expected[1, 298:, 1, 2] = True
            # 0 * NaN of a hidden key of the same tile may show in that column, as in eager
            allowed = expected.clone()
            allowed[0, 299, 0] = allowed[1, :, 1, 2] = True
            assert bool((lost >= expected).all()) and bool((lost <= allowed).all())


@pytest.mark.gpu
@each_row
def test_its_memory_is_the_output_and_a_copy_of_the_operands(name: str) -> None:
    inputs = make(name, B=4, M=2048, N=2048, H=8)
    with mode(name), cases.forced(name):

        def call() -> torch.Tensor:
            return memeff_attn.memory_efficient_attention(*inputs.tuple()[:3])

        call()
        out = inputs.query.numel() * 4
        assert peak_increase(call) <= 4 * out + 2 * MIB
