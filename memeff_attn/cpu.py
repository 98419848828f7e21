"""Attention on the CPU: PyTorch's own flash kernel where it applies, blockwise PyTorch where it
does not.

`route` and `backward_route` decide and say why; `forward` and `backward` are the CPU
implementations of the operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._torch import at_least
from .attn_bias import CAUSAL_BOTTOM_RIGHT, CAUSAL_NONE, CAUSAL_TOP_LEFT
from .inputs import lse_shape
from .mask_rule import MaskRule
from .reference import SCORES_PER_BLOCK, backward_blockwise, blockwise

# Measured with tests/test_cpu.py: that of torch 2.4.1 is off by 1e-3 in the log-sum-exp and wrong
# with some biases, in 16 bits; that of 2.6.0 passes.
_FLASH_IS_RIGHT = at_least(2, 6)


def effective_causal(query: Tensor, key: Tensor, causal: int) -> int:
    """Bottom-right that hides the same keys as a simpler rule becomes that rule."""
    if causal == CAUSAL_BOTTOM_RIGHT:
        if query.shape[1] == key.shape[1]:
            return CAUSAL_TOP_LEFT
        if query.shape[1] == 1:
            return CAUSAL_NONE
    return causal


def route(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    p: float = 0.0,
    output_dtype: torch.dtype | None = None,
) -> tuple[str, str]:
    """("flash" or "blockwise", why)."""
    if not _FLASH_IS_RIGHT:
        return "blockwise", "PyTorch's flash kernel for the CPU is trusted from torch 2.6 on"
    if p != 0.0:
        return "blockwise", "PyTorch's flash kernel for the CPU has no dropout"
    if query.shape[-1] != value.shape[-1]:
        return (
            "blockwise",
            f"PyTorch's flash kernel takes Kv = K only, K is {query.shape[-1]}, Kv "
            f"{value.shape[-1]}",
        )
    if output_dtype not in (None, query.dtype):
        return "blockwise", "PyTorch's flash kernel writes the query's dtype only"
    if query.dtype == torch.float32:
        return "blockwise", "PyTorch's flash kernel rounds exp to 20 bits, too coarse for float32"
    rule = effective_causal(query, key, causal)
    if rule == CAUSAL_BOTTOM_RIGHT:
        return "blockwise", "PyTorch's flash kernel has no bottom-right causal mask"
    if rule == CAUSAL_TOP_LEFT and scale <= 0:
        return (
            "blockwise",
            "PyTorch's flash kernel scales the causal mask, so scale must be above 0",
        )
    if 0 in query.shape or 0 in key.shape:
        return "blockwise", "an input is empty"
    if (
        attn_bias is not None
        and attn_bias.dim() == 5
        and attn_bias.shape[1:3] not in ((1, 1), query.shape[2:4])
    ):
        return (
            "blockwise",
            "PyTorch's flash kernel knows no groups, the bias is broadcast over one of G and H",
        )
    if attn_bias is not None and not _below_infinity(attn_bias):
        return (
            "blockwise",
            "PyTorch's 16-bit flash kernel does not carry NaN and +inf of the bias to the output",
        )
    return "flash", "PyTorch's flash kernel takes these inputs"


# Beyond this the last bit of lse shows in exp(score - lse): 5e-4 and more.
_LARGEST_LSE = 2.0**12


def backward_route(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    p: float = 0.0,
    bias_grad: bool = False,
) -> tuple[str, str]:
    """("flash" or "blockwise", why), as far as the forward's log-sum-exp does not decide."""
    path, why = route(query, key, value, attn_bias, scale, causal, p)
    if path != "flash":
        return path, why
    if bias_grad:
        return "blockwise", "PyTorch's flash kernel has no gradient of the bias"
    if key.shape[2:-1] != query.shape[2:-1]:
        return "blockwise", "PyTorch's flash kernel rounds before it sums over shared heads"
    return path, why


def _below_infinity(bias: Tensor) -> bool:
    if bias.dtype == torch.bool or bias.numel() == 0:
        return True
    return bool(bias.amax() < math.inf)  # NaN compares false


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    scale: float,
    causal: int,
    p: float = 0.0,
    seed: Tensor | None = None,
    rule: MaskRule | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of validated inputs; out contiguous in the query's layout, lse contiguous fp32.

    rule: what attn_bias and causal do not say: windows and sequences.
    """
    dtypes = torch.float32, output_dtype or query.dtype
    if rule is not None:
        return blockwise(query, key, value, rule, scale, *dtypes, p=p, seed=seed)
    path, _ = route(query, key, value, attn_bias, scale, causal, p, output_dtype)
    if path == "flash":
        return _flash(query, key, value, attn_bias, scale, effective_causal(query, key, causal))
    return blockwise(query, key, value, attn_bias, scale, *dtypes, causal, p, seed)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: int,
    needs: Sequence[bool],
    p: float = 0.0,
    seed: Tensor | None = None,
    rule: MaskRule | None = None,
    grad_lse: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of query, key, value and bias, where needed: contiguous, of their input's dtype,
    summed in fp32 and rounded once."""
    settings = scale, causal, p, needs[3]
    path, _ = backward_route(query, key, value, attn_bias, *settings)
    if rule is not None or grad_lse is not None:
        path = "blockwise"
    if path == "flash" and bool(lse.abs().amax() < _LARGEST_LSE):  # NaN and inf compare false
        simple = effective_causal(query, key, causal)
        found = _flash_backward(grad_out, query, key, value, attn_bias, out, lse, scale, simple)
        return [x if n else None for x, n in zip((*found, None), needs, strict=True)]
    inputs = query, key, value, attn_bias
    mask, number = (attn_bias, causal) if rule is None else (rule, None)
    grads = backward_blockwise(
        grad_out, query, key, value, mask, scale, torch.float32, number, p, seed, out, lse, needs,
        grad_lse,
    )  # fmt: skip
    return [
        None if grad is None or x is None else grad.to(x.dtype)
        for grad, x in zip(grads, inputs, strict=True)
    ]


def _bhmk(x: Tensor, heads: int) -> Tensor:
    """Any layout as [B, H, L, D] with last stride 1; shared key heads are repeated."""
    if x.dim() == 3:
        x = x.unsqueeze(2)
    elif x.dim() == 5:
        x = x.flatten(2, 3)
    if x.shape[2] == 1:
        x = x.expand(-1, -1, heads, -1)
    elif x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    if x.shape[-1] != 1 and x.stride(-1) != 1:
        x = x.contiguous()
    return x.transpose(1, 2)


def _bias_bhmn(bias: Tensor, query: Tensor) -> Tensor:
    """A bias of the query's rank as a float one of rank 4, with last stride 1: the kernel of torch
    2.6 reads it so."""
    if bias.dim() == 3:
        bias = bias.unsqueeze(1)
    elif bias.dim() == 5:
        bias = bias.flatten(1, 2)
    if bias.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype)
        bias = torch.where(bias, zero, torch.full((), -math.inf, dtype=query.dtype))
    return bias if bias.shape[-1] == 1 or bias.stride(-1) == 1 else bias.contiguous()


def _flash(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, scale: float, causal: int
) -> tuple[Tensor, Tensor]:
    heads = math.prod(query.shape[2:-1])
    q, k, v = (_bhmk(x, heads) for x in (query, key, value))
    bias = None if attn_bias is None else _bias_bhmn(attn_bias, query)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, causal == CAUSAL_TOP_LEFT, attn_mask=bias, scale=scale)
    lse = lse.reshape(-1).view(lse.shape)  # strides of size-1 dimensions too are contiguous ones
    if bias is not None:
        _mend_empty_rows(lse, bias, causal)
    shape = (*query.shape[:-1], value.shape[-1])
    return out.transpose(1, 2).reshape(-1).view(shape), lse.view(lse_shape(query))


def _mend_empty_rows(lse: Tensor, bias: Tensor, causal: int) -> None:
    """In place on lse [B, H, M]: -inf for a row that sees no key; the kernel says 0."""
    suspects = (lse == 0).nonzero()
    if suspects.numel() == 0:
        return
    rows = bias.expand(*lse.shape, -1)  # [B, H, M, 1 or N]
    keys = rows.shape[-1]
    columns = torch.arange(keys)
    for part in torch.split(suspects, max(1, SCORES_PER_BLOCK // keys)):
        b, h, m = part.unbind(1)
        hidden = rows[b, h, m] == -math.inf
        if causal == CAUSAL_TOP_LEFT and keys > 1:
            hidden |= columns > m[:, None]
        dead = hidden.all(1)
        lse[b[dead], h[dead], m[dead]] = -math.inf


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: int,
) -> list[Tensor]:
    heads = math.prod(query.shape[2:-1])
    g, q, k, v, o = (_bhmk(x, heads) for x in (grad_out, query, key, value, out))
    bias = None if attn_bias is None else _bias_bhmn(attn_bias, query)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = kernel(
        g, q, k, v, o, lse.view(q.shape[:3]), 0.0, causal == CAUSAL_TOP_LEFT,
        attn_mask=bias, scale=scale,
    )  # fmt: skip
    return [
        grad.transpose(1, 2).reshape(-1).view(x.shape)
        for grad, x in zip(grads, (query, key, value), strict=True)
    ]
