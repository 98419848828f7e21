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
from dataclasses import replace
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
shapes = beside("kernels_shapes")
BIAS, BOTH, NO_BIAS, PLAIN = shapes.BIAS, shapes.BOTH, shapes.NO_BIAS, shapes.PLAIN
FEW_QUERIES: dict[str, Any] = shapes.FEW_QUERIES
Variant, Shape, Wgmma = shapes.Variant, shapes.Shape, shapes.Wgmma
Gradient, SumGradient = shapes.Gradient, shapes.SumGradient
variants, wgmma, halves = shapes.variants, shapes.wgmma, shapes.halves
Slab, slabs = shapes.Slab, shapes.slabs
gradients, sum_gradients = shapes.gradients, shapes.sum_gradients

# Hopper: TMA and wgmma.
HOPPER = [
    # Warpgroups by themselves, each with its own tiles and keys: short causal sequences.
    Wgmma("k64_causal", (64, 64, 64), 3, {"plain": 66560}, blocks=3, causal_length=1024),
    Wgmma("k64_m256", (128, 128, 64), 2, {"plain": 99328}, max_m=256),
    Wgmma("k64", (192, 128, 64), 2, {"plain": 115712}),
    Wgmma("k64", (128, 128, 64), 2, {"dropout": 99328, "bias": 164864}),
    Wgmma("k96", (128, 128, 96), 2, {"plain": 197632, "bias": 230400}),
    Wgmma("k128", (128, 128, 128), 2, {"plain": 197632, "dropout": 197632, "bias": 230400}),
    Wgmma("k192", (128, 96, 192), 2, {"plain": 197632}),
    Wgmma("k256", (128, 64, 256), 2, {"plain": 197632, "dropout": 197632, "bias": 230400}),
]
# The same where K or Kv is beyond 256. Spills: in the warp that copies, when it looks for a tile.
HOPPER_WIDE = [
    Slab("k320", (2, 1), 64, 320, (2, 9), 230400, 320, 320),
    Slab("k384", (2, 1), 128, 192, (1, 8), 230400, 384, 384),
    Slab(
        "v256", (2, 1), 64, 256, (2, 6), 230400, 512, turns=False, min_blocks_per_sm=0.45, min_k=256
    ),
    # From one block an SM on, where up to K = 512 the rows above fit too and come first.
    Slab("k1024", (1, 2), 64, 256, (2, 6), 230400, 1024, turns=False, min_blocks_per_sm=1.0),
]
# fp32 as fp16 parts, two, or one where TF32 is allowed: k64 first of all, k128 behind the mma.sync
# row of K = 64, which short sequences take. The split of the operands has to pay.
HOPPER_F32 = [
    Wgmma("k64", (128, 128, 64), 2, {"plain": 167936}, min_length=256),
    Wgmma("k128", (128, 64, 128), 2, {"plain": 199680}, min_length=192),
]
HOPPER_TF32 = [
    Wgmma("k64", (128, 128, 64), 2, {"plain": 86016}, min_length=512),
    Wgmma("k128", (128, 128, 128), 2, {"plain": 167936}, min_length=256),
]
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
    Shape("k128_m64", (64, 64, 128), (16, 64, 128), "resident:128", 58960, 128, blocks=2,
          bias=BIAS, **REGISTER),
]  # fmt: skip
SM80_16_WIDE = [
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
# Few queries come first, with TF32 allowed too: their results are so few that rounded operands
# would show, and no tensor core would be busy.
SM80_F32_FEW = [
    Shape(
        "few", (16, 64, 128), (16, 16, 32), "compensated:2", 57808, alignment=1, max_m=16,
        blocks=3, spills=BIAS,
    ),
]  # fmt: skip
SM80_F32_SPLIT = [
    Shape("k32", (128, 32, 32), (32, 32, 32), "resident:32", 41056, 32, blocks=2, **REGISTER),
    Shape("k64", (128, 32, 64), (32, 32, 64), "resident:64", 82016, 64, blocks=2,
          spills=BIAS, **REGISTER),
    # 227 KB a block: H100, H200. Then 163 KB: A100.
    Shape("k128", (128, 64, 128), (16, 64, 128), "resident:128", 229472, 128, bias=NO_BIAS,
          **REGISTER),
    Shape("k128_small", (64, 32, 128), (16, 32, 128), "resident:128", 114784, 128, blocks=2,
          **REGISTER),
    Shape("k32_u", (128, 32, 32), (32, 32, 32), "resident:32", 41056, 32, alignment=1, blocks=2,
          **REGISTER),
    Shape("k64_u", (128, 32, 64), (32, 32, 64), "resident:64", 82016, 64, alignment=1, blocks=2,
          spills=BOTH, **REGISTER),
    Shape("k128_u", (64, 32, 128), (16, 32, 128), "resident:128", 114784, 128, alignment=1,
          blocks=2, spills=BIAS, **REGISTER),
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
    Shape("k256", (64, 64, 256), (32, 16, 64), "resident:256", 214608, 256, spills=BIAS),
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
        bias=BIAS, full=True, spills=BIAS,
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
    SumGradient("k32", (128, 64, 32), 1, 1, 32, 2,
                {"plain": 67072, "dropout": 67072, "bias": 67584}, blocks=3, spills=True,
                min_length=128, min_biased=48),
    SumGradient("k64", (128, 64, 64), 1, 1, 32, 2,
                {"plain": 99840, "dropout": 99840, "bias": 100352, "full": 100352}, blocks=2,
                spills=True, min_length=128, min_biased=48),
    SumGradient("k64_small", (128, 64, 64), 1, 1, 32, 1, {"plain": 82944, "dropout": 82944},
                blocks=2, spills=True, min_length=128),
    SumGradient("k128", (128, 64, 128), 2, 1, 64, 2,
                {"plain": 165376, "dropout": 165376, "bias": 182272, "full": 182272}, spills=True,
                min_length=64, min_biased=64),
    SumGradient("k256", (64, 64, 256), 2, 2, 32, 2,
                {"plain": 222720, "dropout": 222720, "bias": 231424, "full": 231424}, spills=True,
                min_length=64, min_biased=64),
    SumGradient("k256_small", (64, 32, 256), 2, 2, 16, 2, {"plain": 144384, "dropout": 144384},
                min_length=64),
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
        "k32", (64, 64, 32), (16, 64, 32), "resident:32", (58496, 58512), 32, blocks=(2, 2),
        spills=True,
    ),
    Gradient(
        "k64", (128, 64, 64), (16, 64, 64), "resident:64", (166016,), 64, kinds=PLAIN,
    ),
    Gradient(
        "k64_small", (64, 32, 64), (16, 32, 64), "resident:64", (83072, 91280), 64, blocks=(2, 2),
    ),
    Gradient(
        "k128", (64, 64, 128), (16, 32, 64), "resident:128", (230528,), 128, kinds=PLAIN,
        spills=True,
    ),
    Gradient(
        "k128_small", (32, 32, 128), (16, 16, 64), "resident:128", (115328, 115344), 128,
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
    *slabs(HOPPER_WIDE, "cutlass::half_t", "f16"),
    *slabs(HOPPER_WIDE, "cutlass::bfloat16_t", "bf16"),
    *own_rows("short_rows", own.SHORT_WIDE),
    *variants(SM80_16_FEW, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16_FEW, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *own_rows("thin_rows", own.THIN),
    *variants(SM80_16, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *own_rows("thin_rows", own.THIN_WIDE),
    *variants(SM80_16_WIDE, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::half_t>", "f16", (80, 999)),
    *variants(SM80_16_WIDE, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *variants(SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *variants(SM80_F32_FEW, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *halves(HOPPER_TF32[:1], "tf32"),
    *variants(SM80_TF32[:2], "sm80", "Sm80Tf32", "f32", (80, 999), "tf32"),
    *halves(HOPPER_TF32[1:], "tf32"),
    *variants(SM80_TF32[2:] + SM80_F32, "sm80", "Sm80Tf32", "f32", (80, 999), "tf32"),
    *halves(HOPPER_F32[:1]),
    *variants(SM80_F32_SPLIT[:2], "sm80", "Sm80Split", "f32", (80, 999)),
    *halves(HOPPER_F32[1:]),
    *variants(SM80_F32_SPLIT[2:], "sm80", "Sm80Split", "f32", (80, 999)),
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
    *variants(SM80_F32_FEW_FULL, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *variants(SM80_TF32_FULL + SM80_F32_FULL, "sm80", "Sm80Tf32", "f32", (80, 999), "tf32"),
    *variants(SM80_F32_SPLIT_FULL, "sm80", "Sm80Split", "f32", (80, 999)),
    *variants(SM80_F32_FULL, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *variants(HMMA_FULL, "sm75", "Sm75<cutlass::half_t>", "f16", (75, 79)),
    *variants(HMMA_FULL, "sm70", "Sm70<cutlass::half_t>", "f16", (70, 74)),
    *variants(SIMT_FULL, "simt", "Simt<float>", "f32", (70, 79)),
    *variants(SIMT_FULL, "simt", "Simt<cutlass::bfloat16_t>", "bf16", (70, 79)),
    *own_rows("gradient_rows", own.SHORT_GRADIENTS),
    *sum_gradients(SUM_GRADIENTS, "half_t", "f16", (80, 999)),
    *sum_gradients(SUM_GRADIENTS, "bfloat16_t", "bf16", (80, 999)),
    *gradients(GRADIENTS_SM80_16, "sm80", "Sm80<cutlass::half_t>", "f16", (80, 999)),
    *gradients(
        GRADIENTS_SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::half_t>", "f16", (80, 999)
    ),
    *gradients(GRADIENTS_SM80_16, "sm80", "Sm80<cutlass::bfloat16_t>", "bf16", (80, 999)),
    *gradients(
        GRADIENTS_SM80_16_UNALIGNED, "sm80", "Sm80Unaligned<cutlass::bfloat16_t>", "bf16", (80, 999)
    ),
    *gradients(GRADIENTS_SM80_F32_FEW, "sm80", "Sm80Fp32", "f32", (80, 999)),
    *gradients(
        GRADIENTS_SM80_TF32 + GRADIENTS_SM80_F32, "sm80", "Sm80Tf32", "f32", (80, 999), "tf32"
    ),
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
