"""Decoding operators of xFormers on AMD GPUs: names and attributes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ....attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask
from ..common import register_operator
from .common import AttentionFwOpBase


@register_operator
class FwOp(AttentionFwOpBase):
    """Composable Kernel's decoding: ROCm only."""

    CUDA_MINIMUM_COMPUTE_CAPABILITY = (5, 0)
    SUPPORTED_DTYPES = frozenset({torch.half, torch.bfloat16, torch.float})
    SUPPORTED_MAX_K = 256
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (
        type(None),
        BlockDiagonalCausalWithOffsetPaddedKeysMask,
    )
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_BMGHK = True
    NAME = "ck_splitKF"
    SPLIT_K: int | None = None
    BLOCK_M = 16
    BLOCK_N = 64
    NUM_GROUPS = 1


class FwOp_S1(FwOp):
    SPLIT_K, NAME = 1, "ck_splitK1"


class FwOp_S2(FwOp):
    SPLIT_K, NAME = 2, "ck_splitK2"


class FwOp_S4(FwOp):
    SPLIT_K, NAME = 4, "ck_splitK4"


class FwOp_S8(FwOp):
    SPLIT_K, NAME = 8, "ck_splitK8"


class FwOp_S16(FwOp):
    SPLIT_K, NAME = 16, "ck_splitK16"


class FwOp_S32(FwOp):
    SPLIT_K, NAME = 32, "ck_splitK32"


class FwOp_S64(FwOp):
    SPLIT_K, NAME = 64, "ck_splitK64"


class FwOp_S128(FwOp):
    SPLIT_K, NAME = 128, "ck_splitK128"
