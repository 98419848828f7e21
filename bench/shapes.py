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
SETS = ("llm", "vision", "anyk", "fp32", "tf32", "clients", "features", "varlen", "decode")
PASSES = ("fwd", "bwd")
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4}
BACKWARD_FLOP = 2.5  # five products for the forward's two
LONG = 4096  # keys from which a sequence counts as long in the summary
# The fixed-length problem beside packed sequences: queries and keys (a multiple of the longest
# tile, near this length), and how far its flop may be from theirs.
FIXED_M, FIXED_TILE, FIXED_OFF = 2048, 128, 0.01


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem: query [B, M, H, K], key [B, N, Hkv, K], value [B, N, Hkv, Kv].

    dtype is a key of BYTES; "tf32" are fp32 tensors where torch allows TF32.
    bias names the dimensions that an additive bias of the query's dtype has: "B,H,M,N", or
    "1,H,M,N" where all batch entries share it; its gradient is part of the backward pass. p is the
    dropout probability; None: no dropout. label is what the list calls the cell, if anything.
    window: a query sees the last `window` keys up to its own, counted from the bottom right.
    lens: the lengths of packed sequences, each of which sees itself alone; B is 1, M = N their sum.
    """

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
    bias: str | None = None
    p: float | None = None
    label: str = ""
    window: int | None = None
    lens: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        label = f"{self.label}: " if self.label else ""
        heads = f"H{self.H}" if self.Hkv == self.H else f"H{self.H}/{self.Hkv}"
        packed = f" in {len(self.lens)} sequences" if self.lens else ""
        causal = " causal" if self.causal else ""
        sizes = f"B{self.B} M{self.M} N{self.N}{packed} {heads} K{self.K}"
        return f"{label}{self.dtype} {sizes}{causal}"

    @property
    def decoding(self) -> bool:
        """One query a head: what the keys and values take to read counts, and nothing trains."""
        return self.M == 1

    @property
    def bias_shape(self) -> tuple[int, int, int, int] | None:
        if self.bias is None:
            return None
        sizes = {"B": self.B, "H": self.H, "M": self.M, "N": self.N, "1": 1}
        b, h, m, n = (sizes[d] for d in self.bias.split(","))
        return b, h, m, n

    def flop(self, which: str = "fwd") -> float:
        """Useful flop: two products forward, five backward, of the pairs that see each other."""
        forward = 2.0 * self.B * self.H * self._pairs() * (self.K + self.Kv)
        return forward if which == "fwd" else BACKWARD_FLOP * forward

    def _pairs(self) -> float:
        """(query, key) of one head; causal leaves half of them."""
        if self.window is not None:
            return sum(min(i + 1, self.window) for i in range(self.N - self.M, self.N))
        pairs = sum(n * n for n in self.lens) if self.lens else self.M * self.N
        return pairs * (0.5 if self.causal else 1.0)

    def fixed(self) -> Cell:
        """A problem without sequences of (about) the same flop and of the same kind otherwise: what
        our kernel makes of the work when no length varies."""
        assert self.lens is not None
        wanted = sum(n * n for n in self.lens)
        lengths = range(FIXED_TILE, 2 * FIXED_M, FIXED_TILE)
        for m in sorted(lengths, key=lambda m: abs(m - FIXED_M)):
            b = round(wanted / m**2)
            if abs(b * m**2 - wanted) <= FIXED_OFF * wanted:
                return dataclasses.replace(self, B=b, M=m, N=m, lens=None)
        raise ValueError(f"no fixed length has the flop of {self.lens}")

    def bytes(self, which: str = "fwd") -> int:
        """What must cross DRAM once. Forward: query, key, value, bias in, output out. Backward:
        each of these in, and a gradient of each out or (the output's) in: twice as much."""
        query_and_out = self.B * self.M * self.H * (self.K + self.Kv)
        key_and_value = self.B * self.N * self.Hkv * (self.K + self.Kv)
        bias = 1 if self.bias_shape else 0
        for size in self.bias_shape or ():
            bias *= size
        forward = BYTES[self.dtype] * (query_and_out + key_and_value + bias)
        return forward if which == "fwd" else 2 * forward

    def row(self, which: str, backend: str, **measured: Any) -> dict[str, Any]:
        """A row of a result file (DESIGN section 7); features this cell does without are null."""
        head = {"set": self.set, "name": self.name, **dataclasses.asdict(self)}
        if not self.label:
            del head["label"]
        return {**head, "pass": which, "backend": backend, **measured}

    @property
    def groups(self) -> list[str]:
        """The lines of the summary table that this cell counts in."""
        if self.set == "llm":
            one = f"llm K={self.K}"
            long = [f"{one} long"] if self.N >= LONG and not self.causal else []
            return [one, *long, "llm"]
        if self.set == "anyk":
            if self.K <= 256:
                return ["anyk K<=256"]
            return ["anyk K=320..512" if self.K <= 512 else "anyk K=1024", "anyk K>256"]
        if self.set == "varlen":
            return ["varlen causal" if self.causal else "varlen"]
        if self.set == "decode":
            return [f"decode B{self.B} N{self.N} H{self.H}/{self.Hkv}", "decode"]
        return [f"{self.set} {self.label}", self.set] if self.label else [self.set]


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell of a row; fields that an older file leaves out have their defaults."""
    names = [f.name for f in dataclasses.fields(Cell)]
    given = {f: row[f] for f in names if f in row}
    if given.get("lens"):
        given["lens"] = tuple(given["lens"])
    return Cell(**given)


def check_passes(passes: Iterable[str]) -> None:
    for which in passes:
        if which not in PASSES:
            raise ValueError(f"no pass '{which}'; there are {', '.join(PASSES)}")


def cells(name: str) -> list[Cell]:
    """The cells of a set; ValueError that says which sets there are."""
    if name not in SETS:
        raise ValueError(f"no set '{name}'; there are {', '.join(SETS)}")
    return [_cell(name, listed) for listed in json.loads(CELLS.read_text())[name]]


def _cell(name: str, c: Mapping[str, Any]) -> Cell:
    lens = tuple(c["lens"]) if "lens" in c else None
    return Cell(
        set=name,
        dtype=c["dtype"],
        B=1 if lens else c["B"],
        M=sum(lens) if lens else c["M"],
        N=sum(lens) if lens else c["N"],
        H=c["H"],
        Hkv=c.get("Hkv", c["H"]),
        K=c["K"],
        Kv=c.get("Kv", c["K"]),
        causal=bool(c.get("causal", False)),
        bias=c.get("bias"),
        p=c.get("p"),
        label=c.get("name", ""),
        window=c.get("window"),
        lens=lens,
    )


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
        (c, w, b)
        for c in cells(name)
        for w in passes
        for b in backends
        if not not_served(b, c, sm, w)
    ]
