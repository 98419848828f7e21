"""Few queries: heads that share a key head in one tile, keys cut into parts and merged. Whatever
the plan, the result is attention's; what packing touches (query, out, lse, bias) is tried with
strides of its own."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import torch
from cases import Case

_C = pytest.importorskip("memeff_attn._C")

# sm_90, every row built
REQUEST: dict[str, Any] = {"dtype": "f16", "sm": 90, "any_build": True, "alignment": 16}


def plan(**sizes: int) -> tuple[str, int]:
    return _C.forward_plan({**REQUEST, "K": 128, "Kv": 128, **sizes})  # type: ignore[no-any-return]


def test_parts_fill_the_gpu_once() -> None:
    """As many parts as keep the blocks running together; none where the grid is large or the keys
    are few."""
    row, parts = plan(B=1, M=4, N=32768, H=8)
    assert row == "chained_sm80_f16_k128_m16" and parts == 64
    for sizes in ({"B": 16, "M": 4, "N": 8192, "H": 8}, {"B": 1, "M": 512, "N": 32768, "H": 16}):
        row, parts = plan(**sizes)
        facts = next(r for r in _C.variants() if r["name"] == row)
        places = 132 * min(facts["blocks_per_sm"], (228 << 10) // (facts["smem_bytes"] + 1024))
        blocks = sizes["B"] * sizes["H"] * -(-sizes["M"] // facts["tile_m"])
        assert parts > 1 and blocks * parts <= places < blocks * (parts + 1)
    assert plan(B=64, M=1, N=2048, H=32)[1] == 1
    assert plan(B=1, M=1, N=256, H=1)[1] == 1
    assert plan(B=8, M=2048, N=2048, H=16)[1] == 1
    for rows in (4, 64):
        _, parts = plan(B=1, M=rows, N=32768, H=8, alignment=4, dtype="f32")
        assert 132 // 8 <= parts <= 64


def test_long_keys_keep_the_large_tile() -> None:
    """Parts of the keys fill the GPU, so few queries over many keys need no small tiles."""
    assert plan(B=1, M=512, N=32768, H=16)[0] == "register_sm80_f16_k128"
    assert plan(B=1, M=512, N=256, H=16)[0] == "register_sm80_f16_k128_m64"


SIZES = [
    {"B": 1, "M": 1, "N": 3000, "H": 8, "Hkv": 2},
    {"B": 3, "M": 1, "N": 70, "H": 4, "Hkv": 1},
    {"B": 1, "M": 1, "N": 5000, "H": 4},
    {"B": 2, "M": 1, "N": 1, "H": 8, "Hkv": 4},
    {"B": 1, "M": 5, "N": 1900, "H": 6, "Hkv": 3},
    {"B": 1, "M": 64, "N": 4096, "H": 2},
    {"B": 1, "M": 100, "N": 3333, "H": 2, "Hkv": 1},
    {"B": 1, "M": 300, "N": 2500, "H": 2},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_oracle(dtype: str) -> None:
    dims = ((128, 128), (64, 64), (40, 72), (256, 256), (320, 33))
    every = itertools.product(SIZES, dims, ("none", "bottom_right", "top_left"))
    cases.run(
        [Case(dtype, K=k, Kv=kv, mask=mask, **sizes) for sizes, (k, kv), mask in every], "cuda"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_what_packing_touches(dtype: str) -> None:
    """Biases of every broadcast and layout, strides of the inputs, the 5-D layout."""
    biases = [
        "".join(dims) + rest
        for dims in itertools.product("b1", "h1", "m1", "n1")
        for rest in ("", ":bool", ":f32", ":padded", ":transposed", ":expanded")
    ]
    sizes = {"B": 2, "M": 1, "N": 777, "H": 8, "Hkv": 2}
    strides = ("heads_first", "padded8", "padded1", "offset1", "batch0", "last_dim")
    cases.run(
        [Case(dtype, bias=bias, **sizes) for bias in biases]
        + [Case(dtype, strides=name, **sizes) for name in strides]
        + [Case(dtype, rank="bmghk", strides="heads0", M=1, N=n, H=4) for n in (70, 3000)],
        "cuda",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parts_without_keys(dtype: torch.dtype) -> None:
    """A window that leaves most parts nothing, and a row that sees no key at all."""
    import memeff_attn
    from memeff_attn.attn_bias import LocalAttentionFromBottomRightMask

    q, k, v = (torch.randn(1, n, 1, 128, device="cuda", dtype=dtype) for n in (4, 8192, 8192))
    mask = LocalAttentionFromBottomRightMask(100, 0)
    out = memeff_attn.memory_efficient_attention(q, k, v, mask)
    near = memeff_attn.memory_efficient_attention(q, k[:, -200:], v[:, -200:], mask)
    torch.testing.assert_close(out, near, atol=2e-3, rtol=0)
    hidden = torch.zeros(1, 1, 4, 8192, device="cuda", dtype=torch.bool)
    hidden[:, :, 1:, 17] = True
    out, lse = memeff_attn.memory_efficient_attention_forward_requires_grad(q, k, v, hidden)
    assert (out[:, 0] == 0).all()
    exact = {"atol": 0.0, "rtol": 0.0 if dtype == torch.float16 else 1e-6}  # 3xTF32 splits values
    torch.testing.assert_close(out[0, 1:, 0], v[0, 17].expand(3, 128), **exact)
    first = lse[0] if lse.dim() == 4 else lse
    assert first[0, 0, 0] == -float("inf") and torch.isfinite(first[0, 0, 1:]).all()
    v[0, 100] = float("nan")  # hidden, beside keys of a tile that is read
    out, lse = memeff_attn.memory_efficient_attention_forward_requires_grad(q, k, v, hidden)
    assert (out[:, 0] == 0).all()
