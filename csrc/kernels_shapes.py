"""What a row of the variant list says, and how rows follow from a tile: the types and makers of
kernels_rows.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


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
    causal_length: int = 0  # not 0: automatic choice only for causal calls with M and N up to it
    min_k: int = 0  # automatic choice only where K or Kv is larger
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
    max_m: int = 0
    blocks: int = 1  # an SM
    causal_length: int = 0
    min_length: int = 0


@dataclass(frozen=True)
class Slab:
    """A tile of the hopper family for wide K and Kv. Sizes as in hopper/slab_traits.h."""

    suffix: str
    groups: tuple[int, int]  # warpgroups along queries and along value columns
    keys: int
    columns: int  # of a warpgroup
    stages: tuple[int, int]  # chunks of 64 columns in a stage, stages
    smem: int
    max_k: int
    max_kv: int = 0
    turns: bool = True  # of the warpgroups
    spills: bool = True
    min_blocks_per_sm: float = 0.5
    min_k: int = 0


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
    smem: dict[str, int]  # of each kind (a key of FEATURES)
    blocks: int = 1
    spills: bool = False
    min_length: int = 0
    min_biased: int = 0  # the same of the kind "bias"


# Of backward and hopper rows: the policy of chained/traits.h, bias, dropout. Full rows serve calls
# with either or both.
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
                f"{shape.stages}, chained::{policy}{f', {shape.blocks}' * (shape.blocks > 1)}>",
                min_m=65,
                max_m=shape.max_m,
                min_blocks_per_sm=shape.min_blocks_per_sm,
                pages=False,
                bias_alignment=8 * bias,
                allow_spill=shape.spills,
                blocks_per_sm=shape.blocks,
                causal_length=shape.causal_length,
                header="hopper/launch.h",
                dropout=dropout,
            )


def slabs(shapes: list[Slab], cpp_element: str, dtype: str) -> Iterator[Variant]:
    for shape in shapes:
        tile = (*shape.groups, shape.keys, shape.columns, shape.max_k)
        rest = (*shape.stages, "true" if shape.turns else "false")
        yield Variant(
            name=f"hopper_sm90_{dtype}_{shape.suffix}",
            family="hopper",
            arch="sm90",
            dtype=dtype,
            math="ieee",
            max_k=shape.max_k,
            max_kv=shape.max_kv,
            alignment=8,
            bias=False,
            tile_m=64 * shape.groups[0],
            tile_n=shape.keys,
            value_tile=shape.columns * shape.groups[1],
            threads=384,
            smem_bytes=shape.smem,
            min_sm=90,
            max_sm=90,
            traits=f"hopper::SlabTraits<{cpp_element}, "
            f"hopper::SlabTile<{', '.join(map(str, tile))}>, {', '.join(map(str, rest))}>",
            min_m=65,
            min_blocks_per_sm=shape.min_blocks_per_sm,
            min_k=shape.min_k,
            pages=False,
            allow_spill=shape.spills,
            header="hopper/slab_launch.h",
        )


def halves(shapes: list[Wgmma], math: str = "ieee") -> Iterator[Variant]:
    """The hopper family's fp32 rows: operands in fp16 parts, two or (TF32) one."""
    for shape in shapes:
        tile = ", ".join(map(str, shape.tile))
        parts = ["hopper_sm90_f32", "tf32" * (math == "tf32"), shape.suffix]
        yield Variant(
            name="_".join(filter(None, parts)),
            family="hopper",
            arch="sm90",
            dtype="f32",
            math=math,
            max_k=shape.tile[2],
            max_kv=shape.tile[2],
            alignment=4,
            bias=False,
            tile_m=shape.tile[0],
            tile_n=shape.tile[1],
            value_tile=shape.tile[2],
            threads=128 + 2 * shape.tile[0],
            smem_bytes=shape.smem["plain"],
            min_sm=90,
            max_sm=90,
            traits=f"hopper_f32::ForwardTraits<{1 if math == 'tf32' else 2}, "
            f"hopper_f32::Tile<{tile}>, {shape.stages}>",
            min_m=65,
            min_blocks_per_sm=shape.min_blocks_per_sm,
            min_length=shape.min_length,
            pages=False,
            allow_spill=shape.spills,
            header="hopper/f32_launch.h",
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


def sum_gradients(
    shapes: list[SumGradient], cpp_type: str, dtype: str, sms: tuple[int, int]
) -> Iterator[Variant]:
    """The backward rows of the register family."""
    pairs = [(x, kind) for x in shapes for kind in x.smem.items()]
    for shape, (feature, smem) in pairs:
        keys, queries, columns = shape.tile
        _, bias, dropout = FEATURES[feature]
        sizes = (shape.roles, shape.parts, shape.scores, shape.ds_buffers, shape.blocks)
        arguments = [f"cutlass::{cpp_type}", *map(str, (*shape.tile, *sizes))]
        if dropout or bias:
            arguments += [str(dropout).lower(), *["true"] * bias]
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
            traits=f"registers::BackwardRow<{', '.join(arguments)}>",
            bias_alignment=8 * bias,
            allow_spill=shape.spills,
            blocks_per_sm=shape.blocks,
            header=f"register/backward_{'bias_' * bias}launch.h",
            kind="bwd",
            dropout=dropout,
            sequences=not bias,
            adds_query=True,
            min_length=shape.min_biased if feature == "bias" else shape.min_length,
        )
