"""The operator memeff_attn::forward as torch sees it: schema, CUDA and CPU implementations, fake.
The backward operator is in backward.py, what joins the two in autograd.py.

The CUDA path is short on purpose: allocate, launch. The compiled code checks every number; only
when it refuses does `_second_try` look closer, mend what needs no kernel (empty inputs) or a copy
(a last stride other than 1), and otherwise build the long message.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu, dispatch
from .attn_bias import (
    CAUSAL_BOTTOM_RIGHT,
    CAUSAL_TOP_LEFT,
    AttentionBias,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
)
from .cuda_errors import with_way_out
from .inputs import Inputs, two_part_lse_shape
from .mask_arguments import SCHEMA as MASK_SCHEMA
from .mask_arguments import MaskArguments, check_call, mask_of, rule_of
from .mask_rule import MaskRule

# attn_bias: rank of the query, dimensions 1 or full; causal: values of attn_bias.CAUSAL_*; variant:
# "", a kernel's name, or "family:" and a family's; seed: {seed, offset} (dropout.py), given exactly
# where p > 0; windows and sequences: mask_arguments.py; output_dtype: None for the query's. Returns
# out and the log-sum-exp in two parts (two_part_lse_shape; [0] where need_lse is false).
_SCHEMA = (
    "forward(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, float scale, int causal, "
    "bool tf32, bool need_lse, str variant, float p=0.0, Tensor? seed=None, "
    f"{MASK_SCHEMA}, *, ScalarType? output_dtype=None) -> (Tensor, Tensor)"
)

library: Any = torch.library.Library("memeff_attn", "DEF")  # type: ignore[no-untyped-call]
library.define(_SCHEMA, tags=[torch.Tag.pt2_compliant_tag])

Failure = tuple[int, str]  # Code of csrc/status.h and its message
INVALID, UNSUPPORTED, CUDA_ERROR = 1, 2, 3
Launch = Callable[..., Failure | None]
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]  # query, key, value, attn_bias


class Settings(NamedTuple):
    """What a call says beside its tensors, in the order of the compiled module."""

    scale: float
    p: float
    causal: int
    tf32: bool
    variant: str
    mask: MaskArguments | None = None


# os.environ.get costs 0.6 us a call, more than a tenth of the whole path; its own dictionary 0.05.
_environ: dict[Any, Any] = getattr(os.environ, "_data", {})
FORCE_FORWARD, FORCE_BACKWARD = "MEMEFF_FORCE_VARIANT", "MEMEFF_FORCE_BACKWARD_VARIANT"
_FORCED = os.fsencode(FORCE_FORWARD)
_current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_scalar_codes = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.bool: 3,
    torch.int64: 4,
    torch.int32: 5,
}  # DType of csrc/params.h


def forced_variant(setting: str = FORCE_FORWARD) -> str:
    """The kernel every GPU call must run, from the environment; empty: none."""
    return os.environ.get(setting, "")


def on_first_launch(module: dict[str, Any]) -> Launch:
    """A `_launch` for this module, which replaces itself by what the module's `launcher` finds."""

    def launch(*args: Any) -> Failure | None:
        module["_launch"] = found = module["launcher"]()
        failure: Failure | None = found(*args)
        return failure

    return launch


_TENSORS = 7  # query, key, value, attn_bias, out, lse, seed
_launch = on_first_launch(globals())


def launcher() -> Launch:
    forward = compiled("forward", _TENSORS)
    return forward if has_exchange() else with_workspace(forward)


def with_workspace(function: Launch) -> Launch:
    """A function by numbers that takes, behind the tensors, what allocates its workspace."""

    def launch(query: Tensor, *rest: Any) -> Failure | None:
        workspace = None  # which lives until the launches are made

        def allocate(elements: int) -> Any:
            nonlocal workspace
            workspace = query.new_empty((elements,), dtype=torch.float32)
            return numbers(workspace)

        return function(query, *rest[: _TENSORS - 1], allocate, *rest[_TENSORS - 1 :])

    return launch


def compiled(name: str, tensors: int) -> Launch:
    """The compiled function, by tensors or by their numbers (no DLPack exchange); or a refusal."""
    module, reason = dispatch.native()
    if module is None or not module.is_cuda_build:
        missing = UNSUPPORTED, reason or dispatch.cuda_missing()
        return lambda *args: missing
    if has_exchange():
        function: Launch = getattr(module, name)
        return function
    return by_scalars(getattr(module, name + "_scalars"), tensors)


def has_exchange() -> bool:
    return hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def numbers(x: Tensor | None) -> tuple[int, int, tuple[int, ...], tuple[int, ...]] | None:
    """What describes a tensor where it cannot be handed over itself."""
    if x is None:
        return None
    return x.data_ptr(), _scalar_codes.get(x.dtype, -1), tuple(x.shape), x.stride()


def by_scalars(function: Launch, tensors: int) -> Launch:
    """The function that takes the first arguments, `tensors` of them, by their numbers, and those
    of the mask, the last argument but one."""

    def launch(*args: Any) -> Failure | None:
        *settings, mask, stream = args[tensors:]
        of_mask = () if mask is None else mask.tensors
        given = [x for x in (*args[:tensors], *of_mask) if x is not None]
        if any(x.device != given[0].device for x in given):
            return INVALID, "the tensors are on different devices"
        if mask is not None:
            mask = (*mask[:2], *map(numbers, of_mask), *mask[6:])
        described = map(numbers, args[:tensors])
        return function(*described, *settings, mask, stream, given[0].get_device())

    return launch


def stream_of(index: int) -> int:
    return _current_stream(index) if _current_stream is not None else 0


def _forward_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    tf32: bool,
    need_lse: bool,
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
    *mask: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    output_dtype = named.pop("output_dtype", None)
    given = mask_of(mask, named)
    out, lse = forward_cuda(
        query, key, value, attn_bias, scale, causal, tf32, need_lse, variant, p, seed, given,
        output_dtype,
    )  # fmt: skip
    return out, out.new_empty((0,), dtype=torch.float32) if lse is None else lse


def forward_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    tf32: bool,
    need_lse: bool,
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
    mask: MaskArguments | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The operator's work on plain CUDA tensors; lse is None unless needed."""
    shape = query.shape
    width = value.shape[-1]
    if width == shape[-1]:
        out = torch.empty_like(query, dtype=output_dtype, memory_format=torch.contiguous_format)
    else:
        out = query.new_empty((*shape[:-1], width), dtype=output_dtype)
    lse = query.new_empty(two_part_lse_shape(query), dtype=torch.float32) if need_lse else None
    if not variant and _FORCED in _environ:
        variant = forced_variant()
    stream = stream_of(query.get_device())
    failure = _launch(
        query, key, value, attn_bias, out, lse, seed, scale, p, causal, tf32, variant, mask, stream
    )
    if failure is not None:
        settings = Settings(scale, p, causal, tf32, variant, mask)
        _second_try(failure, (query, key, value, attn_bias), out, lse, seed, settings, stream)
    return out, lse


_plain_types = (Tensor, torch.nn.Parameter)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_tracing: Callable[[], object] = torch._C._get_tracing_state  # torch.jit.trace, ONNX export
transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack  # vmap, grad
_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def goes_direct(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None) -> bool:
    """Whether nothing between the call and the operator's CUDA implementation would act on it: no
    tracing, no mode, no transform, no profiler, plain CUDA tensors. The dispatcher's way through
    Python costs about 4 us more, these tests included."""
    return (
        not torch.compiler.is_compiling()
        and query.is_cuda
        and type(query) in _plain_types
        and type(key) in _plain_types
        and type(value) in _plain_types
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        and (attn_bias is None or (type(attn_bias) in _plain_types and not attn_bias.is_neg()))
        and _modes() == 0
        and _function_modes() == 0
        and not _tracing()
        and transform() is None
        and not _profiled()
    )


def _second_try(
    failure: Failure,
    inputs: Operands,
    out: Tensor,
    lse: Tensor | None,
    seed: Tensor | None,
    settings: Settings,
    stream: int,
) -> None:
    """Writes the result where no kernel or one copy is all it takes; raises otherwise."""
    if failure[0] != CUDA_ERROR:
        query, key, value, attn_bias = inputs
        check_call(*inputs, settings.mask)
        if query.dtype not in dispatch.DTYPES:
            raise error_of((UNSUPPORTED, ""), inputs, settings)
        if 0 in query.shape[:-1] or key.shape[1] == 0:  # B, M, H or N is 0
            out.zero_()
            if lse is not None:
                lse[0].fill_(-math.inf)
                lse[1].zero_()
            return
        mended = [launchable(x) for x in (query, key, value)]
        target = out if value.shape[-1] else out.new_empty((*out.shape[:-1], 1))
        if target is not out or any(
            a is not b for a, b in zip(mended, (query, key, value), strict=True)
        ):
            again = _launch(*mended, attn_bias, target, lse, seed, *settings, stream)
            if again is None:
                return
            failure = again
    raise error_of(failure, inputs, settings)


def launchable(x: Tensor) -> Tensor:
    """With last stride 1 and K, Kv at least 1: a zero column adds as little as no column."""
    if x.shape[-1] == 0:
        return x.new_zeros(()).expand(*x.shape[:-1], 1)
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def error_of(
    failure: Failure, operands: Operands, settings: Settings, backward: bool = False
) -> Exception:
    """The exception that a refusal of the compiled code becomes."""
    code, message = failure
    scale, p, causal, _, variant, given = settings
    query, key, _, attn_bias = operands
    mask: Tensor | AttentionBias | MaskRule | None = attn_bias
    if given is not None:
        mask = rule_of(query, key, attn_bias, causal, given)
    elif causal == CAUSAL_TOP_LEFT:
        mask = LowerTriangularMask()
    elif causal == CAUSAL_BOTTOM_RIGHT:
        mask = LowerTriangularFromBottomRightMask()
    inputs = Inputs(*operands[:3], mask, p, scale)
    if code == CUDA_ERROR:
        return RuntimeError(
            f"The {'backward ' if backward else ''}kernel of memory_efficient_attention failed: "
            f"{with_way_out(message)}\n{inputs}\n"
            "An earlier, asynchronous error may be reported here: CUDA_LAUNCH_BLOCKING=1 shows "
            "where it comes from."
        )
    if code == UNSUPPORTED:
        return NotImplementedError(dispatch.no_operator_text(inputs, message, backward))
    setting = FORCE_BACKWARD if backward else FORCE_FORWARD
    forced = f" (variant {variant!r}, from op= or {setting})" if variant else ""
    return ValueError(f"{message}{forced}\n{inputs}")


def _forward_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    tf32: bool,
    need_lse: bool,
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
    *mask: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    output_dtype = named.pop("output_dtype", None)
    inputs, given = (query, key, value, attn_bias), mask_of(mask, named)
    check_call(*inputs, given)
    if query.dtype not in dispatch.DTYPES:
        settings = Settings(scale, p, causal, tf32, variant, given)
        raise error_of((UNSUPPORTED, ""), inputs, settings)
    rule = None if given is None else rule_of(query, key, attn_bias, causal, given)
    with torch.autocast("cpu", enabled=False):  # what is in the call's dtype stays in it
        out, lse = cpu.forward(*inputs, scale, causal, p, seed, rule, output_dtype)
    if not need_lse:
        return out, query.new_empty((0,), dtype=torch.float32)
    both = lse.new_zeros(two_part_lse_shape(query))  # no low part: cpu.backward needs none
    both[0] = lse
    return out, both


def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    tf32: bool,
    need_lse: bool,
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
    *mask: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    output_dtype = named.pop("output_dtype", None)
    check_call(query, key, value, attn_bias, mask_of(mask, named))
    out = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=output_dtype)
    shape = two_part_lse_shape(query) if need_lse else (0,)
    return out, query.new_empty(shape, dtype=torch.float32)


library.impl("forward", _forward_cuda, "CUDA")
library.impl("forward", _forward_cpu, "CPU")
torch.library.register_fake("memeff_attn::forward", _forward_fake, lib=library)
forward = torch.ops.memeff_attn.forward.default
