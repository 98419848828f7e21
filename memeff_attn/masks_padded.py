"""Block-diagonal masks over a key cache: each sequence has rows of its own there, of which it sees
those in use. Padded: all have as many rows. Gappy: from any row on. What is not in use may hold
anything, NaN too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .masks_base import ANCHOR_BOTTOM_RIGHT, UNLIMITED, Window
from .masks_blocks import SequenceMask
from .masks_dense import check_band, check_window_size
from .seqlen import _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo

Paged = TypeVar("Paged", bound=Any)
CAUSAL_OFFSET = Window(ANCHOR_BOTTOM_RIGHT, UNLIMITED, 0)


def _use_local(name: str) -> NoReturn:
    raise NotImplementedError(f"{name} has a window: use from_seqlens_local")


@dataclass
class BlockDiagonalPaddedKeysMask(SequenceMask):
    """Each sequence sees the keys in use of its own `padding` rows, all of them.

    key and value [1, sequences * padding, ...].
    """

    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: str | torch.device | None = None,
    ) -> BlockDiagonalPaddedKeysMask:
        """Of the queries' lengths, the rows of each sequence, and how many of them are in use.

        causal_diagonal: ignored, as in xFormers. device: of the inputs; default: the GPU where
        there is one.
        AssertionError where lengths are a tensor; ValueError where their numbers differ or one is
        above kv_padding.
        """
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type[Paged]) -> Paged:
        """The same mask for keys that lie in pages: as `paged_type`, which must be the one for this
        class (ValueError).

        block_tables: int32 [sequences, pages of each], which page holds each page_size keys.
        """
        _check_paged_type(self, paged_type)
        rows = block_tables.shape[-1] * page_size
        device = self.k_seqinfo.seqlen.device
        lengths = self.k_seqinfo.seqlen_py
        k_seqinfo = _PaddedSeqLenInfo.from_seqlens_padded(lengths, rows, device=device)
        paged: Paged = paged_type(self.q_seqinfo, k_seqinfo, block_tables, page_size)
        return paged

    def make_local_attention(
        self, window_left: int, window_right: int
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """This mask limited to a band around the bottom-right diagonal of each sequence:
        -window_left <= j - (i + N - M) <= window_right."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(
            self.q_seqinfo, self.k_seqinfo, window_left, window_right
        )


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, each sequence causal from its bottom right: query i of M sees key j of the N in
    use when j <= i + N - M.

    causal_diagonal: ignored.
    """

    causal_diagonal: Any = None

    def make_local_attention(
        self, window_left: int, window_right: int = 0
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """This mask limited to the `window_left` keys before each query's own.

        ValueError unless window_right is 0: a later key is hidden by this mask.
        """
        if window_right != 0:
            raise ValueError(f"a causal mask has window_right = 0, got {window_right}")
        return super().make_local_attention(window_left, window_right)

    def _window(self) -> Window:
        return CAUSAL_OFFSET


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, a band around the bottom-right diagonal of each sequence:
    -window_left <= j - (i + N - M) <= window_right with N the keys in use.

    ValueError where a window is negative.
    """

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_band(self.window_left, self.window_right)

    @classmethod
    def from_seqlens(cls, *args: object, **kwargs: object) -> NoReturn:
        _use_local(cls.__name__)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        *,
        device: str | torch.device | None = None,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """As BlockDiagonalPaddedKeysMask.from_seqlens, with the band."""
        infos = _padded(q_seqlen, kv_padding, kv_seqlen, device)
        return cls(*infos, window_left, window_right)

    def _window(self) -> Window:
        return Window(ANCHOR_BOTTOM_RIGHT, self.window_left, self.window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, each sequence causal from its bottom right, the last w keys only:
    i + N - M - w < j <= i + N - M with N the keys in use.

    _window_size: w in keys. ValueError unless above 0.
    """

    _window_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window_size(self._window_size)

    @classmethod
    def from_seqlens(cls, *args: object, **kwargs: object) -> NoReturn:
        _use_local(cls.__name__)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
        *,
        device: str | torch.device | None = None,
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        """As BlockDiagonalPaddedKeysMask.from_seqlens, with the window."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device), window_size)

    def _window(self) -> Window:
        return Window(ANCHOR_BOTTOM_RIGHT, self._window_size - 1, 0)


@dataclass
class BlockDiagonalGappyKeysMask(SequenceMask):
    """Each sequence sees kv_seqlen keys from row kv_seqstart on, all of them.

    key and value [1, the last of kv_seqstarts, ...].
    """

    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: str | torch.device | None = None,
    ) -> BlockDiagonalGappyKeysMask:
        """Of the queries' lengths, the first row of each sequence and at the end the number of
        rows, and how many keys each has.

        device: of the inputs; default: the GPU where there is one.
        AssertionError where numbers are a tensor; ValueError where they do not fit together.
        """
        return cls(
            _SeqLenInfo.from_seqlens(q_seqlen, device=device),
            _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device),
        )

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type[Paged],
    ) -> Paged:
        """The same mask for keys that lie in pages: as `paged_type`, which must be the one for this
        class.

        block_tables: int32 [sequences, pages of each], which page holds each page_size keys.
        notional_padding: rows of each sequence here: sequence s begins at or after row
            s * notional_padding, and the difference is where it begins in its pages.
        ValueError unless it is a multiple of page_size, and where a sequence begins outside its
        rows or does not end within its pages.
        """
        _check_paged_type(self, paged_type)
        if page_size < 1 or notional_padding % page_size != 0:
            raise ValueError(
                f"notional_padding must be a multiple of page_size {page_size}, got "
                f"{notional_padding}"
            )
        info = self.k_seqinfo
        firsts = [x - s * notional_padding for s, x in enumerate(info.seqstart_py[: info.count])]
        if not all(0 <= first < notional_padding for first in firsts):
            raise ValueError(
                f"sequence s must begin within {notional_padding} rows from s * notional_padding "
                f"on, the sequences begin at {info.seqstart_py[: info.count]}"
            )
        k_seqinfo = _GappySeqInfo.from_seqlens_gappy(
            firsts, info.seqlen_py, True, device=info.seqlen.device
        )
        paged: Paged = paged_type(self.q_seqinfo, k_seqinfo, block_tables, page_size)
        return paged


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Gappy keys, each sequence causal from its bottom right: query i of M sees key j of its N when
    j <= i + N - M."""

    def _window(self) -> Window:
        return CAUSAL_OFFSET


def _padded(
    q_seqlen: Sequence[int],
    kv_padding: int,
    kv_seqlen: Sequence[int],
    device: str | torch.device | None,
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    return (
        _SeqLenInfo.from_seqlens(q_seqlen, device=device),
        _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device),
    )


def _check_paged_type(mask: SequenceMask, paged_type: Any) -> None:
    expected = getattr(paged_type, "_UNPAGED_TYPE", None)
    if expected is not type(mask):
        raise ValueError(
            f"{paged_type.__name__} is the paged form of {getattr(expected, '__name__', 'nothing')}"
            f", this is a {type(mask).__name__}"
        )
