"""Forward and backward rows compute the scores S alike: those that dispatch chooses for one call,
and those that tests force together (companions.py). No GPU needed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from companions import scores
from test_variants import kernels_module

from memeff_attn import attn_bias as ab
from memeff_attn import dispatch

_C = pytest.importorskip("memeff_attn._C", reason="memeff_attn is not compiled")

TABLE: dict[str, dict[str, Any]] = {row["name"]: row for row in _C.variants()}
QUERIES = (1, 16, 17, 100)
HEAD_DIMS = (*range(1, 41), 64, 72, 128, 200, 256, 300)
SMS = (70, 75, 80, 86, 89, 90, 100, 120)


def pair(**fields: Any) -> tuple[str, str]:
    """The forward and the backward row that dispatch chooses."""
    request = {"dtype": "f32", "B": 2, "N": 100, "H": 3, "any_build": True} | fields
    forward, backward = (_C.select(request | {"pass": which}) for which in ("fwd", "bwd"))
    return forward, backward


def mispaired(sm: int, math: str) -> list[str]:
    """Pairs of rows that compute S differently, and the calls that get them."""
    found: dict[tuple[str, str, int], tuple[set[int], set[int]]] = {}
    for m, k, alignment, bias, dropout in itertools.product(
        QUERIES, HEAD_DIMS, (1, 4), (False, True), (False, True)
    ):
        if k % alignment:
            continue
        fields = {"sm": sm, "math": math, "M": m, "K": k, "Kv": k, "alignment": alignment}
        forward, backward = pair(**fields, has_bias=bias, dropout=dropout)
        assert forward and backward, fields
        if scores(TABLE[forward]) != scores(TABLE[backward]):
            sizes = found.setdefault((forward, backward, alignment), (set(), set()))
            sizes[0].add(m)
            sizes[1].add(k)
    return [
        f"{forward} with {backward}: alignment {alignment}, M {sorted(ms)}, K {sorted(ks)}"
        for (forward, backward, alignment), (ms, ks) in found.items()
    ]


def test_kinds_of_scores_are_those_of_the_types() -> None:
    """What companions.scores reads off the limits is what the C++ type of each row says."""
    for row in kernels_module().load_rows():
        kind = "products"
        if "CompensatedQk" in row.traits:
            kind = "compensated"
        elif "Sm80Split" in row.traits:
            kind = "split"
        assert scores(TABLE[row.name]) == kind, row.name


@pytest.mark.parametrize("math", ["ieee", "tf32"])
@pytest.mark.parametrize("sm", SMS)
def test_dispatch_pairs_rows_with_the_same_scores(sm: int, math: str) -> None:
    found = mispaired(sm, math)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("packed", [False, True])
def test_wide_copies_of_a_bias_begin_where_rows_do(packed: bool) -> None:
    """TMA and 16-byte copies want aligned starts: the keys of a packed sequence begin anywhere in a
    row of a bias over all tokens, so other rows take those."""
    mask: Any = ab.BlockDiagonalMask.from_seqlens([300, 340], [203, 437], device="cpu")
    inputs = [torch.zeros(1, 640, 16, 64, dtype=torch.bfloat16) for _ in range(3)]
    bias = torch.zeros(1, 16, 640, 640, dtype=torch.bfloat16)
    given = dispatch.Inputs(*inputs, mask.add_bias(bias) if packed else bias, 0.0)
    gpu = {"sm": 90, "smem_optin": 232448, "sm_count": 132}
    chosen = _C.select(dispatch.request_of(given, gpu) | {"any_build": True})
    assert TABLE[chosen]["bias"] and bool(TABLE[chosen]["bias_alignment"]) is not packed, chosen
