"""Operators of xFormers' Flash-Attention package, by name.

None is installed here and `is_available()` is False, so that nothing chooses them. A call that
names one (op=MemoryEfficientAttentionFlashAttentionOp) runs on memeff_attn's kernels, where
Flash-Attention would have taken it; where it would not, the reasons are xFormers'.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ....attn_bias import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from ..common import register_operator
from .common import check_lastdim_alignment_stride1
from .inputs import Inputs
from .kernels import OnKernelsBw, OnKernelsFw

FLASH_VERSION = "0.0.0"  # none

# Masks of a fixed length or of sequences that follow each other: forward and backward.
_PLAIN = (
    type(None),
    LowerTriangularMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LocalAttentionFromBottomRightMask,
    BlockDiagonalMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
)


def _check_needs_no_topleft(d: Inputs, reasons: list[str]) -> None:
    """Top-left causal masks only where queries and keys are as many: both corners are then one."""
    bias = d.attn_bias
    if isinstance(bias, BlockDiagonalCausalMask):
        starts = zip_longest(bias.q_seqinfo.seqstart_py, bias.k_seqinfo.seqstart_py)
        if any(q != k for q, k in starts):
            reasons.append(
                "Only support BlockDiagonalCausalMask if equal numbers of keys and queries"
            )
    elif isinstance(bias, LowerTriangularMask) and d.query.shape[1] != d.key.shape[1]:
        reasons.append("Only support LowerTriangularMask if equal number of keys and queries")


def _check_strides_for_bmghk(x: Tensor, name: str, reasons: list[str]) -> None:
    """G and H must read as one dimension, or H be shared."""
    if x.dim() != 5 or x.shape[2] == 1 or x.shape[3] == 1 or x.stride(3) == 0:
        return
    if x.stride(2) != x.stride(3) * x.shape[3]:
        reasons.append(
            "GQA is only supported when the G/H dimensions are contiguous\n"
            f"    {name}.stride:  {x.stride()}\n    {name}.shape :  {list(x.shape)}"
        )


@register_operator
class FwOp(OnKernelsFw):
    """Flash-Attention 2's limits; memeff_attn's kernels."""

    OPERATOR = "memeff_attn::forward"
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)
    SUPPORTED_MAX_K = 256
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (
        *_PLAIN,
        BlockDiagonalCausalLocalAttentionPaddedKeysMask,
        BlockDiagonalCausalWithOffsetGappyKeysMask,
        BlockDiagonalCausalWithOffsetPaddedKeysMask,
        BlockDiagonalGappyKeysMask,
        BlockDiagonalPaddedKeysMask,
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
    )
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_BMGHK = True
    SUPPORTS_PARTIAL = True
    NAME = f"fa2F@{FLASH_VERSION}"
    VERSION = FLASH_VERSION

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        check_lastdim_alignment_stride1(found, "query", d.query, 8)
        _check_needs_no_topleft(d, found)
        for name, x in (("query", d.query), ("key", d.key), ("value", d.value)):
            _check_strides_for_bmghk(x, name, found)
        return found


@register_operator
class BwOp(OnKernelsBw):
    """Its gradients; deterministic where `torch.use_deterministic_algorithms` is on."""

    OPERATOR = "memeff_attn::backward"
    CUDA_MINIMUM_COMPUTE_CAPABILITY = FwOp.CUDA_MINIMUM_COMPUTE_CAPABILITY
    SUPPORTED_MAX_K = FwOp.SUPPORTED_MAX_K
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = _PLAIN
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    NAME = f"fa2B@{FLASH_VERSION}"
    VERSION = FLASH_VERSION
    MAX_HEADDIM_DROPOUT_SM8x = 224

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        check_lastdim_alignment_stride1(found, "query", d.query, 8)
        _check_needs_no_topleft(d, found)
        wide = max(d.query.shape[-1], d.key.shape[-1]) > cls.MAX_HEADDIM_DROPOUT_SM8x
        small = d.device.type == "cuda" and (
            torch.cuda.get_device_capability(d.device) not in ((8, 0), (9, 0))
        )
        if small and wide and d.p != 0.0:
            found.append(
                "requires a GPU with compute capability 8.0 (A100) or 9.0 (H100) for dropout "
                f"when 'query.shape[-1] > {cls.MAX_HEADDIM_DROPOUT_SM8x}'"
            )
        return found


FwOp.BACKWARD = BwOp
