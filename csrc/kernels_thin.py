"""The rows of the register family's own kernels: short sequences (register/short.h, and backward
register/short_backward.h) and any N with K in steps of 16 (register/thin.h). kernels_rows.py puts
them into the list. Why each tile is what it is: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ELEMENTS = {"f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}


@dataclass(frozen=True)
class Short:
    """Short sequences: all keys of a head in shared memory. Sizes as in register/short.h."""

    max_n: int
    max_k: int
    part: int  # keys whose scores a warp holds at once; max_n: a single pass
    strips: int  # of 16 queries, that a warp takes at once
    warps: int
    blocks: int  # an SM, that the registers must allow
    stage: bool = True  # queries pass through shared memory
    rounds: int = 4  # a block takes at most so many a warp
    bias: bool = False
    spills: bool = False
    max_m: int = 0  # many queries beside few keys: the next row


@dataclass(frozen=True)
class Thin:
    """Any N. Sizes as in register/thin.h."""

    max_k: int
    keys: int  # of a block
    part: int  # whose scores a warp holds at once
    strips: int
    warps: int
    blocks: int
    spills: bool = False


@dataclass(frozen=True)
class ShortGradient:
    """Short sequences, backward: a head in one block. Sizes as in register/short_backward.h."""

    length: int  # of either side
    max_k: int
    part: int  # rows of the other side at a time
    strips: int  # of 16 rows, of an item
    warps: int
    blocks: int
    spills: bool = False


# The shortest tile first.
SHORT = [
    Short(64, 32, 64, 2, 2, 8),
    Short(64, 64, 64, 2, 2, 6, spills=True),
    Short(64, 128, 64, 1, 4, 4, spills=True),
    Short(96, 32, 96, 2, 3, 4, spills=True),
    Short(96, 64, 96, 2, 3, 4, spills=True, max_m=512),
    Short(96, 96, 32, 2, 4, 2, stage=False, spills=True, max_m=2048),
    Short(128, 32, 32, 2, 4, 4, spills=True),
    Short(128, 64, 32, 2, 4, 3, spills=True),
    Short(128, 128, 32, 2, 4, 2, spills=True),
    Short(208, 32, 32, 2, 4, 4, spills=True),
    Short(208, 64, 32, 2, 4, 3, spills=True),
    Short(288, 32, 32, 2, 4, 4, spills=True),
    Short(64, 32, 64, 1, 4, 4, bias=True),
    Short(64, 64, 64, 1, 4, 4, bias=True),
]
# Where wgmma is faster.
SHORT_WIDE = [
    Short(208, 96, 208, 1, 4, 2, spills=True),
    Short(208, 128, 208, 1, 6, 2, stage=False, spills=True),
    Short(288, 64, 64, 2, 4, 2, spills=True),
    Short(288, 96, 32, 2, 4, 2, stage=False, spills=True),
]
# Exponents bound up to K = 32: before kernels of any architecture.
SMALL_K = [
    Thin(16, 128, 32, 2, 4, 4),
    Thin(32, 128, 32, 2, 4, 4, spills=True),
]
THIN = [
    Thin(48, 64, 64, 2, 4, 2),
    Thin(64, 64, 64, 2, 4, 2, spills=True),
    Thin(80, 64, 32, 2, 4, 2),
    Thin(96, 64, 32, 2, 4, 2, spills=True),
]
# After the register family's k128.
THIN_WIDE = [
    Thin(160, 64, 64, 1, 4, 2),
    Thin(192, 32, 32, 1, 4, 2),
]
SHORT_GRADIENTS = [
    ShortGradient(64, 32, 16, 2, 2, 6, spills=True),
    ShortGradient(64, 64, 16, 2, 2, 4, spills=True),
    ShortGradient(96, 32, 16, 2, 3, 4, spills=True),
    ShortGradient(96, 64, 32, 1, 3, 4, spills=True),
    ShortGradient(128, 32, 32, 1, 4, 3, spills=True),
    ShortGradient(128, 64, 32, 1, 4, 3, spills=True),
    ShortGradient(208, 32, 32, 1, 4, 3, spills=True),
    ShortGradient(208, 64, 32, 1, 6, 2, spills=True),
    ShortGradient(208, 96, 32, 1, 8, 1, spills=True),
    ShortGradient(208, 128, 32, 1, 8, 1, spills=True),
    ShortGradient(256, 32, 32, 1, 6, 2, spills=True),
    ShortGradient(256, 64, 16, 2, 8, 1, spills=True),
]

Fields = dict[str, Any]


def common(name: str, dtype: str, max_k: int, warps: int, blocks: int) -> Fields:
    """What all rows here share. None takes packed sequences or pages, none writes fp32."""
    return {
        "name": name,
        "family": "register",
        "arch": "sm80",
        "dtype": dtype,
        "math": "ieee",
        "max_k": max_k,
        "max_kv": max_k,
        "alignment": 8,
        "value_tile": max_k,
        "threads": 32 * warps,
        "blocks_per_sm": blocks,
        "min_sm": 80,
        "max_sm": 999,
        "pages": False,
        "sequences": False,
    }


def traits(kind: str, dtype: str, *arguments: object) -> str:
    words = (str(x).lower() if isinstance(x, bool) else str(x) for x in arguments)
    return f"registers::{kind}Traits<{', '.join([ELEMENTS[dtype], *words])}>"


def short_rows(shapes: list[Short], dtype: str) -> Iterator[Fields]:
    for x in shapes:
        name = f"register_sm80_{dtype}_k{x.max_k}_n{x.max_n}" + "_bias" * x.bias
        staged = x.warps * 16 * x.strips if x.stage else 0  # queries
        sizes = (x.max_n, x.max_k, x.part, x.strips, x.warps, x.rounds)
        yield common(name, dtype, x.max_k, x.warps, x.blocks) | {
            "bias": x.bias,
            "tile_m": 16 * x.strips * x.warps * x.rounds,
            "tile_n": x.max_n,
            "smem_bytes": 2 * x.max_k * (2 * x.max_n + staged),
            "traits": traits("Short", dtype, *sizes, x.stage, x.bias, x.blocks),
            "max_n": x.max_n,
            "max_m": x.max_m,
            "allow_spill": x.spills,
            "header": "register/short_launch.h",
        }


def thin_rows(shapes: list[Thin], dtype: str) -> Iterator[Fields]:
    for x in shapes:
        tile_m = 16 * x.strips * x.warps
        sizes = (x.max_k, x.keys, x.part, x.strips, x.warps, x.blocks)
        name = f"register_sm80_{dtype}_k{x.max_k}_thin"
        yield common(name, dtype, x.max_k, x.warps, x.blocks) | {
            "bias": False,
            "tile_m": tile_m,
            "tile_n": x.keys,
            "smem_bytes": 2 * x.max_k * (2 * x.keys + max(2 * x.keys, tile_m)),
            "traits": traits("Thin", dtype, *sizes),
            # Smaller grids: rows that cut the keys into parts, or have smaller tiles.
            "min_m": 65,
            "min_blocks_per_sm": 1.5,
            "allow_spill": x.spills,
            "header": "register/thin_launch.h",
        }


def gradient_rows(shapes: list[ShortGradient], dtype: str) -> Iterator[Fields]:
    for x in shapes:
        name = f"register_bwd_sm80_{dtype}_k{x.max_k}_n{x.length}"
        sizes = (x.length, x.max_k, x.part, x.strips, x.warps)
        yield common(name, dtype, x.max_k, x.warps, x.blocks) | {
            "bias": False,
            "tile_m": x.length,
            "tile_n": x.length,
            # Four operands, two statistics of each query, a counter; whole 128 bytes.
            "smem_bytes": -(-(x.length * (8 * x.max_k + 8) + 4) // 128) * 128,
            "traits": traits("ShortBackward", dtype, *sizes, x.blocks),
            "max_n": x.length,
            "min_blocks_per_sm": 1.0,  # smaller grids: rows that take a head in several blocks
            "allow_spill": x.spills,
            "header": "register/short_backward_launch.h",
            "kind": "bwd",
        }
