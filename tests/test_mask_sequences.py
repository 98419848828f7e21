"""Packed sequences: building, splitting, changing in place, pages; masks joined with a tensor."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from mask_cases import (
    EVERY,
    KV,
    PADDING,
    PAGE,
    SEQUENCES,
    TABLES,
    Case,
    Q,
    bottom_right,
    full,
    paged,
)
from torch import Tensor

from memeff_attn import attn_bias as ab
from memeff_attn.attn_bias import BlockDiagonalMask, _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo

CPU = {"device": "cpu"}


# ---- lengths ----


def test_seqlen_info() -> None:
    info = _SeqLenInfo.from_seqlens([3, 0, 5], **CPU)
    assert info.seqstart.dtype == torch.int32 and info.seqstart.tolist() == [0, 3, 3, 8]
    assert info.seqstart_py == [0, 3, 3, 8]
    assert (info.max_seqlen, info.min_seqlen, info.count) == (5, 0, 3)
    assert list(info.intervals()) == [(0, 3), (3, 3), (3, 8)]
    assert _SeqLenInfo.from_seqlens((x for x in (1, 2)), **CPU).seqstart_py == [0, 1, 3]
    none = _SeqLenInfo.from_seqlens([], **CPU)
    assert (none.seqstart_py, none.max_seqlen, none.min_seqlen, none.count) == ([0], 0, 0, 0)


def test_seqlen_info_in_place() -> None:
    """The tensors stay, so that a captured graph sees the new lengths."""
    info = _SeqLenInfo.from_seqlens([3, 1], **CPU)
    tensor = info.seqstart
    info.from_seqlens_inplace([2, 6])
    assert info.seqstart is tensor and tensor.tolist() == [0, 2, 8] == info.seqstart_py
    assert (info.max_seqlen, info.min_seqlen) == (6, 2)
    for bad in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="number of lengths must stay"):
            info.from_seqlens_inplace(bad)
    with pytest.raises(AssertionError):
        info.from_seqlens_inplace(torch.tensor([1, 2]))  # type: ignore[arg-type]


def test_padded_info() -> None:
    info = _PaddedSeqLenInfo.from_seqlens_padded([3, 0, 5], 6, **CPU)
    assert info.seqstart_py == [0, 6, 12, 18] == info.seqstart.tolist()
    assert info.seqlen_py == [3, 0, 5] == info.seqlen.tolist() and info.seqlen.dtype == torch.int32
    assert (info.max_seqlen, info.min_seqlen, info.padding) == (5, 0, 6)
    assert list(info.intervals()) == [(0, 3), (6, 6), (12, 17)]
    tensor = info.seqlen
    info.from_seqlens_padded_inplace([6, 1, 2])
    assert info.seqlen is tensor and tensor.tolist() == [6, 1, 2] == info.seqlen_py
    assert (info.max_seqlen, info.min_seqlen) == (6, 1)
    assert info.seqstart_py == [0, 6, 12, 18]
    with pytest.raises(ValueError, match="at most the padding 6"):
        info.from_seqlens_padded_inplace([7, 1, 2])
    with pytest.raises(RuntimeError, match="from_seqlens_padded_inplace"):
        info.from_seqlens_inplace([1, 1, 1])
    with pytest.raises(NotImplementedError, match="padding"):
        info.split(torch.zeros(1, 18))
    with pytest.raises(ValueError, match="starts"):
        _PaddedSeqLenInfo(info.seqstart, 1, 1, [0, 6], info.seqlen, [1, 1, 1], 6)


def test_gappy_info() -> None:
    info = _GappySeqInfo.from_seqlens_gappy([2, 5, 9], [3, 1], False, **CPU)
    assert list(info.intervals()) == [(2, 5), (5, 6)] and info.count == 2
    assert info.seqstart.tolist() == [2, 5, 9] and info.seqlen.tolist() == [3, 1]
    pages = _GappySeqInfo.from_seqlens_gappy([2, 5], [3, 1], True, **CPU)
    assert list(pages.intervals()) == [(2, 5), (5, 6)] and pages.count == 2
    assert pages == _GappySeqInfo.from_seqlens_gappy([2, 5, 9], [3, 1], True, **CPU)
    with pytest.raises(RuntimeError, match="new mask"):
        info.from_seqlens_inplace([1, 1])
    with pytest.raises(NotImplementedError, match="intervals"):
        info.split(torch.zeros(1, 9))


def test_equal_lengths_share_their_info() -> None:
    """`split` and clients' `is` tests rely on it."""
    for mask in (
        BlockDiagonalMask.from_seqlens([1, 2], **CPU),
        BlockDiagonalMask.from_seqlens([1, 2], [1, 2], **CPU),
    ):
        assert mask.q_seqinfo is mask.k_seqinfo
        moved = mask.to("meta")
        assert moved.q_seqinfo is moved.k_seqinfo is not mask.q_seqinfo
    other = BlockDiagonalMask.from_seqlens([1, 2], [2, 1], **CPU)
    assert other.q_seqinfo is not other.k_seqinfo
    with pytest.raises(AssertionError, match="split_queries"):
        other.split(torch.zeros(1, 3, 2, 4))


# ---- lists of tensors ----


def test_tensor_list_round_trip() -> None:
    """As DINOv2 uses it: crops of several sizes, several images of each."""
    tensors = [torch.randn(2, 3, 4, 8), torch.randn(1, 5, 4, 8), torch.randn(3, 1, 4, 8)]
    mask, packed = BlockDiagonalMask.from_tensor_list(tensors)
    assert mask.q_seqinfo.seqstart_py == [0, 3, 6, 11, 12, 13, 14]
    assert mask._batch_sizes == [2, 1, 3] and packed.shape == (1, 14, 4, 8)
    assert mask.q_seqinfo.seqstart.device == packed.device
    for part, x in zip(mask.split(packed), tensors, strict=True):
        assert torch.equal(part, x)
        assert part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert mask.make_causal()._batch_sizes == [2, 1, 3]
    assert copy.deepcopy(mask)._batch_sizes == [2, 1, 3] == mask.to("meta")._batch_sizes
    with pytest.raises(ValueError, match="at least one"):
        BlockDiagonalMask.from_tensor_list([])


def test_tensor_lists_qkv_round_trip() -> None:
    q = [torch.randn(2, 3, 2, 8), torch.randn(1, 4, 2, 8)]
    k = [torch.randn(2, 5, 2, 8), torch.randn(1, 2, 2, 8)]
    v = [torch.randn(2, 5, 2, 6), torch.randn(1, 2, 2, 6)]
    mask, query, key, value = BlockDiagonalMask.from_tensor_lists_qkv(q, k, v)
    assert value is not None
    assert (query.shape[1], key.shape, value.shape) == (10, (1, 12, 2, 8), (1, 12, 2, 6))
    assert all(torch.equal(a, b) for a, b in zip(mask.split_queries(query), q, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mask.split_kv(value), v, strict=True))
    assert BlockDiagonalMask.from_tensor_lists_qkv(q, k)[3] is None
    with pytest.raises(ValueError, match="batches"):
        BlockDiagonalMask.from_tensor_lists_qkv(q, k[:1])
    with pytest.raises(ValueError, match="keys and values"):
        BlockDiagonalMask.from_tensor_lists_qkv(q, k, q)


def test_split_by_sequence_and_by_written_batch_sizes() -> None:
    mask = BlockDiagonalMask.from_seqlens([2, 2, 3, 0], **CPU)
    x = torch.randn(1, 7, 2).transpose(0, 0)
    assert [tuple(part.shape) for part in mask.split(x)] == [
        (1, 2, 2), (1, 2, 2), (1, 3, 2), (1, 0, 2),
    ]  # fmt: skip
    mask._batch_sizes = [2, 1, 1]  # as DINOv2 does
    parts = mask.split(x)
    assert torch.equal(parts[0], x[0, :4].view(2, 2, 2)) and torch.equal(parts[1], x[:, 4:])
    wide = torch.randn(1, 7, 5)[..., 1:3]  # not contiguous
    assert torch.equal(mask.split(wide)[0], wide[0, :4].reshape(2, 2, 2))
    for sizes, text in (([2, 2], "one length"), ([2, 1], "do not sum up")):
        mask._batch_sizes = sizes
        with pytest.raises(ValueError, match=text):
            mask.split(x)
    for bad in (torch.zeros(1, 6, 2), torch.zeros(2, 7, 2)):
        with pytest.raises(ValueError, match="total"):
            mask.split(bad)


# ---- pages ----


@pytest.mark.parametrize("causal", [False, True])
def test_make_paged_of_padded(causal: bool) -> None:
    unpaged: Any = ab.BlockDiagonalPaddedKeysMask
    kind: Any = ab.PagedBlockDiagonalPaddedKeysMask
    if causal:
        unpaged = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask
        kind = ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    assert kind._UNPAGED_TYPE is unpaged
    mask = unpaged.from_seqlens(Q, PADDING, KV, device="cpu")
    made = mask.make_paged(TABLES, PAGE, kind)
    assert type(made) is kind and made.page_size == PAGE
    assert made == kind.from_seqlens(Q, KV, TABLES, PAGE)
    assert mask.k_seqinfo.padding == PADDING, "the padded mask is left alone"
    case = Case("", made, bottom_right if causal else full, Q, paged([0] * 4, KV), 24)
    assert torch.equal(made.materialize((sum(Q), 24), torch.bool), case.visible())


@pytest.mark.parametrize("causal", [False, True])
def test_make_paged_of_gappy(causal: bool) -> None:
    unpaged: Any = ab.BlockDiagonalGappyKeysMask
    kind: Any = ab.PagedBlockDiagonalGappyKeysMask
    if causal:
        unpaged = ab.BlockDiagonalCausalWithOffsetGappyKeysMask
        kind = ab.PagedBlockDiagonalCausalWithOffsetGappyKeysMask
    assert kind._UNPAGED_TYPE is unpaged
    notional = 2 * PAGE
    first = [1, 2, 0, 0]
    starts = [s * notional + a for s, a in enumerate(first)]
    mask = unpaged.from_seqlens(Q, [*starts, 4 * notional], KV, device="cpu")
    made = mask.make_paged(TABLES, PAGE, notional, kind)
    assert type(made) is kind and made == kind.from_seqlens(Q, first, KV, TABLES, PAGE)
    case = Case("", made, bottom_right if causal else full, Q, paged(first, KV), 24)
    assert torch.equal(made.materialize((sum(Q), 24), torch.bool), case.visible())


def test_pool_rows() -> None:
    """The paged picture is the unpaged one, its columns moved to where the pages are."""
    lengths, tables = [5, 3], torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    mask = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([3, 3], 6, lengths, **CPU)
    made = mask.make_paged(tables, 3, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    flat = mask.materialize((6, 12), torch.bool)
    pool = made.materialize((6, 12), torch.bool)
    moved = torch.zeros_like(flat)
    for s in range(2):
        for t in range(lengths[s]):
            row = int(tables[s, t // 3]) * 3 + t % 3
            moved[:, row] |= flat[:, s * 6 + t]
    assert torch.equal(pool, moved)
    with pytest.raises(ValueError, match="whole pages of 3"):
        made.materialize((6, 13))
    int64 = made._UNPAGED_TYPE.from_seqlens([3, 3], 6, lengths, **CPU)
    wide = int64.make_paged(tables.long(), 3, type(made))
    rule = ab.mask_rule(wide, torch.zeros(1, 6, 1, 4), torch.zeros(1, 12, 1, 4))
    assert rule.block_tables is not None and rule.block_tables.dtype == torch.int32


# ---- masks joined with a tensor ----


# Paged keys take no such bias: test_refused.
@pytest.mark.parametrize("case", [x for x in EVERY if "Paged" not in x.name], ids=str)
def test_bias_over_the_whole_call(case: Case) -> None:
    shape = (1, 2, case.total, case.rows)
    bias = torch.randn(shape)
    if bias.numel():
        bias[..., 0] = -math.inf
    joined = case.mask.add_bias(bias)
    visible = case.visible()
    expected = bias.masked_fill(~visible, -math.inf)
    assert torch.equal(joined.materialize(shape), expected)
    assert torch.equal(joined.materialize(shape, torch.bool), expected != -math.inf)
    assert torch.equal(joined.materialize(shape, torch.float16), expected.half())
    seen = case.mask.add_bias(bias > 0).materialize(shape, torch.bool)
    assert torch.equal(seen, visible & (bias > 0))
    query, key = torch.zeros(1, case.total, 2, 4), torch.zeros(1, case.rows, 2, 4)
    rule, plain = ab.mask_rule(joined, query, key), ab.mask_rule(case.mask, query, key)
    assert rule.bias is not None and rule.bias.data_ptr() == bias.data_ptr()
    assert rule.window == plain.window and not rule.bias_per_sequence
    assert ab.tensor_of(joined) is bias
    assert (
        joined.add_bias(bias)
        .materialize(shape)
        .allclose((2 * bias).masked_fill(~visible, -math.inf))
    )


def local_bias(case: Case, heads: int, count: int) -> Tensor:
    longest = max(len(rows) for rows in case.keys)
    return torch.randn(count, heads, max(case.queries), longest)


def spread(case: Case, bias: Tensor) -> Tensor:
    """By loops: what a bias that counts within the sequences adds to query and row."""
    whole = torch.full((1, bias.shape[1], case.total, case.rows), -math.inf, dtype=bias.dtype)
    visible = case.visible()
    for s, (start, m) in enumerate(zip(case.starts, case.queries, strict=False)):
        for i in range(m):
            for j, row in enumerate(case.keys[s]):
                if visible[start + i, row]:
                    part = bias[s % bias.shape[0]]
                    at = i % part.shape[1], j % part.shape[2]
                    whole[0, :, start + i, row] = part[:, at[0], at[1]]
    return whole


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_bias_within_each_sequence(case: Case, shared: bool) -> None:
    bias = local_bias(case, 2, 1 if shared else len(case.queries))
    mask: Any = case.mask
    for x in (bias, bias[:, :1], bias[:, :, :1], bias[..., :1]):
        joined = mask.add_bias(x, per_sequence=True)
        seen = joined.materialize((1, x.shape[1], case.total, case.rows))
        assert torch.equal(seen, spread(case, x))
    query, key = torch.zeros(1, case.total, 2, 4), torch.zeros(1, case.rows, 2, 4)
    rule = ab.mask_rule(mask.add_bias(bias, per_sequence=True), query, key)
    assert rule.bias_per_sequence and rule.bias is bias
    flat = mask.add_bias(bias[0, 0], per_sequence=True)
    assert torch.equal(flat.materialize((1, 1, case.total, case.rows)), spread(case, bias[:1, :1]))
    with pytest.raises(ValueError, match="longest queries, longest keys"):
        ab.mask_rule(mask.add_bias(torch.zeros(1, 2, 9, 9), per_sequence=True), query, key)
    assert joined.to("meta")._bias.is_meta and joined.to("meta").per_sequence


def test_lower_triangular_with_bias() -> None:
    bias = torch.randn(2, 3, 4, 5)
    mask = ab.LowerTriangularMask().add_bias(bias)
    assert type(mask) is ab.LowerTriangularMaskWithTensorBias and mask._bias is bias
    hidden = torch.ones(4, 5).triu(1).bool()
    assert torch.equal(mask.materialize((2, 3, 4, 5)), bias.masked_fill(hidden, -math.inf))
    twice = mask.add_bias(bias)
    assert type(twice) is type(mask) and torch.equal(twice._bias, 2 * bias)
    other = copy.deepcopy(mask)
    assert torch.equal(other._bias, bias) and type(other.to("meta")) is type(mask)


def test_hidden_stays_hidden() -> None:
    """+inf and NaN where the mask hides change nothing."""
    bias = torch.zeros(3, 3)
    bias[0, 1], bias[0, 2] = math.inf, math.nan
    seen = ab.LowerTriangularMask().add_bias(bias).materialize((3, 3))
    assert seen[0].tolist() == [0, -math.inf, -math.inf]


def test_key_padding() -> None:
    mask = ab.KeyPaddingMask.from_lengths([3, 0, 4], 4, device="cpu")
    expected = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert torch.equal(mask.visible, expected)
    seen = mask.materialize((3, 2, 5, 4), torch.bool)
    assert torch.equal(seen, expected[:, None, None].expand(3, 2, 5, 4))
    assert torch.equal(mask.materialize((3, 5, 4), torch.bool), seen[:, 0])
    for shape in ((3, 5, 4), (3, 5, 2, 4), (3, 5, 1, 2, 4)):
        query = torch.zeros(shape)
        rule = ab.mask_rule(mask, query, torch.zeros(shape[0], 4, *shape[2:]))
        assert rule.bias is not None and rule.bias.data_ptr() == mask.visible.data_ptr()
        assert rule.bias.shape == (3, *(1,) * (len(shape) - 2), 4) and rule.causal == 0
    assert "KeyPaddingMask" in repr(mask) and ab.tensor_of(mask) is mask.visible
