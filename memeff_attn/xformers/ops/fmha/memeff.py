"""What default dispatch has beside `cutlass`, which xFormers leaves to other packages or refuses:
parts of the keys, another output dtype, the masks of other backends, and CPU tensors."""

from __future__ import annotations

from torch import Tensor

from ....attn_bias import MASKS
from ..common import register_operator
from . import cutlass
from .common import AttentionOpBase, Inputs
from .kernels import OnKernelsBw, OnKernelsFw


class Everywhere(AttentionOpBase):
    @classmethod
    def is_available(cls) -> bool:
        return True


@register_operator
class FwOp(Everywhere, OnKernelsFw):
    """Everything memeff_attn takes, on GPU and CPU; lse of sequences is packed, none is padded.

    Another output dtype is what the sums in float32 come to, rounded once to it.
    """

    OPERATOR = "memeff_attn::forward"
    SUPPORTED_DEVICES = frozenset({"cuda", "cpu"})
    SUPPORTED_DTYPES = cutlass.FwOp.SUPPORTED_DTYPES
    SUPPORTED_ATTN_BIAS_TYPES = (type(None), Tensor, *MASKS)
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_OUTPUT_DTYPE = True
    SUPPORTS_PARTIAL = True
    SUPPORTS_BMGHK = True
    NAME = "memeffF"


@register_operator
class BwOp(Everywhere, OnKernelsBw):
    """Its gradients."""

    OPERATOR = "memeff_attn::backward"
    SUPPORTED_DEVICES = FwOp.SUPPORTED_DEVICES
    SUPPORTED_DTYPES = FwOp.SUPPORTED_DTYPES
    SUPPORTED_ATTN_BIAS_TYPES = FwOp.SUPPORTED_ATTN_BIAS_TYPES
    SUPPORTS_ATTN_BIAS_GRAD = True
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_BMGHK = True
    NAME = "memeffB"


FwOp.BACKWARD = BwOp


@register_operator
class CpuFwOp(Everywhere, cutlass.FwOp):
    """`cutlass.FwOp` for CPU tensors, so that a program reads the same lse with and without a GPU.

    Chosen by default alone: naming `cutlass.FwOp` with CPU tensors is a ValueError, as in xFormers.
    """

    SUPPORTED_DEVICES = frozenset({"cpu"})
    NAME = "memeffF-cpu"


@register_operator
class CpuBwOp(Everywhere, cutlass.BwOp):
    """`cutlass.BwOp` for CPU tensors."""

    SUPPORTED_DEVICES = frozenset({"cpu"})
    NAME = "memeffB-cpu"


CpuFwOp.BACKWARD = CpuBwOp


def default(inp: Inputs) -> type[OnKernelsFw]:
    """The operator that runs where none is named: the one of xFormers' CUTLASS operator, with its
    form of lse, for what that takes; `FwOp` for the rest."""
    bias = inp.attn_bias
    kind = Tensor if isinstance(bias, Tensor) else type(bias)
    same_dtype = inp.output_dtype in (None, inp.query.dtype)
    if inp.is_partial or not same_dtype or kind not in cutlass.FwOp.SUPPORTED_ATTN_BIAS_TYPES:
        return FwOp
    return CpuFwOp if inp.device.type == "cpu" else cutlass.FwOp
