"""docs/migrating.md: its rows for PyTorch's attention give PyTorch's result, and those for
flash-attn what flash-attn's documentation defines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from memeff_attn import attn_bias as ab
from memeff_attn import memory_efficient_attention as call

CLOSE = {"atol": 2e-5, "rtol": 1e-4}
M, N, H = 7, 12, 4


def three(device: str, kv_heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, M, H, 16, device=device)
    k, v = (torch.randn(2, N, kv_heads, 16, device=device) for _ in range(2))
    return q, k, v


def as_sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def test_sdpa(device: str) -> None:
    q, k, v = three(device)
    seen = torch.rand(2, 1, M, N, device=device) < 0.7
    seen[..., 0] = True
    bias = torch.randn(1, H, M, N, device=device)
    for mine, theirs in (
        ({}, {}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"attn_bias": seen}, {"attn_mask": seen}),
        ({"attn_bias": bias}, {"attn_mask": bias}),
        ({"attn_bias": ab.LowerTriangularMask()}, {"is_causal": True}),
    ):
        torch.testing.assert_close(call(q, k, v, **mine), as_sdpa(q, k, v, **theirs), **CLOSE)
    q, k, v = three(device, kv_heads=2)
    wide = [x.repeat_interleave(2, 2) for x in (k, v)]
    torch.testing.assert_close(call(q, k, v), as_sdpa(q, *wide), **CLOSE)


def distance(device: str) -> Tensor:
    """i + N - M - j: how far behind the query's own key."""
    rows = torch.arange(M, device=device)[:, None] + N - M
    return rows - torch.arange(N, device=device)


FLASH: dict[str, tuple[ab.AttentionBias, Callable[[Tensor], Tensor]]] = {
    "causal=True": (ab.LowerTriangularFromBottomRightMask(), lambda d: d >= 0),
    "window_size=(3, 2)": (
        ab.LocalAttentionFromBottomRightMask(3, 2),
        lambda d: (d <= 3) & (d >= -2),
    ),
    "causal=True, window_size=(3, 0)": (
        ab.LowerTriangularFromBottomRightLocalAttentionMask(4),
        lambda d: (d <= 3) & (d >= 0),
    ),
}


@pytest.mark.parametrize("name", FLASH)
def test_flash_attn(device: str, name: str) -> None:
    q, k, v = three(device)
    mask, seen = FLASH[name]
    visible = seen(distance(device))
    wanted = as_sdpa(q, k, v, attn_mask=visible)
    torch.testing.assert_close(call(q, k, v, mask), wanted, **CLOSE)


def test_flash_attn_alibi_varlen_and_cache(device: str) -> None:
    q, k, v = three(device)
    slopes = torch.rand(H, device=device)
    bias = -slopes[None, :, None, None] * distance(device).abs()
    mask = ab.LowerTriangularFromBottomRightMask().add_bias(bias)
    dense = bias.masked_fill(distance(device) < 0, -math.inf)
    torch.testing.assert_close(call(q, k, v, mask), as_sdpa(q, k, v, attn_mask=dense), **CLOSE)
    # two sequences as one, their lengths as lists; and the first 12 and 9 keys of a cache
    packed = [x.flatten(0, 1)[None] for x in (q, k, v)]
    blocks = ab.BlockDiagonalMask.from_seqlens([M] * 2, [N] * 2, device=device)
    causal = call(q, k, v, ab.LowerTriangularFromBottomRightMask())
    found = call(*packed, blocks.make_causal_from_bottomright())
    torch.testing.assert_close(found.view(causal.shape), causal, **CLOSE)
    cache = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [M] * 2, N, [N, 9], device=device
    )
    found = call(*packed, cache).view(causal.shape)
    short = call(q[1:], k[1:, :9], v[1:, :9], ab.LowerTriangularFromBottomRightMask())
    torch.testing.assert_close(found, torch.cat([causal[:1], short]), **CLOSE)
