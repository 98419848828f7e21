"""Attention under every mask on the CPU: sequence by sequence, block by block, with gradients for
query, key, value, bias, and through the log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .inputs import Inputs, check_gradient, goes_with, lse_shape
from .mask_rule import MaskRule, mask_rule
from .masks_base import AttentionBias
from .reference import backward_blockwise, blockwise


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of dropout(softmax(scale * Q K^T + bias)) V, both differentiable once.

    Shapes: as `memory_efficient_attention`; lse [B, H, M], with sequences [1, H, all queries].
    Dtypes: as there; lse float32.
    Args: as there (output_dtype too); seed: the dropout state where p > 0.
    Memory: O(M + N) and a few blocks of scores; of paged keys a copy of one sequence's.
    Numerics: everything in float32, out and gradients rounded once.
    Raises: ValueError where inputs disagree; NotImplementedError away from the CPU.
    Source: reference.py.
    """
    inputs, rule = _checked(query, key, value, attn_bias, p, scale)
    call: Any = _Masked.apply
    scale = inputs.scale_float
    settings = scale, float(p), output_dtype or query.dtype, seed
    out, lse = call(query, key, value, rule.bias, rule.with_bias(None), *settings)
    return out, lse


def attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) by hand, as `memory_efficient_attention_backward`.

    Raises: ValueError where inputs disagree; NotImplementedError away from the CPU.
    """
    inputs, rule = _checked(query, key, value, attn_bias, p, scale)
    check_gradient(grad, output, lse, query, value)
    if lse.dim() > len(lse_shape(query)):  # in two parts, of which the second is 0 here
        lse = lse[0]
    needs = True, True, True, False
    with torch.no_grad():
        grads = _gradients(
            grad, None, query, key, value, rule, output, lse, inputs.scale_float, float(p), seed,
            needs,
        )  # fmt: skip
    grad_query, grad_key, grad_value, _ = grads
    assert grad_query is not None and grad_key is not None and grad_value is not None
    return grad_query, grad_key, grad_value


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None,
    p: float,
    scale: float | None,
) -> tuple[Inputs, MaskRule]:
    inputs = Inputs(query, key, value, attn_bias, p, scale)
    inputs.validate_inputs()
    if query.device.type != "cpu":
        raise NotImplementedError(f"this path is for the CPU, query is on {query.device}")
    rule = mask_rule(attn_bias, query, key)
    if rule.bias is not None and not goes_with(query.dtype, rule.bias.dtype):
        raise ValueError(
            f"attn_bias must be {query.dtype} like the query, torch.float32, or torch.bool (True = "
            f"visible), got {rule.bias.dtype}. Convert it with .to()."
        )
    return inputs, rule


def _gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: MaskRule,
    out: Tensor,
    lse: Tensor,
    scale: float,
    p: float,
    seed: Tensor | None,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Of query, key, value and bias, each of its input's dtype."""
    inputs = query, key, value, rule.bias
    with torch.autocast("cpu", enabled=False):
        grads = backward_blockwise(
            grad_out, query, key, value, rule, scale, torch.float32, None, p, seed, out, lse,
            needs, grad_lse,
        )  # fmt: skip
    return [
        None if grad is None or x is None else grad.to(x.dtype)
        for grad, x in zip(grads, inputs, strict=True)
    ]


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        rule: MaskRule,
        scale: float,
        p: float,
        output_dtype: torch.dtype,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            full, dtypes = rule.with_bias(bias), (torch.float32, output_dtype)
            out, lse = blockwise(query, key, value, full, scale, *dtypes, p=p, seed=seed)
        ctx.save_for_backward(query, key, value, bias, out, lse, seed)
        ctx.settings = rule, scale, p
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, bias, out, lse, seed = ctx.saved_tensors
        rule, scale, p = ctx.settings
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        out, grad_out = out.to(query.dtype), grad_out.to(query.dtype)
        grads = _gradients(
            grad_out, grad_lse, query, key, value, rule.with_bias(bias), out, lse, scale, p, seed,
            ctx.needs_input_grad[:4],
        )  # fmt: skip
        return (*grads, None, None, None, None, None)
