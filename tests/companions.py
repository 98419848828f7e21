"""The forward kernel that goes with a forced backward kernel.

A backward kernel recomputes the scores and takes P = exp(S - LSE): P of a single visible key is 1,
and sums of P are 1, only where the forward kernel computed S by the same arithmetic. So tests that
force a backward row force the forward row that goes with it, on every sub-family. Automatic
selection, untouched here, has to pair alike by itself: test_dispatch_pairs.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from cases import Case

Row = dict[str, Any]  # of _C.variants()


def scores(row: Row) -> str:
    """How a row computes S: "compensated" sums, products of "split" operands, or matrix "products".

    The table does not say it; limits do, as test_dispatch_pairs.py checks against the rows' C++
    types: in fp32 on sm80, the rows for few queries take compensated sums (CompensatedQk), and
    those that stop at K = 128 or before split their operands when they enter (Sm80Split)."""
    if (row["arch"], row["dtype"], row["math"]) != ("sm80", "f32", "ieee"):
        return "products"
    if row["max_m"]:
        return "compensated"
    return "split" if 0 < row["max_k"] <= 128 else "products"


AnyCase = TypeVar("AnyCase", bound=Case)


def keys_within(row: Row, n: int) -> int:
    """N, or the longest that the row takes."""
    return min(n, row["max_n"] or n)


def within(row: Row, case: AnyCase) -> AnyCase:
    """The case with the sizes that the row takes: a row of short sequences has a longest N, one of
    the backward pass a longest M too, and a key head for each query head."""
    if not row["max_n"]:
        return case
    case = dataclasses.replace(case, N=keys_within(row, case.N))
    if row["kind"] == "fwd":
        return case
    return dataclasses.replace(case, M=keys_within(row, case.M), Hkv=0)


def forward_row(
    backward: Row,
    table: Iterable[Row],
    bias: bool,
    p: float,
    k: int,
    kv: int,
    smem_optin: int = 1 << 20,
) -> str:
    """The row whose S is that of `backward`, for a call that `backward` takes with these head dims
    on a GPU of so much shared memory a block: best of the same K limit, else the first."""

    def serves(row: Row) -> bool:
        return (
            row["kind"] == "fwd"
            and all(row[x] == backward[x] for x in ("arch", "dtype", "math", "built"))
            and scores(row) == scores(backward)
            and row["sequences"]  # and with it any N: what backward rows take
            and bool(row["max_m"]) == bool(backward["max_m"])  # tiles of few queries are their own
            and backward["alignment"] % row["alignment"] == 0
            and (row["dropout"] if p else row["bias"] == bias and not row["dropout"])
            and k <= (row["max_k"] or k)
            and kv <= (row["max_kv"] or kv)
            and row["smem_bytes"] <= smem_optin
        )

    found = sorted(filter(serves, table), key=lambda row: row["max_k"] != backward["max_k"])
    if not found:
        raise LookupError(f"no forward row goes with {backward['name']}, K {k}, Kv {kv}")
    return str(found[0]["name"])


def forward_name(backward: str, bias: bool, p: float, k: int, kv: int) -> str:
    """The same by the backward row's name ("": automatic), in this build's table on this GPU."""
    if not backward:
        return ""
    import torch

    from memeff_attn import _C

    table = {row["name"]: row for row in _C.variants()}
    optin = _C.device_info(torch.cuda.current_device())["smem_optin"]
    return forward_row(table[backward], table.values(), bias, p, k, kv, optin)
