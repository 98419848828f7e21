"""Which operator xFormers' interface picks, and the errors where there is none."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

from ....attn_bias import VARLEN_BIASES, BlockDiagonalMask
from . import cutlass, flash, flash3, memeff, triton_splitk
from .common import NOT_BUILT, AttentionBwOpBase, AttentionFwOpBase, AttentionOpBase
from .inputs import Inputs

_USE_FLASH_ATTENTION_3 = True
FORWARD, BACKWARD = "memory_efficient_attention_forward", "memory_efficient_attention_backward"


def _set_use_fa3(use_flash_attention3: bool) -> None:
    """Whether flash3 stands in the lists; it is never chosen from them."""
    global _USE_FLASH_ATTENTION_3
    _USE_FLASH_ATTENTION_3 = use_flash_attention3


def _get_use_fa3() -> bool:
    return _USE_FLASH_ATTENTION_3


def fa3_available() -> bool:
    """False: no Flash-Attention 3 is installed here."""
    return False


# ---- texts ----


def _format_inputs_description(inp: Inputs) -> str:
    rows = [
        f"{name:<12}: shape={tuple(x.shape)} ({x.dtype})"
        for name, x in (("query", inp.query), ("key", inp.key), ("value", inp.value))
    ]
    rows += [f"{'attn_bias':<12}: {type(inp.attn_bias)}", f"{'p':<12}: {inp.p}"]
    return "\n".join(rows)


def _format_not_supported_reasons(op: Any, reasons: Sequence[str]) -> str:
    return "\n    ".join([f"`{op.NAME}` is not supported because:", *reasons])


def _message(first: str, inp: Inputs, refused: Sequence[tuple[Any, Sequence[str]]]) -> str:
    parts = [first, textwrap.indent(_format_inputs_description(inp), "     ")]
    return "\n".join([*parts, *(_format_not_supported_reasons(op, why) for op, why in refused)])


def _ensure_op_supports_or_raise(
    exc_type: type[Exception], name: str, op: Any, inp: Inputs
) -> None:
    """exc_type with every reason where a named operator does not take the inputs."""
    reasons = op.not_supported_reasons(inp)
    if reasons:
        raise exc_type(
            _message(f"Operator `{name}` does not support inputs:", inp, [(op, reasons)])
        )


# ---- choice ----

_Op = TypeVar("_Op", bound=type[AttentionOpBase])


def _run_priority_list(
    name: str,
    priority_list: Sequence[_Op],
    inp: Inputs,
    extra_op_reasons: Sequence[tuple[Any, Sequence[str]]] = (),
) -> _Op:
    """The first operator that is installed and takes the inputs; NotImplementedError with the
    reasons of all."""
    refused: list[tuple[Any, Sequence[str]]] = []
    for op in priority_list:
        reasons = op.not_supported_reasons(inp)
        if not op.is_available() and NOT_BUILT not in reasons:
            reasons.append(NOT_BUILT)
        if not reasons:
            return op
        refused.append((op, reasons))
    raise NotImplementedError(
        _message(f"No operator found for `{name}` with inputs:", inp, [*refused, *extra_op_reasons])
    )


def _decodes(inp: Inputs) -> bool:
    """Few queries on many keys that all heads share, and too few heads to fill a GPU."""
    key, query = inp.key, inp.query
    shared = key.dim() > 3 and key.stride(-2) == 0 and key.shape[-2] > 1
    heads = query.shape[0] * (query.shape[2] if query.dim() > 3 else 1)
    return shared and query.shape[1] <= 32 and key.shape[1] >= 256 and 0 < heads < 64


def _dispatch_fw_priority_list(
    inp: Inputs, needs_gradient: bool
) -> Sequence[type[AttentionFwOpBase]]:
    """xFormers' order of preference on a GPU, and behind it what serves the rest here."""
    best = memeff.default(inp)
    rest = [op for op in (cutlass.FwOp, memeff.CpuFwOp, memeff.FwOp) if op is not best]
    ops: list[type[AttentionFwOpBase]] = [flash.FwOp, best, *rest]
    if not needs_gradient and _decodes(inp):
        if isinstance(inp.attn_bias, BlockDiagonalMask):
            front = [flash3.FwOp] if _USE_FLASH_ATTENTION_3 else []
            return [triton_splitk.FwOp, *front, *ops]
        return [flash.FwOp, triton_splitk.FwOp, *ops[1:]]
    return [flash3.FwOp, *ops] if _USE_FLASH_ATTENTION_3 else ops


def _dispatch_fw(inp: Inputs, needs_gradient: bool) -> type[AttentionFwOpBase]:
    """The forward operator for these inputs; NotImplementedError where there is none."""
    return _run_priority_list(FORWARD, _dispatch_fw_priority_list(inp, needs_gradient), inp)


def _dispatch_bw(inp: Inputs, varlen_lse_packed: bool | None) -> type[AttentionBwOpBase]:
    """The backward operator for these inputs; NotImplementedError where there is none.

    varlen_lse_packed: the form of the log-sum-exp with more than one sequence. The operators of
        memeff_attn take both.
    """
    ops: list[type[AttentionBwOpBase]] = [flash.BwOp, cutlass.BwOp, memeff.CpuBwOp, memeff.BwOp]
    if _USE_FLASH_ATTENTION_3:
        ops.insert(0, flash3.BwOp)
    bias = inp.attn_bias
    if (
        varlen_lse_packed is None
        or not isinstance(bias, VARLEN_BIASES)
        or bias.q_seqinfo.seqstart.shape[0] <= 2
    ):
        return _run_priority_list(BACKWARD, ops, inp)
    form = "packed" if varlen_lse_packed else "padded"
    other = [op for op in ops[:-1] if varlen_lse_packed != op.VARLEN_LSE_PACKED]
    return _run_priority_list(
        BACKWARD,
        [op for op in ops if op not in other],
        inp,
        [(op, [f"LSE is in {form} format"]) for op in other],
    )
