"""Operators of xFormers' Flash-Attention 3 package, by name: as in `flash`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ....attn_bias import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from ..common import register_operator
from .common import check_lastdim_alignment_stride1
from .flash import _PLAIN, _check_needs_no_topleft
from .inputs import Inputs
from .kernels import OnKernelsBw, OnKernelsFw

FLASH_VERSION = "0.0.0"  # none
_C_flashattention3 = None

_CACHED_KEYS = (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)


def _check_rows(d: Inputs, reasons: list[str]) -> None:
    for name, x in (("query", d.query), ("key", d.key), ("value", d.value)):
        check_lastdim_alignment_stride1(reasons, name, x, 8)
    _check_needs_no_topleft(d, reasons)
    widths = d.query.shape[-1], d.value.shape[-1]
    hopper = d.device.type != "cuda" or torch.cuda.get_device_capability(d.device) >= (9, 0)
    if widths[0] != widths[1] and not hopper:
        reasons.append(
            f"Q/K head-dim ({widths[0]}) must be equal to V head-dim ({widths[1]}) for Ampere GPUs"
        )


@register_operator
class FwOp(OnKernelsFw):
    """Flash-Attention 3's limits; memeff_attn's kernels."""

    OPERATOR = "memeff_attn::forward"
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)
    CUDA_MAXIMUM_COMPUTE_CAPABILITY = (9, 0)
    SUPPORTED_MAX_K = 256
    SUPPORTED_MIN_K = 32
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (*_PLAIN, *_CACHED_KEYS)
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_BMGHK = True
    SUPPORTS_PARTIAL = True
    UNPADDED_LSE = True
    NAME = f"fa3F@{FLASH_VERSION}"
    VERSION = FLASH_VERSION

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        _check_rows(d, found)
        return found


@register_operator
class BwOp(OnKernelsBw):
    """Its gradients; deterministic where `torch.use_deterministic_algorithms` is on."""

    OPERATOR = "memeff_attn::backward"
    CUDA_MINIMUM_COMPUTE_CAPABILITY = FwOp.CUDA_MINIMUM_COMPUTE_CAPABILITY
    CUDA_MAXIMUM_COMPUTE_CAPABILITY = FwOp.CUDA_MAXIMUM_COMPUTE_CAPABILITY
    SUPPORTED_MAX_K = FwOp.SUPPORTED_MAX_K
    SUPPORTED_MIN_K = 64
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = _PLAIN
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    NAME = f"fa3B@{FLASH_VERSION}"
    VERSION = FLASH_VERSION

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        _check_rows(d, found)
        return found


FwOp.BACKWARD = BwOp


@register_operator
class FwOp_KVSplit(FwOp):
    """The same with keys split over the GPU, which these kernels decide by themselves."""

    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (type(None), *_CACHED_KEYS)
    NAME = f"fa3F_splitKV@{FLASH_VERSION}"
    enable_kvsplit_attn: bool = True
