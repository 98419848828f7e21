"""Masks of calls whose batch entries all have the same length, and masks joined with a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .masks_base import (
    ANCHOR_BOTTOM_RIGHT,
    ANCHOR_TOP_LEFT,
    UNLIMITED,
    AttentionBias,
    Window,
    picture,
)


class LowerTriangularMask(AttentionBias):
    """Causal, anchored to the top-left corner: query i sees key j when j <= i, whatever M and N."""

    def __init__(self, device: str | torch.device | None = None) -> None:
        """`device` is ignored: the mask holds no tensor."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """This mask and an additive tensor in one."""
        return LowerTriangularMaskWithTensorBias(bias)

    def _window(self) -> Window:
        return Window(ANCHOR_TOP_LEFT, UNLIMITED, 0)

    def __repr__(self) -> str:
        return "LowerTriangularMask()"


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal from the top left, and `bias` added to the scores: what is hidden stays hidden.

    bias: broadcasts to [B, H, M, N] as a tensor given as attn_bias does; bool: True = visible.
    """

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        seen = super().materialize(shape, torch.bool, device)
        return joined_picture(seen, self._bias, dtype)

    def to(self, device: str | torch.device) -> LowerTriangularMaskWithTensorBias:
        return type(self)(self._bias.to(device))

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """The sum of both tensors; ValueError where one of them is bool."""
        return type(self)(sum_of_biases(self._bias, bias))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shape_text(self._bias)})"


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, anchored to the bottom-right corner: query i sees key j when j <= i + (N - M).

    The last query sees every key. With more queries than keys the first M - N queries see none:
    their output is 0.
    """

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """This mask limited to the last `window_size` keys of each query."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)

    def _window(self) -> Window:
        return Window(ANCHOR_BOTTOM_RIGHT, UNLIMITED, 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal from the bottom right, the last w keys only: query i sees key j when
    i + (N - M) - w < j <= i + (N - M).

    _window_size: w in keys, the query's own among them. ValueError unless above 0.
    """

    _window_size: int

    def __post_init__(self) -> None:
        check_window_size(self._window_size)

    def _window(self) -> Window:
        return Window(ANCHOR_BOTTOM_RIGHT, self._window_size - 1, 0)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A band around the bottom-right diagonal: query i sees key j when
    -window_left <= j - (i + N - M) <= window_right.

    Both in keys, the query's own not counted. ValueError where one is negative.
    """

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_band(self.window_left, self.window_right)

    def _window(self) -> Window:
        return Window(ANCHOR_BOTTOM_RIGHT, self.window_left, self.window_right)


class KeyPaddingMask(AttentionBias):
    """Some keys of each batch entry are hidden from all its queries: query i of entry b sees key j
    when visible[b, j].

    visible: bool [B, N] or [1, N], True = visible. It is read as it lies: attention broadcasts it
    and builds nothing of size M * N. With causal or local rules: `other_mask.add_bias(bias)` with
    bias = visible[:, None, None, :].
    ValueError where it is not such a tensor.
    """

    def __init__(self, visible: Tensor) -> None:
        if visible.dtype != torch.bool or visible.dim() != 2:
            raise ValueError(
                "KeyPaddingMask takes a bool tensor [B, N] with True = visible, got "
                f"{visible.dtype} {tuple(visible.shape)}. Convert 0/1 masks with .bool()."
            )
        self.visible = visible

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], keys: int, *, device: str | torch.device | None = None
    ) -> KeyPaddingMask:
        """The first lengths[b] keys of entry b are visible, of `keys` in memory.

        ValueError where a length is negative or above `keys`.
        """
        if not all(0 <= length <= keys for length in lengths):
            raise ValueError(f"lengths must be between 0 and keys = {keys}, got {list(lengths)}")
        ends = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        return cls(torch.arange(keys, device=device) < ends[:, None])

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        """As `AttentionBias.materialize`; the first dimension of `shape` is the batch."""
        batch, keys = self.visible.shape
        rows = self.visible.to(device).view(batch, *(1,) * (len(shape) - 2), keys)
        return picture(rows, shape, dtype)

    def to(self, device: str | torch.device) -> KeyPaddingMask:
        return type(self)(self.visible.to(device))

    def bias_for(self, query: Tensor) -> Tensor:
        """A view of the query's rank: [B, 1, 1, N]."""
        batch, keys = self.visible.shape
        return self.visible.view(batch, *(1,) * (query.dim() - 2), keys)

    def _window(self) -> Window:
        return Window()

    def __repr__(self) -> str:
        return f"KeyPaddingMask({_shape_text(self.visible)})"


class MaskWithTensorBias(AttentionBias):
    """Any mask and a tensor in one: `bias` is added to the scores (bool: True = visible), what
    `mask` hides stays hidden.

    bias: broadcasts to [B, H, M, N] as a tensor given as attn_bias does; with block-diagonal masks
        B = 1 and M, N are the tokens of all sequences. With per_sequence it broadcasts to
        [sequences, H, longest M, longest N] instead and counts queries and keys within each
        sequence: bias[s, h, i, j] is for query i and key j of sequence s. One tensor [1, H, L, L]
        then serves all sequences (ALiBi, T5), and its gradient is the sum over them.
    ValueError where `mask` has a tensor already (add the tensors), where per_sequence is set and
        `mask` has no sequences, and where it is not and the keys are paged: pages have no place in
        such a bias.
    """

    def __init__(self, mask: AttentionBias, bias: Tensor, per_sequence: bool = False) -> None:
        if isinstance(mask, LowerTriangularMaskWithTensorBias | MaskWithTensorBias):
            raise ValueError(f"{type(mask).__name__} has a tensor already: add the tensors instead")
        if isinstance(mask, KeyPaddingMask):
            raise ValueError(
                "KeyPaddingMask is a bool tensor: hide keys in the additive one instead, "
                "bias.masked_fill(~visible[:, None, None, :], -math.inf)"
            )
        varlen = hasattr(mask, "q_seqinfo")
        if per_sequence and not varlen:
            raise ValueError(f"per_sequence needs a block-diagonal mask, got {type(mask).__name__}")
        if hasattr(mask, "block_tables") and not per_sequence:
            raise ValueError(
                f"{type(mask).__name__} takes a bias that counts within the sequence: pass "
                "per_sequence=True and [sequences or 1, H, M, N]"
            )
        self.mask = mask
        self._bias = bias
        self.per_sequence = per_sequence

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        seen = self.mask.materialize(shape, torch.bool, device)
        if not self.per_sequence:
            return joined_picture(seen, self._bias, dtype)
        from .masks_blocks import spread_bias

        return joined_picture(seen, spread_bias(self.mask, self._bias, seen.shape), dtype)

    def to(self, device: str | torch.device) -> MaskWithTensorBias:
        return type(self)(self.mask.to(device), self._bias.to(device), self.per_sequence)

    def add_bias(self, bias: Tensor) -> MaskWithTensorBias:
        """The sum of both tensors; ValueError where one of them is bool."""
        return type(self)(self.mask, sum_of_biases(self._bias, bias), self.per_sequence)

    def _window(self) -> Window:
        return self.mask._window()

    def __repr__(self) -> str:
        where = ", per_sequence=True" if self.per_sequence else ""
        return f"MaskWithTensorBias({self.mask!r}, {_shape_text(self._bias)}{where})"


def joined_picture(seen: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """bias where `seen`, -inf elsewhere; as bool: True where both let a key be seen. A bias of more
    batch entries or heads than were asked for keeps them, as in xFormers."""
    bias = bias.detach().to(seen.device)
    shape = torch.broadcast_shapes(seen.shape, bias.shape)  # type: ignore[no-untyped-call]
    seen = seen.expand(shape)
    if bias.dtype == torch.bool or dtype == torch.bool:
        visible = bias if bias.dtype == torch.bool else bias != -math.inf
        return picture(seen & visible, seen.shape, dtype)
    return picture(seen, seen.shape, dtype).add_(bias).masked_fill_(~seen, -math.inf)


def sum_of_biases(one: Tensor, other: Tensor) -> Tensor:
    if torch.bool in (one.dtype, other.dtype):
        raise ValueError("a bool bias cannot be added: turn it into 0 and -inf first")
    return one + other


def check_window_size(window_size: int) -> None:
    if window_size <= 0:
        raise ValueError(
            f"window_size must be above 0 (it counts the query's own key), got {window_size}"
        )


def check_band(left: int, right: int) -> None:
    if left < 0 or right < 0:
        raise ValueError(f"window_left and window_right must not be negative, got {left}, {right}")


def _shape_text(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"
