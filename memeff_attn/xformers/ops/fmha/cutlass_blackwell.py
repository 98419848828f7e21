"""Operators of xFormers' Blackwell kernels, by name: as in `flash`, on sm_100 and newer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....attn_bias import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalPaddedKeysMask,
)
from ..common import register_operator
from .flash import _PLAIN
from .inputs import Inputs
from .kernels import OnKernelsBw, OnKernelsFw

_WIDTHS = (64, 128)


def _fewer_keys(d: Inputs) -> list[str]:
    bias = d.attn_bias
    if isinstance(bias, BlockDiagonalCausalMask) and any(k < q for q, k in bias._lengths()):
        return ["seqlens_k must be >= seqlens_q"]
    return []


@register_operator
class FwOp(OnKernelsFw):
    """xFormers' limits for its Blackwell kernels; memeff_attn's kernels."""

    OPERATOR = "memeff_attn::forward"
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (10, 0)
    SUPPORTED_MAX_K = 128
    SUPPORTED_MIN_K = 64
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (
        *_PLAIN,
        BlockDiagonalPaddedKeysMask,
        BlockDiagonalCausalWithOffsetPaddedKeysMask,
        BlockDiagonalGappyKeysMask,
        BlockDiagonalCausalWithOffsetGappyKeysMask,
        BlockDiagonalLocalAttentionPaddedKeysMask,
        BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    )
    SUPPORTS_BMGHK = True
    NAME = "cutlassF-blackwell"
    _TEST_K = (64, 128)

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        found = super().shape_not_supported_reasons(Mq, Mkv, K, Kv)
        if K not in _WIDTHS or Kv not in _WIDTHS:
            found.append(f"Embed dim {K} not supported")
        elif Mkv != 0 and Mq > Mkv:
            found.append(f"Only support Mq ({Mq}) <= Mk ({Mkv})")
        return found

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d) + _fewer_keys(d)
        if d.query.dim() < 4:
            found.append("Only supports BMHK or BMGHK")
        return found


@register_operator
class BwOp(OnKernelsBw):
    """Its gradients."""

    OPERATOR = "memeff_attn::backward"
    CUDA_MINIMUM_COMPUTE_CAPABILITY = FwOp.CUDA_MINIMUM_COMPUTE_CAPABILITY
    SUPPORTED_MAX_K = FwOp.SUPPORTED_MAX_K
    SUPPORTED_MIN_K = FwOp.SUPPORTED_MIN_K
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = _PLAIN
    SUPPORTS_PARTIAL = False
    NAME = "cutlassB-blackwell"

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        found = super().shape_not_supported_reasons(Mq, Mkv, K, Kv)
        if K not in _WIDTHS:
            found.append(f"Embed dim {K} not supported")
        elif Mkv != 0 and Mq > Mkv:
            found.append(f"Only support Mq ({Mq}) <= Mk ({Mkv})")
        elif Mq < 8:
            found.append(f"Only support Mq ({Mq}) >= 8")
        return found

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d) + _fewer_keys(d)
        if d.query.dim() != 4:
            found.append("Only supports BMHK format")
        return found


FwOp.BACKWARD = BwOp
