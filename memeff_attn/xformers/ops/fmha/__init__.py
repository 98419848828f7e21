"""`xformers.ops.fmha`: memory_efficient_attention and its low-level forms, as xFormers has them.

call --Inputs--> validate_inputs --op named: its reasons, ValueError--> kernels --> memeff_attn
                                 --none named: memeff.default-----------^
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .... import merge
from ....attn_bias import (
    VARLEN_BIASES,
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularMask,
    tensor_of,
)
from . import (
    attn_bias,
    ck,
    ck_splitk,
    common,
    cutlass,
    cutlass_blackwell,
    dispatch,
    flash,
    flash3,
    kernels,
    memeff,
    torch_attention_compat,
    triton_splitk,
)
from .common import AttentionBwOpBase, AttentionFwOpBase, AttentionOp, AttentionOpBase
from .dispatch import (
    _dispatch_bw,
    _dispatch_fw,
    _ensure_op_supports_or_raise,
    _get_use_fa3,
    _set_use_fa3,
)
from .inputs import Bias, Context, Gradients, Inputs, bmk2bmhk

MemoryEfficientAttentionCutlassOp = (cutlass.FwOp, cutlass.BwOp)
MemoryEfficientAttentionCutlassBlackwellOp = (cutlass_blackwell.FwOp, cutlass_blackwell.BwOp)
MemoryEfficientAttentionCutlassFwdFlashBwOp = (cutlass.FwOp, flash.BwOp)
MemoryEfficientAttentionFlashAttentionOp = (flash.FwOp, flash.BwOp)
MemoryEfficientAttentionCkOp = (ck.FwOp, ck.BwOp)
MemoryEfficientAttentionSplitKCkOp = (ck_splitk.FwOp, ck.BwOp)

_Result = TypeVar("_Result")

ALL_FW_OPS: list[type[AttentionFwOpBase]] = [
    cutlass.FwOp,
    cutlass_blackwell.FwOp,
    flash.FwOp,
    flash3.FwOp,
    triton_splitk.FwOp,
]
ALL_BW_OPS: list[type[AttentionBwOpBase]] = [
    cutlass.BwOp,
    cutlass_blackwell.BwOp,
    flash.BwOp,
    flash3.BwOp,
]

_NO_DROPOUT_STATE = (
    "dropout is not supported on the non-autograd API: it returns no state of the random "
    "generator. Call `memory_efficient_attention` for dropout, or "
    "memeff_attn.memory_efficient_attention_forward_requires_grad with a seed"
)


# ---- the public calls ----


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """out = dropout(softmax(scale * Q K^T + bias)) V: `memeff_attn.memory_efficient_attention`
    with xFormers' arguments and errors.

    Shapes: query [B, M, H, K], key [B, N, H, K], value [B, N, H, Kv] -> [B, M, H, Kv]; also
        [B, M, K] and [B, M, G, H, K]. Expand key and value for shared heads.
    Args:
        attn_bias: None, a mask of `attn_bias`, or a tensor [B, H, M, N] (1 in any dimension, any
            strides, [B * H, M, N] too) of the query's dtype or bool.
        op: (forward, backward), each may be None; or one forward operator.
        output_dtype: default the query's; the sums in float32 are rounded to it once.
    Raises:
        ValueError: arguments that disagree, or that a named operator does not take.
        NotImplementedError: legal arguments that no operator takes, with the reasons.
    Source: interface of xFormers 0.0.35.
    """
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    return _memory_efficient_attention(inp, op=op)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """As `memory_efficient_attention`. op: a forward operator."""
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    return _memory_efficient_attention_forward(inp, op=op)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse), the natural log-sum-exp in the operator's form.

    Shapes: lse, by default [B, H, M rounded up to 32], +inf beyond M; of n sequences
        [n, H, the longest's rows rounded up to 32]. With operators of flash, triton and memeff, and
        with the masks that xFormers' CUTLASS operator has not: [B, H, M], [1, H, total].
    Raises: NotImplementedError where p is not 0.
    """
    _no_dropout(p)
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    out, context = _memory_efficient_attention_forward_requires_grad(inp, op=op)
    return out, context.lse


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionBwOpBase] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of what `memory_efficient_attention_forward_requires_grad` returned.

    Args: lse: in either form, or cut to M rows; it may be that of more keys than these.
    Raises: NotImplementedError where p is not 0; ValueError where shapes disagree.
    """
    _no_dropout(p)
    grads = _memory_efficient_attention_backward(
        Context(lse=lse, out=output), Inputs(query, key, value, attn_bias, p, scale), grad, op=op
    )
    return grads.dq, grads.dk, grads.dv


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over a part of the keys, for `merge_attentions`; differentiable, unlike xFormers'.

    Shapes: lse [B, H, M], of sequences [1, H, total]: not padded.
    Raises: NotImplementedError where p is not 0.
    """
    _no_dropout(p)
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype, is_partial=True)
    out, context = _memory_efficient_attention_forward_requires_grad(inp, op=_pair(op)[0])
    return out, context.lse


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`memeff_attn.merge_attentions`: (out, lse or None) over all keys from parts of them."""
    return merge.merge_attentions(attn_split, lse_split, write_lse, output_dtype)


def _no_dropout(p: float) -> None:
    if p != 0.0:
        raise NotImplementedError(f"p is {p}: {_NO_DROPOUT_STATE}.")


# ---- with Inputs, and names that programs replace ----


def _pair(op: Any) -> tuple[Any, Any]:
    """(forward, backward) of what op= may be: a tuple of one or two, a class, an instance."""
    if op is None:
        return None, None
    if not isinstance(op, tuple):
        return op, None
    forward, backward = (*op, None, None)[:2]
    return forward, backward


def _on_kernels(op: Any) -> bool:
    """Whether an operator's `apply` is ours: None, or a class that does not replace it."""
    if op is None:
        return True
    ours = (kernels.OnKernelsFw.apply.__func__, kernels.OnKernelsBw.apply.__func__)  # type: ignore[attr-defined]
    return getattr(getattr(op, "apply", None), "__func__", None) in ours


def _wants_gradient(inp: Inputs) -> bool:
    tensors = (inp.query, inp.key, inp.value, tensor_of(inp.attn_bias))
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _memory_efficient_attention(inp: Inputs, op: Any = None) -> Tensor:
    forward, backward = _pair(op)
    if not _wants_gradient(inp):
        return _memory_efficient_attention_forward(inp, op=forward)
    inp.validate_inputs()
    if not (_on_kernels(forward) and _on_kernels(backward)):
        return _by_apply(inp, forward, backward)
    for named, name in ((forward, dispatch.FORWARD), (backward, dispatch.BACKWARD)):
        if named is not None:
            _ensure_op_supports_or_raise(ValueError, name, named, inp)
    _check_pair(inp, forward, backward)
    return _explained(lambda: kernels.attend(inp), inp, True)


def _memory_efficient_attention_forward(inp: Inputs, op: Any) -> Tensor:
    inp.validate_inputs()
    if op is not None:
        _ensure_op_supports_or_raise(ValueError, "memory_efficient_attention", op, inp)
        if not _on_kernels(op):
            shape = inp.normalize_bmhk()
            own: Tensor = op.apply(inp, needs_gradient=False)[0].reshape(shape)
            return own
    chosen = memeff.default(inp) if op is None else op
    return _explained(lambda: chosen.apply(inp, needs_gradient=False)[0], inp, False)


def _memory_efficient_attention_forward_requires_grad(
    inp: Inputs, op: Any
) -> tuple[Tensor, Context]:
    inp.validate_inputs()
    shape = None
    if op is not None:
        _ensure_op_supports_or_raise(ValueError, "memory_efficient_attention", op, inp)
        shape = None if _on_kernels(op) else inp.normalize_bmhk()
    chosen = memeff.default(inp) if op is None else op
    result: Any = _explained(lambda: chosen.apply(inp, needs_gradient=True), inp, False)
    out, context = result
    return out if shape is None else out.reshape(shape), context


def _detect_lse_packed_or_raise(lse: Tensor, inp: Inputs) -> bool | None:
    """Whether lse of sequences is packed, None where both forms are the same; ValueError where it
    is neither."""
    query, bias = inp.query, inp.attn_bias
    heads, batch, rows = tuple(query.shape[2:-1]) or (1,), query.shape[0], query.shape[1]
    fits = lse.dim() == len(heads) + 2 and tuple(lse.shape[1:-1]) == heads
    packed = fits and lse.shape[0] == batch and lse.shape[-1] >= rows
    padded = False
    if isinstance(bias, VARLEN_BIASES):
        info = bias.q_seqinfo
        count = info.seqstart.shape[0] - 1
        padded = fits and lse.shape[0] == count and lse.shape[-1] >= info.max_seqlen
    if not packed and not padded:
        raise ValueError(
            "Input tensors have incompatible shapes: lse should be [B, H, M or more]"
            f"\n  lse.shape    : {lse.shape}\n  query.shape  : {query.shape}"
            f"\n  attn_bias    : {type(bias)}"
        )
    return packed if isinstance(bias, VARLEN_BIASES) and packed != padded else None


def _memory_efficient_attention_backward(
    ctx: Context, inp: Inputs, grad: Tensor, op: Any, *, _skip_op_checks: bool = False
) -> Gradients:
    inp.validate_inputs()
    if not grad.dim() == ctx.out.dim() == inp.query.dim():
        raise ValueError(
            "grad, out and query should all be in BMK, in BMHK or in BMGHK format\n"
            f"grad.shape : {grad.shape}\nout.shape  : {ctx.out.shape}\n"
            f"query.shape: {inp.query.shape}"
        )
    packed = _detect_lse_packed_or_raise(ctx.lse, inp)
    if op is None:
        op = _dispatch_bw(inp, varlen_lse_packed=packed)
    elif not _skip_op_checks:
        _ensure_op_supports_or_raise(ValueError, dispatch.BACKWARD, op, inp)
        if packed is not None and packed != op.VARLEN_LSE_PACKED:
            raise ValueError(
                f"Wrong LSE format for {op.NAME} in variable seqlen case: it is "
                f"{'packed' if packed else 'padded'}. Use the backward operator that belongs to "
                "the forward operator, or none."
            )
    grads: Gradients = op.apply(ctx, inp, grad)
    return grads


def _explained(run: Callable[[], _Result], inp: Inputs, needs_gradient: bool) -> _Result:
    """run(), whose NotImplementedError is told in xFormers' words where dispatch knows reasons."""
    if torch.compiler.is_compiling():
        return run()
    try:
        return run()
    except NotImplementedError as error:
        try:
            _dispatch_fw(inp, needs_gradient)
            if needs_gradient:
                _dispatch_bw(inp, None)
        except NotImplementedError as told:
            raise told from error
        raise


def _check_pair(inp: Inputs, forward: Any, backward: Any) -> None:
    """ValueError where the named operators do not go together."""
    if forward is None or backward is None:
        return
    known: Any = forward.BACKWARD
    if inp.p != 0.0 and backward.NAME != known.NAME:
        raise ValueError(
            f"Specified op_bw={backward.NAME}, but with dropout the forward op can only run with "
            f"op_bw={known.NAME}. Please set op_bw=None."
        )
    bias = inp.attn_bias
    if (
        isinstance(bias, VARLEN_BIASES)
        and bias.q_seqinfo.seqstart.shape[0] > 2
        and forward.VARLEN_LSE_PACKED != backward.VARLEN_LSE_PACKED
    ):
        raise ValueError(
            f"Specified op_bw={backward.NAME} is not compatible with op_fw={forward.NAME}, because "
            "they use different format of logsumexp. Please set op_bw=None."
        )


# ---- operators that are not ours ----

_OPS_LOOKUP: dict[str, Any] = {flash.FwOp.NAME: flash.FwOp, flash.BwOp.NAME: flash.BwOp}


def _serialize_op(op: Any) -> Any:
    return op.NAME if op is not None and op.NAME in _OPS_LOOKUP else op


def _unserialize_op(op: Any) -> Any:
    return _OPS_LOOKUP[op] if isinstance(op, str) else op


def _deserialize_bias(attn_bias_ctx: Any, attn_bias_tensor: Tensor | None) -> Any:
    return attn_bias_ctx if attn_bias_tensor is None else attn_bias_tensor


class _fMHA(torch.autograd.Function):
    """Operators by their `apply`: what a program that brings operators of its own runs through.

    The other calls are differentiated by memeff_attn itself.
    """

    @staticmethod
    def forward(ctx: Any, op_fw: Any, op_bw: Any, *args: Any) -> tuple[Tensor, Tensor]:
        inp = Inputs(*args)
        op_fw, op_bw = _unserialize_op(op_fw), _unserialize_op(op_bw)
        out, context = _memory_efficient_attention_forward_requires_grad(inp, op=op_fw)
        if context.op_bw is not None and op_bw not in (None, context.op_bw):
            raise ValueError(
                f"Specified op_bw={op_bw.NAME}, but forward op can only run with "
                f"op_bw={context.op_bw.NAME}. Please set op_bw=None."
            )
        ctx.save_for_backward(inp.query, inp.key, inp.value, context.out, context.lse)
        ctx.op_bw = context.op_bw or op_bw
        ctx.call = inp.attn_bias, inp.p, inp.scale
        ctx.rng_state, ctx.spare = context.rng_state, len(args) - 4
        ctx.mark_non_differentiable(context.lse)
        return out, context.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        inp = Inputs(query, key, value, *ctx.call)
        context = Context(lse=lse, out=out, rng_state=ctx.rng_state)
        grads = _memory_efficient_attention_backward(
            context, inp, grad, ctx.op_bw, _skip_op_checks=True
        )
        shapes = (x.shape for x in (query, key, value))
        wanted = (x.reshape(s) for x, s in zip((grads.dq, grads.dk, grads.dv), shapes, strict=True))
        return (None, None, *wanted, grads.db, *(None,) * ctx.spare)


def _by_apply(inp: Inputs, forward: Any, backward: Any) -> Tensor:
    bias = inp.attn_bias
    tensor = tensor_of(bias)
    if tensor is not None and tensor is not bias and tensor.requires_grad:
        raise NotImplementedError(
            f"the gradient of the bias in {type(bias).__name__} with an operator of the program's "
            "own in op=: operators give that of a tensor alone. Leave op out, or detach the bias."
        )
    shape = inp.normalize_bmhk()
    call: Any = _fMHA.apply
    arguments = inp.query, inp.key, inp.value, inp.attn_bias, inp.p, inp.scale
    out: Tensor = call(_serialize_op(forward), _serialize_op(backward), *arguments)[0]
    return out.reshape(shape)


__all__ = [
    "ALL_BW_OPS",
    "ALL_FW_OPS",
    "VARLEN_BIASES",
    "AttentionBias",
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "Bias",
    "BlockDiagonalMask",
    "Context",
    "Gradients",
    "Inputs",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassBlackwellOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "_get_use_fa3",
    "_set_use_fa3",
    "attn_bias",
    "bmk2bmhk",
    "common",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
    "torch_attention_compat",
]
