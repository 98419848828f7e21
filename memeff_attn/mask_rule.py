"""The one normal form of all masks: what kernels, the CPU path and the reference take.

None, a tensor, a mask object --mask_rule--> MaskRule: a window, sequences, a tensor
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .masks_base import (
    ANCHOR_NONE,
    UNLIMITED,
    AttentionBias,
    Window,
)
from .masks_blocks import SequenceMask
from .masks_dense import KeyPaddingMask, LowerTriangularMaskWithTensorBias, MaskWithTensorBias
from .masks_paged import PagedBlockDiagonalGappyKeysMask, PagedMask
from .seqlen import _GappySeqInfo, _PaddedSeqLenInfo
from .tensor_bias import bias_of_rank, bias_shape


@dataclass(frozen=True, eq=False)
class MaskRule:
    """Query i of M sees key j of N where -left <= j - (i + d) <= right and the bias is not -inf (or
    is True); with sequences i, j, M and N count within one.

    anchor: ANCHOR_NONE (no limit on either side), ANCHOR_TOP_LEFT (d = 0) or ANCHOR_BOTTOM_RIGHT
        (d = N - M, of each sequence).
    left, right: in keys, -1 = no limit; right = 0 is causal.

    Sequences, where query_starts is not None; batch size 1:
    query_starts: int32 [sequences + 1], the first query of each sequence in dimension 1, the last
        number is the total.
    key_starts: the first key of each sequence. int32 [sequences + 1], the last number is the total;
        with key_lengths only the first [sequences] are meant. With pages: int32 [sequences], the
        first key within the sequence's own pages, or None: 0.
    key_lengths: int32 [sequences], the keys of each; None: up to the next start.
    block_tables: int32 [sequences, pages of each] or None; then key t of sequence s is row
        block_tables[s, t // page_size] * page_size + t % page_size of dimension 1. Entries behind
        the last key are not to be read.
    page_size: keys of a page, 0 without pages.
    shared_keys: whether a row of key and value may belong to more than one sequence, or the
        sequences' rows do not lie in their order: gradients have no place of their own then.
    sequences, max_queries, max_keys: their number and the longest ones, in Python: no wait for the
        device. Without sequences: B, M, N.

    bias: of the query's rank, each dimension 1 or that of [B, H, M, N]; with bias_per_sequence that
        of [sequences, H, max_queries, max_keys], counted within each sequence. Additive, or bool
        with True = visible.
    All tensors are on the query's device.
    """

    anchor: int = ANCHOR_NONE
    left: int = UNLIMITED
    right: int = UNLIMITED
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    key_lengths: Tensor | None = None
    block_tables: Tensor | None = None
    page_size: int = 0
    shared_keys: bool = False
    sequences: int = 0
    max_queries: int = 0
    max_keys: int = 0
    bias: Tensor | None = None
    bias_per_sequence: bool = False

    @property
    def window(self) -> Window:
        return Window(self.anchor, self.left, self.right)

    @property
    def varlen(self) -> bool:
        return self.query_starts is not None

    @property
    def causal(self) -> int | None:
        """0, 1, 2: the operator's number for this window where it has one, and no sequences."""
        if self.varlen or self.left != UNLIMITED or self.right not in (UNLIMITED, 0):
            return None
        return self.anchor

    def __str__(self) -> str:
        """Without a look at the device."""
        text = f"anchor {self.anchor}, window {self.left} and {self.right}"
        if self.varlen:
            text += f", {self.sequences} sequences"
        if self.page_size:
            text += f", pages of {self.page_size}"
        if self.bias is not None:
            own = " within each sequence" if self.bias_per_sequence else ""
            text += f", bias {self.bias.dtype} {tuple(self.bias.shape)}{own}"
        return f"MaskRule({text})"

    def with_bias(self, bias: Tensor | None, per_sequence: bool | None = None) -> MaskRule:
        """This rule with another tensor, of the same shape where per_sequence is left out; or none.

        Field by field: the compilers of torch 2.4 to 2.6 know no dataclasses.replace.
        """
        return MaskRule(
            anchor=self.anchor,
            left=self.left,
            right=self.right,
            query_starts=self.query_starts,
            key_starts=self.key_starts,
            key_lengths=self.key_lengths,
            block_tables=self.block_tables,
            page_size=self.page_size,
            shared_keys=self.shared_keys,
            sequences=self.sequences,
            max_queries=self.max_queries,
            max_keys=self.max_keys,
            bias=bias,
            bias_per_sequence=self.bias_per_sequence if per_sequence is None else per_sequence,
        )


def mask_rule(
    attn_bias: Tensor | AttentionBias | MaskRule | None, query: Tensor, key: Tensor
) -> MaskRule:
    """The normal form of what a user may pass as attn_bias, for these inputs.

    Memory: views only; nothing is read from the device.
    Raises: ValueError where the mask and the inputs disagree: batch size, totals, device, the
        tensor's shape; TypeError for what is no mask.
    """
    if isinstance(attn_bias, MaskRule):
        return attn_bias
    if attn_bias is None:
        return _fixed(Window(), None, query, key)
    if isinstance(attn_bias, Tensor):
        return _fixed(Window(), attn_bias, query, key)
    if isinstance(attn_bias, LowerTriangularMaskWithTensorBias):
        return _fixed(attn_bias._window(), attn_bias._bias, query, key)
    if isinstance(attn_bias, KeyPaddingMask):
        return _fixed(Window(), attn_bias.bias_for(query), query, key)
    if isinstance(attn_bias, MaskWithTensorBias):
        return _with_bias(attn_bias, query, key)
    if isinstance(attn_bias, SequenceMask):
        return _sequences(attn_bias, query, key)
    if isinstance(attn_bias, AttentionBias):
        return _fixed(attn_bias._window(), None, query, key)
    raise TypeError(f"attn_bias must be None, a tensor or a mask, got {type(attn_bias).__name__}")


def tensor_of(attn_bias: Tensor | AttentionBias | MaskRule | None) -> Tensor | None:
    """The tensor that a mask adds, as its user gave it."""
    if isinstance(attn_bias, Tensor):
        return attn_bias
    if isinstance(attn_bias, MaskRule):
        return attn_bias.bias
    if isinstance(attn_bias, (LowerTriangularMaskWithTensorBias, MaskWithTensorBias)):
        return attn_bias._bias
    return attn_bias.visible if isinstance(attn_bias, KeyPaddingMask) else None


def _fixed(window: Window, bias: Tensor | None, query: Tensor, key: Tensor) -> MaskRule:
    """All batch entries alike."""
    return MaskRule(
        *window,
        sequences=query.shape[0],
        max_queries=query.shape[1],
        max_keys=key.shape[1],
        bias=None if bias is None else _bias(bias, query, key),
    )


def _with_bias(mask: MaskWithTensorBias, query: Tensor, key: Tensor) -> MaskRule:
    rule = mask_rule(mask.mask, query, key)
    if not mask.per_sequence:
        return rule.with_bias(_bias(mask._bias, query, key))
    bias, rank = mask._bias, query.dim()
    if bias.dim() == 2:
        bias = bias[(None,) * (rank - 2)]
    expected = (rule.sequences, *query.shape[2:-1], rule.max_queries, rule.max_keys)
    if bias.dim() != rank or not _broadcasts(bias, expected):
        raise ValueError(
            f"a bias that counts within the sequences must broadcast to {expected} (sequences, "
            f"heads, longest queries, longest keys), each dimension that or 1; got "
            f"{tuple(mask._bias.shape)}"
        )
    _check_device("attn_bias", bias, query)
    return rule.with_bias(bias, per_sequence=True)


def _bias(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    expected = bias_shape(query, key)
    ranked = bias_of_rank(bias, query)
    if not _broadcasts(ranked, expected):
        raise ValueError(
            f"attn_bias must broadcast to {expected}, each dimension that or 1; got "
            f"{tuple(bias.shape)}. Add dimensions with unsqueeze, or slice it."
        )
    _check_device("attn_bias", bias, query)
    return ranked


def _broadcasts(x: Tensor, shape: tuple[int, ...]) -> bool:
    return all(got in (1, want) for got, want in zip(x.shape, shape, strict=True))


def _check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(
            f"{name} is on {x.device}, query on {query.device}: move it once with "
            f"{name}.to({str(query.device)!r})"
        )


def _sequences(mask: SequenceMask, query: Tensor, key: Tensor) -> MaskRule:
    name = type(mask).__name__
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise ValueError(
            f"{name} takes all sequences packed along the length of one batch entry: expected "
            f"batch size 1, got {query.shape[0]} and {key.shape[0]}. Flatten batch and length: "
            "x.flatten(0, 1).unsqueeze(0)."
        )
    mask._check_totals(query.shape[1], key.shape[1])
    q_info, k_info = mask.q_seqinfo, mask.k_seqinfo
    _check_device("attn_bias", q_info.seqstart, query)
    _check_device("attn_bias", k_info.seqstart, query)
    rule = MaskRule(
        *mask._window(),
        query_starts=q_info.seqstart,
        key_starts=k_info.seqstart,
        key_lengths=k_info.seqlen
        if isinstance(k_info, (_PaddedSeqLenInfo, _GappySeqInfo))
        else None,
        shared_keys=_share_rows(mask),
        sequences=q_info.count,
        max_queries=q_info.max_seqlen,
        max_keys=k_info.max_seqlen,
    )
    return _paged(rule, mask) if isinstance(mask, PagedMask) else rule


def _paged(rule: MaskRule, mask: PagedMask) -> MaskRule:
    starts = rule.key_starts if isinstance(mask, PagedBlockDiagonalGappyKeysMask) else None
    tables = mask.block_tables.to(torch.int32)
    assert rule.query_starts is not None
    if tables.device != rule.query_starts.device:
        raise ValueError(
            f"block_tables are on {tables.device}, the lengths on {rule.query_starts.device}: move "
            "the mask once with attn_bias.to(device)"
        )
    return dataclasses.replace(
        rule, key_starts=starts, block_tables=tables, page_size=mask.page_size
    )


def _share_rows(mask: SequenceMask) -> bool:
    """Pages may be in two tables; gappy sequences may overlap or lie in any order; others have rows
    of their own, one after the other."""
    if isinstance(mask, PagedMask):
        return True
    if not isinstance(mask.k_seqinfo, _GappySeqInfo):
        return False
    ends = (last for _, last in mask.k_seqinfo.intervals())
    return any(e > s for e, s in zip(ends, mask.k_seqinfo.seqstart_py[1:], strict=False))
