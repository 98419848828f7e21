"""Mask classes: what each shows, that the normal form says the same, that they travel, and how
they refuse. What they mean is spelled out in mask_cases.py."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import mask_cases
import pytest
import torch
from mask_cases import EVERY, SEQUENCES, Case
from torch import Tensor

from memeff_attn import attn_bias as ab

CPU = {"device": "cpu"}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def inputs_of(case: Case) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, case.total, 2, 4), torch.zeros(1, case.rows, 2, 4)


# ---- pictures ----


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_materialize(case: Case) -> None:
    visible = case.visible()
    shape = (case.total, case.rows)
    assert torch.equal(case.mask.materialize(shape, torch.bool), visible)
    assert case.mask.materialize(shape).dtype == torch.float32
    for dtype in DTYPES:
        seen = case.mask.materialize((2, 3, *shape), dtype)
        expected = torch.where(visible, 0.0, -math.inf).to(dtype)
        assert seen.dtype == dtype and torch.equal(seen, expected.expand(2, 3, *shape))
    assert case.mask.materialize(shape, torch.bool, "cpu").is_contiguous()


def test_every_class_has_a_case() -> None:
    names = {x for x in vars(ab) if x.endswith("Mask") and not x.startswith("_")}
    covered = {type(case.mask).__name__ for case in EVERY} | {"KeyPaddingMask"}
    assert names == covered
    assert all(issubclass(getattr(ab, name), ab.AttentionBias) for name in names)
    with_tensor = {ab.LowerTriangularMaskWithTensorBias, ab.MaskWithTensorBias}
    assert set(ab.MASKS) == {getattr(ab, name) for name in names} | with_tensor


def test_materialize_needs_the_sequences_lengths() -> None:
    for case in SEQUENCES:
        with pytest.raises(ValueError, match="queries"):
            case.mask.materialize((case.total + 1, case.rows))
        with pytest.raises(ValueError, match="keys"):
            case.mask.materialize((case.total, case.rows + 1))


# ---- the normal form ----


def rows_of_rule(rule: ab.MaskRule) -> list[list[int]]:
    """Rows of key that each sequence has, by the rule's tensors."""
    found = []
    for s in range(rule.sequences):
        first = 0 if rule.key_starts is None else int(rule.key_starts[s])
        if rule.key_lengths is None:
            assert rule.key_starts is not None
            count = int(rule.key_starts[s + 1]) - first
        else:
            count = int(rule.key_lengths[s])
        rows = list(range(first, first + count))
        if rule.block_tables is not None:
            page = rule.page_size
            rows = [int(rule.block_tables[s, t // page]) * page + t % page for t in rows]
        found.append(rows)
    return found


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_mask_rule_says_the_same(case: Case) -> None:
    query, key = inputs_of(case)
    rule = ab.mask_rule(case.mask, query, key)
    assert rule.varlen == (case in SEQUENCES) and rule.bias is None
    if rule.varlen:
        assert rule.query_starts is not None and rule.query_starts.tolist() == case.starts
        assert rows_of_rule(rule) == case.keys
        assert rule.causal is None
    assert rule.sequences == len(case.queries)
    assert rule.max_queries == max(case.queries)
    assert rule.max_keys == max(len(rows) for rows in case.keys)
    for x in (rule.query_starts, rule.key_starts, rule.key_lengths, rule.block_tables):
        assert x is None or x.dtype == torch.int32
    assert (rule.page_size > 0) == (rule.block_tables is not None)
    seen = torch.zeros(case.total, case.rows, dtype=torch.bool)
    for start, m, rows in zip(case.starts, case.queries, case.keys, strict=False):
        offset = {ab.ANCHOR_BOTTOM_RIGHT: len(rows) - m}.get(rule.anchor, 0)
        for i in range(m):
            for j, row in enumerate(rows):
                distance = j - (i + offset)
                right = rule.right == -1 or distance <= rule.right
                seen[start + i, row] = right and (rule.left == -1 or distance >= -rule.left)
    assert torch.equal(seen, case.visible())


def test_causal_number_of_a_rule() -> None:
    x = torch.zeros(2, 5, 2, 4)
    for mask, causal in (
        (None, ab.CAUSAL_NONE),
        (torch.zeros(5, 5), ab.CAUSAL_NONE),
        (ab.LowerTriangularMask(), ab.CAUSAL_TOP_LEFT),
        (ab.LowerTriangularFromBottomRightMask(), ab.CAUSAL_BOTTOM_RIGHT),
        (ab.LowerTriangularMask().add_bias(torch.zeros(5, 5)), ab.CAUSAL_TOP_LEFT),
        (ab.LocalAttentionFromBottomRightMask(1, 0), None),
        (ab.LocalAttentionFromBottomRightMask(1, 1), None),
    ):
        rule = ab.mask_rule(mask, x, x)
        assert rule.causal == causal
        assert (rule.sequences, rule.max_queries, rule.max_keys) == (2, 5, 5)
        assert ab.mask_rule(rule, x, x) is rule


def test_shared_rows() -> None:
    """Whether two sequences may write one row's gradient."""
    for case in SEQUENCES:
        rule = ab.mask_rule(case.mask, *inputs_of(case))
        assert rule.shared_keys == ("Paged" in case.name)
    overlapping = ab.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [0, 2, 9], [3, 4], **CPU)
    assert ab.mask_rule(overlapping, torch.zeros(1, 2, 1, 4), torch.zeros(1, 9, 1, 4)).shared_keys


@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_rule_refuses_other_inputs(case: Case) -> None:
    query, key = inputs_of(case)
    with pytest.raises(ValueError, match=r"batch size 1, got 2.*flatten\(0, 1\)"):
        ab.mask_rule(case.mask, query.expand(2, -1, -1, -1), key.expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match=f"{case.total} queries"):
        ab.mask_rule(case.mask, torch.zeros(1, case.total + 1, 2, 4), key)
    with pytest.raises(ValueError, match="keys"):
        ab.mask_rule(case.mask, query, torch.zeros(1, case.rows + 1, 2, 4))
    with pytest.raises(ValueError, match=r"attn_bias is on cpu, query on meta.*\.to\('meta'\)"):
        ab.mask_rule(case.mask, query.to("meta"), key.to("meta"))
    moved = case.mask.to("meta")
    assert ab.mask_rule(moved, query.to("meta"), key.to("meta")).sequences == len(case.queries)


def test_rule_refuses_what_is_no_mask() -> None:
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(TypeError, match="got str"):
        ab.mask_rule("causal", x, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broadcast to"):
        ab.mask_rule(torch.zeros(1, 2, 3, 4), x, x)
    with pytest.raises(ValueError, match="attn_bias is on meta"):
        ab.mask_rule(torch.zeros(3, 3, device="meta"), x, x)


# ---- they travel ----


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_travels(case: Case) -> None:
    mask = case.mask
    shape = (case.total, case.rows)
    for other in (
        pickle.loads(pickle.dumps(mask)),
        copy.deepcopy(mask),
        copy.copy(mask),
        mask.to("cpu"),
        mask.to(torch.device("cpu")),
    ):
        assert type(other) is type(mask)
        assert torch.equal(other.materialize(shape), mask.materialize(shape))
        if case in SEQUENCES:
            shared = mask.q_seqinfo is mask.k_seqinfo  # type: ignore[attr-defined]
            assert other == mask
            assert (other.q_seqinfo is other.k_seqinfo) == shared
    assert type(mask).__name__ in repr(mask)


def test_moves_every_tensor() -> None:
    for case in SEQUENCES:
        moved: Any = case.mask.to("meta")
        assert type(moved) is type(case.mask)
        assert moved.q_seqinfo.seqstart.is_meta and moved.k_seqinfo.seqstart.is_meta
        for x in ("seqlen", "block_tables"):
            for owner in (moved, moved.k_seqinfo):
                assert getattr(owner, x, moved.q_seqinfo.seqstart).is_meta
        assert moved.to("meta").q_seqinfo is moved.q_seqinfo
    with_bias = ab.LowerTriangularMask().add_bias(torch.zeros(2, 2)).to("meta")
    assert type(with_bias) is ab.LowerTriangularMaskWithTensorBias and with_bias._bias.is_meta
    assert ab.KeyPaddingMask(torch.ones(1, 2).bool()).to("meta").visible.is_meta
    # Moving keeps subclasses and settings: a causal mask once lost its causality so (B44).
    local = ab.BlockDiagonalMask.from_seqlens([2, 2], **CPU).make_local_attention(2)
    assert local.to("meta")._window_size == 2


def test_equality_and_hash() -> None:
    """Dataclass masks are compared by lengths and cannot be hashed; plain ones by identity."""
    make = ab.BlockDiagonalMask.from_seqlens
    assert make([2, 3], **CPU) == make([2, 3], **CPU) != make([3, 2], **CPU)
    assert make([2, 3], **CPU) != make([2, 3], **CPU).make_causal()
    assert make([4, 4], **CPU).make_local_attention(2) != make([4, 4], **CPU).make_local_attention(
        3
    )
    for case in SEQUENCES:
        with pytest.raises(TypeError, match="unhashable"):
            hash(case.mask)
    tables = mask_cases.TABLES
    paged = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens
    assert paged([1] * 4, [2] * 4, tables, 3) != paged([1] * 4, [2] * 4, tables + 1, 3)
    assert paged([1] * 4, [2] * 4, tables, 3) != "mask"
    assert isinstance(hash(ab.LowerTriangularMask()), int)
    assert ab.LocalAttentionFromBottomRightMask(1, 2) == ab.LocalAttentionFromBottomRightMask(1, 2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(ab.LocalAttentionFromBottomRightMask(1, 2))


def test_bases() -> None:
    """isinstance checks of clients."""
    for case in SEQUENCES:
        assert isinstance(case.mask, ab.VARLEN_BIASES)
    assert len(ab.VARLEN_BIASES) == 5
    assert not any(isinstance(case.mask, ab.VARLEN_BIASES) for case in mask_cases.dense_cases())
    for sub, base in (
        (ab.LowerTriangularMaskWithTensorBias, ab.LowerTriangularMask),
        (
            ab.LowerTriangularFromBottomRightLocalAttentionMask,
            ab.LowerTriangularFromBottomRightMask,
        ),
        (ab.BlockDiagonalCausalMask, ab.BlockDiagonalMask),
        (ab.BlockDiagonalCausalFromBottomRightMask, ab.BlockDiagonalMask),
        (ab.BlockDiagonalCausalLocalAttentionMask, ab.BlockDiagonalCausalMask),
        (
            ab.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
            ab.BlockDiagonalCausalFromBottomRightMask,
        ),
        (ab.BlockDiagonalCausalWithOffsetPaddedKeysMask, ab.BlockDiagonalPaddedKeysMask),
        (ab.BlockDiagonalLocalAttentionPaddedKeysMask, ab.BlockDiagonalPaddedKeysMask),
        (ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask, ab.BlockDiagonalPaddedKeysMask),
        (ab.BlockDiagonalCausalWithOffsetGappyKeysMask, ab.BlockDiagonalGappyKeysMask),
    ):
        assert issubclass(sub, base)


# ---- what is refused ----

BLOCKS = ab.BlockDiagonalMask.from_seqlens
PADDED = ab.BlockDiagonalPaddedKeysMask.from_seqlens
GAPPY = ab.BlockDiagonalGappyKeysMask.from_seqlens
PAGED = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens
TABLE = torch.zeros(2, 3, dtype=torch.int32)

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "window 0": (
        lambda: ab.LowerTriangularFromBottomRightLocalAttentionMask(0),
        ValueError,
        "above 0",
    ),
    "negative left": (lambda: ab.LocalAttentionFromBottomRightMask(-1, 2), ValueError, "negative"),
    "negative right": (lambda: ab.LocalAttentionFromBottomRightMask(1, -2), ValueError, "negative"),
    "picture of no window": (
        lambda: ab._materialize_causal_mask((2, 2), window_size=0),
        ValueError,
        "at least 1",
    ),
    "tensor of lengths": (lambda: BLOCKS(torch.tensor([1, 2])), AssertionError, "tolist"),  # type: ignore[arg-type]
    "tensor of key lengths": (
        lambda: BLOCKS([1, 2], torch.tensor([1, 2])),  # type: ignore[arg-type]
        AssertionError,
        "tolist",
    ),
    "negative length": (lambda: BLOCKS([1, -2]), ValueError, "negative"),
    "other number of keys": (lambda: BLOCKS([1, 2], [3]), ValueError, "2 sequences.*1 of keys"),
    "fewer keys than queries": (
        lambda: BLOCKS([1, 3], [1, 2]).make_causal_from_bottomright(),
        ValueError,
        "sequence 1 has 3 queries and only 2 keys",
    ),
    "the same with a window": (
        lambda: BLOCKS([1, 3], [1, 2]).make_local_attention_from_bottomright(2),
        ValueError,
        "sequence 1",
    ),
    "no window": (lambda: BLOCKS([2]).make_local_attention(0), ValueError, "above 0"),
    "no window from bottom right": (
        lambda: BLOCKS([2]).make_local_attention_from_bottomright(-1),
        ValueError,
        "above 0",
    ),
    "a query without keys": (
        lambda: BLOCKS([5], [3]).make_local_attention(2),
        RuntimeError,
        "sees none of 3 keys",
    ),
    "length above padding": (lambda: PADDED([1], 4, [5]), ValueError, "at most the padding 4"),
    "negative padded window": (
        lambda: PADDED([1], 4, [4]).make_local_attention(-1, 0),
        ValueError,
        "negative",
    ),
    "causal with later keys": (
        lambda: ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            [1], 4, [4]
        ).make_local_attention(1, 1),  # type: ignore[attr-defined]
        ValueError,
        "window_right = 0",
    ),
    "padded window 0": (
        lambda: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
            [1], 4, [4], 0
        ),
        ValueError,
        "above 0",
    ),
    "constructor without a window": (
        lambda: ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens([1], 4, [4]),
        NotImplementedError,
        "from_seqlens_local",
    ),
    "plain lengths of padded": (
        lambda: ab._PaddedSeqLenInfo.from_seqlens([1]),
        RuntimeError,
        "from_seqlens_padded",
    ),
    "plain lengths of gappy": (
        lambda: ab._GappySeqInfo.from_seqlens([1]),
        NotImplementedError,
        "from_seqlens_gappy",
    ),
    "no gappy sequence": (lambda: GAPPY([], [0], []), ValueError, "at least one"),
    "gappy without a total": (lambda: GAPPY([1, 1], [0, 3], [1, 1]), ValueError, "the total"),
    "gappy beyond the total": (lambda: GAPPY([1], [2, 4], [3]), ValueError, "beyond the total 4"),
    "page size 0": (lambda: PAGED([1, 1], [1, 1], TABLE, 0), ValueError, "page_size|padding"),
    "tables of others": (lambda: PAGED([1], [1], TABLE, 4), ValueError, r"must be \[1, pages"),
    "float tables": (lambda: PAGED([1, 1], [1, 1], TABLE.float(), 4), ValueError, "int32"),
    "more keys than pages": (lambda: PAGED([1, 1], [1, 13], TABLE, 4), ValueError, "12"),
    "gappy beyond its pages": (
        lambda: ab.PagedBlockDiagonalGappyKeysMask.from_seqlens([1, 1], [0, 8], [1, 5], TABLE, 4),
        ValueError,
        "beyond its 3 pages",
    ),
    "paged form of another": (
        lambda: PADDED([1, 1], 4, [1, 1], **CPU).make_paged(
            TABLE, 4, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        ),
        ValueError,
        "paged form of BlockDiagonalCausalWithOffsetPaddedKeysMask",
    ),
    "padding of half a page": (
        lambda: GAPPY([1, 1], [0, 6, 12], [1, 1], **CPU).make_paged(
            TABLE, 4, 6, ab.PagedBlockDiagonalGappyKeysMask
        ),
        ValueError,
        "multiple of page_size 4",
    ),
    "gappy outside its rows": (
        lambda: GAPPY([1, 1], [0, 3, 12], [1, 1], **CPU).make_paged(
            TABLE, 4, 4, ab.PagedBlockDiagonalGappyKeysMask
        ),
        ValueError,
        "begin within 4 rows",
    ),
    "float padding": (lambda: ab.KeyPaddingMask(torch.ones(2, 3)), ValueError, "bool"),
    "long lengths": (lambda: ab.KeyPaddingMask.from_lengths([4], 3), ValueError, "between 0"),
    "two tensors": (
        lambda: ab.MaskWithTensorBias(
            ab.LowerTriangularMask().add_bias(torch.zeros(1, 1)), torch.zeros(1, 1)
        ),
        ValueError,
        "has a tensor already",
    ),
    "sum with bool": (
        lambda: BLOCKS([2]).add_bias(torch.zeros(2, 2)).add_bias(torch.ones(2, 2).bool()),
        ValueError,
        "bool",
    ),
    "per sequence of none": (
        lambda: ab.MaskWithTensorBias(
            ab.LocalAttentionFromBottomRightMask(1, 1), torch.zeros(1, 1), per_sequence=True
        ),
        ValueError,
        "block-diagonal",
    ),
    "pages in a packed bias": (
        lambda: PAGED([1, 1], [1, 1], TABLE, 4).add_bias(torch.zeros(2, 12)),
        ValueError,
        "per_sequence=True",
    ),
    "padding and a bias": (
        lambda: ab.KeyPaddingMask(torch.ones(1, 2).bool()).add_bias(torch.zeros(1, 2)),
        ValueError,
        "masked_fill",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        make()
