"""Which attention weights dropout drops: a pure function of {seed, offset}, head, query and key.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11) in
counter mode, the same numbers as csrc/common/dropout.h whatever the tile: one call makes eight
16-bit numbers, for two rows and four columns.

    columns of 16:   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15
    column group:     0     1     2     3     0      1       2       3       + 4 * (n // 16)
    even row:        w0    w0    w0    w0    w1     w1      w1      w1       low half: even column
    odd row:         w2    w2    w2    w2    w3     w3      w3      w3       high half: odd column
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CELLS = 1 << 16  # a cell is kept where its 16-bit number is not below the threshold
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def threshold(p: float) -> int:
    """p in 65536ths, rounded; only p = 1 drops everything."""
    return CELLS if p == 1 else min(CELLS - 1, math.floor(p * CELLS + 0.5))


def keep_scale(p: float) -> float:
    """What a kept weight is multiplied by: 1 / (1 - threshold / 65536), 0 where none is kept."""
    dropped = threshold(p)
    return 0.0 if dropped == CELLS else CELLS / (CELLS - dropped)


def new_seed(device: str | torch.device) -> Tensor:
    """{seed, offset} of one call, from torch's generator of the device: follows
    torch.manual_seed, CUDA graphs and checkpointing."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_mask(seed: Tensor, p: float, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """[B, H, M, N], True where a weight is kept: the mask that `memory_efficient_attention` used.

    Args: seed: the {seed, offset} of the call; heads: of the query, G * H with 5-D inputs.
    Memory: O(B * H * M * N), on purpose; attention never builds it.
    """
    every = torch.arange(batch * heads, device=seed.device).view(batch, heads)
    return dropout_rows(seed, p, every, 0, queries, keys)


def dropout_rows(seed: Tensor, p: float, heads: Tensor, first: int, last: int, keys: int) -> Tensor:
    """[*heads.shape, last - first, keys], True where kept: rows `first` to `last` of some heads.

    heads: int64, b * H + h of each.
    """
    return dropout_numbers(seed, heads, first, last, keys) >= threshold(p)


def dropout_numbers(seed: Tensor, heads: Tensor, first: int, last: int, keys: int) -> Tensor:
    """The 16-bit numbers, in int64, that `dropout_rows` compares with the threshold."""
    pairs = torch.arange(first // 2, (last + 1) // 2, device=seed.device)
    blocks = (keys + 15) // 16
    groups = torch.arange(4 * blocks, device=seed.device)
    offset = seed[1]
    counter = (
        groups,
        pairs[:, None],
        heads[..., None, None],
        offset & _WORD,
    )
    key = seed[0] & _WORD, ((seed[0] >> 32) ^ (offset >> 32)) & _WORD
    words = torch.stack(philox(counter, key), -1)  # [..., pairs, groups, 4]
    words = words.view(*words.shape[:-2], blocks, 4, 2, 2)
    numbers = torch.stack((words & (CELLS - 1), words >> 16), -1)
    # [..., pairs, n // 16, (n % 8) // 2, m % 2, n % 16 // 8, n % 2]
    numbers = numbers.movedim(-2, -4).movedim(-2, -5)  # [..., pairs, m % 2, n // 16, n % 16]
    numbers = numbers.flatten(-4).flatten(-3, -2)
    start = first % 2
    return numbers[..., start : start + last - first, :keys]


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit words, in int64, of broadcast 32-bit counters and keys.

    A 64-bit product wraps around in int64; its upper half is read by a shift and a mask.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (x >> 32 & _WORD for x in (product0, product1))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        if i < _ROUNDS - 1:
            k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3
