"""Public faults in masks and softmax (tests/faults.py): B01-B04, B08, B44. Each test is the class,
not the one input."""

from __future__ import annotations

import itertools
import math

import cases
import pytest
import torch
from cases import Case, Inputs
from tolerance import BOTTOM_RIGHT, TOP_LEFT, Checker
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")

DTYPES = list(cases.DTYPES)


def normal(device: str, dtype: str, *shape: int, gain: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * gain).to(cases.DTYPES[dtype])


def problem(device: str, dtype: str, B: int, M: int, N: int, H: int, K: int) -> list[Tensor]:
    return [normal(device, dtype, B, length, H, K) for length in (M, N, N)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", ["same", "f32", "bool"])
def test_b01_leading_keys_hidden(device: str, dtype: str, bias_dtype: str) -> None:
    """The first key tiles are all -inf: running maximum -inf, then visible keys."""
    checker = Checker()
    hidden = (1, 31, 32, 33, 64, 65, 96, 127, 128, 129, 192, 256, 299)
    for first, k in itertools.product(hidden, (32, 33, 136)):
        with checker.case(f"keys :{first} hidden, K{k}"):
            query, key, value = problem(device, dtype, 1, 64, 300, 2, k)
            bias = normal(device, dtype, 1, 2, 64, 300, gain=3.0)
            bias[..., :first] = -math.inf
            if bias_dtype == "f32":
                bias = bias.float()
            if bias_dtype == "bool":
                bias = bias > -math.inf
            inputs = Inputs(query, key, value, bias, 0, None)
            out, lse = cases.attention(inputs)
            checker.attention(f"keys :{first} hidden, K{k}", out, lse, *inputs.tuple())
    patterns = {
        "one row": (5, slice(0, 200)),
        "tiles 0 and 2": (slice(None), [*range(64), *range(128, 192)]),
    }
    patterns["every other tile of 32"] = (slice(None), [n for n in range(300) if n // 32 % 2 == 0])
    patterns["all but the last key"] = (slice(None), slice(0, 299))
    for label, (rows, keys) in patterns.items():
        with checker.case(label):
            query, key, value = problem(device, dtype, 2, 64, 300, 1, 32)
            bias = normal(device, dtype, 1, 1, 64, 300)
            part = bias[..., keys]
            part[..., rows, :] = -math.inf
            bias[..., keys] = part
            inputs = Inputs(
                query, key, value, bias if bias_dtype != "bool" else bias > -math.inf, 0, None
            )
            checker.attention(label, *cases.attention(inputs), *inputs.tuple())
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b01_equals_the_call_on_visible_keys(device: str, dtype: str) -> None:
    query, key, value = problem(device, dtype, 1, 64, 130, 1, 32)
    bias = normal(device, dtype, 1, 1, 64, 130, gain=3.0)
    bias[..., :64] = -math.inf
    checker = Checker()
    whole = cases.attention(Inputs(query, key, value, bias, 0, None))
    part = Inputs(query, key[:, 64:], value[:, 64:], bias[..., 64:], 0, None)
    checker.attention("keys 64:", *whole, *part.tuple())
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", ["same", "f32", "bool"])
def test_b02_fully_masked_rows(device: str, dtype: str, bias_dtype: str) -> None:
    """A dead row gives 0 and LSE -inf, and no bit of another row changes."""
    checker = Checker()
    for (m, n, k), dead in itertools.product(
        ((4, 4, 8), (3, 3, 4), (65, 77, 33), (130, 257, 64), (1, 300, 128)),
        ("row", "all", "batch", "alternate"),
    ):
        label = f"M{m} N{n} K{k} dead {dead}"
        with checker.case(label):
            query, key, value = problem(device, dtype, 2, m, n, 2, k)
            bias = normal(device, dtype, 2, 2, m, n)
            clean = bias.clone()
            where = {"row": (1, 0, m // 2), "all": (slice(None),), "batch": (1,)}
            where["alternate"] = (slice(None), slice(None), slice(0, None, 2))
            bias[where[dead]] = -math.inf
            if bias_dtype == "bool":
                bias, clean = bias > -math.inf, clean > -math.inf
            if bias_dtype == "f32":
                bias, clean = bias.float(), clean.float()
            inputs = Inputs(query, key, value, bias, 0, None)
            out, lse = cases.attention(inputs)
            checker.attention(label, out, lse, *inputs.tuple())
            gone = torch.zeros(2, 2, m, dtype=torch.bool, device=device)
            gone[where[dead]] = True
            checker.true(f"{label}: LSE is -inf there", (lse == -math.inf) == gone)
            without, lse_without = cases.attention(Inputs(query, key, value, clean, 0, None))
            keep = ~gone.transpose(1, 2)[..., None]
            checker.same_bits(f"{label}: other rows", out.where(keep, 0), without.where(keep, 0))
            checker.same_bits(
                f"{label}: other LSE", lse.where(~gone, 0), lse_without.where(~gone, 0)
            )
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", ["same", "f32"])
def test_b03_finite_sentinels_are_numbers(device: str, dtype: str, bias_dtype: str) -> None:
    """finfo.min (and half of it, and -1e4) as a mask: hides keys next to others, averages where it
    is everywhere."""
    checker = Checker()
    kind = cases.DTYPES[dtype] if bias_dtype == "same" else torch.float32
    lowest = torch.finfo(kind).min
    values = [lowest, lowest / 2, -1e4, -torch.finfo(torch.float16).max]
    for sentinel, (m, n, k) in itertools.product(
        values, ((3, 3, 4), (65, 441, 64), (64, 130, 33), (1, 77, 128))
    ):
        label = f"{sentinel:.3e} M{m} N{n} K{k}"
        query, key, value = problem(device, dtype, 2, m, n, 2, k)
        bias = torch.zeros(2, 2, m, n, dtype=kind, device=device)
        bias[..., : n // 3] = sentinel  # left padding, in every row
        with checker.case(f"{label} left"):
            inputs = Inputs(query, key, value, bias, 0, None)
            checker.attention(f"{label} left", *cases.attention(inputs), *inputs.tuple())
        with checker.case(f"{label} a whole row"):
            bias = bias.clone()
            bias[:, :, m // 2] = sentinel
            inputs = Inputs(query, key, value, bias, 0, None)
            out, lse = cases.attention(inputs)
            # Row by row: LSE there is of the size of the sentinel, and so would be its tolerance.
            rows = [i for i in range(m) if i != m // 2]
            for name, pick in (("that row", [m // 2]), ("the others", rows)):
                if pick:
                    some = Inputs(query[:, pick], key, value, bias[:, :, pick], 0, None)
                    checker.attention(
                        f"{label} {name}", out[:, pick], lse[:, :, pick], *some.tuple()
                    )
            checker.true(f"{label} finite", out.isfinite() & lse.isfinite().all())
    checker.finish()


def test_b03_uniform_lowest_is_the_mean(device: str) -> None:
    """A score is absorbed by -3.4e38: softmax of equal numbers."""
    checker = Checker()
    for dtype in ("f32", "bf16", "f16"):
        with checker.case(dtype):
            query, key, value = problem(device, dtype, 1, 5, 200, 1, 16)
            bias = torch.full((1, 1, 5, 200), torch.finfo(torch.float32).min, device=device)
            out, lse = cases.attention(Inputs(query, key, value, bias, 0, None))
            checker.attention(f"{dtype} mean of V", out, None, query, key, value, bias)
            checker.true(f"{dtype} LSE finite", lse.isfinite())
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b03_large_finite_logits(device: str, dtype: str) -> None:
    """Scores of +-1e4 and a positive finite bias neither overflow nor lose a row."""
    checker = Checker()
    for k, gain, shift in itertools.product((16, 64, 33), (10.0, 30.0), (0.0, 1e4, -1e4)):
        label = f"K{k} gain {gain} shift {shift}"
        with checker.case(label):
            query, key, value = problem(device, dtype, 1, 65, 140, 2, k)
            bias = torch.full((1, 1, 1, 140), shift, device=device)
            inputs = Inputs(query * gain, key * gain, value, bias, 0, None)
            checker.attention(label, *cases.attention(inputs), *inputs.tuple())
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b04_bottom_right_with_more_queries(device: str, dtype: str) -> None:
    """A negative diagonal: the first M - N rows see nothing, no key of the future is seen."""
    checker = Checker()
    sizes = [(100, 64), (128, 64), (65, 64), (64, 1), (300, 3), (129, 128), (257, 65), (192, 64)]
    sizes += [(2048, 1024)] if device == "cuda" else []
    for (m, n), k in itertools.product(sizes, (64, 33, 264)):
        label = f"M{m} N{n} K{k}"
        with checker.case(label):
            query, key, value = problem(device, dtype, 1, m, n, 2, k)
            inputs = Inputs(query, key, value, None, BOTTOM_RIGHT, None)
            out, lse = cases.attention(inputs)
            checker.attention(label, out, lse, *inputs.tuple())
            checker.true(f"{label}: first rows are 0", out[:, : m - n] == 0)
            checker.true(f"{label}: their LSE is -inf", lse[..., : m - n] == -math.inf)
            checker.true(f"{label}: the others see a key", lse[..., m - n :] > -math.inf)
            # Row M-N sees key 0 alone (fp32 on tensor cores splits V, so it is not exact there).
            if dtype != "f32" or device == "cpu":
                checker.same_bits(f"{label}: first key", out[:, m - n], value[:, 0])
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b08_one_query_with_almost_nothing_visible(device: str, dtype: str) -> None:
    """Long keys of which most or all are hidden, for one query: every way of splitting keys sees
    empty parts."""
    checker = Checker()
    for n, visible in itertools.product(
        (4096, 4097), (slice(0, 512), slice(4000, None), slice(2047, 2048), slice(0, 0))
    ):
        label = f"N{n} visible {visible.start}:{visible.stop}"
        with checker.case(label):
            query, key, value = problem(device, dtype, 1, 1, n, 2, 64)
            bias = torch.full((1, 1, 1, n), -math.inf, dtype=query.dtype, device=device)
            bias[..., visible] = 0
            inputs = Inputs(query, key, value, bias, 0, None)
            checker.attention(label, *cases.attention(inputs), *inputs.tuple())
    checker.finish()


def visible_keys(device: str, mask: object, m: int, n: int) -> list[str]:
    """Which keys each query sees, read off the result: V is the identity and every score is
    equal."""
    query = torch.zeros(1, m, 1, 8, device=device)
    key = torch.zeros(1, n, 1, 8, device=device)
    value = torch.eye(n, device=device).view(1, n, 1, n)
    out = memeff_attn.memory_efficient_attention(query, key, value, mask)
    return ["".join("1" if weight > 0 else "0" for weight in row) for row in out[0, :, 0].tolist()]


def test_b44_corners(device: str) -> None:
    """LowerTriangularMask is anchored top-left, ...FromBottomRight bottom-right, whatever M and N
    are."""
    top_left, bottom_right = (
        memeff_attn.LowerTriangularMask(),
        memeff_attn.LowerTriangularFromBottomRightMask(),
    )
    assert visible_keys(device, top_left, 2, 5) == ["10000", "11000"]
    assert visible_keys(device, bottom_right, 2, 5) == ["11110", "11111"]
    assert visible_keys(device, top_left, 5, 2) == ["10", "11", "11", "11", "11"]
    assert visible_keys(device, bottom_right, 5, 2) == ["00", "00", "00", "10", "11"]
    for m, n in itertools.product((1, 2, 63, 64, 65), (1, 2, 33, 64, 129)):
        for mask, diagonal in ((top_left, 0), (bottom_right, n - m)):
            expected = [
                "".join("1" if j <= i + diagonal else "0" for j in range(n)) for i in range(m)
            ]
            assert visible_keys(device, mask, m, n) == expected, (type(mask).__name__, m, n)


@pytest.mark.parametrize("causal", [TOP_LEFT, BOTTOM_RIGHT], ids=["top_left", "bottom_right"])
def test_b44_diagonal_with_a_bias(device: str, causal: int) -> None:
    """The diagonal stays when a tensor bias is added to it."""
    checker = Checker()
    for (m, n), bias in itertools.product(
        ((2, 5), (5, 2), (70, 133), (133, 70)), ("bhmn", "11m1:f32", "b11n:bool")
    ):
        for dtype in DTYPES:
            mask = {TOP_LEFT: "top_left", BOTTOM_RIGHT: "bottom_right"}[causal]
            case = Case(dtype, M=m, N=n, K=40, mask=mask, bias=bias)
            with checker.case(case):
                inputs = cases.make(case, device)
                checker.attention(case, *cases.attention(inputs), *inputs.tuple())
    checker.finish()
