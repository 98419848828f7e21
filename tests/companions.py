"""The forward kernel that goes with a forced backward kernel.

A backward kernel recomputes the scores and takes exp(S - LSE): where its LSE comes from a kernel
that sums the products of S in another order or with other instructions, P is off by what the two
differ in, which no GPU of that sub-family ever sees. So tests that force a backward row of another
sub-family than this GPU's force a forward row of the same one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def forward_row(
    backward: dict[str, Any], table: Iterable[dict[str, Any]], bias: bool, p: float, k: int, kv: int
) -> str:
    """The first row that takes what `backward` takes with these head dims; "" (automatic, which
    stays in the sub-family on every GPU that runs these tests) for a row of sm80."""
    if backward["arch"] == "sm80":
        return ""
    for row in table:
        same = all(row[x] == backward[x] for x in ("arch", "dtype", "math", "built"))
        if row["kind"] != "fwd" or not same or backward["alignment"] % row["alignment"]:
            continue
        serves = row["dropout"] if p else row["bias"] == bias and not row["dropout"]
        if serves and k <= (row["max_k"] or k) and kv <= (row["max_kv"] or kv):
            return str(row["name"])
    raise LookupError(f"no forward row goes with {backward['name']}, K {k}, Kv {kv}")


def forward_name(backward: str, bias: bool, p: float, k: int, kv: int) -> str:
    """The same by the backward row's name ("": automatic), in this build's table."""
    if not backward:
        return ""
    from memeff_attn import _C

    table = {row["name"]: row for row in _C.variants()}
    return forward_row(table[backward], table.values(), bias, p, k, kv)
