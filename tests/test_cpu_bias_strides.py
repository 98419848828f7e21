"""torch's CPU kernel and a bias whose last stride is not 1, as T5 makes it (a permuted table)."""

from __future__ import annotations

import pytest
import torch
from tolerance import check

from memeff_attn import memory_efficient_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["permuted", "expanded keys", "bool"])
def test_bias_of_any_strides(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 40, 4, 16).to(dtype) for _ in range(3))
    bias = 4 * torch.randn(40, 40, 4).to(dtype).permute(2, 0, 1)[None].expand(2, -1, -1, -1)
    if kind == "bool":
        bias = bias > 0
    elif kind == "expanded keys":
        bias = bias[..., :1].expand(-1, -1, -1, 40)
    assert bias.stride(-1) != 1
    out = memory_efficient_attention(query, key, value, bias)
    check(out, None, query, key, value, bias)
