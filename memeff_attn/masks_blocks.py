"""Block-diagonal masks: sequences of any lengths packed along the length of one batch entry, each
of which sees only itself.

    query [1, sum of the queries' lengths, H, K]; key and value likewise, with lengths of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .masks_base import (
    ANCHOR_BOTTOM_RIGHT,
    ANCHOR_TOP_LEFT,
    UNLIMITED,
    AttentionBias,
    Window,
)
from .masks_dense import MaskWithTensorBias, check_window_size
from .seqlen import _SeqLenInfo

Self = TypeVar("Self", bound="SequenceMask")


@dataclass
class SequenceMask(AttentionBias):
    """Base of all masks with sequences: where they lie, on the device and in lists.

    q_seqinfo, k_seqinfo: where the queries and the keys of each sequence begin and how many they
        are; both tell of as many sequences (ValueError).
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def __post_init__(self) -> None:
        if self.q_seqinfo.count != self.k_seqinfo.count:
            raise ValueError(
                f"{self.q_seqinfo.count} sequences of queries and {self.k_seqinfo.count} of keys"
            )

    def to(self: Self, device: str | torch.device) -> Self:
        q_seqinfo = self.q_seqinfo.to(device)
        same = self.k_seqinfo is self.q_seqinfo
        k_seqinfo = q_seqinfo if same else self.k_seqinfo.to(device)
        if q_seqinfo is self.q_seqinfo and k_seqinfo is self.k_seqinfo:
            return self
        return replace(self, q_seqinfo=q_seqinfo, k_seqinfo=k_seqinfo)

    def add_bias(self, bias: Tensor, per_sequence: bool = False) -> MaskWithTensorBias:
        """This mask and a tensor, additive or bool, in one.

        bias: broadcasts to [1, H, M, N] over the tokens of all sequences; with per_sequence to
            [sequences, H, longest M, longest N], counted within each (ALiBi, T5).
        """
        return MaskWithTensorBias(self, bias, per_sequence)

    def _lengths(self) -> list[tuple[int, int]]:
        """(queries, keys) of each sequence."""
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        return [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in pairs]

    def _check_totals(self, queries: int, keys: int) -> None:
        """ValueError where the tensors' lengths are not the sequences'."""
        for name, got, want in (
            ("queries", queries, self.q_seqinfo.seqstart_py[-1]),
            ("keys", keys, self.k_seqinfo.seqstart_py[-1]),
        ):
            if got != want:
                raise ValueError(
                    f"{type(self).__name__} is for {want} {name} in all sequences together, got "
                    f"{got}"
                )

    def _key_rows(self, device: str | torch.device) -> list[slice | Tensor]:
        """Which rows of key and value each sequence has, in its order."""
        return [slice(first, last) for first, last in self.k_seqinfo.intervals()]

    def _visible(self, queries: int, keys: int, device: str | torch.device) -> Tensor:
        self._check_totals(queries, keys)
        window, starts = self._window(), self.q_seqinfo.seqstart_py
        seen = torch.zeros((queries, keys), dtype=torch.bool, device=device)
        places = zip(starts, self._lengths(), self._key_rows(device), strict=False)
        for start, (own, others), rows in places:
            seen[start : start + own, rows] = window.visible(own, others, device)
        return seen

    def _window(self) -> Window:
        return Window()


def spread_bias(mask: AttentionBias, bias: Tensor, shape: Sequence[int]) -> Tensor:
    """A bias that counts within the sequences, [sequences or 1, ..., M or 1, N or 1], as one of
    `shape` [1, ..., M, N]; 0 (False) between the sequences."""
    assert isinstance(mask, SequenceMask)
    full = bias.detach().new_zeros(tuple(shape))
    starts, rows = mask.q_seqinfo.seqstart_py, mask._key_rows(bias.device)
    for s, (queries, keys) in enumerate(mask._lengths()):
        part = bias if bias.dim() == 2 else bias[s if bias.shape[0] > 1 else 0]
        part = part[
            ..., : queries if part.shape[-2] > 1 else 1, : keys if part.shape[-1] > 1 else 1
        ]
        part = part.expand(*part.shape[:-2], queries, keys)
        full[..., starts[s] : starts[s] + queries, rows[s]] = part.detach()
    return full


@dataclass
class BlockDiagonalMask(SequenceMask):
    """Each sequence sees all of itself and nothing else.

    _batch_sizes: how many sequences one tensor of `split` takes, where that is not one.
    """

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: str | torch.device | None = None,
    ) -> BlockDiagonalMask:
        """Of the queries' lengths and the keys' (default: the same), in tokens; a length may be 0.

        device: of the inputs; default: the GPU where there is one.
        AssertionError where lengths are a tensor; ValueError where their numbers differ.
        """
        q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None:
            return cls(q_seqinfo=q_seqinfo, k_seqinfo=q_seqinfo)
        k_seqinfo = _SeqLenInfo.from_seqlens(kv_seqlen, device=device)
        return cls(q_seqinfo, q_seqinfo if k_seqinfo == q_seqinfo else k_seqinfo)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """(mask, the tensors [b, length, *] as one [1, sum of b * length, *]): one sequence for
        each entry of each tensor. `split` undoes it."""
        sizes, lengths = _sizes(tensors)
        mask = cls.from_seqlens(lengths, device=tensors[0].device)
        mask._batch_sizes = sizes
        return mask, _packed(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[BlockDiagonalMask, Tensor, Tensor, Tensor | None]:
        """(mask, queries, keys, values or None), packed as by `from_tensor_list`.

        ValueError where the lists, or two of their tensors, disagree in number.
        """
        sizes, q_lengths = _sizes(tensors_q)
        k_sizes, k_lengths = _sizes(tensors_k)
        if k_sizes != sizes:
            raise ValueError(f"queries are in batches of {sizes}, keys of {k_sizes}")
        if tensors_v is not None and _sizes(tensors_v) != (k_sizes, k_lengths):
            raise ValueError("keys and values must have the same batch sizes and lengths")
        mask = cls.from_seqlens(q_lengths, k_lengths, device=tensors_q[0].device)
        mask._batch_sizes = sizes
        values = None if tensors_v is None else _packed(tensors_v)
        return mask, _packed(tensors_q), _packed(tensors_k), values

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views [b, length, *] of a packed tensor [1, total queries, *]."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views [b, length, *] of a packed tensor [1, total keys, *]."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """As `split_queries`; AssertionError where queries and keys have lengths of their own."""
        assert self.q_seqinfo is self.k_seqinfo, "use split_queries or split_kv"
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Each sequence causal from its top left."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Each sequence causal from its bottom right."""
        return BlockDiagonalCausalFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        )

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Each sequence causal from its top left, the last `window_size` keys of each query."""
        return BlockDiagonalCausalLocalAttentionMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Each sequence causal from its bottom right, the last `window_size` keys of each query."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each sequence causal from its top left: its query i sees its key j when j <= i."""

    def _window(self) -> Window:
        return Window(ANCHOR_TOP_LEFT, UNLIMITED, 0)


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each sequence causal from its bottom right: query i of M sees key j of N when j <= i + N - M.

    ValueError where a sequence has fewer keys than queries.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for s, (queries, keys) in enumerate(self._lengths()):
            if keys < queries:
                raise ValueError(
                    f"sequence {s} has {queries} queries and only {keys} keys: the first queries "
                    "would see none"
                )

    def _window(self) -> Window:
        return Window(ANCHOR_BOTTOM_RIGHT, UNLIMITED, 0)


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Each sequence causal from its top left, the last w keys only: i - w < j <= i.

    _window_size: w in keys, the query's own among them.
    ValueError unless w is above 0; RuntimeError where the last query of a sequence would see no
    key, its queries - w >= its keys.
    """

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window_size(self._window_size)
        for s, (queries, keys) in enumerate(self._lengths()):
            if queries > 0 and queries - self._window_size >= keys:
                raise RuntimeError(
                    f"sequence {s}: with a window of {self._window_size} the last of {queries} "
                    f"queries sees none of {keys} keys"
                )

    def _window(self) -> Window:
        return Window(ANCHOR_TOP_LEFT, self._window_size - 1, 0)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Each sequence causal from its bottom right, the last w keys only: d - w < j - i <= d with
    d = N - M.

    _window_size: w in keys. ValueError unless it is above 0, and where a sequence has fewer keys
    than queries.
    """

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window_size(self._window_size)

    def _window(self) -> Window:
        return Window(ANCHOR_BOTTOM_RIGHT, self._window_size - 1, 0)


def _sizes(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """(batch size of each tensor, length of each of their entries)."""
    if not tensors:
        raise ValueError("expected at least one tensor [b, length, ...]")
    lengths: Iterable[int] = (x.shape[1] for x in tensors for _ in range(x.shape[0]))
    return [x.shape[0] for x in tensors], list(lengths)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1).unsqueeze(0) for x in tensors], dim=1)
