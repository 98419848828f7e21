"""What all operators share: their base classes, and reasons against inputs in xFormers' words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....dispatch import cuda_missing
from ..common import BaseOperator
from .inputs import (
    Bias,
    Context,
    Gradients,
    Inputs,
    _attn_bias_apply,
    _is_bias_type_supported_in_BMK,
    bmk2bmhk,
)

NO_KERNELS = (
    "unavailable: no kernels for a GPU in this installation: "
    "`python -m memeff_attn.info --check` says why"
)
NOT_BUILT = "operator wasn't built - see `python -m memeff_attn.xformers.info` for more info"


def _names(things: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, things)))


class ScaledTensor(Tensor):
    """A quantised tensor and what it is multiplied by. No kernel here takes one as it is:
    `dequantize` it first."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    scale: Tensor
    dequant_func: Callable[[Tensor, Tensor], Tensor]
    original_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        dequant_func: Callable[[Tensor, Tensor], Tensor],
        original_dtype: torch.dtype,
        require_grad: bool = False,
    ) -> ScaledTensor:
        made: ScaledTensor = Tensor._make_subclass(cls, data, require_grad)
        made.scale, made.original_dtype = scale, original_dtype
        made.dequant_func = dequant_func
        return made

    def dequantize(self) -> Tensor:
        """dequant_func(data, scale), in the dtype from before the quantisation."""
        return self.dequant_func(Tensor(self.float()), self.scale).to(self.original_dtype)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """(data, scale)."""
        return self.data, self.scale


def pack_fp8_tensorwise_per_head(
    x: Tensor, scale: Tensor | float, original_dtype: torch.dtype
) -> ScaledTensor:
    """x [B, M, H, K] with one scale for each batch entry and head: [B, H]."""
    if isinstance(scale, float):
        scale = torch.full((1, 1), scale, device=x.device)
    return ScaledTensor(x, scale, lambda data, by: data * by[:, None, :, None], original_dtype)


class AttentionOpBase(BaseOperator):
    """An attention operator: attributes that say what it takes, `not_supported_reasons` for one
    call. Attributes have xFormers' names and meaning.

    Two kinds exist here. Those whose `RUNS_HERE` is True run on memeff_attn's kernels wherever they
    are named in op=, though only those with `is_available()` are chosen without being named: flash
    and its like keep xFormers' limits, so that code which asks `supports` hears what it expects.
    The others (ROCm) are names.
    """

    OPERATOR: Any = None
    OPERATOR_CATEGORY = "memory_efficient_attention"
    SUPPORTED_DEVICES: frozenset[str] = frozenset({"cuda"})
    CUDA_MINIMUM_COMPUTE_CAPABILITY: tuple[int, int] = (7, 0)
    CUDA_MAXIMUM_COMPUTE_CAPABILITY: tuple[int, int] | None = None
    SUPPORTED_DTYPES: frozenset[torch.dtype] = frozenset({torch.half, torch.bfloat16})
    SUPPORTED_MAX_K: float = math.inf
    SUPPORTED_MIN_K: int = 0
    SUPPORTED_ATTN_BIAS_TYPES: Iterable[Any] = (type(None),)
    SUPPORTS_DROPOUT: bool = False
    SUPPORTS_CUSTOM_SCALE: bool = False
    SUPPORTS_DIFFERENT_VALUE_EMBED: bool = False
    SUPPORTS_OUTPUT_DTYPE: bool = False
    SUPPORTS_PARTIAL: bool = False
    IS_DETERMINISTIC: bool = True
    SUPPORTS_BMGHK: bool = False
    VARLEN_LSE_PACKED: bool = True  # lse of packed sequences: [1, H, total], else [n, H, longest]
    RUNS_HERE: bool = False
    ERROR_ATOL: ClassVar[Mapping[torch.dtype, float]] = {}
    ERROR_RTOL: ClassVar[Mapping[torch.dtype, float]] = {}

    _TEST_BATCH_SIZES: Sequence[int] = (1, 300)
    _TEST_K: Sequence[int] = (32, 128)

    @classmethod
    def is_available(cls) -> bool:
        """Whether it is chosen here without being named."""
        return False

    @classmethod
    def unavailable_reason(cls) -> str:
        if not cls.RUNS_HERE:
            return "unavailable: ROCm only"
        return NO_KERNELS if cuda_missing() else "by name: op= runs memeff_attn's kernels"

    @classmethod
    def supports(cls, d: Inputs) -> bool:
        return not cls.not_supported_reasons(d)

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        """Reasons in the sizes alone."""
        found = []
        if Kv != K and not cls.SUPPORTS_DIFFERENT_VALUE_EMBED:
            found.append("query.shape[-1] != value.shape[-1]")
        if max(K, Kv) > cls.SUPPORTED_MAX_K:
            found.append(f"max(query.shape[-1], value.shape[-1]) > {cls.SUPPORTED_MAX_K}")
        if min(K, Kv) < cls.SUPPORTED_MIN_K:
            found.append(f"min(query.shape[-1], value.shape[-1]) < {cls.SUPPORTED_MIN_K}")
        return found

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        """Every reason against these inputs; empty where it takes them."""
        width, quantised = d.query.shape[-1], d.value.dtype == torch.int32
        found = cls.shape_not_supported_reasons(
            d.query.shape[1], d.key.shape[1], width, width if quantised else d.value.shape[-1]
        )
        device = d.query.device.type
        if device not in cls.SUPPORTED_DEVICES:
            found.append(f"device={device} (supported: {_names(cls.SUPPORTED_DEVICES)})")
        if device == "cuda":
            found += cls._capability_reasons(d)
        if d.query.dtype not in cls.SUPPORTED_DTYPES:
            found.append(f"dtype={d.query.dtype} (supported: {_names(cls.SUPPORTED_DTYPES)})")
        if not cls._takes_bias(d.attn_bias):
            found.append(f"attn_bias type is {type(d.attn_bias)}")
        if d.output_dtype not in (None, d.query.dtype) and not cls.SUPPORTS_OUTPUT_DTYPE:
            found.append("Custom output dtype not supported")
        if d.is_partial and not cls.SUPPORTS_PARTIAL:
            found.append("Partial attention not supported")
        if d.p != 0.0 and not cls.SUPPORTS_DROPOUT:
            found.append("dropout > 0.0")
        if d.scale is not None and not cls.SUPPORTS_CUSTOM_SCALE:
            found.append("has custom scale")
        if not cls.IS_DETERMINISTIC and torch.are_deterministic_algorithms_enabled():
            found.append(
                "operator is non-deterministic, but `torch.use_deterministic_algorithms` is set"
            )
        if d.query.dim() == 5 and not cls.SUPPORTS_BMGHK:
            found.append("operator does not support BMGHK format")
        if not cls.RUNS_HERE and not cls.is_available():
            found.append(NOT_BUILT)
        return found

    @classmethod
    def _capability_reasons(cls, d: Inputs) -> list[str]:
        capability = torch.cuda.get_device_capability(d.device)
        least, most = cls.CUDA_MINIMUM_COMPUTE_CAPABILITY, cls.CUDA_MAXIMUM_COMPUTE_CAPABILITY
        text = "requires device with capability {} {} but your GPU has capability {} (too {})"
        if capability < least:
            return [text.format(">=", least, capability, "old")]
        if most is not None and capability > most:
            return [text.format("<=", most, capability, "new")]
        return []

    @classmethod
    def _takes_bias(cls, bias: Bias) -> bool:
        kind = Tensor if isinstance(bias, Tensor) else type(bias)  # Parameters are tensors
        return kind in cls.SUPPORTED_ATTN_BIAS_TYPES


class AttentionFwOpBase(AttentionOpBase):
    """A forward operator: `apply` runs it."""

    ERROR_ATOL: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float: 3e-4,
        torch.half: 4e-3,
        torch.bfloat16: 2e-2,
    }
    ERROR_RTOL: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float: 2e-5,
        torch.half: 4e-4,
        torch.bfloat16: 5e-3,
    }

    @classmethod
    def apply(cls, inp: Inputs, needs_gradient: bool) -> tuple[Tensor, Context | None]:
        """(out, what the backward pass takes, where needs_gradient)."""
        raise NotImplementedError(f"{cls.NAME}: {cls.unavailable_reason()}")


class AttentionBwOpBase(AttentionOpBase):
    """A backward operator: `apply` runs it."""

    ERROR_ATOL: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float: 9e-4,
        torch.half: 0.2,
        torch.bfloat16: 0.9,
    }
    ERROR_RTOL: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float: 1e-4,
        torch.half: 2e-2,
        torch.bfloat16: 0.1,
    }
    SUPPORTS_ATTN_BIAS_GRAD: bool = False
    SUPPORTS_PARTIAL = True

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        bias = d.attn_bias
        if isinstance(bias, Tensor) and bias.requires_grad and not cls.SUPPORTS_ATTN_BIAS_GRAD:
            found.append(
                "Computing the bias gradient is not supported (attn_bias.requires_grad = True)"
            )
        return found

    @classmethod
    def apply(cls, ctx: Context, inp: Inputs, grad: Tensor) -> Gradients:
        """The gradients, of `grad`, the output's."""
        raise NotImplementedError(f"{cls.NAME}: {cls.unavailable_reason()}")


AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]


def check_lastdim_alignment_stride1(
    reasons: list[str], name: str, x: Tensor, alignment: int
) -> None:
    """Adds the reasons of an operator whose rows must be multiples of `alignment` elements."""
    if x.shape[-1] % alignment != 0:
        reasons.append(f"{name}.shape[-1] % {alignment} != 0")
    elif x.stride(-2) % alignment != 0:
        reasons.append(f"{name}.stride(-2) % {alignment} != 0 ({name}.stride() = {x.stride()})")
    if x.stride(-1) > 1:
        reasons.append(
            f"{name}.stride(-1) > 1 ({name}.stride() = {x.stride()}) - you should call "
            "`.contiguous()` on the input"
        )


__all__ = [
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "Bias",
    "Context",
    "Gradients",
    "Inputs",
    "ScaledTensor",
    "_attn_bias_apply",
    "_is_bias_type_supported_in_BMK",
    "bmk2bmhk",
    "check_lastdim_alignment_stride1",
    "pack_fp8_tensorwise_per_head",
]
