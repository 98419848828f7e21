"""The operator that runs by default on a GPU: memeff_attn's CUTLASS kernels, under the name that
xFormers' CUTLASS operator has."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ....attn_bias import (
    MASKS,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from ....dispatch import cuda_missing
from ..common import register_operator
from .common import NO_KERNELS, AttentionOpBase
from .inputs import Bias
from .kernels import OnKernelsBw, OnKernelsFw

USE_TORCH_CUTLASS = False  # the kernels are not torch's


class _CustomMaskType(int, Enum):
    NoCustomMask = 0
    CausalFromTopLeft = 1
    CausalFromBottomRight = 2


class OnGpu(AttentionOpBase):
    """Chosen by default wherever memeff_attn has kernels for a GPU; takes every mask."""

    @classmethod
    def is_available(cls) -> bool:
        return not cuda_missing()

    @classmethod
    def unavailable_reason(cls) -> str:
        return NO_KERNELS

    @classmethod
    def _takes_bias(cls, bias: Bias) -> bool:
        return bias is None or isinstance(bias, Tensor) or type(bias) in MASKS


@register_operator
class FwOp(OnGpu, OnKernelsFw):
    """Every GPU from sm_70 on, any head dimension and alignment, every mask.

    SUPPORTED_ATTN_BIAS_TYPES is xFormers' list for its operator of this name, from which its test
    suite draws its cases; `supports` says yes to every mask of `attn_bias`.
    """

    OPERATOR = "memeff_attn::forward"
    SUPPORTED_DTYPES = frozenset({torch.float, torch.half, torch.bfloat16})
    SUPPORTED_MAX_K = 65536
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (
        type(None),
        Tensor,
        LowerTriangularMask,
        LowerTriangularFromBottomRightMask,
        LowerTriangularFromBottomRightLocalAttentionMask,
        LowerTriangularMaskWithTensorBias,
        BlockDiagonalMask,
        BlockDiagonalCausalMask,
        BlockDiagonalCausalWithOffsetPaddedKeysMask,
        BlockDiagonalCausalFromBottomRightMask,
        BlockDiagonalCausalLocalAttentionMask,
        BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    )
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_BMGHK = True
    VARLEN_LSE_PACKED = False
    PADDED_LSE = True
    NAME = "cutlassF-pt"
    _TEST_K = (32, 128, 256)


@register_operator
class BwOp(OnGpu, OnKernelsBw):
    """Gradients of `FwOp`, of a bias too, through any broadcast; deterministic where
    `torch.use_deterministic_algorithms` is on.

    SUPPORTED_ATTN_BIAS_TYPES: see `FwOp`.
    """

    OPERATOR = "memeff_attn::backward"
    SUPPORTED_DTYPES = FwOp.SUPPORTED_DTYPES
    SUPPORTED_MAX_K = FwOp.SUPPORTED_MAX_K
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (
        type(None),
        Tensor,
        LowerTriangularMask,
        LowerTriangularFromBottomRightMask,
        BlockDiagonalMask,
        BlockDiagonalCausalMask,
        BlockDiagonalCausalFromBottomRightMask,
        BlockDiagonalCausalLocalAttentionMask,
    )
    SUPPORTS_ATTN_BIAS_GRAD = True
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_BMGHK = True
    VARLEN_LSE_PACKED = False
    NAME = "cutlassB-pt"
    _TEST_K = (32, 128, 256)


FwOp.BACKWARD = BwOp
