"""Paths inside a backward or forward row that no field of the variant list shows: short sequences
in one kernel, the bias by wide copies, narrow copies or loads, its gradient from the queries'
kernel or from its own. Sizes sit on both sides of each border."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import backward_cases
import cases
import pytest
from backward_cases import BackwardCase

memeff_attn = pytest.importorskip("memeff_attn")

SHORT = (1, 17, 49, 64, 65, 82, 127, 128, 129)


def _short(dtype: str) -> Iterator[BackwardCase]:
    for head_dims in ((8, 8), (32, 24), (32, 32), (16, 64), (64, 40), (64, 64), (72, 64)):
        k, kv = head_dims
        for i, m in enumerate(SHORT):
            for n in (SHORT[-1 - i], m, 64, 100):
                mask = ("none", "top_left", "bottom_right")[(m + n) % 3]
                yield BackwardCase(dtype, B=2, M=m, N=n, H=3, K=k, Kv=kv, mask=mask)
    for m, n in ((64, 64), (100, 128)):  # shared keys and fewer gradients take the other kernels
        yield BackwardCase(dtype, B=2, M=m, N=n, H=4, Hkv=2, K=32)
        for wants in ("q", "k", "v", "qk", "kv"):
            yield BackwardCase(dtype, B=2, M=m, N=n, H=2, K=64, wants=wants)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_short_sequences(dtype: str) -> None:
    backward_cases.run(list(_short(dtype)), "cuda")


# "padded" rows are N + 3 elements apart: 16-byte copies, 4-byte ones, loads.
COLUMNS = {"wide": (61, 197), "narrow": (63, 135), "odd": (62, 130)}


@pytest.mark.gpu
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_ways_to_the_bias(dtype: str, columns: str) -> None:
    """Broadcasts, the input's dtype, fp32 and bool, three alignments; K of every kind of row."""
    kinds = itertools.product(
        ("bhmn", "1hmn", "b11n", "bhm1", "11mn"), ("", ":bool", ":f32"), (16, 64, 128, 160)
    )
    backward_cases.run(
        [
            BackwardCase(dtype, B=3, M=m, N=n, H=2, K=k, bias=f"{shape}{kind}:padded", p=p)
            for shape, kind, k in kinds
            for m, n, p in zip((70, 200), COLUMNS[columns], (0.0, 0.3), strict=True)
        ],
        "cuda",
    )
