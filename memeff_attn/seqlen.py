"""Where the sequences of a packed batch begin and how long they are: on the device for kernels, in
Python lists for everything that must not wait for the device.

    seqstart          0        3             8      9     int32 [n + 1], the last one is the total
    tokens            a a a    b b b b b     c
    padded keys       a a a .  b b . .       c . . .      each in `padding` rows, seqlen 3, 2, 1
    gappy keys        . a a .  . . b b b     c            from seqstart[s] on, seqlen rows, any gaps
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="_SeqLenInfo")


def default_device(device: str | torch.device | None = None) -> torch.device:
    """`device`, or the GPU where there is one."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _lengths(seqlens: Iterable[int], name: str = "seqlens") -> list[int]:
    """As a list. AssertionError for a tensor, whose numbers would have to be waited for; ValueError
    for a negative number."""
    assert not isinstance(seqlens, Tensor), f"{name} must be a list of int, not a tensor: .tolist()"
    lengths = [int(x) for x in seqlens]
    if any(x < 0 for x in lengths):
        raise ValueError(f"{name} must not be negative, got {lengths}")
    return lengths


def _from_lengths(starts: list[int], lengths: list[int]) -> Iterator[tuple[int, int]]:
    # Cut, since the compiler of torch 2.4 refuses to zip two lengths.
    firsts = starts[: len(lengths)]
    return ((start, start + length) for start, length in zip(firsts, lengths, strict=True))


def _int32(numbers: Sequence[int], device: str | torch.device) -> Tensor:
    """On a GPU without waiting for it: through pinned memory, in the current stream's order."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    pinned = torch.tensor(numbers, dtype=torch.int32, pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _overwrite(tensor: Tensor, numbers: Sequence[int]) -> None:
    """ValueError where there are more or fewer numbers."""
    if len(tensor) != len(numbers):
        raise ValueError(f"the number of lengths must stay, was {len(tensor)}, is {len(numbers)}")
    pinned = torch.tensor(numbers, dtype=torch.int32, pin_memory=tensor.is_cuda)
    tensor.copy_(pinned, non_blocking=True)


@dataclass
class _SeqLenInfo:
    """n sequences, one after the other.

    seqstart: int32 [n + 1] on the device, in tokens; the last one is the total.
    max_seqlen, min_seqlen: of the n lengths in tokens, 0 where n is 0.
    seqstart_py: seqstart as a list.
    Two are equal where their lists are; the tensors are not looked at.
    """

    seqstart: Tensor = field(compare=False)
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def to(self: Self, device: str | torch.device) -> Self:
        """The same lengths for inputs on `device`; this very object where they are there."""
        if self.seqstart.device == torch.device(device):
            return self
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    @property
    def count(self) -> int:
        """n."""
        return len(self.seqstart_py) - 1

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(first token, first token after it) of each sequence."""
        return itertools.pairwise(self.seqstart_py)

    @classmethod
    def from_seqlens(
        cls, seqlens: Iterable[int], *, device: str | torch.device | None = None
    ) -> _SeqLenInfo:
        """Of lengths in tokens, 0 among them if need be.

        AssertionError for a tensor, ValueError for a negative length.
        """
        lengths = _lengths(seqlens)
        starts = [0, *itertools.accumulate(lengths)]
        return cls(
            seqstart=_int32(starts, default_device(device)),
            max_seqlen=max(lengths, default=0),
            min_seqlen=min(lengths, default=0),
            seqstart_py=starts,
        )

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """As many other lengths, written into the same tensors.

        ValueError where their number differs.
        """
        other = _SeqLenInfo.from_seqlens(seqlens, device="cpu")
        _overwrite(self.seqstart, other.seqstart_py)
        self.max_seqlen, self.min_seqlen = other.max_seqlen, other.min_seqlen
        self.seqstart_py = other.seqstart_py

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Views of x [1, total, *], one [1, length, *] for each sequence; with batch_sizes one
        [b, length, *] for each b sequences, which must be of one length.

        ValueError where x is not of the total length, batch_sizes do not sum up to n, or lengths
        within a batch differ.
        """
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(
                f"expected a tensor [1, {self.seqstart_py[-1]}, ...], the sequences' total, got "
                f"{tuple(x.shape)}"
            )
        sizes = [1] * self.count if batch_sizes is None else list(batch_sizes)
        if sum(sizes) != self.count:
            raise ValueError(f"batch_sizes {sizes} do not sum up to {self.count} sequences")
        lengths = [end - start for start, end in self.intervals()]
        parts, first = [], 0
        for size in sizes:
            own = lengths[first : first + size]
            if len(set(own)) > 1:
                raise ValueError(f"the sequences of one batch must have one length, got {own}")
            start, end = self.seqstart_py[first], self.seqstart_py[first + size]
            length = own[0] if own else 0
            parts.append(x[0, start:end].view(size, length, *x.shape[2:]))
            first += size
        return parts


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """n sequences, each at the beginning of `padding` rows.

    seqstart: the multiples of padding; seqlen: int32 [n] on the device, the rows in use, which
    seqlen_py has as a list; max_seqlen and min_seqlen are of these.
    """

    seqlen: Tensor = field(compare=False)
    seqlen_py: list[int]
    padding: int

    def __post_init__(self) -> None:
        if len(self.seqstart_py) != len(self.seqlen_py) + 1:
            raise ValueError(
                f"{len(self.seqlen_py)} lengths need as many starts and the total, got "
                f"{len(self.seqstart_py)}"
            )

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(first row, first row not in use) of each sequence."""
        return _from_lengths(self.seqstart_py, self.seqlen_py)

    @classmethod
    def from_seqlens(
        cls, seqlens: Iterable[int], *, device: str | torch.device | None = None
    ) -> NoReturn:
        raise RuntimeError("padded sequences have a padding: use from_seqlens_padded")

    @classmethod
    def from_seqlens_padded(
        cls,
        seqlens: Iterable[int],
        padding: int,
        *,
        device: str | torch.device | None = None,
    ) -> _PaddedSeqLenInfo:
        """Of the lengths in use and the rows of each sequence.

        AssertionError for a tensor, ValueError for a negative length or one above padding.
        """
        lengths = _lengths(seqlens)
        _check_padding(lengths, padding)
        starts = [i * padding for i in range(len(lengths) + 1)]
        device = default_device(device)
        return cls(
            seqstart=_int32(starts, device),
            max_seqlen=max(lengths, default=0),
            min_seqlen=min(lengths, default=0),
            seqstart_py=starts,
            seqlen=_int32(lengths, device),
            seqlen_py=lengths,
            padding=padding,
        )

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> NoReturn:
        raise RuntimeError("padded sequences: use from_seqlens_padded_inplace")

    def from_seqlens_padded_inplace(self, seqlens: Iterable[int]) -> None:
        """As many other lengths with the same padding, written into the same tensor."""
        lengths = _lengths(seqlens)
        _check_padding(lengths, self.padding)
        _overwrite(self.seqlen, lengths)
        self.seqlen_py = lengths
        self.max_seqlen, self.min_seqlen = max(lengths, default=0), min(lengths, default=0)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> NoReturn:
        raise NotImplementedError("padded sequences are not split: view x as [n, padding, ...]")


@dataclass
class _GappySeqInfo(_SeqLenInfo):
    """n sequences with unused rows between them.

    seqstart: int32 [n + 1], the first row of each and the total; of paged keys [n], the first key
    of each within its own pages. seqlen: int32 [n] on the device, which seqlen_py has as a list;
    max_seqlen and min_seqlen are of these.
    """

    seqlen: Tensor = field(compare=False)
    seqlen_py: list[int]

    @property
    def count(self) -> int:
        return len(self.seqlen_py)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(first row, first row after it) of each sequence."""
        return _from_lengths(self.seqstart_py, self.seqlen_py)

    @classmethod
    def from_seqlens(
        cls, seqlens: Iterable[int], *, device: str | torch.device | None = None
    ) -> NoReturn:
        raise NotImplementedError("gappy sequences have starts of their own: from_seqlens_gappy")

    @classmethod
    def from_seqlens_gappy(
        cls,
        seqstarts: Iterable[int],
        seqlens: Iterable[int],
        paged: bool,
        *,
        device: str | torch.device | None = None,
    ) -> _GappySeqInfo:
        """Of first rows and lengths; seqstarts ends with the total, which with paged may be left
        out and is ignored.

        AssertionError for tensors, ValueError without a sequence, for negative numbers, for the
        wrong number of starts and for a sequence that ends beyond the total.
        """
        starts, lengths = _lengths(seqstarts, "seqstarts"), _lengths(seqlens)
        if not lengths:
            raise ValueError("gappy sequences need at least one sequence")
        if paged and len(starts) == len(lengths) + 1:
            starts.pop()
        if len(starts) != len(lengths) + (not paged):
            raise ValueError(
                f"{len(lengths)} sequences need as many starts{'' if paged else ' and the total'}, "
                f"got {len(starts)} numbers"
            )
        if not paged and any(s + n > starts[-1] for s, n in zip(starts, lengths, strict=False)):
            raise ValueError(f"a sequence ends beyond the total {starts[-1]}: {starts}, {lengths}")
        device = default_device(device)
        return cls(
            seqstart=_int32(starts, device),
            max_seqlen=max(lengths),
            min_seqlen=min(lengths),
            seqstart_py=starts,
            seqlen=_int32(lengths, device),
            seqlen_py=lengths,
        )

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> NoReturn:
        raise RuntimeError("gappy sequences have starts of their own: make a new mask")

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> NoReturn:
        raise NotImplementedError("gappy sequences are not split: slice x by intervals()")


def _check_padding(lengths: Sequence[int], padding: int) -> None:
    if any(length > padding for length in lengths):
        raise ValueError(f"each length must be at most the padding {padding}, got {list(lengths)}")
