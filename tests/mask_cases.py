"""Every mask class with what it means, spelled out by loops over sequences and indices: nothing
here asks the mask itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from memeff_attn import attn_bias as ab
from memeff_attn.attn_bias import AttentionBias

See = Callable[[int, int, int, int], bool]  # (i, j, M, N) -> is key j visible to query i


def full(i: int, j: int, m: int, n: int) -> bool:
    return True


def top_left(i: int, j: int, m: int, n: int) -> bool:
    return j <= i


def bottom_right(i: int, j: int, m: int, n: int) -> bool:
    return j <= i + n - m


def local_top_left(window: int) -> See:
    return lambda i, j, m, n: i - window < j <= i


def local_bottom_right(window: int) -> See:
    return lambda i, j, m, n: i + n - m - window < j <= i + n - m


def band(left: int, right: int) -> See:
    return lambda i, j, m, n: i + n - m - left <= j <= i + n - m + right


@dataclasses.dataclass
class Case:
    name: str
    mask: AttentionBias
    see: See
    queries: list[int]  # of each sequence
    keys: list[list[int]]  # rows of key that each sequence has, in its order
    rows: int  # of key

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        return sum(self.queries)

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.queries)]

    def visible(self) -> Tensor:
        seen = torch.zeros(self.total, self.rows, dtype=torch.bool)
        for start, m, rows in zip(self.starts, self.queries, self.keys, strict=False):
            for i in range(m):
                for j, row in enumerate(rows):
                    seen[start + i, row] = self.see(i, j, m, len(rows))
        return seen


DENSE: list[tuple[AttentionBias, See]] = [
    (ab.LowerTriangularMask(), top_left),
    (ab.LowerTriangularFromBottomRightMask(), bottom_right),
    (ab.LowerTriangularFromBottomRightLocalAttentionMask(3), local_bottom_right(3)),
    (ab.LowerTriangularFromBottomRightMask().make_local_attention(1), local_bottom_right(1)),
    (ab.LocalAttentionFromBottomRightMask(2, 1), band(2, 1)),
    (ab.LocalAttentionFromBottomRightMask(0, 3), band(0, 3)),
]
SHAPES = [(1, 1), (5, 5), (4, 9), (9, 4), (1, 7), (7, 1), (0, 3), (3, 0)]


def dense_cases() -> list[Case]:
    return [
        Case(f"{type(mask).__name__}-{k}-{m}x{n}", mask, see, [m], [list(range(n))], n)
        for k, (mask, see) in enumerate(DENSE)
        for m, n in SHAPES
    ]


def packed(lengths: list[int]) -> list[list[int]]:
    starts = [0, *itertools.accumulate(lengths)]
    return [list(range(a, b)) for a, b in itertools.pairwise(starts)]


def block_cases() -> list[Case]:
    """Queries and keys of each sequence: equal, unequal, zero-length segments."""
    found = []
    for q, k in (
        ([3, 1, 4], None),
        ([5], [7]),
        ([2, 4, 1], [6, 2, 3]),
        ([0, 3, 0, 2], [2, 0, 3, 2]),
    ):
        lengths = q if k is None else k
        mask = ab.BlockDiagonalMask.from_seqlens(q, k, device="cpu")
        made: list[tuple[AttentionBias, See]] = [(mask, full), (mask.make_causal(), top_left)]
        if all(n >= m for m, n in zip(q, lengths, strict=True)):
            made += [
                (mask.make_causal_from_bottomright(), bottom_right),
                (mask.make_local_attention_from_bottomright(2), local_bottom_right(2)),
            ]
        if all(m == 0 or m - 3 < n for m, n in zip(q, lengths, strict=True)):
            made.append((mask.make_local_attention(3), local_top_left(3)))
        tag = f"{q}-{lengths}"
        found += [
            Case(f"{type(x).__name__}-{tag}", x, see, q, packed(lengths), sum(lengths))
            for x, see in made
        ]
    return found


PADDED: list[tuple[Callable[..., AttentionBias], tuple[int, ...], See]] = [
    (ab.BlockDiagonalPaddedKeysMask.from_seqlens, (), full),
    (ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens, (), bottom_right),
    (ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local, (2, 1), band(2, 1)),
    (
        ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local,
        (2,),
        local_bottom_right(2),
    ),
]
Q, KV, PADDING = [2, 0, 3, 1], [4, 3, 2, 0], 5
TABLES = torch.tensor([[7, 2], [0, 5], [3, -9], [99, 99]], dtype=torch.int32)
PAGE, POOL = 3, 24


def paged(first: list[int], lengths: list[int]) -> list[list[int]]:
    found = []
    for s, (a, n) in enumerate(zip(first, lengths, strict=True)):
        found.append([int(TABLES[s, t // PAGE]) * PAGE + t % PAGE for t in range(a, a + n)])
    return found


def cache_cases() -> list[Case]:
    """Padded, gappy and paged keys; a sequence without queries, one without keys, one with fewer
    keys than queries."""
    found = []
    rows = [list(range(s * PADDING, s * PADDING + n)) for s, n in enumerate(KV)]
    for make, window, see in PADDED:
        mask = make(Q, PADDING, KV, *window, device="cpu")
        found.append(Case(type(mask).__name__, mask, see, Q, rows, len(KV) * PADDING))
    starts = [3, 7, 11, 13, 16]
    gaps = [list(range(a, a + n)) for a, n in zip(starts, KV, strict=False)]
    first = [1, 2, 0, 0]
    for gappy, page_gappy, page_padded, see in (
        (
            ab.BlockDiagonalGappyKeysMask,
            ab.PagedBlockDiagonalGappyKeysMask,
            ab.PagedBlockDiagonalPaddedKeysMask,
            full,
        ),
        (
            ab.BlockDiagonalCausalWithOffsetGappyKeysMask,
            ab.PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
            ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
            bottom_right,
        ),
    ):
        masks: list[tuple[AttentionBias, list[list[int]], int]] = [
            (gappy.from_seqlens(Q, starts, KV, device="cpu"), gaps, 16),
            (page_padded.from_seqlens(Q, KV, TABLES, PAGE), paged([0] * 4, KV), POOL),
            (page_gappy.from_seqlens(Q, first, KV, TABLES, PAGE), paged(first, KV), POOL),
        ]
        found += [Case(type(x).__name__, x, see, Q, own, rows) for x, own, rows in masks]
    return found


SEQUENCES = [*block_cases(), *cache_cases()]
EVERY = [*dense_cases(), *SEQUENCES]
