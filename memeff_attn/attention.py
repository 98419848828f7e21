"""The public calls: cheap checks, the mask as a number, then the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import autograd, dispatch, masked, ops
from . import backward as backward_op
from .attn_bias import (
    CAUSAL_BOTTOM_RIGHT,
    CAUSAL_NONE,
    CAUSAL_TOP_LEFT,
    AttentionBias,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    bias_of_rank,
    is_plain,
    mask_rule,
)
from .dropout import new_seed
from .inputs import Inputs, check_inputs, check_numbers, goes_with
from .mask_arguments import lowered

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
    """out = dropout(softmax(scale * Q K^T + bias)) V, exactly, without ever holding the M x N
    scores; differentiable once, for query, key, value and bias.

    Shapes:
        query [B, M, H, K], key [B, N, H, K], value [B, N, H, Kv] -> out [B, M, H, Kv]; key and
        value may have fewer heads Hkv, H % Hkv == 0: head h then reads key head h // (H / Hkv).
        Also [B, M, K] (one head) and [B, M, G, H, K] (all operands alike; expand key and value for
        shared heads). Any size, K and Kv from 1 up, any strides; a tensor whose last stride is not
        1 is copied.
    Dtypes: float16, bfloat16 or float32, all three alike; out has output_dtype. Inputs that differ
        are cast to the autocast dtype under torch.autocast (inputs that agree stay as they are) and
        refused elsewhere.
    Args:
        attn_bias: None; a mask of memeff_attn.attn_bias (LowerTriangularMask() and many more:
            docs/masks.md; with sequences B is 1); or a tensor that broadcasts to
            [B, H, M, N] ([B, M, N] or [B, G, H, M, N] with the other layouts), of the query's dtype
            or float32 (added to the scores), or bool (True = visible). Fewer dimensions: [M, N],
            [1, M, N] and [B * H, M, N]. Scale does not touch it. It may be a Parameter; its
            gradient is summed over the dimensions along which it is broadcast.
        p: probability of dropping a weight, in steps of 1 / 65536; the kept ones are scaled by
            1 / (1 - p). The mask is drawn by torch's generator of the device and is a pure
            function of (seed, batch entry, head, query, key): memeff_attn.dropout.
        scale: any finite number; default K ** -0.5.
        op: operators of memeff_attn.dispatch to insist on: a forward one, or a tuple (forward,
            backward), each of which may be None; default: the best.
        output_dtype: of out, one of the three; default: the query's. float32 is what the sums in
            float32 come to, unrounded; gradients go through the query's dtype.
    Memory: the output; in float32 without a gradient on sm_90 also a copy of query, key and value
        (K and Kv rounded up to 64 or 128); where a gradient is asked for, two floats a row (the
        log-sum-exp and what rounding took from it); for few queries also one partial result in
        float32 for each tile that the GPU runs at once (H200, Kv = 128: at most 18 MiB), and for a
        16-bit output_dtype that is not the inputs' the output once in float32; the backward pass
        takes the gradients, B * H * M floats (B * H * M * (K + 1) where the gradient of the query
        is added up) and, where few blocks fill the GPU, partial sums: for each gradient at most 8
        times its elements, or 64 MiB, in float32; with sequences none of these sums. Nothing grows
        with M * N but a gradient of a bias that does, or that is broadcast over sequences
        (docs/masks.md, which also says which pages are copied). On the CPU also a few blocks of
        scores.
    Numerics: sums and softmax in float32; weights are rounded to the inputs' dtype for the product
        with V, gradients once, after all sums. float32 products are accurate to float32 unless
        torch allows TF32 (torch.backends.cuda.matmul). A query that sees no key gives 0, and adds 0
        to every gradient. A finite bias is a number, however negative. The forward pass is
        bit-deterministic, the backward pass where torch.use_deterministic_algorithms is on; else
        the gradient of 16-bit queries may be added up in any order, in float32.
    Raises:
        ValueError: inputs that disagree with each other, or with a named op.
        NotImplementedError: legal inputs that no operator here takes, with the reasons; on a GPU a
            gradient through rows of key and value that sequences share (pages).
        RuntimeError: a CUDA failure; a gradient of a gradient.
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
    """out = softmax(scale * Q K^T + bias) V: as `memory_efficient_attention`, without dropout.

    Raises: NotImplementedError where p is not 0, as no state of a random generator is returned.
    """
    if p != 0.0:
        _refuse_dropout(Inputs(query, key, value, attn_bias, p, scale))
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
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with out as `memory_efficient_attention` and lse = log sum_j exp(scale * q k_j +
    bias_j): what `memory_efficient_attention_backward` takes.

    Shapes: lse [B, H, M]; [B, 1, M] for 3-D and [B, G, H, M] for 5-D inputs. No padding.
    Dtypes: lse is float32, natural logarithm; it has no gradient and knows no dropout.
    Args: seed: the dropout state where p > 0, memeff_attn.dropout.new_seed(device); pass the same
        to the backward call. Everything else as `memory_efficient_attention`.
    Numerics: a query that sees no key has lse -inf.
    Raises: NotImplementedError where p > 0 and no seed is given.
    """
    if p != 0.0 and seed is None:
        _refuse_dropout(Inputs(query, key, value, attn_bias, p, scale))
    out, lse = _attention(query, key, value, attn_bias, p, scale, op, output_dtype, True, seed)
    return out, lse[0]


def memory_efficient_attention_partial(
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
    """(out, lse) of attention over a part of the keys: what `merge_attentions` puts together.

    out = softmax(scale * Q K^T + bias) V and lse = log sum_j exp(scale * q k_j + bias_j) over these
    keys; both are differentiable once: with lse, dS = P * (dP - rowsum(dO * out) + dLSE).

    Shapes: as `memory_efficient_attention_forward_requires_grad`; with sequences lse is
        [1, H, sum of M], not padded.
    Dtypes, Args: as there, without dropout.
    Memory: as `memory_efficient_attention`; where lse is asked for a gradient, also one float32
        copy of out and of its gradient.
    Numerics: a query that sees no key has out 0 and lse -inf, which merge as weight zero.
    Raises: NotImplementedError where p is not 0.
    Source: interface of xFormers.
    """
    if p != 0.0:
        _refuse_dropout(Inputs(query, key, value, attn_bias, p, scale))
    arguments = query, key, value, attn_bias, p, scale, op, output_dtype
    out, lse = _attention(*arguments, True, partial=True)
    return out, lse[0]


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
    op: Any = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) = gradients of sum(grad * output), by hand: for code that manages its own graph.

    With P = exp(scale * Q K^T + bias - lse), D the dropout scale and dP = D * (grad V^T):
    dS = P * (dP - rowsum(grad * output)), dQ = scale * dS K, dK = scale * dS^T Q,
    dV = (P * D)^T grad.

    Shapes: output and lse as `memory_efficient_attention_forward_requires_grad` gives them, grad as
        output; dQ, dK, dV as query, key and value, contiguous. output and lse may be those of more
        keys than these, as in ring attention: the gradients are then this part's.
    Dtypes: lse float32, all others the query's; no autocast.
    Args: attn_bias, p, scale: as in the forward call; no gradient of the bias is returned. op: a
        backward operator of memeff_attn.dispatch, or a tuple that ends with one. seed: the forward
        call's where p > 0.
    Memory: the gradients and the workspace named at `memory_efficient_attention`.
    Numerics: as the backward pass of `memory_efficient_attention`. Not differentiable.
    Raises:
        ValueError: inputs that disagree with each other, or with a named op.
        NotImplementedError: legal inputs that no operator here takes, with the reasons; p > 0
            without a seed.
        RuntimeError: a CUDA failure.
    Source: csrc/chained/backward.h; interface of xFormers, and seed.
    """
    if not (attn_bias is None or isinstance(attn_bias, (Tensor, AttentionBias))):
        _refuse_mask(attn_bias)
    inputs = Inputs(query, key, value, attn_bias, p, scale)
    inputs.validate_inputs()
    if p != 0.0 and seed is None:
        _refuse_dropout(inputs)
    state = _seed(p, seed, query)
    chosen = dispatch.resolve_bw_op(op)
    if chosen is not None:
        dispatch.ensure_op_takes(chosen, inputs)
    if _on_cpu(query) and not is_plain(attn_bias):
        return masked.attention_backward(
            grad, output, lse, query, key, value, attn_bias, float(p), scale, state
        )
    rule = mask_rule(attn_bias, query, key)
    if rule.shared_keys:
        raise NotImplementedError(dispatch.no_operator_text(inputs, backward=True))
    key, value, bias, causal, mask = lowered(rule, query, key, value)
    tf32 = query.dtype == torch.float32 and dispatch.tf32_allowed()
    with torch.no_grad():
        grads = backward_op.backward(
            grad, query, key, value, bias, output, lse, inputs.scale_float, causal, tf32,
            [True, True, True, False], "" if chosen is None else chosen.VARIANT, float(p), state,
            None, *(mask or ()),
        )  # fmt: skip
    return grads[0], grads[1], grads[2]


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
    seed: Tensor | None = None,
    partial: bool = False,
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
            return _by_rule(
                query, key, value, attn_bias, p, scale, op, output_dtype, need_lse, seed, partial
            )
    if mixed:
        query, key, value, bias = _cast_by_autocast(query, key, value, bias)
        dtype = query.dtype
    if scale is None:
        head_dim = query.shape[-1]
        scale = head_dim**-0.5 if head_dim else 1.0
    elif type(scale) is not float or not -_LARGEST_SCALE <= scale <= _LARGEST_SCALE:
        scale = _number("scale", scale)
    differentiable = (
        torch.is_grad_enabled()
        and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (bias is not None and bias.requires_grad)
        )
    ) or forward_ad._current_level >= 0  # forward mode: autograd refuses it, the operator would not
    variant = backward_variant = ""
    state = other_dtype = None
    if p != 0.0 or op is not None or output_dtype is not None:
        inputs = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
        variant, backward_variant = _unusual(inputs, op, differentiable)
        other_dtype = None if output_dtype is dtype else output_dtype
        p = float(p)
        state = _seed(p, seed, query)
    tf32 = dtype == torch.float32 and dispatch.tf32_allowed()
    direct = not differentiable and ops.goes_direct(query, key, value, bias)
    if differentiable or (not direct and autograd.hidden()):
        return autograd.differentiable(
            query, key, value, bias, scale, causal, tf32, variant, backward_variant, p, state,
            partial=partial, output_dtype=other_dtype,
        )  # fmt: skip
    call: Any = ops.forward_cuda if direct else ops.forward  # the same result
    arguments = query, key, value, bias, scale, causal, tf32, need_lse, variant, p, state
    result: tuple[Tensor, Tensor] = (
        call(*arguments) if other_dtype is None else call(*arguments, output_dtype=other_dtype)
    )
    return result


def _by_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: AttentionBias,
    p: float,
    scale: float | None,
    op: Any,
    output_dtype: torch.dtype | None,
    need_lse: bool,
    seed: Tensor | None,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    """Masks that are more than a tensor or one number."""
    if not isinstance(attn_bias, AttentionBias):
        _refuse_mask(attn_bias)
    inputs = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    named: list[Any] = [dispatch.resolve_op(op)]
    if isinstance(op, tuple):
        named.append(dispatch.resolve_bw_op(op))
    for chosen in named if torch.is_grad_enabled() else named[:1]:
        if chosen is not None:
            dispatch.ensure_op_takes(chosen, inputs)
    if output_dtype not in (None, *dispatch.DTYPES):
        inputs.validate_inputs()
        raise NotImplementedError(dispatch.no_operator_text(inputs))
    p = _number("p", p) if isinstance(p, Tensor) else p
    scale = inputs.scale_float if scale is None else _number("scale", scale)
    check_numbers(p, scale)
    if _on_cpu(query):
        if not query.dtype == key.dtype == value.dtype:
            query, key, value, _ = _cast_by_autocast(query, key, value, None)
        state = _seed(p, seed, query)
        out, lse = masked.attention(query, key, value, attn_bias, p, scale, state, output_dtype)
        return out, lse.unsqueeze(0)
    variants = ["" if chosen is None else chosen.VARIANT for chosen in (*named, None)]
    inputs.is_partial = partial
    return _by_operators(inputs, float(p), scale, (variants[0], variants[1]), need_lse, seed)


def _by_operators(
    inputs: Inputs,
    p: float,
    scale: float,
    variants: tuple[str, str],
    need_lse: bool,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    query, key, value = inputs.query, inputs.key, inputs.value
    rule = mask_rule(inputs.attn_bias, query, key)
    bias, dtype = rule.bias, query.dtype
    bias_dtype = dtype if bias is None else bias.dtype
    if key.dtype != dtype or value.dtype != dtype or not goes_with(dtype, bias_dtype):
        query, key, value, bias = _cast_by_autocast(query, key, value, bias)
        rule = rule.with_bias(bias)
    asked = (
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (query, key, value, bias))
    ) or forward_ad._current_level >= 0
    other_dtype = None if inputs.output_dtype == query.dtype else inputs.output_dtype
    hidden = autograd.hidden()
    if rule.shared_keys and (asked or hidden) and query.device.type != "cpu":
        raise NotImplementedError(dispatch.no_operator_text(inputs, backward=True))
    bias_grad = hidden or (asked and bias is not None and bias.requires_grad)
    key, value, bias, causal, mask = lowered(rule, query, key, value, bias_grad)
    state = _seed(p, seed, query)
    tf32 = query.dtype == torch.float32 and dispatch.tf32_allowed()
    direct = not asked and ops.goes_direct(query, key, value, bias)
    if asked or (not direct and hidden):
        return autograd.differentiable(
            query, key, value, bias, scale, causal, tf32, *variants, p, state, *(mask or ()),
            partial=inputs.is_partial, output_dtype=other_dtype,
        )  # fmt: skip
    arguments = query, key, value, bias, scale, causal, tf32, need_lse, variants[0], p, state
    named: dict[str, Any] = {} if other_dtype is None else {"output_dtype": other_dtype}
    result: Any = (
        ops.forward_cuda(*arguments, mask, **named)
        if direct
        else ops.forward(*arguments, *(mask or ()), **named)
    )
    out, lse = result
    return out, lse


def _on_cpu(query: Tensor) -> bool:
    """Whether masks go to masked.py, which has a gradient of the log-sum-exp; graphs hold the
    operators, for every device."""
    return query.device.type == "cpu" and not torch.compiler.is_compiling()


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | AttentionBias | None
) -> None:
    Inputs(query, key, value, attn_bias).validate_inputs()
    raise AssertionError("inputs that were refused are valid")


def _refuse_mask(attn_bias: object) -> None:
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


def _unusual(inputs: Inputs, op: Any, differentiable: bool) -> tuple[str, str]:
    """Dropout, named operators, an output dtype: the kernels to insist on, forward and backward; or
    why not."""
    if isinstance(inputs.p, Tensor):
        _number("p", inputs.p)
    check_numbers(inputs.p, inputs.scale)
    chosen = dispatch.resolve_op(op)
    backward = dispatch.resolve_bw_op(op) if isinstance(op, tuple) else None
    unknown = inputs.output_dtype not in (None, *dispatch.DTYPES)
    if chosen is None and backward is None and not unknown:
        return "", ""
    inputs.validate_inputs()
    if chosen is None and unknown:
        raise NotImplementedError(dispatch.no_operator_text(inputs))
    if chosen is not None:
        dispatch.ensure_op_takes(chosen, inputs)
    if backward is not None and differentiable:
        dispatch.ensure_op_takes(backward, inputs)
    first, second = ("" if x is None else x.VARIANT for x in (chosen, backward))
    return first, second


def _seed(p: float, seed: Tensor | None, query: Tensor) -> Tensor | None:
    """The dropout state of a call: None where nothing is dropped, drawn where none is given."""
    if p == 0.0:
        return None
    if seed is None:
        return new_seed(query.device)
    if seed.dtype != torch.int64 or seed.shape != (2,) or seed.device != query.device:
        raise ValueError(
            f"seed must be int64 of shape (2,) on {query.device}, as memeff_attn.dropout.new_seed "
            f"makes it; got {seed.dtype}, {tuple(seed.shape)}, {seed.device}"
        )
    return seed


def _refuse_dropout(inputs: Inputs) -> None:
    if isinstance(inputs.p, Tensor):
        _number("p", inputs.p)
    inputs.validate_inputs()
    raise NotImplementedError(
        f"p is {inputs.p}, and this call returns no dropout state. Use memory_efficient_attention, "
        "or memory_efficient_attention_forward_requires_grad and "
        "memory_efficient_attention_backward with the same "
        "seed=memeff_attn.dropout.new_seed(device)."
    )
