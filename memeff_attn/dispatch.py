"""Which operator takes an input, and why the others do not.

Operator classes carry xFormers' attribute names and say by `not_supported_reasons` what they cannot
do; explanation.py tells it all. Which kernel of an operator runs is decided in csrc/dispatch.cpp,
asked here through the compiled module.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .attn_bias import ANCHOR_NONE, MASKS, MaskRule, is_plain, mask_rule
from .cuda_errors import with_way_out
from .determinism import fixed_order
from .inputs import Inputs as Inputs  # public here, as in xFormers
from .mask_arguments import is_copied, sizes_of

NoneType: type = type(None)
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_OPERATORS = "memory_efficient_attention_forward", "memory_efficient_attention_backward"


@functools.cache
def native() -> tuple[ModuleType | None, str]:
    """(the compiled module memeff_attn._C, "") or (None, why it is not there and what to do)."""
    try:
        return importlib.import_module("memeff_attn._C"), ""
    except ModuleNotFoundError as error:
        if error.name != "memeff_attn._C":
            raise
        return None, "memeff_attn was not compiled here (no memeff_attn._C). " + _BUILD_HINT
    except ImportError as error:  # there, but it does not load
        return None, f"memeff_attn._C does not load: {error}. " + _BUILD_HINT


_BUILD_HINT = (
    "Install memeff_attn with nvcc in reach (CUDA_HOME or PATH) and MEMEFF_CUDA_ARCHS naming your "
    "GPU, such as "
    "MEMEFF_CUDA_ARCHS=80, or move the tensors to the CPU."
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cuda_missing() -> str:
    """Why this installation runs nothing on a GPU; empty where it does."""
    module, reason = native()
    if module is None:
        return reason
    return (
        ""
        if module.is_cuda_build
        else "memeff_attn was compiled without CUDA (host-only build). " + _BUILD_HINT
    )


# ---- operators ----


class AttentionOpBase:
    """What an operator takes. Attributes have xFormers' names and meaning."""

    NAME: ClassVar[str] = ""
    OPERATOR_CATEGORY: ClassVar[str] = "memory_efficient_attention"
    SUPPORTED_DEVICES: ClassVar[frozenset[str]] = frozenset()
    CUDA_MINIMUM_COMPUTE_CAPABILITY: ClassVar[tuple[int, int]] = (7, 0)
    CUDA_MAXIMUM_COMPUTE_CAPABILITY: ClassVar[tuple[int, int] | None] = None
    SUPPORTED_DTYPES: ClassVar[frozenset[torch.dtype]] = DTYPES
    SUPPORTED_MAX_K: ClassVar[float] = math.inf
    SUPPORTED_MIN_K: ClassVar[int] = 0
    SUPPORTED_ATTN_BIAS_TYPES: ClassVar[tuple[type, ...]] = (
        NoneType,
        Tensor,
        *MASKS,
    )
    SUPPORTS_DROPOUT: ClassVar[bool] = True
    SUPPORTS_CUSTOM_SCALE: ClassVar[bool] = True
    SUPPORTS_DIFFERENT_VALUE_EMBED: ClassVar[bool] = True
    SUPPORTS_OUTPUT_DTYPE: ClassVar[bool] = True
    SUPPORTS_PARTIAL: ClassVar[bool] = True
    SUPPORTS_BMGHK: ClassVar[bool] = True
    IS_DETERMINISTIC: ClassVar[bool] = True
    VARLEN_LSE_PACKED: ClassVar[bool] = True
    # The kernel it runs, or "family:" and the name of those it chooses from; empty: any that fits.
    VARIANT: ClassVar[str] = ""
    PASS: ClassVar[str] = "fwd"  # or "bwd"

    @classmethod
    def is_available(cls) -> bool:
        """Whether this installation can run it at all."""
        return True

    @classmethod
    def supports(cls, d: Inputs) -> bool:
        return not cls.not_supported_reasons(d)

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        return []

    @classmethod
    def _mask_reasons(cls, d: Inputs) -> list[str]:
        return []

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        """Every reason against these (legal) inputs; empty where the operator takes them."""
        found = []
        device = d.query.device.type
        if device not in cls.SUPPORTED_DEVICES:
            found.append(f"device is {device}, it takes {', '.join(sorted(cls.SUPPORTED_DEVICES))}")
        if d.query.dtype not in cls.SUPPORTED_DTYPES:
            found.append(f"dtype is {d.query.dtype}, it takes {_names(cls)}")
        bias = d.attn_bias
        known = type(bias) in cls.SUPPORTED_ATTN_BIAS_TYPES or isinstance(bias, Tensor | MaskRule)
        if known:
            found += cls._mask_reasons(d)
        else:
            found.append(f"attn_bias is {type(bias).__name__}, which is none of attn_bias.MASKS")
        if d.p != 0.0 and not cls.SUPPORTS_DROPOUT:
            found.append(f"p is {d.p}: it has no dropout")
        if d.output_dtype not in (None, *cls.SUPPORTED_DTYPES):
            found.append(f"output_dtype is {d.output_dtype}, it writes {_names(cls)}")
        return found


def _names(op: type[AttentionOpBase]) -> str:
    return ", ".join(sorted(map(str, op.SUPPORTED_DTYPES)))


class AttentionFwOpBase(AttentionOpBase):
    """A forward operator."""


class AttentionBwOpBase(AttentionOpBase):
    """A backward operator."""

    PASS = "bwd"
    SUPPORTS_ATTN_BIAS_GRAD: ClassVar[bool] = True


class CpuFwOp(AttentionFwOpBase):
    """PyTorch's own CPU attention, blockwise where that does not apply (cpu.py, masked.py)."""

    NAME = "cpu"
    SUPPORTED_DEVICES = frozenset({"cpu"})


class CpuBwOp(AttentionBwOpBase):
    """Its gradients, the same way."""

    NAME = "cpu_bwd"
    SUPPORTED_DEVICES = frozenset({"cpu"})


class _Kernels(AttentionOpBase):
    SUPPORTED_DEVICES = frozenset({"cuda"})

    @classmethod
    def is_available(cls) -> bool:
        return not cuda_missing()

    @classmethod
    def _inherent_reasons(cls, d: Inputs) -> list[str]:
        """What stands against it in any build, on any GPU."""
        return super().not_supported_reasons(d)

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = cls._inherent_reasons(d)
        missing = cuda_missing()
        if missing:
            return [*found, missing]
        if (
            torch.compiler.is_compiling()
        ):  # no addresses yet; the kernel's own check comes at run time
            return found
        if not found and not _is_empty(d):
            request = request_of(d, _gpu_of(d.query.device), cls.VARIANT, cls.PASS)
            if not _C().select(request):
                found.append(_C().explain(request).replace("\n", "\n    "))
        return found


class KernelFwOp(_Kernels, AttentionFwOpBase):
    """Our kernels: of whichever family the first that fits is."""

    NAME = "cuda"


class KernelBwOp(_Kernels, AttentionBwOpBase):
    """Their gradients, with the scores computed again; where `torch.use_deterministic_algorithms`
    is on, the same bits in every run."""

    NAME = "cuda_bwd"

    @classmethod
    def _mask_reasons(cls, d: Inputs) -> list[str]:
        if is_plain(d.attn_bias) or not mask_rule(d.attn_bias, d.query, d.key).shared_keys:
            return []
        return [
            "sequences share rows of key and value (pages, or gappy keys that overlap or are out "
            "of order): it has no gradient for these; the CPU has one, torch.no_grad() needs none"
        ]


class HopperFwOp(KernelFwOp):
    """TMA and wgmma (csrc/hopper): sm90; fp32 where no gradient is wanted."""

    NAME = "hopper"
    VARIANT = "family:hopper"


class RegisterFwOp(KernelFwOp):
    """The weights stay in registers between the two products (csrc/register): sm80 and newer."""

    NAME = "register"
    VARIANT = "family:register"


class ChainedFwOp(KernelFwOp):
    """Both matrix products chained in one CUTLASS 2.x kernel (csrc/chained): sm70 and newer."""

    NAME = "chained"
    VARIANT = "family:chained"


class RegisterBwOp(KernelBwOp):
    """Five products in one kernel (csrc/register): 16 bits, sm80 and newer. The gradient of the
    query is added up in any order."""

    NAME = "register_bwd"
    VARIANT = "family:register"
    IS_DETERMINISTIC = False


class ChainedBwOp(KernelBwOp):
    """Its gradients: no atomics, the same bits in every run."""

    NAME = "chained_bwd"
    VARIANT = "family:chained"


# Those one may insist on. Which family serves a call that names none is csrc/kernels_rows.py's
# choice, row by row.
ALL_FW_OPS: list[type[AttentionFwOpBase]] = [
    HopperFwOp,
    RegisterFwOp,
    ChainedFwOp,
    CpuFwOp,
]
ALL_BW_OPS: list[type[AttentionBwOpBase]] = [RegisterBwOp, ChainedBwOp, CpuBwOp]
_FAMILIES: dict[tuple[str, str], type[AttentionOpBase]] = {
    (op.VARIANT.removeprefix("family:"), op.PASS): op
    for op in (*ALL_FW_OPS, *ALL_BW_OPS)
    if op.VARIANT
}
AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]


@functools.cache
def variant(name: str) -> Any:
    """The operator that runs the kernel of this name and no other:
    `op=variant("chained_sm70_f16_k64")`, `op=(None, variant("chained_bwd_sm70_f16_k64"))`.

    `python -m memeff_attn.info` lists the names. The environment variables MEMEFF_FORCE_VARIANT and
    MEMEFF_FORCE_BACKWARD_VARIANT do the same for a whole program.
    """
    rows = {} if native()[0] is None else {row["name"]: row for row in _C().variants()}
    if native()[0] is None:
        raise ValueError(f"no kernel {name!r}: {native()[1]}")
    if name not in rows:
        raise ValueError(
            f"no kernel {name!r}; python -m memeff_attn.info lists the {len(rows)} there are"
        )
    family = _FAMILIES[rows[name]["family"], rows[name].get("kind", "fwd")]
    return type(name, (family,), {"NAME": name, "VARIANT": name, "__doc__": f"The kernel {name}."})


def resolve_op(op: Any) -> type[AttentionFwOpBase] | None:
    """The forward operator in `op=`: a class, an instance, or a tuple (forward, backward)."""
    if isinstance(op, tuple):
        op = op[0] if op else None
    return None if op is None else _operator(op, AttentionFwOpBase, ALL_FW_OPS, "forward", "begins")


def resolve_bw_op(op: Any) -> type[AttentionBwOpBase] | None:
    """The backward operator in `op=`: a class, an instance, or the second of a tuple."""
    if isinstance(op, tuple):
        op = op[1] if len(op) > 1 else None
    return None if op is None else _operator(op, AttentionBwOpBase, ALL_BW_OPS, "backward", "ends")


_Op = TypeVar("_Op", bound=AttentionOpBase)


def _operator(op: Any, base: type[_Op], known: list[type[_Op]], kind: str, verb: str) -> type[_Op]:
    cls = op if isinstance(op, type) else type(op)
    if not issubclass(cls, base):
        raise ValueError(
            f"op must be a {kind} operator of memeff_attn.dispatch "
            f"({', '.join(o.__name__ for o in known)}, variant(name)) or a tuple that {verb} with "
            f"one, got {op!r}. Leave it out to have one chosen."
        )
    return cls


def ensure_op_takes(op: type[AttentionOpBase], d: Inputs) -> None:
    """ValueError where a named operator does not take the inputs."""
    reasons = op.not_supported_reasons(d)
    if reasons:
        raise ValueError(
            f"Operator {op.NAME} was asked for by op= and does not support "
            f"inputs:\n{d}\n{_listing(op, reasons)}\n"
            "Leave op out to have one chosen."
        )


def _listing(op: type[AttentionOpBase], reasons: list[str]) -> str:
    return f"{op.NAME} is not supported because:\n" + "\n".join(
        "    " + reason for reason in reasons
    )


def no_operator_text(d: Inputs, kernel_text: str = "", backward: bool = False) -> str:
    """The text of NotImplementedError; kernel_text: what csrc/dispatch.cpp says already."""
    parts = [f"No operator found for `{_OPERATORS[backward]}` with inputs:", str(d)]
    for op in (KernelBwOp, CpuBwOp) if backward else (KernelFwOp, CpuFwOp):
        reasons = op.not_supported_reasons(d)
        if not reasons and kernel_text:
            reasons = [kernel_text.replace("\n", "\n    ")]
        if reasons:
            parts.append(_listing(op, reasons))
    return "\n".join(parts)


def _chosen(op: type[_Op], d: Inputs) -> type[_Op]:
    """The operator of the family whose kernel would run; op itself where none needs to."""
    if _is_empty(d):
        return op
    name = _C().select(request_of(d, _gpu_of(d.query.device), which=op.PASS))
    family = next((row["family"] for row in _C().variants() if row["name"] == name), "")
    found = _FAMILIES.get((family, op.PASS), op)
    assert issubclass(found, op)
    return found


def _dispatch_fw(inp: Inputs, needs_gradient: bool = False) -> type[AttentionFwOpBase]:
    if KernelFwOp.supports(inp):
        return _chosen(KernelFwOp, inp)
    if CpuFwOp.supports(inp):
        return CpuFwOp
    raise NotImplementedError(no_operator_text(inp))


def _dispatch_bw(inp: Inputs, varlen_lse_packed: bool | None = None) -> type[AttentionBwOpBase]:
    if KernelBwOp.supports(inp):
        return _chosen(KernelBwOp, inp)
    if CpuBwOp.supports(inp):
        return CpuBwOp
    raise NotImplementedError(no_operator_text(inp, backward=True))


# ---- which kernel, and why ----


def _C() -> Any:
    return native()[0]


def _is_empty(d: Inputs) -> bool:
    return any(0 in x.shape for x in (d.query, d.key, d.value))


def _gpu_of(device: torch.device) -> Mapping[str, int]:
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        if not _C().is_cuda_build:
            return gpu_named(torch.cuda.get_device_capability(index))
        facts = _C().device_info(index)
    except (AssertionError, RuntimeError) as error:  # torch's, then ours
        raise RuntimeError(
            f"{device} cannot be asked what GPU it is: {with_way_out(str(error))}\n"
            'explain(..., device="sm_80") answers for a GPU that is not here.'
        ) from error
    return {name: v for name, v in facts.items() if name != "name"}


def gpu_named(device: Any) -> dict[str, int]:
    """{"sm": 70} of "sm_70", "sm70", (7, 0) or 70: a GPU that need not be here."""
    if isinstance(device, tuple) and len(device) == 2:
        return {"sm": 10 * int(device[0]) + int(device[1])}
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})a?", str(device))
    if match is None:
        raise ValueError(f'device names a GPU as "sm_70" or (7, 0), or is "cpu", got {device!r}')
    return {"sm": int(match[1])}


def _alignment(x: Tensor) -> int:
    """Or of all that alignment depends on, in elements; size-1 dimensions do not count."""
    return x.shape[-1] | _row_alignment(x)


def _row_alignment(x: Tensor) -> int:
    """The same without the last dimension's size."""
    bits = 0
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        bits |= 0 if size == 1 else stride
    try:
        return bits | x.data_ptr() // x.element_size()
    except RuntimeError:  # a tensor without storage: taken as aligned
        return bits


def _bias_alignment(rule: MaskRule, dtype: torch.dtype) -> int:
    """Largest power of two, at most 16, of a bias of the query's dtype; 0: of another kind."""
    bias = rule.bias
    if bias is None or bias.dtype != dtype or rule.varlen:
        return 0
    if bias.shape[-1] > 1 and bias.stride(-1) != 1:
        return 0
    bits = 16 | _row_alignment(bias)
    return bits & -bits


def request_of(
    d: Inputs, gpu: Mapping[str, int], name: str = "", which: str = "fwd"
) -> dict[str, object]:
    """The question csrc/dispatch.cpp answers."""
    query, key, value = (
        x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()
        for x in (d.query, d.key, d.value)
    )
    rule = mask_rule(d.attn_bias, query, key)
    bits = 16 | _alignment(query)  # 16: more than any kernel asks for
    for x in (key, value):
        bits |= x.shape[-1] if is_copied(rule) else _alignment(x)
    bias = rule.bias
    return {
        **gpu,
        "dtype": _DTYPE_NAMES[query.dtype],
        "math": "tf32" if query.dtype == torch.float32 and tf32_allowed() else "ieee",
        **sizes_of(rule, query, key),
        "H": math.prod(query.shape[2:-1]),
        "heads_per_key": _packable_heads(query, key, value, bias, d.p, rule.varlen),
        "K": query.shape[-1],
        "Kv": value.shape[-1],
        "alignment": bits & -bits,
        "has_bias": bias is not None,
        "bias_alignment": _bias_alignment(rule, query.dtype),
        "causal": rule.anchor != ANCHOR_NONE and rule.right >= 0 and rule.left < 0,
        "paged": rule.block_tables is not None,
        "partial": d.output_dtype not in (None, query.dtype),
        "pass": which,
        "dropout": d.p > 0.0,
        "sequences": rule.query_starts is not None,
        "heads_per_kv": query.shape[2] // key.shape[2] if query.dim() == 4 else 1,
        "lse": d.wants_gradient or d.wants_lse,
        "bias_grad": bias is not None and bias.requires_grad,
        "deterministic": which == "bwd" and fixed_order(name),
        "variant": name,
    }


def _packable_heads(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, varlen: bool
) -> int:
    """packable_heads of csrc/forward_plan.cpp, of tensors."""
    if query.dim() == 3 or p > 0.0:
        return 1
    heads = query.shape[-2]
    if key.shape[2:-1] != query.shape[2:-1]:
        heads //= max(1, key.shape[2])
    elif any(x.stride(-2) != 0 for x in (key, value)):
        return 1
    if bias is None or (query.shape[1] == 1 and not varlen):
        return heads
    strides = [0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)]
    of_head, of_query = strides[-3], strides[-2]
    filled = heads & (heads - 1) == 0 or of_head == 0
    return heads if filled and of_query == heads * of_head else 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def tf32_allowed() -> bool:
    """Whether torch lets fp32 matrix products round their inputs to TF32."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(
        matmul, "fp32_precision", None
    )  # torch >= 2.9; reading allow_tf32 raises once this one is set
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
