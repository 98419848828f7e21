"""Operators of xFormers on AMD GPUs: names and attributes alone, there is nothing that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from ....attn_bias import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from ..common import register_operator
from . import cutlass
from .common import AttentionBwOpBase, AttentionFwOpBase


@register_operator
class FwOp(AttentionFwOpBase):
    """Composable Kernel's forward: ROCm only."""

    CUDA_MINIMUM_COMPUTE_CAPABILITY = (5, 0)
    SUPPORTED_MAX_K = 512
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (
        *cutlass.FwOp.SUPPORTED_ATTN_BIAS_TYPES,
        BlockDiagonalCausalWithOffsetGappyKeysMask,
        BlockDiagonalCausalLocalAttentionPaddedKeysMask,
        BlockDiagonalGappyKeysMask,
        BlockDiagonalPaddedKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        PagedBlockDiagonalGappyKeysMask,
    )
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_PARTIAL = True
    SUPPORTS_BMGHK = True
    NAME = "ckF"
    ERROR_ATOL: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float: 3e-4,
        torch.half: 6e-3,
        torch.bfloat16: 2.8e-2,
    }
    ERROR_RTOL: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float: 2e-5,
        torch.half: 3e-3,
        torch.bfloat16: 2e-2,
    }
    _TEST_K = (32, 96, 128, 256, 512)


@register_operator
class BwOp(AttentionBwOpBase):
    """Composable Kernel's backward: ROCm only."""

    CUDA_MINIMUM_COMPUTE_CAPABILITY = (5, 0)
    SUPPORTED_MAX_K = 256
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = cutlass.BwOp.SUPPORTED_ATTN_BIAS_TYPES
    SUPPORTS_ATTN_BIAS_GRAD = True
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    NAME = "ckB"
    _TEST_K = (32, 64, 96, 128, 256)
