"""What the operators take of a mask beside `attn_bias` and `causal`, and how a `MaskRule` becomes
that.

MaskRule --lowered--> key, value, attn_bias, causal, MaskArguments --compiled module--> params.h
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attn_bias import ANCHOR_NONE, UNLIMITED, MaskRule
from .inputs import check_inputs

# The longest key tile of all kernels: a tile lies within one page.
PAGE_UNIT = 128

# The last arguments of both operators, in the order of MaskArguments.
SCHEMA = (
    "int window_left=-1, int window_right=0, Tensor? query_starts=None, Tensor? key_starts=None, "
    "Tensor? key_lengths=None, Tensor? block_tables=None, int page_size=0, "
    "bool bias_per_sequence=False"
)


class MaskArguments(NamedTuple):
    """Names and meaning as in `MaskRule`, whose anchor is the operators' `causal`; where that is 0
    the windows are not read.

    Without query_starts: a window alone. With them: B is 1; key_starts [sequences + 1], or
    block_tables with page_size and key_lengths. Starts do not fall; for the backward pass on CUDA
    the rows of the sequences must not overlap. With bias_per_sequence the numbers behind the bias'
    sizes are the caller's word: nothing checks them.
    """

    window_left: int = UNLIMITED
    window_right: int = 0
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    key_lengths: Tensor | None = None
    block_tables: Tensor | None = None
    page_size: int = 0
    bias_per_sequence: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[2:6]


def mask_of(given: Sequence[Any], named: Mapping[str, Any]) -> MaskArguments | None:
    """Of an operator's last arguments; None where `causal` says it all."""
    if not given and not named:
        return None
    mask = MaskArguments(*given, **named)
    plain = mask.window_left == UNLIMITED and mask.window_right == 0
    return None if plain and all(x is None for x in mask.tensors) else mask


def rule_of(
    query: Tensor, key: Tensor, attn_bias: Tensor | None, causal: int, mask: MaskArguments
) -> MaskRule:
    """The operator's arguments as the rule they came from."""
    left, right = mask[:2] if causal != ANCHOR_NONE else (UNLIMITED, UNLIMITED)
    starts, tables = mask.query_starts, mask.block_tables
    return MaskRule(
        causal,
        left,
        right,
        *(starts, mask.key_starts, mask.key_lengths, tables, mask.page_size),
        shared_keys=tables is not None,
        sequences=query.shape[0] if starts is None else starts.shape[0] - 1,
        max_queries=query.shape[1],
        max_keys=key.shape[1] if tables is None else tables.shape[1] * mask.page_size,
        bias=attn_bias,
        bias_per_sequence=mask.bias_per_sequence,
    )


# ---- MaskRule -> operator ----


class Lowered(NamedTuple):
    """Arguments of the operators."""

    key: Tensor
    value: Tensor
    attn_bias: Tensor | None
    causal: int
    mask: MaskArguments | None


def lowered(
    rule: MaskRule, query: Tensor, key: Tensor, value: Tensor, bias_grad: bool = False
) -> Lowered:
    """The operators' arguments for a rule.

    bias_grad: whether a gradient of the bias may be asked for: with sequences it is then expanded
        to its full shape, as float32 where that changes anything, so that autograd sums in float32
        and rounds once.
    Memory: views; for pages that are no multiple of 128 keys, or begin within a sequence, a copy of
        key and value with sequences * pages * page_size rows (`unpaged`).
    """
    bias = rule.bias
    if rule.causal is not None:
        return Lowered(key, value, bias, rule.causal, None)
    if is_copied(rule):
        key, value, rule = unpaged(rule, key, value)
    if bias is not None and bias_grad and rule.varlen and bias.dtype != torch.bool:
        bias = _full_bias(bias, rule, query, key)
    tables = rule.block_tables
    if tables is not None and tables.stride(-1) != 1:
        tables = tables.contiguous()
    mask = MaskArguments(
        rule.left,
        rule.right,
        rule.query_starts,
        None if tables is not None else rule.key_starts,
        rule.key_lengths,
        tables,
        rule.page_size,
        rule.bias_per_sequence,
    )
    return Lowered(key, value, bias, rule.anchor, mask)


def _full_bias(bias: Tensor, rule: MaskRule, query: Tensor, key: Tensor) -> Tensor:
    heads = query.shape[2:-1]
    if rule.bias_per_sequence:
        shape = (rule.sequences, *heads, rule.max_queries, rule.max_keys)
    else:
        shape = (1, *heads, query.shape[1], key.shape[1])
    return bias if bias.shape == shape else bias.float().expand(shape)


def is_copied(rule: MaskRule) -> bool:
    """Whether kernels cannot read these pages where they lie."""
    return rule.block_tables is not None and (
        rule.page_size % PAGE_UNIT != 0 or rule.key_starts is not None
    )


def unpaged(rule: MaskRule, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, MaskRule]:
    """Paged keys as padded ones: (key, value, rule) with the rows of each sequence in its order.

    Memory: sequences * pages * page_size rows of key and of value (stride-0 heads stay such): all
        that the tables could name, so that lengths may change between replays of a CUDA graph. On
        the device; nothing waits for it.
    """
    tables, size = rule.block_tables, rule.page_size
    assert tables is not None and rule.query_starts is not None
    count, pages = tables.shape
    length = pages * size
    tokens = torch.arange(length, device=tables.device).expand(count, length)
    if rule.key_starts is not None:
        tokens = (tokens + rule.key_starts[:count, None]).clamp(max=max(length - 1, 0))
    rows = tables.long().gather(1, tokens // size) * size + tokens % size
    # Entries behind a sequence's last key may be anything: their rows too are never looked at.
    rows = rows.clamp(0, max(key.shape[1] - 1, 0)).flatten()
    starts = torch.arange(count + 1, dtype=torch.int32, device=tables.device) * length
    padded = dataclasses.replace(rule, key_starts=starts, block_tables=None, page_size=0)
    return _gathered(key, rows), _gathered(value, rows), padded


def _gathered(x: Tensor, rows: Tensor) -> Tensor:
    """x[:, rows], with one copy of what heads of stride 0 share."""
    if x.shape[1] == 0:  # no page at all: then no sequence has a key
        return x
    narrow = x
    for dim in range(2, x.dim() - 1):
        if x.stride(dim) == 0:
            narrow = narrow.narrow(dim, 0, min(1, x.shape[dim]))
    return narrow.index_select(1, rows).expand(x.shape[0], rows.shape[0], *x.shape[2:])


# ---- checks of a direct call of an operator ----


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    mask: MaskArguments | None,
) -> None:
    """ValueError where the operator's tensors disagree; what they hold is not read."""
    own_bias = mask is not None and mask.bias_per_sequence
    check_inputs(query, key, value, None if own_bias else attn_bias)
    if mask is None:
        return
    if mask.window_left < UNLIMITED or mask.window_right < UNLIMITED:
        raise ValueError(
            f"window_left and window_right must be -1 (no limit), 0 or more keys, got "
            f"{mask.window_left} and {mask.window_right}"
        )
    if mask.query_starts is None:
        if any(x is not None for x in mask.tensors) or mask.page_size or own_bias:
            raise ValueError("query_starts is missing: without it there are no sequences")
        return
    _check_sequences(query, key, mask)
    if own_bias and attn_bias is not None:
        _check_own_bias(query, attn_bias, mask.query_starts.shape[0] - 1)


def _check_sequences(query: Tensor, key: Tensor, mask: MaskArguments) -> None:
    if query.shape[0] != 1:
        raise ValueError(f"with sequences the batch size is 1, got {query.shape[0]}")
    starts, tables = mask.query_starts, mask.block_tables
    assert starts is not None
    count = starts.shape[0] - 1 if starts.dim() == 1 else -1
    pages = tables.shape[1] if tables is not None and tables.dim() == 2 else 0
    expected = (
        ("query_starts", starts, (count + 1,)),
        ("key_starts", mask.key_starts, (count + 1,)),
        ("key_lengths", mask.key_lengths, (count,)),
        ("block_tables", tables, (count, pages)),
    )
    for name, x, shape in expected:
        if x is None:
            continue
        if x.dtype != torch.int32 or x.device != query.device or x.shape != shape or count < 0:
            raise ValueError(
                f"{name} must be int32 of shape {shape} on {query.device}, got {x.dtype}, "
                f"{tuple(x.shape)}, {x.device}"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} must have a last stride of 1, got {x.stride()}")
    _check_keys(key, mask)


def _check_keys(key: Tensor, mask: MaskArguments) -> None:
    if mask.block_tables is None:
        if mask.key_starts is None or mask.page_size != 0:
            raise ValueError(
                "sequences need key_starts, or block_tables with page_size and key_lengths"
            )
    elif mask.key_starts is not None or mask.key_lengths is None:
        raise ValueError("block_tables need key_lengths and take no key_starts")
    elif mask.page_size < 1 or key.shape[1] % mask.page_size != 0:
        raise ValueError(f"key must be whole pages of {mask.page_size} rows, got {key.shape[1]}")


def _check_own_bias(query: Tensor, bias: Tensor, count: int) -> None:
    lead = (count, *query.shape[2:-1])
    if bias.dim() != query.dim() or any(
        got not in (1, want) for got, want in zip(bias.shape, lead, strict=False)
    ):
        raise ValueError(
            f"a bias that counts within the sequences must broadcast to {(*lead, 'M', 'N')}, got "
            f"{tuple(bias.shape)}"
        )
    if bias.dtype not in (query.dtype, torch.float32, torch.bool) or bias.device != query.device:
        raise ValueError(
            f"attn_bias must be {query.dtype}, torch.float32 or torch.bool on {query.device}, got "
            f"{bias.dtype} on {bias.device}"
        )


# ---- what dispatch asks ----


def sizes_of(rule: MaskRule, query: Tensor, key: Tensor) -> dict[str, int]:
    """B, M and N of the question to csrc/dispatch.cpp, as count_sequences of csrc/mask_desc.cpp:
    one batch entry for each sequence, of mean length; of pages the length of a table."""
    if not rule.varlen or rule.sequences == 0:
        return {"B": query.shape[0], "M": query.shape[1], "N": key.shape[1]}
    if rule.block_tables is not None:
        keys = rule.block_tables.shape[1] * rule.page_size
    else:
        keys = key.shape[1] // rule.sequences
    queries = query.shape[1] // rule.sequences
    return {"B": rule.sequences, "M": max(1, queries), "N": max(1, keys)}
