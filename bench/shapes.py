"""The sets of shapes: what is timed, what work it is, and which rows a result file must hold.

cells.json is the one list. A cell is one attention problem; a row of a result file is one cell,
pass and backend.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CELLS = Path(__file__).with_name("cells.json")
SETS = ("llm", "vision", "anyk", "fp32", "clients")
LATER = {
    "features": "bias and dropout with gradients, and windows, come with [training] and [masks]",
    "varlen": "packed variable-length sequences come with [masks]",
    "decode": "split-key decoding and grouped heads' speed come with [decode]",
}
PASSES = ("fwd",)
LATER_PASSES = {"bwd": "the backward pass comes with [training]"}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
LONG = 4096  # keys from which a sequence counts as long in the summary


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem: query [B, M, H, K], key [B, N, Hkv, K], value [B, N, Hkv, Kv]."""

    set: str
    dtype: str
    B: int
    M: int
    N: int
    H: int
    Hkv: int
    K: int
    Kv: int
    causal: bool

    @property
    def name(self) -> str:
        causal = " causal" if self.causal else ""
        return f"{self.dtype} B{self.B} M{self.M} N{self.N} H{self.H} K{self.K}{causal}"

    @property
    def flop(self) -> float:
        """Useful flop of the forward pass: two products; a causal mask leaves half of the pairs."""
        pairs = self.M * self.N * (0.5 if self.causal else 1.0)
        return 2.0 * self.B * self.H * pairs * (self.K + self.Kv)

    @property
    def bytes(self) -> int:
        """What must cross DRAM once: query, key, value in, output out."""
        query_and_out = self.B * self.M * self.H * (self.K + self.Kv)
        key_and_value = self.B * self.N * self.Hkv * (self.K + self.Kv)
        return BYTES[self.dtype] * (query_and_out + key_and_value)

    def row(self, which: str, backend: str, **measured: Any) -> dict[str, Any]:
        """A row of a result file (DESIGN section 7); features this cell does without are null."""
        head = {"set": self.set, "name": self.name, **dataclasses.asdict(self)}
        absent = dict.fromkeys(("bias", "p", "window", "lens"))
        return {**head, **absent, "pass": which, "backend": backend, **measured}

    @property
    def group(self) -> str:
        """The line of the summary table that this cell counts in."""
        if self.set == "llm":
            return f"llm K={self.K}"
        if self.set == "anyk":
            return (
                "anyk K<=256"
                if self.K <= 256
                else "anyk K=320..512"
                if self.K <= 512
                else "anyk K=1024"
            )
        return self.set

    @property
    def groups(self) -> list[str]:
        if self.set == "llm" and self.N >= LONG and not self.causal:
            return [self.group, f"{self.group} long", "llm"]
        return [self.group, "llm"] if self.set == "llm" else [self.group]


def cells(name: str) -> list[Cell]:
    """The cells of a set; ValueError that says what is known, or which work brings it."""
    if name in LATER:
        raise ValueError(f"the set '{name}' is not served yet: {LATER[name]}")
    if name not in SETS:
        raise ValueError(
            f"no set '{name}'; there are {', '.join(SETS)} (and later {', '.join(LATER)})"
        )
    listed = json.loads(CELLS.read_text())[name]
    return [
        Cell(
            set=name,
            dtype=c["dtype"],
            B=c["B"],
            M=c["M"],
            N=c["N"],
            H=c["H"],
            Hkv=c.get("Hkv", c["H"]),
            K=c["K"],
            Kv=c.get("Kv", c["K"]),
            causal=bool(c.get("causal", False)),
        )
        for c in listed
    ]


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two rows the same measurement; fields that a file leaves out have defaults."""
    heads = row.get("Hkv") or row.get("H")
    return (
        *(row.get(f) for f in ("set", "dtype", "B", "M", "N", "H")),
        heads,
        row.get("K"),
        row.get("Kv") or row.get("K"),
        bool(row.get("causal")),
        *(json.dumps(row.get(f)) for f in ("bias", "p", "window", "lens")),
        row.get("pass", "fwd"),
        row.get("backend"),
    )


def expected(
    name: str, passes: Iterable[str], backends: Iterable[str], sm: int
) -> list[tuple[Cell, str, str]]:
    """Every (cell, pass, backend) that a result file of this set must hold, on a GPU of this sm."""
    from bench.backends import not_served

    passes, backends = list(passes), list(backends)
    return [
        (c, w, b) for c in cells(name) for w in passes for b in backends if not not_served(b, c, sm)
    ]
