"""What joins the operators forward and backward: autograd, and the count of their operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import backward, ops
from .mask_arguments import MaskArguments

# Arguments of apply after attn_bias and before the mask's (MaskArguments, or none at all): none of
# them has a gradient.
_SETTINGS = 8


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    tf32: bool,
    variant: str,
    backward_variant: str,
    p: float,
    seed: Tensor | None,
    output_dtype: torch.dtype | None,
    *mask: Any,
) -> tuple[Tensor, Tensor]:
    """Of the arguments of apply; with the log-sum-exp, which the backward pass needs."""
    call: Any = ops.forward
    if ops.goes_direct(query, key, value, attn_bias):
        call = ops.forward_cuda
        if mask:
            mask = (MaskArguments(*mask),)
    named: dict[str, Any] = {} if output_dtype is None else {"output_dtype": output_dtype}
    result: tuple[Tensor, Tensor] = call(
        query, key, value, attn_bias, scale, causal, tf32, True, variant, p, seed, *mask, **named
    )
    return result


def _keep(ctx: Any, arguments: tuple[Any, ...], out: Tensor, lse: Tensor) -> None:
    """What the backward pass needs of a call of apply."""
    settings, mask = arguments[: 4 + _SETTINGS], arguments[4 + _SETTINGS :]
    query, key, value, attn_bias, scale, causal, tf32, _, backward_variant, p, seed, _ = settings
    ctx.save_for_backward(query, key, value, attn_bias, out, lse, seed, *mask[2:6])
    ctx.settings = scale, causal, tf32, backward_variant, p, mask[:2], mask[6:]


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
    """grad_lse: of the log-sum-exp in two parts, where it has a gradient."""
    query, key, value, attn_bias, out, lse, seed, *tensors = ctx.saved_tensors
    scale, causal, tf32, variant, p, windows, rest = ctx.settings
    mask: tuple[Any, ...] = (*windows, *tensors, *rest)
    without = (None,) * (_SETTINGS + len(mask))
    if grad_out is None:
        if grad_lse is None:
            return (None, None, None, None, *without)
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        grad_lse = grad_lse[0]
    if out.dtype != query.dtype:  # as `.to(output_dtype)` behind the call would have it
        out, grad_out = out.to(query.dtype), grad_out.to(query.dtype)
    needs = [bool(need) for need in ctx.needs_input_grad[:4]]
    call: Any = backward.backward
    if torch.compiler.is_compiling():
        pass
    elif torch.is_grad_enabled():  # create_graph=True, or torch.func.grad
        call = _Backward.apply
    elif (
        type(grad_out) is Tensor
        and not grad_out.is_neg()
        and ops.goes_direct(query, key, value, attn_bias)
    ):
        call = backward.backward_cuda
        mask = (MaskArguments(*mask),) if mask else ()
    grads = call(
        grad_out, query, key, value, attn_bias, out, lse, scale, causal, tf32, needs, variant, p,
        seed, grad_lse, *mask,
    )  # fmt: skip
    wanted = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return (*wanted, *without)


class _Backward(torch.autograd.Function):
    """The gradients where a gradient of them may be asked for: an error then, not zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> backward.Gradients:
        grads: backward.Gradients = backward.backward(*arguments)
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: backward.Gradients) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "memory_efficient_attention has no gradient of its gradient. Use "
            "torch.nn.functional.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where create_graph=True is needed."
        )


class Forward(torch.autograd.Function):
    """The operator where a gradient may be asked for later. Not differentiable twice."""

    # Not the setup_context form: torch binds its arguments by signature, 20 us a call.
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = _forward(*arguments)
        _keep(ctx, arguments, out, lse)
        ctx.mark_non_differentiable(lse)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # or torch fills a gradient of lse with zeros, to drop
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Any = None) -> Any:
        return _backward(ctx, grad_out)


class FunctionalForward(torch.autograd.Function):
    """The same under torch.func.grad, vmap and their like, which take this form only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _keep(ctx, inputs, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Any = None) -> Any:
        return _backward(ctx, grad_out)


class Partial(torch.autograd.Function):
    """The operator where a gradient of the log-sum-exp too may be asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _keep(ctx, inputs, *output)
        if not torch.compiler.is_compiling() and ops.transform() is None:
            ctx.set_materialize_grads(False)  # a log-sum-exp that nobody used costs nothing

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        return _backward(ctx, grad_out, grad_lse)


def hidden() -> bool:
    """Whether tensors may need a gradient without saying so: inside torch.vmap."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and ops.transform() is not None
    )


def _no_start_twice(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where queries and keys have the same starts: those of the keys as another tensor."""
    first = 1 + _SETTINGS + 2  # attn_bias, settings, windows
    starts = arguments[first : first + 2]
    if len(starts) < 2 or starts[0] is None or starts[0] is not starts[1]:
        return arguments
    return (*arguments[: first + 1], starts[1].view_as(starts[1]), *arguments[first + 2 :])


def differentiable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    partial: bool = False,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse), of which out may be asked for gradients, and with partial lse. arguments: those
    of the operator, from attn_bias on, with the backward variant behind its own and no need_lse;
    output_dtype: None for the query's."""
    arguments = (*arguments[:_SETTINGS], output_dtype, *arguments[_SETTINGS:])
    function: Any = Partial if partial else Forward
    if torch.compiler.is_compiling():  # Dynamo takes no tensor twice
        if key is query:
            key = key.view_as(key)
        if value is query or value is key:
            value = value.view_as(value)
        arguments = _no_start_twice(arguments)
    elif ops.transform() is not None and not partial:
        function = FunctionalForward
    result: tuple[Tensor, Tensor] = function.apply(query, key, value, *arguments)
    return result


# ---- torch.vmap: one call an entry, as each has its own dropout ----


def _entry_by_entry(op: Any) -> Callable[..., Any]:
    @torch.no_grad()  # gradients are FunctionalForward's
    def batched(info: Any, in_dims: Sequence[int | None], *arguments: Any, **named: Any) -> Any:
        def entry(i: int) -> Any:
            pairs = zip(arguments, in_dims, strict=True)
            return op(*(x.select(d, i) if isinstance(d, int) else x for x, d in pairs), **named)

        results = [entry(i) for i in range(info.batch_size)]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return batched


if hasattr(torch.library, "register_vmap"):  # torch >= 2.5; before, torch loops itself and warns
    for _op in (ops.forward, backward.backward):
        torch.library.register_vmap(_op, _entry_by_entry(_op), lib=ops.library)


# ---- torch.utils.flop_counter: every score, as for torch's own attention ----


def _products(query: torch.Size, key: torch.Size, widths: int, starts: torch.Size | None) -> int:
    """Operations of products over [B, H, M, N] whose other dimensions sum to `widths`; n sequences,
    whose lengths are on the device, count as n of the mean length (pages: of all rows)."""
    heads = math.prod(query[2:-1])
    sequences = 1 if starts is None else max(1, starts[0] - 1)
    return 2 * query[0] * heads * query[1] * key[1] * widths // sequences


def _starts(rest: Sequence[Any], named: Mapping[str, Any], before: int) -> torch.Size | None:
    """The shape of query_starts, which `before` other arguments and two windows precede."""
    found: torch.Size | None = named.get("query_starts")
    return rest[before + 2] if len(rest) > before + 2 else found


@register_flop_formula(ops.forward.overloadpacket)
def _forward_flop(
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    *rest: Any,
    **named: Any,
) -> int:
    widths = query_shape[-1] + value_shape[-1]
    return _products(query_shape, key_shape, widths, _starts(rest, named, 8))


@register_flop_formula(backward.backward.overloadpacket)
def _backward_flop(
    grad_shape: torch.Size,
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    *rest: Any,
    **named: Any,
) -> int:
    """Scores, dQ and dK over K; dP and dV over Kv."""
    widths = 3 * query_shape[-1] + 2 * value_shape[-1]
    return _products(query_shape, key_shape, widths, _starts(rest, named, 11))
