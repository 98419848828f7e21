"""From an operator of this package to memeff_attn's kernels and back: the two forms of the
log-sum-exp, dropout states.

    lse of memeff_attn:  [B, H, M], [B, G, H, M], of sequences [1, H, total]
    padded (cutlass):    rows up to a multiple of 32, +inf beyond; of n sequences
                         [n, H, the longest's rows up to a multiple of 32]
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .... import attention, dispatch
from .... import backward as backward_op
from ....attn_bias import VARLEN_BIASES, bias_of_rank
from ....dropout import new_seed
from ....inputs import Inputs as KernelInputs
from .common import AttentionBwOpBase, AttentionFwOpBase
from .inputs import Bias, Context, Gradients, Inputs, _grouped

QUANTISED = "quantised keys and values are not supported: dequantise them"
PAD = 32  # rows; clients of the padded form slice [:, :, :M]


# ---- the log-sum-exp ----


def _has_sequences(bias: Bias) -> bool:
    return isinstance(bias, VARLEN_BIASES)


def padded(lse: Tensor, inp: Inputs) -> Tensor:
    """memeff_attn's lse in the padded form. Nothing waits for the device."""
    if not _has_sequences(inp.attn_bias):
        missing = -lse.shape[-1] % PAD
        return torch.nn.functional.pad(lse, (0, missing), value=math.inf) if missing else lse
    info: Any = inp.attn_bias.q_seqinfo  # type: ignore[union-attr]
    starts, total = info.seqstart.long(), lse.shape[-1]
    rows = info.max_seqlen + -info.max_seqlen % PAD
    places = starts[:-1, None] + torch.arange(rows, device=lse.device)  # [n, rows]
    beyond = places >= starts[1:, None]
    if total == 0:
        return lse.new_full((places.shape[0], *lse.shape[1:-1], rows), math.inf)
    picked = lse[0][..., places.clamp(max=total - 1)]  # [*heads, n, rows]
    return picked.masked_fill(beyond, math.inf).movedim(-2, 0).contiguous()


def packed(lse: Tensor, inp: Inputs) -> Tensor:
    """Any form's lse as memeff_attn takes it."""
    queries = inp.query.shape[1]
    if not _has_sequences(inp.attn_bias) or _is_packed(lse, inp):
        return lse[..., :queries].contiguous()
    starts = inp.attn_bias.q_seqinfo.seqstart.long()  # type: ignore[union-attr]
    tokens = torch.arange(queries, device=lse.device)
    own = torch.searchsorted(starts, tokens, right=True) - 1  # the sequence of each token
    rows = lse.movedim(-1, 1)[own, tokens - starts[own]]  # [total, *heads]
    return rows.movedim(0, -1).unsqueeze(0).contiguous()


def _is_packed(lse: Tensor, inp: Inputs) -> bool:
    """Of sequences: [1, *heads, total] and not [n, *heads, longest]. With one sequence both are."""
    return lse.shape[0] == 1 and lse.shape[-1] >= inp.query.shape[1]


# ---- forward and backward ----


def _with_groups(inp: Inputs) -> Inputs:
    """The inputs whose bias has the query's groups."""
    bias = inp.attn_bias
    if inp.query.dim() != 5 or not isinstance(bias, Tensor) or bias.dim() != 4:
        return inp
    return dataclasses.replace(inp, attn_bias=_grouped(bias, inp.query))


def _arguments(inp: Inputs) -> tuple[Any, ...]:
    """Of memeff_attn's calls, up to scale."""
    if inp._quantized:
        raise NotImplementedError(QUANTISED)
    given = _with_groups(inp)
    return given.query, given.key, given.value, given.attn_bias, given.p, given.scale


def attend(inp: Inputs, output_dtype: torch.dtype | None = None) -> Tensor:
    """The output alone, differentiable."""
    output_dtype = output_dtype or inp.output_dtype
    return attention.memory_efficient_attention(*_arguments(inp), output_dtype=output_dtype)


def attend_with_lse(
    inp: Inputs, output_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, the dropout state where p > 0); lse in memeff_attn's form."""
    arguments, output_dtype = _arguments(inp), output_dtype or inp.output_dtype
    seed = None
    if inp.is_partial:
        out, lse = attention.memory_efficient_attention_partial(
            *arguments, output_dtype=output_dtype
        )
    else:
        seed = new_seed(inp.device) if inp.p != 0.0 else None
        out, lse = attention.memory_efficient_attention_forward_requires_grad(
            *arguments, output_dtype=output_dtype, seed=seed
        )
    return out, lse, seed


def gradients(inp: Inputs, grad: Tensor, out: Tensor, lse: Tensor, seed: Any) -> Gradients:
    """Of `grad`; lse in memeff_attn's form."""
    dtype, bias = inp.query.dtype, inp.attn_bias
    inp = _with_groups(inp)
    grad, out = grad.to(dtype), out.to(dtype)
    if isinstance(bias, Tensor) and bias.requires_grad and bias.dtype != torch.bool:
        ranked = bias_of_rank(_grouped(bias.detach(), inp.query), inp.query)
        tf32 = dtype == torch.float32 and dispatch.tf32_allowed()
        with torch.no_grad():
            dq, dk, dv, db = backward_op.backward(
                grad, inp.query, inp.key, inp.value, ranked, out, lse, inp.scale_float, 0, tf32,
                [True] * 4, "", float(inp.p), seed,
            )  # fmt: skip
        return Gradients(dq, dk, dv, db.view(bias.shape))
    return Gradients(
        *attention.memory_efficient_attention_backward(
            grad,
            out,
            lse,
            inp.query,
            inp.key,
            inp.value,
            inp.attn_bias,
            inp.p,
            inp.scale,
            seed=seed,
        )
    )


def reasons(inp: Inputs, backward: bool) -> list[str]:
    """What memeff_attn has against the inputs; of its kernels' reasons those on a GPU."""
    if inp._quantized:
        return [QUANTISED]
    if inp.device.type != "cuda":
        return []
    if not (inp.query.dtype == inp.key.dtype == inp.value.dtype):
        return []  # autocast will cast them
    inp = _with_groups(inp)
    given = KernelInputs(
        inp.query, inp.key, inp.value, inp.attn_bias, inp.p, inp.scale, None, inp.is_partial
    )
    op = dispatch.KernelBwOp if backward else dispatch.KernelFwOp
    try:
        return op.not_supported_reasons(given)
    except ValueError as error:  # the mask and the tensors disagree
        return [str(error)]


class OnKernelsFw(AttentionFwOpBase):
    """A forward operator on memeff_attn's kernels; PADDED_LSE says which form its lse has."""

    RUNS_HERE = True
    PADDED_LSE: bool = False
    BACKWARD: Any = None  # the operator that knows its dropout

    @classmethod
    def _output_dtype(cls, inp: Inputs) -> torch.dtype | None:
        return inp.output_dtype

    @classmethod
    def apply(cls, inp: Inputs, needs_gradient: bool) -> tuple[Tensor, Context | None]:
        dtype = cls._output_dtype(inp)
        if not needs_gradient:
            return attend(inp, dtype), None
        out, lse, seed = attend_with_lse(inp, dtype)
        context = Context(lse=padded(lse, inp) if cls.PADDED_LSE else lse, out=out)
        if seed is not None:
            context.rng_state, context.op_bw = seed, cls.BACKWARD
        return out, context

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        return found or reasons(d, False)


class OnKernelsBw(AttentionBwOpBase):
    """A backward operator on memeff_attn's kernels; takes either form of lse."""

    RUNS_HERE = True

    @classmethod
    def apply(cls, ctx: Context, inp: Inputs, grad: Tensor) -> Gradients:
        return gradients(inp, grad, ctx.out, packed(ctx.lse, inp), ctx.rng_state)

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        found = super().not_supported_reasons(d)
        return found or reasons(d, True)
