"""torch.unbind and torch.stack that do not copy where the parts lie in one tensor already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .common import _get_storage_base


def get_stack_strides(tensors: Sequence[Tensor], dim: int) -> tuple[int, ...] | None:
    """The strides of torch.stack(tensors, dim) as a view, None where it would have to copy.

    It is a view where all tensors have one shape, one set of strides and one storage, in which they
    follow each other at equal distances, the first one first: no stride of torch is negative.
    """
    if len(tensors) < 2 or not 0 <= dim <= tensors[0].dim():
        return None
    first, *others = tensors
    step = int(others[0].storage_offset() - first.storage_offset())
    if step < 0:
        return None
    layout = first.shape, first.stride()
    for number, x in enumerate(others, 1):
        if (x.shape, x.stride()) != layout:
            return None
        if x.storage_offset() != first.storage_offset() + number * step:
            return None
        if _get_storage_base(x) != _get_storage_base(first):
            return None
    strides = list(first.stride())
    strides.insert(dim, step)
    return tuple(strides)


def _stacked_view(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    strides = get_stack_strides(tensors, dim)
    if strides is None:
        return None
    shape = list(tensors[0].shape)
    shape.insert(dim, len(tensors))
    return tensors[0].as_strided(shape, strides)


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim % x.dim()
        return x.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        view = _stacked_view(grads, ctx.dim)
        return (torch.stack(grads, ctx.dim) if view is None else view), None


class _StackOrNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *tensors: Tensor) -> Tensor | None:
        ctx.dim = dim
        return _stacked_view(tensors, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grad.unbind(ctx.dim))


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """torch.unbind(x, dim), whose backward pass copies nothing where the gradients are one tensor's
    views."""
    call: Any = _Unbind.apply
    parts: tuple[Tensor, ...] = call(x, dim)
    return parts


def stack_or_none(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """torch.stack(tensors, dim) as a view; None where that would have to copy."""
    call: Any = _StackOrNone.apply
    stacked: Tensor | None = call(dim, *tensors)
    return stacked
