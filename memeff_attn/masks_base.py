"""What every mask class is made of: the base class and the window rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="AttentionBias")

# From where a rule counts its diagonal. The first three are also what the operator takes as
# `causal`; the values of `Anchor` in csrc/params.h.
ANCHOR_NONE, ANCHOR_TOP_LEFT, ANCHOR_BOTTOM_RIGHT = 0, 1, 2
UNLIMITED = -1


class Window(NamedTuple):
    """Query i of M sees key j of N where -left <= j - (i + d) <= right, with d = 0 from the top
    left and d = N - M from the bottom right; -1 is no limit."""

    anchor: int = ANCHOR_NONE
    left: int = UNLIMITED
    right: int = UNLIMITED

    def offset(self, queries: int, keys: int) -> int:
        """d of a sequence."""
        return keys - queries if self.anchor == ANCHOR_BOTTOM_RIGHT else 0

    def visible(
        self,
        queries: int,
        keys: int,
        device: str | torch.device,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Tensor:
        """bool [rows, columns] of a sequence of that many queries and keys."""
        middle = torch.arange(*rows.indices(queries), device=device) + self.offset(queries, keys)
        distance = torch.arange(*columns.indices(keys), device=device) - middle[:, None]
        if self.left == self.right == UNLIMITED:
            return torch.ones(distance.shape, dtype=torch.bool, device=device)
        if self.left == UNLIMITED:
            return distance <= self.right
        seen = distance >= -self.left
        return seen if self.right == UNLIMITED else seen & (distance <= self.right)


def picture(visible: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A bool [..., M, N] as a mask of `shape` and `dtype`: 0 and -inf, bool as it is."""
    visible = visible.expand(tuple(shape))
    if dtype == torch.bool:
        return visible.clone(memory_format=torch.contiguous_format)
    hidden = torch.zeros(tuple(shape), dtype=dtype, device=visible.device)
    return hidden.masked_fill_(~visible, -math.inf)


def _materialize_causal_mask(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    window_size: int | None = None,
    from_bottomright: bool = False,
) -> Tensor:
    """A causal mask of `shape` [..., M, N], limited to the last `window_size` keys of each query:
    0 where visible, -inf where not (bool: True where visible)."""
    anchor = ANCHOR_BOTTOM_RIGHT if from_bottomright else ANCHOR_TOP_LEFT
    window = Window(anchor, UNLIMITED if window_size is None else window_size - 1, 0)
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size must be at least 1 (the query's own key), got {window_size}")
    return picture(window.visible(shape[-2], shape[-1], device), shape, dtype)


class AttentionBias:
    """Base of all masks: may be pickled and copied, serve any number of calls."""

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        """The mask as a tensor [..., M, N]: 0 where visible, -inf where not (bool: True where
        visible).

        For tests and for looking at: attention itself never builds it.
        """
        return picture(self._visible(shape[-2], shape[-1], device), shape, dtype)

    def to(self: Self, device: str | torch.device) -> Self:
        """The same mask for inputs on `device`."""
        return self

    def add_bias(self, bias: Tensor) -> AttentionBias:
        """This mask and a tensor, additive or bool, in one: `MaskWithTensorBias`."""
        from .masks_dense import MaskWithTensorBias

        return MaskWithTensorBias(self, bias)

    def _window(self) -> Window:
        """The rule between the queries and keys of one sequence."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it looks like")

    def _visible(self, queries: int, keys: int, device: str | torch.device) -> Tensor:
        """bool [queries, keys] of the whole call."""
        return self._window().visible(queries, keys, device)
