"""The inputs of a call, and the errors of inputs that disagree with each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .attn_bias import AttentionBias, MaskRule, bias_of_rank, bias_shape

LAYOUTS = "[B, M, K], [B, M, H, K] or [B, M, G, H, K]"


def default_scale(query: Tensor) -> float:
    head_dim = query.shape[-1]
    return float(head_dim) ** -0.5 if head_dim else 1.0


def lse_shape(query: Tensor) -> tuple[int, ...]:
    """[B, 1, M], [B, H, M] or [B, G, H, M]."""
    if query.dim() == 3:
        return (query.shape[0], 1, query.shape[1])
    return (query.shape[0], *query.shape[2:-1], query.shape[1])


def two_part_lse_shape(query: Tensor) -> tuple[int, ...]:
    """Part 0 is the log-sum-exp, part 1 what rounding took from it: beside a large score the last
    bit of fp32 is worth more than a weight, and the backward pass computes exp(score - lse)."""
    return (2, *lse_shape(query))


def describe(name: str, x: Tensor | AttentionBias | MaskRule | None) -> str:
    if isinstance(x, Tensor):
        return f"{name}: shape {tuple(x.shape)}, strides {tuple(x.stride())}, {x.dtype}, {x.device}"
    if isinstance(x, MaskRule):
        return f"{name}: {x}"
    return f"{name}: {'None' if x is None else type(x).__name__}"


@dataclass
class Inputs:
    """One call; field names as in xFormers."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | AttentionBias | MaskRule | None = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False
    wants_lse: bool = False

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def scale_float(self) -> float:
        return default_scale(self.query) if self.scale is None else float(self.scale)

    @property
    def nbytes(self) -> int:
        """Bytes of query, key and value."""
        return sum(x.numel() * x.element_size() for x in (self.query, self.key, self.value))

    @property
    def wants_gradient(self) -> bool:
        tensors = self.query, self.key, self.value, self.attn_bias
        asked = any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        return asked and torch.is_grad_enabled()

    def get_output_dtype(self) -> torch.dtype:
        return self.query.dtype if self.output_dtype is None else self.output_dtype

    def validate_inputs(self) -> None:
        """ValueError where the inputs disagree, whatever operator would take them."""
        bias = self.attn_bias if isinstance(self.attn_bias, Tensor) else None
        check_inputs(self.query, self.key, self.value, bias)
        check_numbers(self.p, self.scale)

    def __str__(self) -> str:
        named = ("query", "key", "value", "attn_bias")
        lines = [describe(name, getattr(self, name)) for name in named]
        lines.append(f"p: {self.p}, scale: {'K ** -0.5' if self.scale is None else self.scale}")
        return "\n".join([f"    {line}" for line in lines])


def check_numbers(p: float, scale: float | None) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(
            f"p is the probability of dropping a weight: expected 0 <= p <= 1, got {p}. Pass p=0.0."
        )
    if scale is not None and not abs(float(scale)) <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"scale multiplies Q K^T: expected a finite float32 number, got {scale}. Leave it out "
            "for K ** -0.5."
        )


def goes_with(query: torch.dtype, bias: torch.dtype) -> bool:
    """Whether a bias of this dtype may stand beside a query of that one."""
    return bias in (query, torch.float32, torch.bool)


def _fail(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, text: str
) -> ValueError:
    named = (("query", query), ("key", key), ("value", value), ("attn_bias", attn_bias))
    for name, x in named:
        text = f"{text}\n    {describe(name, x)}"
    return ValueError(text)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None) -> None:
    """ValueError where shapes, dtypes or devices disagree."""
    fail = functools.partial(_fail, query, key, value, attn_bias)
    rank = query.dim()
    if not 3 <= rank <= 5 or key.dim() != rank or value.dim() != rank:
        raise fail(
            f"query, key and value must all be {LAYOUTS}. Add the head dimension with unsqueeze(2)."
        )
    for x, name in ((key, "key"), (value, "value"), (attn_bias, "attn_bias")):
        if x is not None and x.device != query.device:
            raise fail(
                f"all tensors must be on one device: query is on {query.device}, {name} on "
                f"{x.device}. Move it with .to()."
            )
    if not (query.is_floating_point() and key.is_floating_point() and value.is_floating_point()):
        raise fail(
            "query, key and value must be floating-point. Convert them with .to(torch.float16) or "
            ".float()."
        )
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise fail(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and "
            f"{value.dtype}. Convert them with .to(), or call under torch.autocast, which does."
        )
    _check_shapes(query, key, value, fail)
    if attn_bias is not None:
        _check_bias(query, key, attn_bias, fail)


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, fail: Callable[[str], ValueError]
) -> None:
    if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
        raise fail(
            f"query, key and value must have one batch size, got {query.shape[0]}, {key.shape[0]} "
            f"and {value.shape[0]}. Expand the ones that are shared."
        )
    if value.shape[1] != key.shape[1]:
        raise fail(
            f"key and value must have one length N, got {key.shape[1]} and {value.shape[1]}. "
            "Dimension 1 is the length, heads come after it."
        )
    if key.shape[-1] != query.shape[-1]:
        raise fail(
            f"query and key must have one head dimension K, got {query.shape[-1]} and "
            f"{key.shape[-1]}. Only value may have another one."
        )
    if value.shape[2:-1] != key.shape[2:-1]:
        raise fail(
            f"key and value must have the same heads, got {tuple(key.shape[2:-1])} and "
            f"{tuple(value.shape[2:-1])}. Expand the one that is shared."
        )
    if query.dim() == 5 and key.shape[2:4] != query.shape[2:4]:
        raise fail(
            f"with [B, M, G, H, K] inputs query and key must have the same G and H, got "
            f"{tuple(query.shape[2:4])} and {tuple(key.shape[2:4])}. Share key "
            "heads by key.expand (stride 0 costs nothing) or by 4-D inputs."
        )
    if query.dim() == 4 and key.shape[2] != query.shape[2]:
        heads, key_heads = query.shape[2], key.shape[2]
        if key_heads == 0 or heads % key_heads != 0:
            raise fail(
                f"the heads of query must be a multiple of those of key, got {heads} and "
                f"{key_heads}. Heads are dimension 2: inputs are [B, M, H, K], not [B, H, M, K]."
            )


def _check_bias(
    query: Tensor, key: Tensor, bias: Tensor, fail: Callable[[str], ValueError]
) -> None:
    if not goes_with(query.dtype, bias.dtype):
        raise fail(
            f"attn_bias must be {query.dtype} like the query, torch.float32, or torch.bool (True = "
            f"visible), got {bias.dtype}. Convert it with .to()."
        )
    expected = bias_shape(query, key)
    actual = tuple(bias_of_rank(bias, query).shape)
    if any(got not in (1, want) for got, want in zip(actual, expected, strict=True)):
        raise fail(
            f"attn_bias must broadcast to {expected}, each dimension that or 1; got "
            f"{tuple(bias.shape)}. Add dimensions with unsqueeze, or slice it."
        )


def check_gradient(
    grad_out: Tensor, out: Tensor, lse: Tensor, query: Tensor, value: Tensor
) -> None:
    """ValueError where what the backward pass takes beside the inputs disagrees with them."""
    shape = (*query.shape[:-1], value.shape[-1])
    expected = (
        ("grad", grad_out, shape, query.dtype),
        ("output", out, shape, query.dtype),
        ("lse", lse, lse_shape(query), torch.float32),
    )
    for name, x, want, dtype in expected:
        if x is lse and x.dim() > len(want):
            want = two_part_lse_shape(query)
        if x.shape != want or x.dtype != dtype or x.device != query.device:
            raise ValueError(
                f"{name} must have shape {tuple(want)}, {dtype}, on {query.device}, as the forward "
                f"pass gives it; got\n    {describe(name, x)}"
            )
