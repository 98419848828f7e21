"""`xformers.ops`: the attention part and what attention models import beside it."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import fmha
from .fmha import (
    AttentionBias,
    AttentionOp,
    AttentionOpBase,
    LowerTriangularMask,
    MemoryEfficientAttentionCkOp,
    MemoryEfficientAttentionCutlassFwdFlashBwOp,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    MemoryEfficientAttentionSplitKCkOp,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from .indexing import index_select_cat, scaled_index_add
from .swiglu_op import SwiGLU, SwiGLUEagerOp, SwiGLUOp, SwiGLUOpDispatch, swiglu
from .unbind import get_stack_strides, stack_or_none, unbind

AttentionMask = AttentionBias  # its name in old releases


def masked_matmul(a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
    """a @ b with a mask: a bool one puts -inf where it is False, any other is added.

    Shapes: a [B, M, K], b [B, K, N], mask [M, N] or [B, M, N].
    """
    scores = a @ b
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


__all__ = [
    "AttentionBias",
    "AttentionMask",
    "AttentionOp",
    "AttentionOpBase",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "SwiGLU",
    "SwiGLUEagerOp",
    "SwiGLUOp",
    "SwiGLUOpDispatch",
    "fmha",
    "get_stack_strides",
    "index_select_cat",
    "masked_matmul",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "scaled_index_add",
    "stack_or_none",
    "swiglu",
    "unbind",
]


# What xformers.ops has beside attention: named, so that the error says why.
_ELSEWHERE = {
    "RMSNorm",
    "rms_norm_add",
    "rope_padded",
    "tiled_matmul",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "sequence_parallel_leading_matmul",
    "sequence_parallel_trailing_matmul",
    "fused_allgather_and_linear",
    "fused_linear_and_reducescatter",
    "sparsify24",
    "sparsify24_like",
    "Sparse24Tensor",
}


def __getattr__(name: str) -> Any:
    _refuse(name)


def _refuse(name: str) -> NoReturn:
    hint = ": memeff_attn has xFormers' attention only" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
