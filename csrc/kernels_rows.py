"""THE variant list: every kernel of the library, in order of preference.

kernels.py reads it and is its only user. To change a tile, change its row; to add a kernel, add
one. Each row states its shared memory; a static_assert in the generated unit compares it with what
the traits derive (`python csrc/kernels_rows.py` prints the list). Why each tile is what it is:
docs/performance.md.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


def beside(name: str) -> Any:
    """A file of this folder as a module, however this one was loaded."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own = beside("kernels_thin")


@dataclass(frozen=True)
class Variant:
    name: str
    family: str  # "chained"
    arch: str  # sub-family: "sm70" | "sm75" | "sm80" | "simt"
    dtype: str  # of query, key and value: "f16" | "bf16" | "f32"
    math: str  # "ieee" | "tf32": the latter only where the request allows TF32
    max_k: int  # largest K, 0 = any
    max_kv: int  # largest Kv, 0 = any
    alignment: int  # elements: addresses, strides, K and Kv are multiples of it
    bias: bool  # serves calls with a bias, and only those
    tile_m: int
    tile_n: int
    value_tile: int
    threads: int
    smem_bytes: int  # dynamic shared memory of a block
    min_sm: int  # automatic choice only for these compute capabilities
    max_sm: int
    traits: str  # C++ type
    max_m: int = 0  # with max_blocks_per_sm: automatic choice only when M <= max_m, ...
    max_blocks_per_sm: float = 0  # ... or when this row's grid has at most so many blocks an SM
    min_m: int = 0  # automatic choice only when M >= min_m, ...
    min_blocks_per_sm: float = 0  # ... and when this row's grid has so many blocks an SM
    partial: bool = False  # writes results in fp32 too (params.h: Partial)
    pages: bool = True  # reads keys through a block table
    bias_alignment: int = 0  # elements; of a bias of the query's dtype alone; 0: any bias
    allow_spill: bool = False
    blocks_per_sm: int = 1  # that the registers allow; the plan of split keys counts on them
    in_memory: bool = False  # a block writes all value columns, a value tile at a time
    header: str = "chained/launch.h"
    kind: str = "fwd"  # "fwd" | "bwd"
    # Forward: serves calls with dropout, and only those; with bias also set, both with and without
    # a bias ("full"). Backward: full rows (bias and dropout set) serve calls with either or both.
    dropout: bool = False
    adds_query: bool = False  # backward: dQ is summed by atomics, in no fixed order
    min_length: int = 0  # automatic choice only where M or N is longer
    max_n: int = 0  # longest N, 0 = any; of backward rows longest M too, and no shared key heads
    sequences: bool = True  # takes packed sequences


@dataclass(frozen=True)
class Shape:
    """A tile before dtype and bias are chosen. Sizes as in chained/traits.h."""

    suffix: str
    tile: tuple[int, int, int]  # queries, keys, value columns
    warp: tuple[int, int, int]  # queries, keys of S, value columns of O
    # "resident:K": the query tile stays in shared memory; "streamed:S": S pipeline stages;
    # "compensated:2": streamed, scores in compensated sums
    qk: str
    smem: int
    max_kv: int = 0
    alignment: int = 0  # 0: 16 bytes
    blocks: int = 1  # blocks an SM that the registers must allow
    in_memory: bool = False  # O accumulates in the fp32 output
    max_m: int = 0
    max_blocks_per_sm: float = 0
    bias: tuple[bool, ...] = (False, True)
    spills: tuple[bool, ...] = ()  # values of bias for which a few registers spill
    full: bool = False  # the row with a bias serves dropout too, and only that
    bias_smem: int = 0  # of the row with a bias; 0: smem
    family: str = "chained"  # "register": P in registers (register/register_mma.h)


@dataclass(frozen=True)
class Gradient:
    """A tile of the backward pass. Sizes as in chained/backward_traits.h; `tile` is rows of the
    owner's side, rows of the loop's side, columns of the output."""

    suffix: str
    tile: tuple[int, int, int]
    warp: tuple[int, int, int]
    qk: str
    smem: tuple[int, ...]  # of each of `kinds`
    max_k: int = 0  # K and Kv
    alignment: int = 0
    blocks: tuple[int, int] = (1, 1)  # an SM: of the queries' kernel, of the keys'
    full_blocks: tuple[int, int] = (1, 1)
    buffers: int = 1
    kinds: tuple[str, ...] = ("plain", "full")  # keys of FEATURES
    max_m: int = 0
    spills: bool = False


@dataclass(frozen=True)
class Wgmma:
    """A tile of the hopper family. Sizes as in hopper/traits.h."""

    suffix: str
    tile: tuple[int, int, int]  # queries, keys, the largest K and Kv
    stages: int  # of keys and of values
    smem: dict[str, int]  # of each kind (a key of FEATURES)
    spills: bool = True  # in the warp that copies, and a few in tiles with masks
    min_blocks_per_sm: float = 0.5


@dataclass(frozen=True)
class SumGradient:
    """A tile of the backward pass that adds dQ up. Sizes as in register/backward_traits.h; `tile`
    is keys, queries of the loop, columns."""

    suffix: str
    tile: tuple[int, int, int]
    roles: int
    parts: int
    scores: int  # queries of one product of scores
    ds_buffers: int
    smem: tuple[int, ...]  # of each of `kinds`
    kinds: tuple[str, ...] = ("plain", "dropout")
    blocks: int = 1
    spills: bool = False
    min_length: int = 0


# Of backward and hopper rows: the policy of chained/traits.h, bias, dropout. Full rows serve calls with either
# or both.
FEATURES = {
    "plain": ("NoBias", False, False),
    "dropout": ("DropoutOnly", False, True),
    "bias": ("TensorBias", True, False),
    "full": ("FullBias", True, True),
}
QK = {"resident": "ResidentQk<{}>", "streamed": "StreamedQk<{}>", "compensated": "CompensatedQk"}
BYTES = {"f16": 2, "bf16": 2, "f32": 4}
BOTH = (False, True)
PLAIN = ("plain",)
NO_BIAS = (False,)
BIAS = (True,)
SPACES = {"register": "registers"}  # C++ namespaces that are not the family's name: a keyword
FEW_QUERIES: dict[str, Any] = {"max_m": 64, "max_blocks_per_sm": 3}


def variants(
    shapes: list[Shape],
    arch: str,
    cpp_arch: str,
    dtype: str,
    sms: tuple[int, int],
    math: str = "ieee",
) -> Iterator[Variant]:
    """The rows of a list of shapes: one without and one with a bias each, as the shape says."""
    for shape in shapes:
        kind, size = shape.qk.split(":")
        qk = f"chained::{QK[kind].format(size)}"
        family, space = shape.family, SPACES.get(shape.family, shape.family)
        output = "OutputInMemory" if shape.in_memory else "OutputInRegisters"
        alignment = shape.alignment or 16 // BYTES[dtype]
        warps = shape.tile[0] // shape.warp[0] * (shape.tile[1] // shape.warp[1])
        for bias in shape.bias:
            arguments = [
                f"chained::{cpp_arch}",
                f"chained::Tile<{', '.join(map(str, shape.tile))}>",
                f"chained::Warp<{', '.join(map(str, shape.warp))}>",
                qk,
                *([] if family == "register" else [f"chained::{output}"]),
                str(alignment),
                f"chained::{'FullBias' if shape.full else 'TensorBias' if bias else 'NoBias'}",
                str(shape.blocks),
            ]
            end = "full" if shape.full else "bias" * bias
            parts = [family, arch, dtype, "tf32" * (math == "tf32"), shape.suffix, end]
            yield Variant(
                name="_".join(filter(None, parts)),
                family=family,
                arch=arch,
                dtype=dtype,
                math=math,
                max_k=int(size) if kind == "resident" else 0,
                max_kv=shape.max_kv,
                alignment=alignment,
                bias=bias,
                tile_m=shape.tile[0],
                tile_n=shape.tile[1],
                value_tile=shape.tile[2],
                threads=32 * warps,
                smem_bytes=(bias and shape.bias_smem) or shape.smem,
                min_sm=sms[0],
                max_sm=sms[1],
                traits=f"{space}::ForwardTraits<{', '.join(arguments)}>",
                max_m=shape.max_m,
                max_blocks_per_sm=shape.max_blocks_per_sm,
                allow_spill=bias in shape.spills,
                blocks_per_sm=shape.blocks,
                in_memory=shape.in_memory,
                header=f"{family}/launch.h",
                dropout=shape.full,
                partial=True,
            )


def wgmma(shapes: list[Wgmma], cpp_element: str, dtype: str) -> Iterator[Variant]:
    for shape in shapes:
        for feature, smem in shape.smem.items():
            policy, bias, dropout = FEATURES[feature]
            tile = ", ".join(map(str, shape.tile))
            parts = ["hopper_sm90", dtype, shape.suffix, feature.replace("plain", "")]
            yield Variant(
                name="_".join(filter(None, parts)),
                family="hopper",
                arch="sm90",
                dtype=dtype,
                math="ieee",
                max_k=shape.tile[2],
                max_kv=shape.tile[2],
                alignment=8,
                bias=bias,
                tile_m=shape.tile[0],
                tile_n=shape.tile[1],
                value_tile=shape.tile[2],
                threads=128 + 2 * shape.tile[0],
                smem_bytes=smem,
                min_sm=90,
                max_sm=90,
                traits=f"hopper::ForwardTraits<{cpp_element}, hopper::Tile<{tile}>, "
                f"{shape.stages}, chained::{policy}>",
                min_m=65,
                min_blocks_per_sm=shape.min_blocks_per_sm,
                pages=False,
                bias_alignment=8 * bias,
                allow_spill=shape.spills,
                header="hopper/launch.h",
                dropout=dropout,
            )


def gradients(
    shapes: list[Gradient],
    arch: str,
    cpp_arch: str,
    dtype: str,
    sms: tuple[int, int],
    math: str = "ieee",
) -> Iterator[Variant]:
    """The backward rows of a list of shapes: plain, then full (bias, dropout)."""
    for shape in shapes:
        kind, size = shape.qk.split(":")
        alignment = shape.alignment or 16 // BYTES[dtype]
        warps = shape.tile[0] // shape.warp[0] * (shape.tile[1] // shape.warp[1])
        for feature, smem in zip(shape.kinds, shape.smem, strict=True):
            policy, bias, dropout = FEATURES[feature]
            arguments = [
                f"chained::{cpp_arch}",
                f"chained::Tile<{', '.join(map(str, shape.tile))}>",
                f"chained::Warp<{', '.join(map(str, shape.warp))}>",
                f"chained::{QK[kind].format(size)}",
                str(alignment),
                f"chained::{policy}",
                *map(str, shape.full_blocks if bias else shape.blocks),
                str(shape.buffers),
            ]
            parts = ["chained_bwd", arch, dtype, "tf32" * (math == "tf32"), shape.suffix]
            yield Variant(
                name="_".join(filter(None, [*parts, feature.replace("plain", "")])),
                family="chained",
                arch=arch,
                dtype=dtype,
                math=math,
                max_k=shape.max_k,
                max_kv=shape.max_k,
                alignment=alignment,
                bias=bias,
                tile_m=shape.tile[0],
                tile_n=shape.tile[1],
                value_tile=shape.tile[2],
                threads=32 * warps,
                smem_bytes=smem,
                min_sm=sms[0],
                max_sm=sms[1],
                traits=f"chained::BackwardRow<{', '.join(arguments)}>",
                max_m=shape.max_m,
                allow_spill=shape.spills,
                blocks_per_sm=min(shape.full_blocks if bias else shape.blocks),
                header="chained/backward_launch.h",
                kind="bwd",
                dropout=dropout,
            )


# Hopper: TMA and wgmma.
HOPPER = [
    Wgmma("k64", (192, 128, 64), 2, {"plain": 115712, "dropout": 115712}),
    Wgmma("k64", (128, 128, 64), 2, {"bias": 164864}),
    Wgmma("k96", (128, 128, 96), 2, {"plain": 197632, "bias": 230400}),
    Wgmma("k128", (128, 128, 128), 2, {"plain": 197632, "dropout": 197632, "bias": 230400}),
    Wgmma("k192", (128, 96, 192), 2, {"plain": 197632}),
    Wgmma("k256", (128, 64, 256), 2, {"plain": 197632, "dropout": 197632, "bias": 230400}),
]
def sum_gradients(
    shapes: list[SumGradient], cpp_type: str, dtype: str, sms: tuple[int, int]
) -> Iterator[Variant]:
    """The backward rows of the register family."""
    for shape, (feature, smem) in (
        (shape, kind) for shape in shapes for kind in zip(shape.kinds, shape.smem, strict=True)
    ):
        keys, queries, columns = shape.tile
        _, bias, dropout = FEATURES[feature]
        sizes = (shape.roles, shape.parts, shape.scores, shape.ds_buffers, shape.blocks)
        arguments = [f"cutlass::{cpp_type}", *map(str, (*shape.tile, *sizes))]
        parts = [f"register_bwd_sm80_{dtype}_{shape.suffix}", feature.replace("plain", "")]
        yield Variant(
            name="_".join(filter(None, parts)),
            family="register",
            arch="sm80",
            dtype=dtype,
            math="ieee",
            max_k=columns,
            max_kv=columns,
            alignment=8,
            bias=bias,
            tile_m=keys,
            tile_n=queries,
            value_tile=columns,
            threads=shape.roles * shape.parts * keys,  # a warp for each 32 keys, role and part
            smem_bytes=smem,
            min_sm=sms[0],
            max_sm=sms[1],
            traits=f"registers::BackwardRow<{', '.join([*arguments, *['true'] * dropout])}>",
            allow_spill=shape.spills,
            blocks_per_sm=shape.blocks,
            header="register/backward_launch.h",
            kind="bwd",
            dropout=dropout,
            adds_query=True,
            min_length=shape.min_length,
        )


# Ampere and later, 16 bits. Resident rows: a warp owns whole rows, nothing is exchanged between
# warps. Blocks of 64 queries where 128 would be half empty or too few to fill the GPU.
REGISTER: dict[str, Any] = {"family": "register"}
SM80_16_FEW = [  # blocks of 64 queries and fewer
    Shape("k32_m64", (64, 64, 32), (16, 64, 32), "resident:32", 12880, 32, blocks=4, bias=NO_BIAS,
          spills=BOTH, **FEW_QUERIES, **REGISTER),
    Shape("k32_m64", (64, 64, 32), (16, 64, 32), "resident:32", 22096, 32, blocks=3, bias=BIAS,
          spills=BOTH, **FEW_QUERIES, **REGISTER),
    Shape("k64_m64", (64, 128, 64), (16, 128, 64), "resident:64", 41552, 64, blocks=3, bias=NO_BIAS,
          spills=BOTH, **FEW_QUERIES, **REGISTER),
    Shape("k64_m64", (64, 64, 64), (16, 64, 64), "resident:64", 34384, 64, blocks=3, bias=BIAS,
          spills=BIAS, **FEW_QUERIES, **REGISTER),
    # Decoding: up to 16 queries, more blocks an SM to keep copies in flight.
    Shape("k128_m16", (16, 64, 128), (16, 16, 32), "resident:128", 39312, 128, blocks=4,
          bias=NO_BIAS, max_m=16),
    Shape("k128_m64", (64, 64, 128), (16, 64, 128), "resident:128", 49744, 128, blocks=3,
          bias=NO_BIAS, max_m=64, max_blocks_per_sm=2, spills=NO_BIAS, **REGISTER),
    Shape("k128_m64", (64, 64, 128), (16, 64, 128), "resident:128", 58960, 128, blocks=2,
          bias=BIAS, **REGISTER),
]  # fmt: skip
SM80_16 = [
    Shape("k32", (128, 128, 32), (32, 128, 32), "resident:32", 25680, 32, blocks=2, bias=NO_BIAS,
          spills=BOTH, **REGISTER),
    Shape("k32", (128, 64, 32), (32, 64, 32), "resident:32", 35920, 32, blocks=2, bias=BIAS,
          **REGISTER),
    Shape("k64", (128, 128, 64), (32, 128, 64), "resident:64", 50256, 64, blocks=2, bias=NO_BIAS,
          spills=NO_BIAS, **REGISTER),
    Shape("k64", (128, 64, 64), (32, 64, 64), "resident:64", 52304, 64, blocks=2, bias=BIAS,
          spills=BIAS, **REGISTER),
    Shape("k128", (128, 64, 128), (32, 64, 128), "resident:128", 66640, 128, blocks=2, bias=NO_BIAS,
          spills=NO_BIAS, **REGISTER),
    Shape("k256", (64, 64, 256), (16, 64, 256), "resident:256", 98896, 256, blocks=2, spills=BOTH,
          **REGISTER),
    # The same with P in shared memory.
    Shape("k64", (128, 64, 64), (32, 64, 64), "resident:64", 50256, 64, blocks=2, bias=NO_BIAS),
    Shape("k128", (128, 64, 128), (32, 64, 128), "resident:128", 83024, 128, blocks=2, bias=NO_BIAS,
          spills=NO_BIAS),
    Shape("k256", (64, 64, 256), (16, 64, 256), "resident:256", 107088, 256, blocks=2,
          bias=NO_BIAS),
    Shape("k320", (128, 64, 320), (16, 64, 320), "resident:320", 181328, 320, bias=NO_BIAS,
          spills=NO_BIAS),
    Shape("v384", (64, 128, 384), (16, 64, 192), "streamed:3", 189264, 384, bias=NO_BIAS),
    # 227 KB a block: H100, H200. Then 163 KB: A100. Then 99 KB: sm86, sm89.
    Shape("v512", (64, 128, 512), (32, 32, 128), "streamed:3", 222544, spills=BOTH),
    Shape("v512_small", (64, 64, 512), (32, 16, 128), "streamed:3", 124240, bias_smem=133456,
          spills=BIAS),
    Shape("v256_small", (64, 64, 256), (32, 32, 128), "streamed:3", 90960, bias_smem=100176,
          spills=BOTH),
]  # fmt: skip
SM80_16_UNALIGNED = [
    Shape("unaligned", (64, 64, 128), (32, 32, 64), "streamed:2", 58192, alignment=1, blocks=2,
          spills=BOTH),
]  # fmt: skip
# Ampere and later, fp32 and TF32. cp.async moves single fp32 elements, so unaligned data takes the
# same tiles. fp32 up to K = 128 on bf16 tensor cores, in three parts; wider ones by 3xTF32.
SM80_F32_FEW = [
    Shape(
        "few", (16, 64, 128), (16, 16, 32), "compensated:2", 57808, alignment=1, max_m=16,
        blocks=3,
    ),
]  # fmt: skip
SM80_F32_SPLIT = [
    Shape("k32", (128, 32, 32), (32, 32, 32), "resident:32", 42592, 32, blocks=2, **REGISTER),
    Shape("k64", (128, 32, 64), (32, 32, 64), "resident:64", 83552, 64, blocks=2, **REGISTER),
    Shape("k128", (64, 32, 128), (16, 32, 128), "resident:128", 115552, 128, blocks=2, **REGISTER),
    Shape("k32_u", (128, 32, 32), (32, 32, 32), "resident:32", 42592, 32, alignment=1, blocks=2,
          **REGISTER),
    Shape("k64_u", (128, 32, 64), (32, 32, 64), "resident:64", 83552, 64, alignment=1, blocks=2,
          **REGISTER),
    Shape("k128_u", (64, 32, 128), (16, 32, 128), "resident:128", 115552, 128, alignment=1,
          blocks=2, **REGISTER),
]  # fmt: skip
SM80_TF32 = [
    Shape("k32", (128, 64, 32), (32, 64, 32), "resident:32", 67152, 32, blocks=2, spills=BOTH),
    Shape("k64", (128, 64, 64), (32, 64, 64), "resident:64", 99920, 64, spills=BOTH),
    Shape("k96", (64, 64, 96), (16, 64, 96), "resident:96", 90960, 96, blocks=2, bias=NO_BIAS),
    Shape("k128", (128, 64, 128), (32, 32, 64), "resident:128", 165968, 128, spills=BIAS),
    Shape("k32_u", (128, 64, 32), (32, 64, 32), "resident:32", 67152, 32, alignment=1, blocks=2,
          spills=BOTH),
    Shape("k64_u", (64, 64, 64), (32, 32, 32), "resident:64", 66640, 64, alignment=1, blocks=2),
]  # fmt: skip
SM80_F32 = [
    Shape("k256", (64, 64, 256), (32, 16, 64), "resident:256", 214608, 256),
    Shape("any", (64, 64, 64), (32, 32, 32), "streamed:3", 71248, in_memory=True),
    Shape("unaligned", (64, 64, 64), (32, 32, 32), "streamed:3", 71248, alignment=1,
          in_memory=True),
]  # fmt: skip
# Turing (64 KB a block): loads pass through registers, the first product streams: K is free.
SM75 = [
    Shape("v64", (64, 64, 64), (32, 32, 32), "streamed:2", 33616, 64, blocks=2, bias=NO_BIAS),
    Shape("v128", (64, 64, 128), (32, 32, 64), "streamed:2", 41808, blocks=2, bias=NO_BIAS),
    Shape("v64", (64, 64, 64), (32, 32, 32), "streamed:2", 33616, blocks=2, bias=BIAS),
    Shape("unaligned", (64, 64, 64), (32, 32, 32), "streamed:2", 33616, alignment=1, blocks=2),
]
# Volta (96 KB): the same tiles; its operand layout pads differently.
SM70 = [
    Shape("v64", (64, 64, 64), (32, 32, 32), "streamed:2", 33616, 64, blocks=2, bias=NO_BIAS),
    Shape("v128", (64, 64, 128), (32, 32, 64), "streamed:2", 42064, blocks=2, bias=NO_BIAS),
    Shape("v64", (64, 64, 64), (32, 32, 32), "streamed:2", 33616, blocks=2, bias=BIAS),
    Shape("unaligned", (64, 64, 64), (32, 32, 32), "streamed:2", 33616, alignment=1, blocks=2),
]
# FFMA: fp32 before Ampere, and bf16 where no tensor core knows it.
SIMT = [
    Shape("v64", (64, 64, 64), (32, 32, 32), "streamed:2", 43344, 64, alignment=1, blocks=2),
    Shape("v128", (64, 64, 128), (16, 32, 64), "streamed:2", 60304, alignment=1),
]

# Dropout, with or without a bias.
SM80_16_FULL = [
    Shape(
        "k64", (128, 64, 64), (32, 64, 64), "resident:64", 52304, 64, blocks=2, bias=BIAS,
        full=True, spills=BIAS, **REGISTER,
    ),
    Shape(
        "k128", (64, 64, 128), (16, 64, 128), "resident:128", 58960, 128, blocks=2, bias=BIAS,
        full=True, **REGISTER,
    ),
    Shape(
        "any", (64, 64, 256), (32, 32, 128), "streamed:3", 100176, bias=BIAS, full=True, spills=BIAS
    ),
]  # fmt: skip
SM80_16_FULL_UNALIGNED = [
    Shape(
        "unaligned", (64, 64, 128), (32, 32, 64), "streamed:2", 58192, alignment=1, blocks=2,
        bias=BIAS, full=True, spills=BIAS,
    ),
]  # fmt: skip
SM80_F32_FEW_FULL = [
    Shape(
        "few", (16, 64, 128), (16, 16, 32), "compensated:2", 57808, alignment=1, max_m=16,
        blocks=3,
        bias=BIAS, full=True,
    ),
]  # fmt: skip
SM80_F32_SPLIT_FULL = [
    replace(shape, suffix=shape.suffix[:-2], bias=BIAS, full=True)
    for shape in SM80_F32_SPLIT
    if shape.alignment == 1
]
SM80_TF32_FULL = [
    Shape(
        "k32", (128, 64, 32), (32, 64, 32), "resident:32", 67152, 32, alignment=1, blocks=2,
        bias=BIAS, full=True, spills=BIAS,
    ),
    Shape(
        "k64", (128, 64, 64), (32, 64, 64), "resident:64", 99920, 64, alignment=1, bias=BIAS,
        full=True, spills=BIAS,
    ),
]  # fmt: skip
SM80_F32_FULL = [
    Shape(
        "any", (64, 64, 64), (32, 32, 32), "streamed:3", 71248, alignment=1, in_memory=True,
        bias=BIAS, full=True,
    ),
]  # fmt: skip
HMMA_FULL = [  # Turing and Volta
    Shape(
        "any", (64, 64, 64), (32, 32, 32), "streamed:2", 33616, alignment=1, blocks=2, bias=BIAS,
        full=True,
    ),
]  # fmt: skip
SIMT_FULL = [
    Shape(
        "any", (64, 64, 128), (16, 32, 64), "streamed:2", 60304, alignment=1, bias=BIAS, full=True
    ),
]  # fmt: skip

# Backward, five products, dQ added up. Up to K = 64 whole sequences of 128 have their own kernel.
# The small ones: two blocks of 163 KB (A100), or one.
SUM_GRADIENTS = [
    SumGradient("k32", (128, 64, 32), 1, 1, 32, 2, (67072, 67072), blocks=3, spills=True,
                min_length=128),
    SumGradient("k64", (128, 64, 64), 1, 1, 32, 2, (99840, 99840), blocks=2, spills=True,
                min_length=128),
    SumGradient("k64_small", (128, 64, 64), 1, 1, 32, 1, (82944, 82944), blocks=2, spills=True,
                min_length=128),
    SumGradient("k128", (128, 64, 128), 2, 1, 64, 2, (165376, 165376), spills=True, min_length=64),
    SumGradient("k256", (64, 64, 256), 2, 2, 32, 2, (222720, 222720), spills=True,
                min_length=64),
    SumGradient("k256_small", (64, 32, 256), 2, 2, 16, 2, (144384, 144384), min_length=64),
]  # fmt: skip

# Backward. Resident rows: one copy of each tile serves the scores and the output products.
GRADIENTS_SM80_16 = [
    Gradient(
        "k32", (64, 64, 32), (16, 64, 32), "resident:32", (42368, 51344), 32, blocks=(4, 3),
        full_blocks=(3, 2), spills=True,
    ),
    Gradient(
        "k64", (64, 64, 64), (32, 32, 32), "resident:64", (66944, 50064, 75920), 64, blocks=(3, 3),
        full_blocks=(3, 2), kinds=("plain", "dropout", "full"), spills=True,
    ),
    Gradient(
        "k128", (64, 64, 128), (32, 32, 64), "resident:128", (82816, 82832, 100496), 128,
        blocks=(2, 2), kinds=("plain", "dropout", "full"), spills=True,
    ),
    # 227 KB a block: H100, H200. Then 163 KB: A100. Then 99 KB: sm86, sm89.
    Gradient(
        "k256", (64, 64, 256), (32, 16, 64), "resident:256", (213888,), 256, buffers=2,
        kinds=PLAIN,
    ),
    Gradient(
        "k256_small", (64, 64, 256), (32, 16, 64), "resident:256", (148352,), 256, kinds=PLAIN
    ),
    Gradient(
        "v512", (64, 128, 512), (32, 32, 128), "streamed:3", (222592,), kinds=PLAIN, spills=True
    ),
    Gradient(
        "v512_small", (64, 64, 512), (32, 16, 128), "streamed:3", (123776,), kinds=PLAIN,
        spills=True,
    ),
    Gradient(
        "v256_small", (64, 64, 256), (32, 32, 128), "streamed:3", (91008, 100496), spills=True
    ),
]  # fmt: skip
GRADIENTS_SM80_16_UNALIGNED = [
    Gradient(
        "unaligned", (64, 64, 128), (32, 32, 64), "streamed:2", (58240, 58512), alignment=1,
        blocks=(2, 2), spills=True,
    ),
]  # fmt: skip
GRADIENTS_SM80_F32_FEW = [  # scores as the forward's row "few" has them
    Gradient(
        "few", (16, 64, 64), (16, 16, 16), "compensated:2", (41920, 41936), alignment=1, max_m=16,
    ),
]  # fmt: skip
# 227 KB a block: H100, H200. Then 163 KB: A100. Then 99 KB: sm86, sm89.
GRADIENTS_SM80_F32_SPLIT = [
    Gradient(
        "k32", (64, 64, 32), (16, 64, 32), "resident:32", (58496, 58496), 32, blocks=(2, 2),
    ),
    Gradient(
        "k64", (128, 64, 64), (16, 64, 64), "resident:64", (166016,), 64, kinds=PLAIN,
    ),
    Gradient(
        "k64_small", (64, 32, 64), (16, 32, 64), "resident:64", (83072, 83072), 64, blocks=(2, 2),
    ),
    Gradient(
        "k128", (64, 64, 128), (16, 32, 64), "resident:128", (230528,), 128, kinds=PLAIN,
        spills=True,
    ),
    Gradient(
        "k128_small", (32, 32, 128), (16, 16, 64), "resident:128", (115328, 115328), 128,
        spills=True,
    ),
]  # fmt: skip
GRADIENTS_SM80_F32_SPLIT += [
    replace(shape, suffix=name, alignment=1)
    for shape in GRADIENTS_SM80_F32_SPLIT
    for name in [{"k32": "k32_u", "k64_small": "k64_u", "k128_small": "k128_u"}.get(shape.suffix)]
    if name
]
GRADIENTS_SM80_TF32 = [
    Gradient(
        "k32", (64, 64, 32), (16, 64, 32), "resident:32", (66688, 66704), 32, blocks=(2, 2),
        spills=True,
    ),
    Gradient(
        "k64", (64, 64, 64), (32, 32, 32), "resident:64", (99456, 99472), 64, blocks=(2, 2),
        spills=True,
    ),
    Gradient(
        "k128", (32, 64, 128), (32, 16, 32), "resident:128", (115712,), 128, blocks=(2, 2),
        kinds=PLAIN,
    ),
]  # fmt: skip
GRADIENTS_SM80_F32 = [
    Gradient(
        "v256", (64, 64, 256), (32, 16, 64), "streamed:3", (115840,), kinds=PLAIN, spills=True
    ),
    Gradient(
        "any", (64, 64, 64), (32, 32, 32), "streamed:3", (66688, 66704), alignment=1, spills=True
    ),
]  # fmt: skip
GRADIENTS_HMMA = [  # Turing and Volta
    Gradient("v64", (64, 64, 64), (32, 32, 32), "streamed:2", (33664, 33936), spills=True),
    Gradient(
        "unaligned", (64, 64, 64), (32, 32, 32), "streamed:2", (33664, 33936), alignment=1,
        spills=True,
    ),
]  # fmt: skip
GRADIENTS_SIMT_F32 = [
    Gradient(
        "any", (64, 64, 64), (32, 32, 32), "streamed:2", (43648, 43664), alignment=1, spills=True
    ),
]  # fmt: skip
GRADIENTS_SIMT_BF16 = [replace(GRADIENTS_SIMT_F32[0], smem=(43392, 43664))]


def own_rows(maker: str, shapes: list[Any]) -> Iterator[Variant]:
    """Rows of kernels_thin.py, of both 16-bit types."""
    for dtype in ("f16", "bf16"):
        yield from (Variant(**fields) for fields in getattr(own, maker)(shapes, dtype))


VARIANTS: list[Variant] = [
    *own_rows("short_rows", own.SHORT),
    *own_rows("thin_rows", own.SMALL_K),
    *wgmma(HOPPER, "cutlass::half_t", "f16"),
    *wgmma(HOPPER, "cutlass::bfloat16_t", "bf16"),
    *variants(SM80_16_FEW, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16_FEW, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *own_rows("thin_rows", own.THIN),
    *variants(SM80_16, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *variants(SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *variants(SM80_TF32 + SM80_F32, "sm80", "Sm80Tf32", "f32", (80, 999), "tf32"),
    *variants(SM80_F32_FEW, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *variants(SM80_F32_SPLIT, "sm80", "Sm80Split", "f32", (80, 999)),
    *variants(SM80_F32, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *variants(SM75, "sm75", "Sm75<cutlass::half_t>", "f16", (75, 79)),
    *variants(SM70, "sm70", "Sm70<cutlass::half_t>", "f16", (70, 74)),
    *variants(SIMT, "simt", "Simt<float>", "f32", (70, 79)),
    *variants(SIMT, "simt", "Simt<cutlass::bfloat16_t>", "bf16", (70, 79)),
    *variants(SM80_16_FULL, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16_FULL_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16_FULL, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *variants(
        SM80_16_FULL_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::bfloat16_t>", "bf16", (80, 999)
    ),
    *variants(SM80_TF32_FULL + SM80_F32_FULL, "sm80", "Sm80Tf32", "f32", (80, 999), "tf32"),
    *variants(SM80_F32_FEW_FULL, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *variants(SM80_F32_SPLIT_FULL, "sm80", "Sm80Split", "f32", (80, 999)),
    *variants(SM80_F32_FULL, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *variants(HMMA_FULL, "sm75", "Sm75<cutlass::half_t>", "f16", (75, 79)),
    *variants(HMMA_FULL, "sm70", "Sm70<cutlass::half_t>", "f16", (70, 74)),
    *variants(SIMT_FULL, "simt", "Simt<float>", "f32", (70, 79)),
    *variants(SIMT_FULL, "simt", "Simt<cutlass::bfloat16_t>", "bf16", (70, 79)),
    *sum_gradients(SUM_GRADIENTS, "half_t", "f16", (80, 999)),
    *sum_gradients(SUM_GRADIENTS, "bfloat16_t", "bf16", (80, 999)),
    *own_rows("gradient_rows", own.SHORT_GRADIENTS),
    *gradients(GRADIENTS_SM80_16, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *gradients(
        GRADIENTS_SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::half_t>", "f16", (80, 999)
    ),
    *gradients(GRADIENTS_SM80_16, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *gradients(
        GRADIENTS_SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::bfloat16_t>", "bf16", (80, 999)
    ),
    *gradients(
        GRADIENTS_SM80_TF32 + GRADIENTS_SM80_F32, "sm80", "Sm80Tf32", "f32", (80, 999), "tf32"
    ),
    *gradients(GRADIENTS_SM80_F32_FEW, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *gradients(GRADIENTS_SM80_F32_SPLIT, "sm80", "Sm80Split", "f32", (80, 999)),
    *gradients(GRADIENTS_SM80_F32, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *gradients(GRADIENTS_HMMA, "sm75", "Sm75<cutlass::half_t>", "f16", (75, 79)),
    *gradients(GRADIENTS_HMMA, "sm70", "Sm70<cutlass::half_t>", "f16", (70, 74)),
    *gradients(GRADIENTS_SIMT_F32, "simt", "Simt<float>", "f32", (70, 79)),
    *gradients(GRADIENTS_SIMT_BF16, "simt", "Simt<cutlass::bfloat16_t>", "bf16", (70, 79)),
]


if __name__ == "__main__":
    for row in VARIANTS:
        tile = f"{row.tile_m}x{row.tile_n}x{row.value_tile}"
        print(f"{row.name:40} {tile:12} {row.threads:4} threads {row.smem_bytes:7} bytes")
