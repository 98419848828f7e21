"""Block-diagonal masks over paged keys: key and value are a pool of pages, and a table says which
page holds the next keys of a sequence.

    key and value [1, pages * page_size, ...]; key t of sequence s is row
    block_tables[s, t // page_size] * page_size + t % page_size. A page may serve many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from .masks_base import Window
from .masks_blocks import SequenceMask
from .masks_padded import (
    CAUSAL_OFFSET,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
)
from .seqlen import _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo, default_device

Self = TypeVar("Self", bound="PagedMask")


@dataclass(eq=False)
class PagedMask(SequenceMask):
    """Base of the masks over paged keys.

    block_tables: int32 [sequences, pages of each] on the device; entries behind a sequence's last
        key may be anything. page_size: keys of a page.
    ValueError for another shape or dtype, and where a sequence does not end within its pages.
    """

    block_tables: Tensor
    page_size: int

    _UNPAGED_TYPE: ClassVar[type[SequenceMask]]

    def __post_init__(self) -> None:
        super().__post_init__()
        tables, count = self.block_tables, self.k_seqinfo.count
        if tables.dim() != 2 or tables.shape[0] != count or self.page_size < 1:
            raise ValueError(
                f"block_tables must be [{count}, pages of a sequence] and page_size at least 1, "
                f"got {tuple(tables.shape)} and {self.page_size}"
            )
        if tables.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"block_tables must be int32, got {tables.dtype}")
        rows = tables.shape[1] * self.page_size
        if any(last > rows for _, last in self._logical()):
            raise ValueError(
                f"a sequence ends beyond its {tables.shape[1]} pages of {self.page_size} keys: "
                f"{self._logical()}"
            )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, PagedMask)
        mine = self.q_seqinfo, self.k_seqinfo, self.page_size
        return mine == (other.q_seqinfo, other.k_seqinfo, other.page_size) and torch.equal(
            self.block_tables, other.block_tables
        )

    def to(self: Self, device: str | torch.device) -> Self:
        moved = super().to(device)
        return replace(moved, block_tables=self.block_tables.to(device))

    def _logical(self) -> list[tuple[int, int]]:
        """(first key, first key after it) of each sequence, counted within its own pages."""
        firsts = self._first_keys()
        return [(a, a + n) for a, n in zip(firsts, self.k_seqinfo.seqlen_py, strict=True)]  # type: ignore[attr-defined]

    def _first_keys(self) -> list[int]:
        return [0] * self.k_seqinfo.count

    def _check_totals(self, queries: int, keys: int) -> None:
        if queries != self.q_seqinfo.seqstart_py[-1]:
            raise ValueError(
                f"{type(self).__name__} is for {self.q_seqinfo.seqstart_py[-1]} queries in all "
                f"sequences together, got {queries}"
            )
        if keys % self.page_size != 0:
            raise ValueError(f"keys must be whole pages of {self.page_size}, got {keys} of them")

    def _key_rows(self, device: str | torch.device) -> list[slice | Tensor]:
        tables = self.block_tables.to(device)
        spans = enumerate(self._logical())
        return [paged_rows(tables[s], self.page_size, *span) for s, span in spans]


def paged_rows(table: Tensor, page_size: int, first: int, last: int) -> Tensor:
    """int64 [last - first]: where in the pool the keys from `first` on lie, of a sequence whose
    pages `table` lists."""
    keys = torch.arange(first, last, device=table.device)
    pages = table.long().index_select(0, keys // page_size)
    return pages * page_size + keys % page_size


@dataclass(eq=False)
class PagedBlockDiagonalPaddedKeysMask(PagedMask):
    """Each sequence sees its first kv_seqlen paged keys, all of them."""

    k_seqinfo: _PaddedSeqLenInfo

    _UNPAGED_TYPE = BlockDiagonalPaddedKeysMask

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: str | torch.device | None = None,
    ) -> PagedBlockDiagonalPaddedKeysMask:
        """Of the queries' and the keys' lengths and the pages.

        device: of the inputs; default: that of block_tables.
        AssertionError where lengths are a tensor; ValueError where they do not fit.
        """
        device = block_tables.device if device is None else default_device(device)
        rows = block_tables.shape[-1] * page_size
        return cls(
            _SeqLenInfo.from_seqlens(q_seqlen, device=device),
            _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, rows, device=device),
            block_tables.to(device),
            page_size,
        )


@dataclass(eq=False)
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Paged keys, each sequence causal from its bottom right: query i of M sees key j of its N when
    j <= i + N - M."""

    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetPaddedKeysMask

    def _window(self) -> Window:
        return CAUSAL_OFFSET


@dataclass(eq=False)
class PagedBlockDiagonalGappyKeysMask(PagedMask):
    """Each sequence sees kv_seqlen of its paged keys from key kv_seqstart on, all of them."""

    k_seqinfo: _GappySeqInfo

    _UNPAGED_TYPE = BlockDiagonalGappyKeysMask

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: str | torch.device | None = None,
    ) -> PagedBlockDiagonalGappyKeysMask:
        """Of the queries' lengths, each sequence's first key within its own pages, how many keys it
        has, and the pages.

        device: of the inputs; default: that of block_tables.
        AssertionError where numbers are a tensor; ValueError where they do not fit.
        """
        device = block_tables.device if device is None else default_device(device)
        return cls(
            _SeqLenInfo.from_seqlens(q_seqlen, device=device),
            _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device),
            block_tables.to(device),
            page_size,
        )

    def _first_keys(self) -> list[int]:
        return self.k_seqinfo.seqstart_py


@dataclass(eq=False)
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Paged gappy keys, each sequence causal from its bottom right: query i of M sees key j of its
    N when j <= i + N - M."""

    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetGappyKeysMask

    def _window(self) -> Window:
        return CAUSAL_OFFSET
