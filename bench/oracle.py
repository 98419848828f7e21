"""Correctness in the same run: samples of each output and gradient against fp64.

Sampled are a few (batch, head) pairs. Of each, some queries (rows of the output, of its gradient
and of the bias' gradient) and some keys (rows of the gradients of key and value, which are sums
over all queries and are computed so, block by block).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bench.backends import Tensors
from bench.shapes import Cell

# Sampled queries (keys) of a head: the edges, where masks and tile ends are, and some others.
FIRST, LAST, RANDOM = 8, 24, 32
AROUND = 2  # on each side of where a sequence or a window begins
HEADS = 3  # sampled (batch, head) pairs: the first, the last, one between
GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_bias")

Kept = tuple[Tensor | None, float]  # which weights dropout keeps, [pairs, M, N]; 1 / (1 - q)


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


def math_of(cell: Cell) -> AbstractContextManager[None]:
    """In it torch allows TF32 if the cell says so: to us, to peers and to the rule's eager."""
    allowing: AbstractContextManager[None] = tolerance().tf32(cell.dtype == "tf32")
    return allowing


@dataclasses.dataclass
class Exact:
    """One quantity: fp64, plain PyTorch in the inputs' dtype, plain PyTorch in fp32."""

    fp64: Tensor
    eager: Tensor
    eager32: Tensor

    def figures(self, mine: Tensor) -> list[float]:
        found: list[float] = tolerance().measure(mine, self.fp64, self.eager, self.eager32).tolist()
        return found

    def relative(self, error: float) -> float:
        return error / max(float(self.fp64.abs().amax()), 1e-30)


@dataclasses.dataclass
class Sample:
    """Sampled pairs, queries and keys of one cell, and what is right there."""

    cell: Cell
    pairs: list[tuple[int, int]]
    rows: Tensor
    keys: Tensor
    out: Exact
    gradients: list[Exact]  # of query, key, value, bias; empty for the forward pass

    def error(self, out: Tensor) -> tuple[float, list[str]]:
        """Of an output [B, M, H, Kv]: largest error over largest value; what breaks the rule."""
        mine = torch.stack([out[b, self.rows, h] for b, h in self.pairs])
        figures = self.out.figures(mine)
        broken: list[str] = tolerance().judge("sampled rows", figures, 0.0)
        return self.out.relative(figures[0]), broken

    def gradient_error(self, gradients: tuple[Tensor, ...]) -> tuple[float, list[str]]:
        """The same of all gradients: the worst of their relative errors."""
        shared = self.cell.H // self.cell.Hkv
        parts = [[gradients[0][b, self.rows, h] for b, h in self.pairs]]
        parts += [[g[b, self.keys, h // shared] for b, h in self.pairs] for g in gradients[1:3]]
        if len(gradients) > 3:
            per_batch = gradients[3].shape[0] > 1
            parts.append([gradients[3][b * per_batch, h][self.rows] for b, h in self.pairs])
        worst, broken = 0.0, []
        for label, mine, exact in zip(GRADIENTS, parts, self.gradients, strict=False):
            figures = exact.figures(torch.stack(mine))
            worst = max(worst, exact.relative(figures[0]))
            broken += tolerance().judge(label, figures, 0.0, tolerance().GRADIENT)
        return worst, broken


class Problem:
    """The sampled pairs as tensors [pairs, M or N, K or Kv], in any dtype."""

    def __init__(
        self, cell: Cell, tensors: Tensors, pairs: list[tuple[int, int]], dropout: Kept
    ) -> None:
        self.cell, self.tensors, self.pairs = cell, tensors, pairs
        self.keep, self.keep_scale = dropout
        shared = cell.H // cell.Hkv
        self.query = self._stack(tensors.query, 1)
        self.key, self.value = (self._stack(x, shared) for x in (tensors.key, tensors.value))
        self.grad_out = self._stack(tensors.grad_out, 1)
        self.sequence = None  # of each token, its sequence's number
        if cell.lens is not None:
            lens = torch.tensor(cell.lens, device=tensors.query.device)
            self.sequence = torch.arange(len(lens), device=lens.device).repeat_interleave(lens)
        bias = tensors.bias
        self.bias = None
        if bias is not None:
            self.bias = torch.stack([bias[b if bias.shape[0] > 1 else 0, h] for b, h in pairs])

    def _stack(self, x: Tensor, shared: int) -> Tensor:
        return torch.stack([x[b, :, h // shared] for b, h in self.pairs])

    def _bias(self, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None if self.bias is None else self.bias[:, rows].to(dtype)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: Tensor
    ) -> Tensor:
        """Of the queries `rows` in the obvious way, in the tensors' dtype. In no cell is there a
        query that sees no key."""
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.cell.K**-0.5
        if bias is not None:
            scores = scores + bias
        hidden = self._hidden(rows)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, -1)
        if self.keep is not None:
            weights = weights * self.keep[:, rows] * self.keep_scale
        return torch.matmul(weights, v)

    def _hidden(self, rows: Tensor) -> Tensor | None:
        """[rows, N]: the keys that the queries do not see; None where they see all."""
        cell, hidden = self.cell, None
        keys = torch.arange(cell.N, device=rows.device)
        if cell.causal:  # packed sequences have as many keys as queries: one diagonal for all
            hidden = keys > rows[:, None]
        if cell.window is not None:
            last = rows[:, None] + (cell.N - cell.M)
            hidden = (keys > last) | (keys <= last - cell.window)
        if self.sequence is not None:
            others = self.sequence[rows][:, None] != self.sequence
            hidden = others if hidden is None else hidden | others
        return hidden

    def out(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        bias = self._bias(rows, dtype)
        q, k, v = (x.to(dtype) for x in (self.query[:, rows], self.key, self.value))
        return self.attention(q, k, v, bias, rows)

    def gradients(self, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Of query at `rows`, of key and value at `keys` (summed over all queries), of the bias at
        `rows`, by autograd."""
        wide = torch.promote_types(dtype, torch.float32)
        key, value = (x.detach().to(dtype).requires_grad_() for x in (self.key, self.value))
        sums = [torch.zeros_like(x[:, keys], dtype=wide) for x in (key, value)]
        most = tolerance().MAX_SCORES[key.device.type]
        step = max(1, most // (len(self.pairs) * self.cell.N))
        everything = torch.arange(self.cell.M, device=rows.device)
        blocks = [everything[i : i + step] for i in range(0, self.cell.M, step)]
        for block in blocks:
            bias = self._bias(block, dtype)
            out = self.attention(self.query[:, block].to(dtype), key, value, bias, block)
            grads = torch.autograd.grad(out, (key, value), self.grad_out[:, block].to(dtype))
            for total, grad in zip(sums, grads, strict=True):
                total += grad[:, keys]
        yield self._grad_query(rows, dtype)
        yield from (total.to(dtype) for total in sums)
        if self.bias is not None:
            yield torch.stack([self._grad_bias(b, h, rows, dtype) for b, h in self.pairs])

    def _grad_query(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        query = self.query[:, rows].detach().to(dtype).requires_grad_()
        bias = self._bias(rows, dtype)
        out = self.attention(query, self.key.to(dtype), self.value.to(dtype), bias, rows)
        return torch.autograd.grad(out, query, self.grad_out[:, rows].to(dtype))[0]

    def _grad_bias(self, b: int, h: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Summed over the batch where its entries share the bias. No cell has bias and dropout."""
        x, bias = self.tensors, self.tensors.bias
        assert bias is not None and self.keep is None
        per_batch = bias.shape[0] > 1
        leaf = bias.detach()[b if per_batch else 0, h][rows].to(dtype).requires_grad_()
        entries = slice(b, b + 1) if per_batch else slice(None)
        shared = self.cell.H // self.cell.Hkv
        q, grad_out = (y[entries][:, rows, h].to(dtype) for y in (x.query, x.grad_out))
        k, v = (y[entries, :, h // shared].to(dtype) for y in (x.key, x.value))
        out = self.attention(q, k, v, leaf, rows)
        return torch.autograd.grad(out, leaf, grad_out)[0]


def dropout_of(cell: Cell, pairs: list[tuple[int, int]], seed: int, device: torch.device) -> Kept:
    """What the forward call that follows torch.manual_seed(seed) keeps."""
    if not cell.p:
        return None, 1.0
    from memeff_attn import dropout

    torch.manual_seed(seed)
    state = dropout.new_seed(device)
    heads = torch.tensor([b * cell.H + h for b, h in pairs], device=device)
    kept = dropout.dropout_rows(state, cell.p, heads, 0, cell.M, cell.N)
    return kept, dropout.keep_scale(cell.p)


def _chosen(length: int, inner: list[int], generator: torch.Generator) -> list[int]:
    """Both ends, some at random, and those around each of `inner`."""
    edges = [*range(min(FIRST, length)), *range(max(0, length - LAST), length)]
    edges += [i for at in inner for i in range(at - AROUND, at + AROUND) if 0 <= i < length]
    return sorted({*edges, *torch.randint(length, (RANDOM,), generator=generator).tolist()})


def _inner(cell: Cell) -> tuple[list[int], list[int]]:
    """Queries and keys at which a mask begins or ends: the first of each sequence; the first query
    that a window hides a key from, the first key that the last query sees."""
    if cell.lens is not None:
        starts = list(accumulate(cell.lens))[:-1]
        return starts, starts
    if cell.window is not None:
        return [cell.window + cell.M - cell.N], [cell.N - cell.window]
    return [], []


def pairs_of(cell: Cell) -> list[tuple[int, int]]:
    middle = (cell.B // 2, cell.H // 2)
    return sorted({(0, 0), (cell.B - 1, cell.H - 1), middle})[:HEADS]


def sample(
    cell: Cell, tensors: Tensors, passes: list[str], seed: int = 0, dropout: Kept | None = None
) -> Sample:
    """seed: that of the generator before a forward call, for the dropout mask."""
    generator = torch.Generator().manual_seed(seed)
    device = tensors.query.device
    lengths = zip((cell.M, cell.N), _inner(cell), strict=True)
    rows, keys = (torch.tensor(_chosen(n, at, generator), device=device) for n, at in lengths)
    pairs = pairs_of(cell)
    problem = Problem(cell, tensors, pairs, dropout or dropout_of(cell, pairs, seed, device))
    dtype = tensors.query.dtype
    kinds = [torch.float64, dtype, torch.float32]
    out = Exact(*(problem.out(rows, kind) for kind in kinds))
    gradients = []
    if "bwd" in passes:
        if cell.Hkv != cell.H:  # a key's gradient sums its group's heads; a pair is one head
            raise NotImplementedError("gradients of grouped heads are not sampled")
        of = [list(problem.gradients(rows, keys, kind)) for kind in kinds]
        gradients = [Exact(*three) for three in zip(*of, strict=True)]
    return Sample(cell, pairs, rows, keys, out, gradients)
