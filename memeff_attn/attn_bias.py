"""Masks as objects: a rule instead of a tensor, so they cost no memory.

Each class says which keys a query sees; `mask_rule` turns any of them into the one form that
kernels take. docs/masks.md has them all in one table.
"""

from __future__ import annotations

from torch import Tensor

from .mask_rule import MaskRule, mask_rule, tensor_of
from .masks_base import (
    ANCHOR_BOTTOM_RIGHT,
    ANCHOR_NONE,
    ANCHOR_TOP_LEFT,
    UNLIMITED,
    AttentionBias,
    Window,
    _materialize_causal_mask,
)
from .masks_blocks import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
)
from .masks_dense import (
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    MaskWithTensorBias,
)
from .masks_padded import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalPaddedKeysMask,
)
from .masks_paged import (
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from .seqlen import _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo
from .seqlen import default_device as _get_default_bias_device
from .tensor_bias import bias_of_rank, bias_shape

# What the operator takes as `causal`; the values of `Anchor` in csrc/params.h.
CAUSAL_NONE, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT = (
    ANCHOR_NONE,
    ANCHOR_TOP_LEFT,
    ANCHOR_BOTTOM_RIGHT,
)

# The bases of all masks with sequences: batch size 1, lengths of their own.
VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)

# Every class that is a mask, by its exact type.
MASKS: tuple[type[AttentionBias], ...] = (
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    LowerTriangularFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LocalAttentionFromBottomRightMask,
    KeyPaddingMask,
    MaskWithTensorBias,
    BlockDiagonalMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalPaddedKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
)


def is_plain(attn_bias: Tensor | AttentionBias | MaskRule | None) -> bool:
    """Whether it is a tensor or one number: what needs no `MaskRule`."""
    plain = LowerTriangularMask, LowerTriangularFromBottomRightMask
    return attn_bias is None or isinstance(attn_bias, Tensor) or type(attn_bias) in plain


__all__ = [
    "ANCHOR_BOTTOM_RIGHT",
    "ANCHOR_NONE",
    "ANCHOR_TOP_LEFT",
    "CAUSAL_BOTTOM_RIGHT",
    "CAUSAL_NONE",
    "CAUSAL_TOP_LEFT",
    "MASKS",
    "UNLIMITED",
    "VARLEN_BIASES",
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "KeyPaddingMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "MaskRule",
    "MaskWithTensorBias",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "Window",
    "_GappySeqInfo",
    "_PaddedSeqLenInfo",
    "_SeqLenInfo",
    "_get_default_bias_device",
    "_materialize_causal_mask",
    "bias_of_rank",
    "bias_shape",
    "is_plain",
    "mask_rule",
    "tensor_of",
]
