"""Correctness in the same run: sampled rows of each output against fp64, by the tolerance rule."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bench.shapes import Cell

FIRST, LAST, RANDOM = (
    8,
    24,
    32,
)  # rows of a sampled head: the edges, where masks and tile ends are, and some others
HEADS = 3  # sampled (batch, head) pairs: the first, the last, one between


@cache
def tolerance() -> ModuleType:
    """tests/tolerance.py: the rule has one place, whether or not tests are on the path."""
    path = Path(__file__).resolve().parents[1] / "tests" / "tolerance.py"
    spec = importlib.util.spec_from_file_location("memeff_tolerance", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass
class Sample:
    """Sampled rows of one cell: their fp64 result, and plain PyTorch's in the same dtype."""

    pairs: list[tuple[int, int]]
    rows: Tensor
    exact: Tensor
    eager: Tensor
    eager32: Tensor

    def error(self, out: Tensor) -> tuple[float, list[str]]:
        """Of an output [B, M, H, Kv]: largest error over largest value; what breaks the rule."""
        mine = torch.stack([out[b, self.rows, h] for b, h in self.pairs])
        figures = tolerance().measure(mine, self.exact, self.eager, self.eager32).tolist()
        largest = float(self.exact.abs().amax())
        broken: list[str] = tolerance().judge("sampled rows", figures, 0.0)
        return figures[0] / max(largest, 1e-30), broken


def sample(cell: Cell, q: Tensor, k: Tensor, v: Tensor, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    edges = [*range(min(FIRST, cell.M)), *range(max(0, cell.M - LAST), cell.M)]
    chosen = sorted({*edges, *torch.randint(cell.M, (RANDOM,), generator=generator).tolist()})
    rows = torch.tensor(chosen, device=q.device)
    middle = (cell.B // 2, cell.H // 2)
    pairs = sorted({(0, 0), (cell.B - 1, cell.H - 1), middle})[:HEADS]
    mask = None
    if cell.causal:
        mask = torch.arange(cell.N, device=q.device) <= rows[:, None]
    plain = tolerance().plain_attention
    shared = cell.H // cell.Hkv

    def stacked(dtype: torch.dtype) -> Tensor:
        outs = []
        for b, h in pairs:
            one = (q[b, rows, h], k[b, :, h // shared], v[b, :, h // shared])
            outs.append(plain(*(x[None] for x in one), mask, scale=cell.K**-0.5, dtype=dtype)[0][0])
        return torch.stack(outs)

    exact, eager32 = stacked(torch.float64), stacked(torch.float32)
    return Sample(
        pairs, rows, exact, eager32 if q.dtype == torch.float32 else stacked(q.dtype), eager32
    )
