"""The dropout mask: Philox's known answers, the layout of its numbers, blocks, rates."""

from __future__ import annotations

import pytest
import torch

from memeff_attn import dropout

ANSWERS = [  # Random123, kat_vectors: philox 4x32 10
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """The definition, in Python's integers."""
    c, k = list(counter), list(key)
    for i in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        if i < 9:
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def python_kept(seed: int, offset: int, p: float, bh: int, m: int, n: int) -> bool:
    """One cell, as the contract words it."""
    unsigned = [x % 2**64 for x in (seed, offset)]
    key = [unsigned[0] & 0xFFFFFFFF, ((unsigned[0] >> 32) ^ (unsigned[1] >> 32)) & 0xFFFFFFFF]
    counter = [(n // 16) * 4 + (n % 8) // 2, m // 2, bh, unsigned[1] & 0xFFFFFFFF]
    word = python_philox(counter, key)[(m % 2) * 2 + (n // 8) % 2]
    return (word >> 16 if n % 2 else word & 0xFFFF) >= dropout.threshold(p)


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_philox_known_answers(device: str, counter: list[int], key: list[int], answer: str) -> None:
    expected = [int(word, 16) for word in answer.split()]
    assert python_philox(counter, key) == expected
    words = [torch.tensor([x] * 9, device=device) for x in (*counter, *key)]
    mine = dropout.philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert [x.tolist() for x in mine] == [[word] * 9 for word in expected]


@pytest.mark.parametrize(
    "state", [(0, 0), (1, 2), (2**63 - 2, 2**40 + 17), (-1, -(2**62)), (2**32, 2**32)]
)
def test_mask_is_the_contract(device: str, state: tuple[int, int]) -> None:
    seed = torch.tensor(state, device=device)
    for p in (1e-6, 0.3, 0.7, 1.0):
        mask = dropout.dropout_mask(seed, p, 2, 3, 5, 37)
        assert mask.shape == (2, 3, 5, 37) and mask.dtype == torch.bool
        expected = [
            [[python_kept(*state, p, bh, m, n) for n in range(37)] for m in range(5)]
            for bh in range(6)
        ]
        assert mask.flatten(0, 1).tolist() == expected


def test_rows_are_rows_of_the_mask(device: str) -> None:
    seed = dropout.new_seed(device)
    whole = dropout.dropout_mask(seed, 0.4, 2, 3, 9, 21)
    for first, last in ((0, 9), (0, 1), (1, 2), (3, 8), (8, 9), (4, 4)):
        for keys in (1, 15, 16, 21):
            heads = torch.tensor([[5], [2]], device=device)
            rows = dropout.dropout_rows(seed, 0.4, heads, first, last, keys)
            expected = whole.flatten(0, 1)[[5, 2], first:last, :keys].unsqueeze(1)
            assert torch.equal(rows, expected)
    assert torch.equal(whole[:1, :2, :7, :19], dropout.dropout_mask(seed, 0.4, 1, 2, 7, 19))


def test_threshold_and_scale() -> None:
    assert dropout.threshold(0.0) == 0 and dropout.keep_scale(0.0) == 1.0
    assert dropout.threshold(1e-6) == 0 and dropout.keep_scale(1e-6) == 1.0
    assert dropout.threshold(0.5) == 32768 and dropout.keep_scale(0.5) == 2.0
    assert dropout.threshold(1.0) == 65536 and dropout.keep_scale(1.0) == 0.0
    assert dropout.threshold(0.9999999) == 65535 and dropout.keep_scale(0.9999999) == 65536.0


def test_rate_and_seeds(device: str) -> None:
    """The rate is that of the threshold within six standard deviations; seeds differ."""
    seed = dropout.new_seed(device)
    for p in (0.01, 0.1, 0.5, 0.9):
        mask = dropout.dropout_mask(seed, p, 2, 2, 300, 500)
        rate = dropout.threshold(p) / 65536
        count = mask.numel()
        limit = 6 * (count * rate * (1 - rate)) ** 0.5
        assert abs(int((~mask).sum()) - rate * count) < limit
    other = dropout.dropout_mask(dropout.new_seed(device), 0.5, 1, 1, 64, 64)
    assert not torch.equal(other, dropout.dropout_mask(seed, 0.5, 1, 1, 64, 64))
    torch.manual_seed(3)
    first = dropout.new_seed(device)
    torch.manual_seed(3)
    assert torch.equal(first, dropout.new_seed(device))
    assert first.shape == (2,) and first.dtype == torch.int64 and bool((first >= 0).all())
