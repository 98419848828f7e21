"""Decoding operators of xFormers written in Triton, by name: as in `flash`.

The number of splits in a name is not followed: these kernels spread the keys by themselves.
Quantised keys are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import merge
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
from .inputs import Inputs
from .kernels import OnKernelsFw

_CAUSAL = (
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
)
_LOCAL = (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
)
_PAGED = (PagedBlockDiagonalGappyKeysMask, PagedBlockDiagonalPaddedKeysMask)
_WIDTHS = (16, 32, 64, 128, 256, 512)
_MOST_QUERIES = 16  # of a sequence under a causal or local mask


@dataclass
class InputsFp8(Inputs):
    """Inputs whose key and value are quantised: int32 words, with scales and shifts beside."""

    k_fp8_scale_shift: Tensor | None = None
    v_fp8_scale_shift: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of query, key, value and of both scales."""
        extra = (self.k_fp8_scale_shift, self.v_fp8_scale_shift)
        own = sum(x.untyped_storage().nbytes() for x in self._qkv)
        return own + sum(x.untyped_storage().nbytes() for x in extra if x is not None)


@register_operator
class FwOp(OnKernelsFw):
    """xFormers' limits for its Triton kernel; memeff_attn's kernels.

    Parts are float32 by default, as there: keys and values are then copied to float32, one copy of
    what heads share.
    """

    OPERATOR = "memeff_attn::forward"
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)
    SUPPORTED_MAX_K = 512
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (
        type(None),
        Tensor,
        BlockDiagonalCausalWithOffsetPaddedKeysMask,
        BlockDiagonalCausalLocalAttentionPaddedKeysMask,
        BlockDiagonalLocalAttentionPaddedKeysMask,
        BlockDiagonalGappyKeysMask,
        BlockDiagonalCausalWithOffsetGappyKeysMask,
        BlockDiagonalPaddedKeysMask,
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
        PagedBlockDiagonalGappyKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
    )
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_BMGHK = True
    SUPPORTS_OUTPUT_DTYPE = True
    SUPPORTS_PARTIAL = True
    NAME = "triton_splitKF"
    SPLIT_K: int | None = None
    MAX_BLOCK_M = 32
    BLOCK_M: int = 16
    BLOCK_N: int = 64
    NUM_GROUPS = 1
    NUM_GROUPS_VALUES = (1, 2, 4, 8)

    @classmethod
    def _output_dtype(cls, inp: Inputs) -> torch.dtype | None:
        return inp.get_output_dtype() if inp.is_partial else inp.output_dtype

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        found = super().shape_not_supported_reasons(Mq, Mkv, K, Kv)
        return found if K in _WIDTHS else [*found, f"Embed dim {K} not supported"]

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        quantised = d.key.dtype == torch.int32
        for name, x in (("query", d.query), ("key", d.key), ("value", d.value)):
            if x is d.query or not quantised:
                check_lastdim_alignment_stride1(found, name, x, 8)
        cls._check_lengths(d, found)
        bias = d.attn_bias
        if isinstance(bias, _PAGED) and d.key.shape[1] % bias.page_size != 0:
            found.append(
                "For paged attention, key.shape[1] should be divisible by the page size, but got "
                f"{d.key.shape[1]} and {bias.page_size}."
            )
        if isinstance(bias, _PAGED) and bias.page_size % cls.BLOCK_N != 0:
            found.append(
                "For paged attention, page size should be divisible by the block size, but got "
                f"{bias.page_size} and {cls.BLOCK_N}."
            )
        if isinstance(bias, Tensor) and bias.dim() not in (4, 5):
            found.append(
                "Additive attention bias has to have shape (B, G, H, Mq, Mkv) or (B, H, Mq, Mkv), "
                f"but got {tuple(bias.shape)}."
            )
        if isinstance(bias, Tensor) and cls.SPLIT_K is not None and cls.SPLIT_K > 1:
            found.append("Additive attention bias is not supported with split-k > 1.")
        return found

    @classmethod
    def _check_lengths(cls, d: Inputs, found: list[str]) -> None:
        bias, queries = d.attn_bias, d.query.shape[1]
        kinds: tuple[tuple[str, tuple[type, ...]], ...] = (("causal", _CAUSAL), ("local", _LOCAL))
        narrow = [kind for kind, classes in kinds if isinstance(bias, classes)]
        if isinstance(bias, (BlockDiagonalPaddedKeysMask, BlockDiagonalGappyKeysMask, *_PAGED)):
            info = bias.q_seqinfo
            if queries != info.seqstart_py[-1]:
                found.append(f"Expected total {info.seqstart_py[-1]} queries not {queries}")
            queries = info.max_seqlen
            if narrow and queries != info.min_seqlen:
                found.append(
                    f"Variable query len is not supported for {narrow[0]} masks: got "
                    f"{info.max_seqlen} and {info.min_seqlen}."
                )
        if narrow and queries > _MOST_QUERIES:
            found.append(
                f"Query length should not be larger than {_MOST_QUERIES} for causal or local "
                "attention biases"
            )

    @classmethod
    @functools.cache
    def get_operator(cls, splitk: int, **settings: Any) -> type[FwOp]:
        """The operator of this many splits."""
        names = {name.upper(): x for name, x in settings.items() if x is not None}
        members = {"NAME": f"triton_splitK{splitk}", "SPLIT_K": splitk, "__doc__": cls.__doc__}
        return type(f"FwOp_S{splitk}", (cls,), {**members, **names})


FwOp_Map: dict[int, Any] = {
    k: FwOp.get_operator(k) for k in (1, 2, 4, 8, 16, 32, 48, 64, 72, 80, 96, 112, 128)
}
FwOp_S1 = FwOp_Map[1]
FwOp_S2 = FwOp_Map[2]
FwOp_S4 = FwOp_Map[4]
FwOp_S8 = FwOp_Map[8]
FwOp_S16 = FwOp_Map[16]
FwOp_S32 = FwOp_Map[32]
FwOp_S64 = FwOp_Map[64]
FwOp_S128 = FwOp_Map[128]


def merge_attentions(
    attn_out: Tensor, lse_out: Tensor | None, attn_split: Tensor, lse_split: Tensor
) -> None:
    """fmha.merge_attentions into given tensors.

    Shapes: attn_out [B, M, G, H, K], lse_out [B, G, H, M]; attn_split [B, G, H, S, M, K] and
        lse_split [B, G, H, S, M].
    """
    parts = [x.permute(0, 3, 1, 2, 4) for x in attn_split.unbind(3)]
    sums = lse_split.unbind(3)
    out, lse = merge.merge_attentions(parts, sums, lse_out is not None, attn_out.dtype)
    attn_out.copy_(out)
    if lse_out is not None and lse is not None:
        lse_out.copy_(lse)
