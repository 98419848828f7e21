"""What the compiled module checks of windows and sequences before any launch (csrc/mask_desc.cpp),
by tensors and by scalars; CPU tensors are enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

_C = pytest.importorskip("memeff_attn._C", reason="memeff_attn is not compiled")

INVALID, UNSUPPORTED = 1, 2
CODES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.bool: 3,
    torch.int64: 4,
    torch.int32: 5,
}
pytestmark = [
    pytest.mark.skipif(not _C.variants(), reason="the variant list is empty"),
    pytest.mark.skipif(
        not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
        reason=f"torch {torch.__version__} has no DLPack C exchange API",
    ),
]


def scalars(t: Tensor | None) -> Any:
    return t if t is None else (t.data_ptr(), CODES.get(t.dtype, -1), tuple(t.shape), t.stride())


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


STARTS = numbers(0, 2, 2, 5)  # 3 sequences of 5 queries
KEYS = numbers(0, 3, 4, 256)
LENGTHS = numbers(3, 1, 2)
TABLES = torch.zeros(3, 2, dtype=torch.int32)
FIELDS = (
    "window_left", "window_right", "query_starts", "key_starts", "key_lengths", "block_tables",
    "page_size", "bias_per_sequence",
)  # fmt: skip


def mask_tuple(**fields: Any) -> tuple[Any, ...]:
    plain = dict(zip(FIELDS, (-1, 0, None, None, None, None, 0, False), strict=True))
    return tuple((plain | fields).values())


def varlen(**fields: Any) -> dict[str, Any]:
    return {"query_starts": STARTS, "key_starts": KEYS} | fields


def paged(**fields: Any) -> dict[str, Any]:
    base = {"query_starts": STARTS, "key_lengths": LENGTHS, "block_tables": TABLES}
    return base | {"page_size": 128} | fields


def described(mask: Any) -> Any:
    return tuple(scalars(x) if isinstance(x, Tensor) else x for x in mask)


def operands(heads: tuple[int, ...], kv_heads: tuple[int, ...], batch: int) -> tuple[Tensor, ...]:
    key = half(batch, 256, *kv_heads, 8)
    return half(batch, 5, *heads, 8), key, key


def forward(
    mask: Any,
    causal: int = 1,
    heads: tuple[int, ...] = (4,),
    kv_heads: tuple[int, ...] = (2,),
    bias: Tensor | None = None,
    batch: int = 1,
) -> Any:
    query, key, value = operands(heads, kv_heads, batch)
    lse = torch.zeros(batch, *(heads or (1,)), 5)
    tensors = query, key, value, bias, torch.empty_like(query), lse, None
    settings = 1.0, 0.0, causal, False, ""
    answer = _C.forward(*tensors, *settings, mask, 0)
    by_scalars = None if mask is None else described(mask)
    assert (
        _C.forward_scalars(*map(scalars, tensors), unasked, *settings, by_scalars, 0, -1) == answer
    )
    return answer


def unasked(elements: int) -> Any:
    raise AssertionError("a workspace was asked for, of a call that cannot be launched")


def backward(mask: Any, causal: int = 1, bias: Tensor | None = None, **given: Any) -> Any:
    query, key, value = operands((4,), (2,), 1)
    lse = torch.zeros(2, 1, 4, 5)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    grad_bias = None if bias is None else torch.empty(bias.shape, dtype=bias.dtype)
    delta = given.get("delta")
    tensors = query, query, key, value, bias, query, lse, None, delta, *grads, grad_bias
    settings = False, 1.0, 0.0, causal, False, ""
    answer = _C.backward(*tensors, unasked, *settings, mask, 0)
    by_scalars = described(mask)
    more = _C.backward_scalars(*map(scalars, tensors), unasked, *settings, by_scalars, 0, -1)
    assert more == answer
    return answer


def assert_passes(answer: Any) -> None:
    """Every check but that of the device or the build."""
    code, text = answer
    if _C.is_cuda_build:
        assert (code, text) == (INVALID, "a tensor is not on a CUDA device")
    else:
        assert code == UNSUPPORTED and "host-only" in text, text


VALID: dict[str, dict[str, Any]] = {
    "window": {"window_left": 3, "window_right": 0},
    "both sides": {"window_left": 0, "window_right": 0},
    "no limit": {"window_left": -1, "window_right": -1},
    "wide": {"window_left": 1 << 40, "window_right": 1 << 40},
    "blocks": varlen(),
    "padded": varlen(key_lengths=LENGTHS),
    "pages": paged(),
    "large pages": paged(page_size=256),
    "one table": paged(
        query_starts=numbers(0, 5), key_lengths=numbers(3), block_tables=TABLES[:1, :1]
    ),
    "table of strides": paged(block_tables=torch.zeros(3, 9, dtype=torch.int32)[:, 3:5]),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_masks_pass(name: str) -> None:
    mask = mask_tuple(**VALID[name])
    for causal in (0, 1, 2):
        for heads, kv_heads in (((4,), (2,)), ((), ()), ((2, 3), (2, 3))):
            assert_passes(forward(mask, causal, heads, kv_heads))
        if "page_size" not in VALID[name]:
            assert_passes(backward(mask, causal))


def test_windows_are_not_read_without_an_anchor() -> None:
    assert_passes(forward(mask_tuple(window_left=-7, window_right=-9), causal=0))


INVALID_MASKS: list[tuple[dict[str, Any], str]] = [
    ({"window_left": -2}, "window_left is -2, window_right is 0"),
    ({"window_right": -5}, "window_right is -5: not -1 (no limit), 0 or more keys"),
    ({"key_starts": KEYS}, "query_starts is missing"),
    ({"key_lengths": LENGTHS}, "query_starts is missing"),
    ({"block_tables": TABLES}, "query_starts is missing"),
    ({"page_size": 128}, "query_starts is missing"),
    ({"bias_per_sequence": True}, "query_starts is missing"),
    ({"query_starts": STARTS}, "key_starts is missing"),
    (varlen(query_starts=STARTS.long()), "query_starts is not int32"),
    (varlen(query_starts=STARTS.float()), "query_starts is not int32"),
    (varlen(query_starts=STARTS[None]), "query_starts is not of one dimension"),
    (varlen(query_starts=STARTS[:1]), "query_starts is not of one dimension with the starts"),
    (varlen(query_starts=STARTS.repeat(2)[::2]), "query_starts [4] is not contiguous"),
    (varlen(key_starts=KEYS[:3]), "key_starts has shape [3], expected [4]"),
    (varlen(key_starts=KEYS.long()), "key_starts is not int32"),
    (varlen(key_lengths=KEYS), "key_lengths has shape [4], expected [3]"),
    (varlen(key_lengths=LENGTHS.short()), "key_lengths is not int32"),
    (varlen(page_size=128), "page_size is given, block_tables is missing"),
    (paged(block_tables=TABLES.long()), "block_tables is not int32"),
    (paged(block_tables=TABLES[:2]), "block_tables is not of shape [3, pages"),
    (paged(block_tables=TABLES[0]), "block_tables is not of shape [3, pages"),
    (paged(block_tables=torch.zeros(2, 3, dtype=torch.int32).mT), "last stride other than 1"),
    (paged(page_size=0), "page_size is 0, not a multiple of 128"),
    (paged(page_size=64), "page_size is 64, not a multiple of 128"),
    (paged(page_size=192), "page_size is 192, not a multiple of 128"),
    (paged(page_size=384), "key has 256 rows, not whole pages of 384"),
    (paged(key_starts=KEYS), "key_starts is given, which pages do not have"),
    (paged(key_lengths=None), "key_lengths is missing"),
    (
        paged(block_tables=torch.zeros(1, dtype=torch.int32).expand(3, 1 << 24), page_size=256),
        "block_tables has a last stride other than 1",
    ),
]


@pytest.mark.parametrize(
    "fields, text", INVALID_MASKS, ids=[str(i) for i in range(len(INVALID_MASKS))]
)
def test_invalid_masks_are_named(fields: dict[str, Any], text: str) -> None:
    for run in (forward, backward):
        code, said = run(mask_tuple(**fields))
        assert code == INVALID and text in said, said


def test_pages_name_fewer_than_2_to_the_31_keys() -> None:
    tables = torch.empty(1 << 24, dtype=torch.int32).expand(3, -1)  # never read
    code, text = forward(mask_tuple(**paged(block_tables=tables)))
    assert code == INVALID and "2^31 keys" in text


def test_sequences_take_one_batch_entry() -> None:
    code, text = forward(mask_tuple(**varlen()), batch=2)
    assert code == INVALID and "batch size is 1, here it is 2" in text
    assert_passes(forward(mask_tuple(window_left=1), batch=2))


def test_a_mask_of_other_fields_is_an_error() -> None:
    with pytest.raises(ValueError, match="mask has 3 fields, not 8"):
        forward((1, 2, None))
    with pytest.raises(TypeError):
        forward(mask_tuple(query_starts=[0, 5], key_starts=KEYS))


def test_biases_over_sequences() -> None:
    """All tokens, or within each sequence: M and N are then the caller's word."""
    own = varlen(bias_per_sequence=True)
    for shape in ((1, 4, 5, 256), (1, 1, 1, 256), (1, 4, 5, 1)):
        assert_passes(forward(mask_tuple(**varlen()), bias=half(*shape)))
    for shape in ((3, 4, 9, 300), (1, 1, 7, 7), (1, 4, 1, 11), (3, 1, 1, 1)):
        assert_passes(forward(mask_tuple(**own), bias=half(*shape)))
    for fields, shape in ((varlen(), (3, 4, 5, 256)), (own, (2, 4, 9, 9)), (own, (3, 2, 9, 9))):
        code, text = forward(mask_tuple(**fields), bias=half(*shape))
        assert code == INVALID and "attn_bias has shape" in text


def test_gradients_of_biases_over_sequences() -> None:
    own = varlen(bias_per_sequence=True)
    assert_passes(backward(mask_tuple(**varlen()), bias=half(1, 4, 5, 256)))
    assert_passes(backward(mask_tuple(**own), bias=half(3, 4, 2, 9)))
    for fields, shape in (
        (varlen(), (1, 1, 5, 256)),
        (varlen(), (1, 4, 1, 256)),
        (varlen(), (1, 4, 5, 1)),
        (own, (1, 4, 2, 9)),
        (own, (3, 1, 2, 9)),
    ):
        code, text = backward(mask_tuple(**fields), bias=half(*shape))
        assert code == INVALID and "attn_bias is broadcast: with sequences expand it" in text


def test_no_gradient_through_pages() -> None:
    code, text = backward(mask_tuple(**paged()))
    assert code == UNSUPPORTED and "takes no pages" in text


def test_delta() -> None:
    """rowsum(grad_out * out) may be given: fp32, contiguous, of lse's plain shape."""
    mask = mask_tuple(window_left=1)
    assert_passes(backward(mask, delta=torch.zeros(1, 4, 5)))
    for delta, text in (
        (torch.zeros(2, 1, 4, 5), "delta has shape [2, 1, 4, 5], expected [1, 4, 5]"),
        (torch.zeros(1, 5, 4).mT, "delta [1, 4, 5] is not contiguous"),
        (half(1, 4, 5), "delta is not float32"),
    ):
        code, said = backward(mask, delta=delta)
        assert code == INVALID and text in said


@pytest.mark.gpu
def test_dispatch_sees_each_sequence() -> None:
    """One batch entry a sequence, of mean length: what memeff_attn.explain asks too."""
    query, key, value = (x.cuda() for x in operands((4,), (2,), 1))
    wrong = next(row["name"] for row in _C.variants() if row["dtype"] == "f32")
    for fields, asked in (
        (varlen(), "B 3, M 2, N 85, H 2"),  # two heads of a key head are packed
        (paged(), "B 3, M 2, N 256, H 2"),
        ({"window_left": 1}, "B 1, M 5, N 256, H 4"),
    ):
        mask = (x.cuda() if isinstance(x, Tensor) else x for x in mask_tuple(**fields))
        given = query, key, value, None, torch.empty_like(query), None, None
        code, text = _C.forward(*given, 1.0, 0.0, 1, False, wrong, tuple(mask), 0)
        assert code == UNSUPPORTED and asked in text, text
