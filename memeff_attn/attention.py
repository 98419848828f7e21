"""The public calls: cheap checks, the mask as a number, then the operator (ops.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch, ops
from .attn_bias import (
    CAUSAL_BOTTOM_RIGHT,
    CAUSAL_NONE,
    CAUSAL_TOP_LEFT,
    AttentionBias,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    bias_of_rank,
)
from .inputs import Inputs, check_inputs, check_numbers

_with_backward: Callable[..., tuple[Tensor, Tensor]] = ops.Forward.apply
_LARGEST_SCALE = torch.finfo(torch.float32).max


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """out = softmax(scale * Q K^T + bias) V, exactly, without ever holding the M x N scores.

    Shapes:
        query [B, M, H, K], key [B, N, H, K], value [B, N, H, Kv] -> out [B, M, H, Kv]; key and
        value may have fewer heads Hkv, H % Hkv == 0: head h then reads key head h // (H / Hkv).
        Also [B, M, K] (one head) and [B, M, G, H, K] (all operands alike; expand key and value for
        shared heads). Any size, K and Kv from 1 up, any strides; a tensor whose last stride is not
        1 is copied.
    Dtypes: float16, bfloat16 or float32, all three alike; out has the same. Inputs that differ are
        cast to the autocast dtype under torch.autocast (inputs that agree stay as they are) and
        refused elsewhere.
    Args:
        attn_bias: None; LowerTriangularMask() (query i sees keys up to i);
            LowerTriangularFromBottomRightMask() (up to i + N - M); or a tensor that broadcasts to
            [B, H, M, N] ([B, M, N] or [B, G, H, M, N] with the other layouts), of the query's dtype
            or float32 (added to the scores), or bool (True = visible). Fewer dimensions: [M, N],
            [1, M, N] and [B * H, M, N]. Scale does not touch it.
        p: dropout probability; 0 until [training].
        scale: any finite number; default K ** -0.5.
        op: an operator of memeff_attn.dispatch, or a tuple that begins with one, to insist on;
            default: the best.
        output_dtype: the query's dtype until [masks].
    Memory: the output, and nothing that grows with M * N. On the CPU also one block of scores.
    Numerics: sums and softmax in float32; weights are rounded to the inputs' dtype for the product
        with V. float32 products are accurate to float32 unless torch allows TF32
        (torch.backends.cuda.matmul). A query that sees no key gives 0. A finite bias is a number,
        however negative. The forward pass is bit-deterministic.
    Raises:
        ValueError: inputs that disagree with each other, or with a named op.
        NotImplementedError: legal inputs that no operator here takes, with the reasons; the
            backward pass.
        RuntimeError: a CUDA failure.
    Source: Rabe and Staats, "Self-attention does not need O(n^2) memory"; csrc/chained; interface
        of xFormers.
    """
    return _attention(query, key, value, attn_bias, p, scale, op, output_dtype, False)[0]


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """out = softmax(scale * Q K^T + bias) V: the forward pass alone.

    Everything as `memory_efficient_attention`; p must be 0, as no state of a random generator is
    returned.
    """
    return _attention(query, key, value, attn_bias, p, scale, op, output_dtype, False)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with out as `memory_efficient_attention` and lse = log sum_j exp(scale * q k_j +
    bias_j).

    Shapes: lse [B, H, M]; [B, 1, M] for 3-D and [B, G, H, M] for 5-D inputs. No padding.
    Dtypes: lse is float32, natural logarithm.
    Numerics: a query that sees no key has lse -inf.
    Everything else as `memory_efficient_attention_forward`.
    """
    return _attention(query, key, value, attn_bias, p, scale, op, output_dtype, True)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None,
    p: float,
    scale: float | None,
    op: Any,
    output_dtype: torch.dtype | None,
    need_lse: bool,
) -> tuple[Tensor, Tensor]:
    # Every call passes here: cheap tests only; a failing one leads to the function that explains
    # it.
    rank = query.dim()
    if rank != key.dim() or rank != value.dim() or rank < 3 or rank > 5:
        _refuse(query, key, value, attn_bias)
    dtype = query.dtype
    mixed = dtype != key.dtype or dtype != value.dtype
    bias, causal = None, CAUSAL_NONE
    if attn_bias is not None:
        if isinstance(attn_bias, Tensor):
            bias = attn_bias if attn_bias.dim() == rank else bias_of_rank(attn_bias, query)
            kind = bias.dtype
            mixed = mixed or (kind != dtype and kind != torch.float32 and kind != torch.bool)
        elif type(attn_bias) is LowerTriangularMask:
            causal = CAUSAL_TOP_LEFT
        elif type(attn_bias) is LowerTriangularFromBottomRightMask:
            causal = CAUSAL_BOTTOM_RIGHT
        else:
            _refuse_mask(query, key, value, attn_bias, p, scale)
    if mixed:
        query, key, value, bias = _cast_by_autocast(query, key, value, bias)
        dtype = query.dtype
    if scale is None:
        head_dim = query.shape[-1]
        scale = head_dim**-0.5 if head_dim else 1.0
    elif type(scale) is not float or not -_LARGEST_SCALE <= scale <= _LARGEST_SCALE:
        scale = _number("scale", scale)
    variant = ""
    if p != 0.0 or op is not None or output_dtype is not None:
        variant = _unusual(Inputs(query, key, value, attn_bias, p, scale, output_dtype), op)
    tf32 = dtype == torch.float32 and dispatch.tf32_allowed()
    call: Any  # three ways to the same result
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (bias is not None and bias.requires_grad)
    ):
        call = _with_backward
    elif ops.goes_direct(query, key, value, bias):
        call = ops.forward_cuda
    else:
        call = ops.forward
    result: tuple[Tensor, Tensor] = call(
        query, key, value, bias, scale, causal, tf32, need_lse, variant
    )
    return result


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | AttentionBias | None
) -> None:
    Inputs(query, key, value, attn_bias).validate_inputs()
    raise AssertionError("inputs that were refused are valid")


def _refuse_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: object, p: float, scale: float | None
) -> None:
    if isinstance(attn_bias, AttentionBias):
        inputs = Inputs(query, key, value, attn_bias, p, scale)
        inputs.validate_inputs()
        raise NotImplementedError(dispatch.no_operator_text(inputs))
    hint = f" Did you mean {attn_bias.__name__}()?" if isinstance(attn_bias, type) else ""
    raise ValueError(
        f"attn_bias must be None, a tensor, or a mask of memeff_attn.attn_bias, got "
        f"{type(attn_bias).__name__}.{hint}"
    )


def _cast_by_autocast(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        check_inputs(query, key, value, bias)
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:  # float64 and integers stay, as with torch's own operators
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    if bias is not None and bias.dtype != torch.float32:
        bias = cast(bias)
    return cast(query), cast(key), cast(value), bias


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a number, got a tensor; pass {name}.item(), which waits for the "
            "device."
        )
    number = float(value)
    check_numbers(0.0, number)
    return number


def _unusual(inputs: Inputs, op: Any) -> str:
    """Dropout, a named operator, another output dtype: the kernel to insist on, or why not."""
    check_numbers(inputs.p, inputs.scale)
    chosen = dispatch.resolve_op(op)
    asks_more = inputs.p != 0.0 or inputs.output_dtype not in (None, inputs.query.dtype)
    if chosen is None and not asks_more:
        return ""
    inputs.validate_inputs()
    if chosen is None:
        raise NotImplementedError(dispatch.no_operator_text(inputs))
    dispatch.ensure_op_takes(chosen, inputs)
    return chosen.VARIANT
