"""Public faults of masks and packed sequences, at the sizes they were reported with (faults.py)."""

from __future__ import annotations

import itertools
from typing import Any

import mask_runs
import pytest
import torch
from mask_runs import Run
from tolerance import Checker
from torch import Tensor

import memeff_attn
from memeff_attn import attn_bias as ab

attention = memeff_attn.memory_efficient_attention
with_lse = memeff_attn.memory_efficient_attention_forward_requires_grad


def lengths(starts: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(starts)]


def run_of(mask: Any, device: str, heads: tuple[int, int], width: int, dtype: torch.dtype) -> Run:
    """Random packed inputs with that many heads of queries and of keys."""
    rows, keys = mask_runs.shape_of(mask)
    query, key, value = (
        torch.randn(1, n, h, width, device=device).to(dtype)
        for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    )
    return Run(mask, query, key, value, mask.materialize((rows, keys), torch.bool, device))


def checked(run: Run, label: str) -> None:
    checker = Checker()
    mask_runs.check(checker, label, run)
    checker.finish()


@pytest.mark.parametrize("causal", [False, True])
def test_b40_zero_length_segments(device: str, causal: bool) -> None:
    """dK and dV of keys whose sequence has no query are exactly 0."""
    sizes = [([0, 150, 150, 300], [0, 100, 200, 300])]
    if device == "cuda":
        sizes.append(([0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]))
    for q, k in sizes:
        mask = ab.BlockDiagonalMask.from_seqlens(lengths(q), lengths(k), device=device)
        mask = mask.make_causal() if causal else mask
        run = run_of(mask, device, (4, 1), 256 if device == "cuda" else 32, torch.bfloat16)
        checked(run, f"{q} {k}")
        key = run.key.clone().requires_grad_()
        value = run.value.clone().requires_grad_()
        grads = torch.autograd.grad(attention(run.query, key, value, mask).sum(), (key, value))
        for (a, b), (c, d) in zip(itertools.pairwise(q), itertools.pairwise(k), strict=True):
            if a == b:
                assert all(x[:, c:d].count_nonzero() == 0 for x in grads)


def test_b41_lengths_that_do_not_fill_tiles(device: str) -> None:
    mask = ab.BlockDiagonalMask.from_seqlens([1, 129, 64, 0, 257], device=device).make_causal()
    heads = 56 if device == "cuda" else 2
    checked(run_of(mask, device, (heads, heads), 128, torch.bfloat16), "b41")


def test_b42_many_queries_few_keys_in_a_sequence(device: str) -> None:
    for q, k in (([256], [2]), ([256, 3, 130], [2, 70, 1])):
        mask = ab.BlockDiagonalMask.from_seqlens(q, k, device=device).make_causal()
        run = run_of(mask, device, (2, 2), 64, torch.float16)
        checked(mask_runs.poisoned(run), f"b42 {q} {k}")


def test_b28_one_query_keeps_its_window_of_shared_heads(device: str) -> None:
    """Keys of stride 0 along the heads, one query: only the window counts."""
    mask = ab.LowerTriangularFromBottomRightLocalAttentionMask(128)
    query = torch.randn(1, 1, 16, 64, device=device).half()
    key, value = (
        torch.randn(1, 512, 1, 64, device=device).half().expand(1, 512, 16, 64) for _ in range(2)
    )
    visible = torch.zeros(1, 512, dtype=torch.bool, device=device)
    visible[:, -128:] = True
    checked(Run(mask, query, key, value, visible), "b28")


def test_b07_position_bias_within_sequences(device: str) -> None:
    """ALiBi over sequences that end within a tile, causal, with its gradient."""
    mask = ab.BlockDiagonalMask.from_seqlens([129, 1, 66], device=device).make_causal()
    run = run_of(mask, device, (2, 2), 64, torch.bfloat16)
    run = mask_runs.with_bias(run, (1, 2, 129, 129), torch.float32, True)
    assert run.bias is not None
    places = torch.arange(129, device=device)
    slopes = torch.tensor([0.5, 0.25], device=device)[:, None, None]
    run.bias.data.copy_(slopes * (places - places[:, None]))
    checked(run, "b07")


def test_b44_a_mask_that_moves_stays_causal(device: str) -> None:
    mask = ab.BlockDiagonalCausalMask.from_seqlens([2, 2], device="cpu").to(device)
    x = torch.randn(1, 4, 1, 8, device=device)
    out = attention(x, x, x, mask)
    # the first query of each sees itself alone; 3xTF32 keeps 22 bits of the value
    torch.testing.assert_close(out[:, ::2], x[:, ::2], rtol=2**-22, atol=0)


@pytest.mark.gpu
def test_b14_packed_offsets_beyond_2_to_the_31(gpu_memory: Any) -> None:
    """512 sequences of 512 tokens, 2^31 elements of query: the last is as it is alone."""
    gpu_memory(16)
    count, length, heads, width = 512, 512, 32, 256
    mask = ab.BlockDiagonalMask.from_seqlens([length] * count, device="cuda").make_causal()
    query = torch.empty(1, count * length, heads, width, device="cuda", dtype=torch.bfloat16)
    query.normal_()
    key, value = (
        torch.randn(1, count * length, 2, width, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    with torch.no_grad():
        out, lse = with_lse(query, key, value, mask)
    checker = Checker()
    for s in (0, count // 2, count - 1):
        rows = slice(s * length, (s + 1) * length)
        own: tuple[Tensor, ...] = (query[:, rows], key[:, rows], value[:, rows])
        checker.attention(f"sequence {s}", out[:, rows], lse[..., rows], *own, causal=1)
    checker.finish()
