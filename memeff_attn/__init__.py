"""Exact attention in linear memory on CUTLASS kernels, V100 to H200."""

from . import attn_bias, dispatch, dropout, reference
from .attention import (
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from .attn_bias import AttentionBias, LowerTriangularFromBottomRightMask, LowerTriangularMask
from .dispatch import explain

__version__ = "0.1.0"
__all__ = [
    "AttentionBias",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "attn_bias",
    "dispatch",
    "dropout",
    "explain",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "reference",
]
