"""Exact attention in linear memory on CUTLASS kernels, V100 to H200."""

# _torch comes first: it refuses a torch that the others would not even import under.
from . import _torch as _torch  # isort: split

from . import attn_bias, dispatch, dropout, reference
from .attention import (
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
)
from .attn_bias import AttentionBias, LowerTriangularFromBottomRightMask, LowerTriangularMask
from .explanation import explain
from .merge import Partial, merge_attentions, merge_attentions_autograd

__version__ = "0.1.0"
__all__ = [
    "AttentionBias",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "Partial",
    "attn_bias",
    "dispatch",
    "dropout",
    "explain",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
    "merge_attentions_autograd",
    "reference",
]
