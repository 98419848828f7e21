"""Masks as objects: a rule instead of a tensor, so they cost no memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="AttentionBias")

# What the operator takes as `causal`; the values of `Causal` in csrc/params.h.
CAUSAL_NONE, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT = 0, 1, 2


class AttentionBias:
    """Base of all masks: immutable, may be pickled and copied, serve calls of any size."""

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
        raise NotImplementedError(f"{type(self).__name__} does not say what it looks like")

    def to(self: Self, device: str | torch.device) -> Self:
        """The same mask for inputs on `device`."""
        return self


class LowerTriangularMask(AttentionBias):
    """Causal, anchored to the top-left corner: query i sees key j when j <= i, whatever M and N."""

    def __init__(self, device: str | torch.device | None = None) -> None:
        """`device` is ignored: the mask holds no tensor."""

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        return _materialize_causal_mask(shape, dtype, device)

    def add_bias(self, bias: Tensor) -> AttentionBias:
        """This mask and an additive tensor in one."""
        raise NotImplementedError(planned_text("LowerTriangularMaskWithTensorBias"))

    def __repr__(self) -> str:
        return "LowerTriangularMask()"


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, anchored to the bottom-right corner: query i sees key j when j <= i + (N - M).

    The last query sees every key. With more queries than keys the first M - N queries see none:
    their output is 0.
    """

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        return _materialize_causal_mask(shape, dtype, device, from_bottomright=True)

    def make_local_attention(self, window_size: int) -> AttentionBias:
        """This mask limited to the last `window_size` keys of each query."""
        raise NotImplementedError(planned_text("LowerTriangularFromBottomRightLocalAttentionMask"))

    def __repr__(self) -> str:
        return "LowerTriangularFromBottomRightMask()"


def split_bias(attn_bias: Tensor | AttentionBias | None) -> tuple[Tensor | None, int]:
    """(additive or bool tensor, causal) of what a user may pass."""
    if attn_bias is None or isinstance(attn_bias, Tensor):
        return attn_bias, CAUSAL_NONE
    if type(attn_bias) is LowerTriangularMask:
        return None, CAUSAL_TOP_LEFT
    if type(attn_bias) is LowerTriangularFromBottomRightMask:
        return None, CAUSAL_BOTTOM_RIGHT
    raise NotImplementedError(planned_text(type(attn_bias).__name__))


def _materialize_causal_mask(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    window_size: int | None = None,
    from_bottomright: bool = False,
) -> Tensor:
    rows, columns = shape[-2:]
    diagonal = columns - rows if from_bottomright else 0
    visible = torch.ones(tuple(shape), dtype=torch.bool, device=device).tril_(diagonal)
    if window_size is not None:
        visible = visible.triu_(diagonal - (window_size - 1))
    if dtype == torch.bool:
        return visible
    return torch.zeros(tuple(shape), dtype=dtype, device=device).masked_fill_(~visible, -math.inf)


def bias_shape(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """What a tensor bias broadcasts to: [B, M, N], [B, H, M, N] or [B, G, H, M, N]."""
    return (query.shape[0], *query.shape[2:-1], query.shape[1], key.shape[1])


def bias_of_rank(bias: Tensor, query: Tensor) -> Tensor:
    """A view of the bias with as many dimensions as the query; ValueError where the missing ones
    could mean two things.

    [M, N] serves every batch and head. With a 4-D query also [1, M, N], [B * H, M, N] (heads
    fastest) and, where B and H differ, [B, M, N].
    """
    rank = query.dim()
    if bias.dim() == rank:
        return bias
    if bias.dim() == 2:
        return bias[(None,) * (rank - 2)]
    if bias.dim() == 3 and rank == 4:
        batch, heads, first = query.shape[0], query.shape[2], bias.shape[0]
        if first == 1:
            return bias.unsqueeze(0)
        if first == batch * heads:
            return bias.view(batch, heads, *bias.shape[1:])
        if first == batch != heads:
            return bias.unsqueeze(1)
        raise ValueError(
            f"attn_bias has shape {tuple(bias.shape)}, whose first dimension may be meant as batch "
            f"({batch}) or heads "
            f"({heads}); expected [B, H, M, N], any dimension 1. Pass attn_bias.unsqueeze(1) for "
            "one mask a batch "
            "entry, attn_bias.unsqueeze(0) for one a head."
        )
    raise ValueError(
        f"attn_bias has {bias.dim()} dimensions {tuple(bias.shape)}, query {tuple(query.shape)} "
        f"takes {rank} "
        f"({_BIAS_LAYOUT.get(rank, 'none')}, any dimension 1) or 2 ([M, N]). Add the missing ones "
        "with unsqueeze."
    )


_BIAS_LAYOUT = {3: "[B, M, N]", 4: "[B, H, M, N]", 5: "[B, G, H, M, N]"}


# xFormers' other masks: the names exist, so that imports and isinstance checks work, and say what
# is missing when used.
_PLANNED = (
    "LowerTriangularMaskWithTensorBias",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LocalAttentionFromBottomRightMask",
    "BlockDiagonalMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
)


def planned_text(name: str) -> str:
    return (
        f"{name} is not here yet: it comes with [masks] (issue 4). Today attn_bias may be None, "
        "LowerTriangularMask(), "
        "LowerTriangularFromBottomRightMask() or a tensor (additive, or bool with True = visible)."
    )


class _PlannedMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):  # protocols probe such names
            raise AttributeError(name)
        raise NotImplementedError(planned_text(cls.__name__))


class _PlannedBias(AttentionBias, metaclass=_PlannedMeta):
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(planned_text(type(self).__name__))


_planned = {
    name: _PlannedMeta(name, (_PlannedBias,), {"__module__": __name__}) for name in _PLANNED
}


def __getattr__(name: str) -> Any:
    if name in _planned:
        return _planned[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
