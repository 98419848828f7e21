"""torch.nn.functional.scaled_dot_product_attention, served by memory_efficient_attention.

activate_sdpa() puts `scaled_dot_product_attention` of this file in torch's place:

    [..., H, M, K] -> [B, M, H, K] (views) -> memory_efficient_attention -> [..., H, M, Kv]
      | what it does not take
      v
    what was there before, unchanged; counted, with the reason
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..attention import memory_efficient_attention
from ..attn_bias import (
    AttentionBias,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
)
from ..dispatch import DTYPES, cuda_missing
from .calls import TRACED, Calls, Counter

_Sdpa = Callable[..., Tensor]

# Tensors that no subclass's own rules would be lost for.
_PLAIN = (Tensor, torch.nn.Parameter, *TRACED)

_NAME = "scaled_dot_product_attention"
_counter = Counter()
_lock = threading.Lock()


class _State:
    """depth: activate_sdpa() calls not yet taken back; the rest: what they found."""

    depth = 0
    active = False
    original: _Sdpa = functional.scaled_dot_product_attention
    fastpath = True


class Activation:
    """What activate_sdpa() returns: a context manager that takes it back at its end, once."""

    def __init__(self) -> None:
        self._open = True

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open:
            self._open = False
            restore_sdpa()


def activate_sdpa() -> Activation:
    """From here on torch.nn.functional.scaled_dot_product_attention is memory_efficient_attention
    for all inputs that it takes, in the whole process; other calls go where they went before.

    As a statement, until restore_sdpa(); or `with activate_sdpa():`. Nests: the last restore_sdpa()
    brings the original back. nn.MultiheadAttention and nn.TransformerEncoderLayer go through it
    with need_weights=False; their inference fast path, which calls no SDPA, is off as long.

    Shapes: as SDPA: query [..., H, M, K], key [..., H, N, K], value [..., H, N, Kv]; fewer heads of
        key and value with enable_gqa, or one; sizes of 1 before M, N and K are broadcast.
    Dtypes: float16, bfloat16, float32; under autocast the inputs are cast to its dtype, as SDPA
        casts them.
    Args of SDPA: attn_mask: bool or float, any broadcast, with gradient; CausalBias. dropout_p:
        other random numbers than the original's. is_causal: anchored at the top left.
    Refused, and left to the original: other dtypes and devices, tensor subclasses and nested
        tensors, forward-mode derivatives, inputs that disagree, what no kernel takes. sdpa_calls()
        has the counts and the last reason. In graphs that torch.compile makes, what no kernel takes
        raises instead.
    Not seen: SDPA called under a name that was bound before (`from torch.nn.functional import
        scaled_dot_product_attention`), torch.jit.script, the choice of sdpa_kernel.
    Numerics, memory: those of memory_efficient_attention; a gradient of a gradient raises
        RuntimeError. A backward pass that recomputes (checkpointing) must run before
        restore_sdpa().
    """
    with _lock:
        if _State.depth == 0:
            _State.original = getattr(functional, _NAME)
            _State.fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            setattr(functional, _NAME, scaled_dot_product_attention)
            _State.active = True
        _State.depth += 1
    return Activation()


def restore_sdpa() -> None:
    """Takes one activate_sdpa() back; the last one brings the original and MHA's fast path back.

    Where another program has put its own function there since, that one stays, and what it passes
    on goes to the original.

    Raises: RuntimeError where nothing is active.
    """
    with _lock:
        if _State.depth == 0:
            raise RuntimeError(
                "restore_sdpa() takes back one activate_sdpa(), and none is active: call it once "
                "for each, or use `with activate_sdpa():`"
            )
        _State.depth -= 1
        if _State.depth == 0:
            _State.active = False
            torch.backends.mha.set_fastpath_enabled(_State.fastpath)
            if getattr(functional, _NAME) is scaled_dot_product_attention:
                setattr(functional, _NAME, _State.original)


def sdpa_calls(*, reset: bool = False) -> Calls:
    """The calls of SDPA since the first activate_sdpa(), or since they were last reset."""
    return _counter.read(reset)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * Q K^T + mask) V as torch's function of that name: ours where it can be, else
    the original."""
    given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if not _State.active:
        return _call_original(*given)
    call = _understood(*given)
    if isinstance(call, str):
        _counter.add(query, call)
        return _call_original(*given)
    if torch.compiler.is_compiling():
        _counter.add(query)
        return call.run(dropout_p, scale)
    try:
        out = call.run(dropout_p, scale)
    except NotImplementedError as error:  # legal inputs that no kernel takes
        _counter.add(query, str(error))
        return _call_original(*given)
    _counter.add(query)
    return out


def _call_original(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    settings: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if enable_gqa:  # torch 2.4 does not know it
        settings["enable_gqa"] = True
    if isinstance(attn_mask, CausalBias):  # it looks for its function under the name taken here
        attn_mask = attn_mask._materialize(query.device)
    return _State.original(query, key, value, attn_mask=attn_mask, **settings)


class _Call(NamedTuple):
    """One call in our layout; rank: of SDPA's query; lead: its dimensions before the heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | AttentionBias | None
    rank: int
    lead: tuple[int, ...]

    def run(self, p: float, scale: float | None) -> Tensor:
        scale = None if scale is None else float(scale)
        out = memory_efficient_attention(self.query, self.key, self.value, self.bias, p, scale)
        out = out.transpose(1, 2)
        if self.rank == 4:
            return out
        if self.rank > 4:
            return out.view((*self.lead, *out.shape[1:]))
        return out[0] if self.rank == 3 else out[0, 0]


def _understood(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> _Call | str:
    """The call as memory_efficient_attention takes it, or why it cannot."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        refusal = _not_plain(name, x, query)
        if refusal:
            return refusal
    device = query.device.type
    if device not in ("cpu", "cuda"):
        return f"device {device}: only cpu and cuda are served"
    if device == "cuda" and cuda_missing():
        return str(cuda_missing())
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives: the attention has none"
    if not 0.0 <= dropout_p <= 1.0:
        return f"dropout_p is {dropout_p}: expected 0 to 1"
    if torch.is_autocast_enabled(device):
        query, key, value = (in_autocast_dtype(x, device) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype != torch.float32:
            attn_mask = in_autocast_dtype(attn_mask, device)
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return (
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype}: expected float16, bfloat16 or "
            "float32, all three alike"
        )
    return _in_our_layout(query, key, value, attn_mask, is_causal, enable_gqa)


def _not_plain(name: str, x: Any, query: Tensor) -> str:
    if type(x) not in _PLAIN:
        return f"{name} is a {type(x).__name__}: only plain tensors are served"
    if x.is_nested or x.layout != torch.strided:
        return f"{name} is nested or sparse: only strided tensors are served"
    if x.device != query.device:
        return f"{name} is on {x.device}, query on {query.device}"
    return ""


def in_autocast_dtype(x: Tensor, device: str) -> Tensor:
    return x.to(torch.get_autocast_dtype(device)) if x.dtype in DTYPES else x


def _in_our_layout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> _Call | str:
    rank = query.dim()
    if rank == 2:
        query, key, value = query[None], key[None], value[None]
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    fault = "" if rank >= 2 else "expected [..., H, M, K]"
    if not fault and not len(of_query) == len(of_key) == len(of_value):
        fault = "expected as many dimensions of each"
    if fault or of_key[-1] != of_query[-1] or of_value[-2] != of_key[-2] or of_query[-1] == 0:
        fault = fault or "expected [..., M, K], [..., N, K], [..., N, Kv] with K above 0"
        return _shapes(query, key, value, fault)
    lead: tuple[int, ...] = of_query[:-3]
    heads = of_query[-3]
    if not of_query[:-2] == of_key[:-2] == of_value[:-2]:
        common = _common(of_query[:-3], of_key[:-3], of_value[:-3])
        heads = _heads(heads, of_key[-3], of_value[-3], enable_gqa)
        if common is None or heads < 0:
            fault = "do not broadcast" if heads >= 0 else f"heads, with enable_gqa {enable_gqa}"
            return _shapes(query, key, value, fault)
        lead = common
        if of_query[-3] != heads:
            query = query.expand(*of_query[:-3], heads, -1, -1)
    bias: Tensor | AttentionBias | None = None
    if attn_mask is not None:
        understood = _mask(attn_mask, query, of_key[-2], (*lead, heads), is_causal, rank)
        if isinstance(understood, str):
            return understood
        bias = understood
    elif is_causal:
        bias = LowerTriangularMask()
    if rank != 4 or not of_query[0] == of_key[0] == of_value[0]:
        query, key, value = (_one_batch(x, lead) for x in (query, key, value))
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    return _Call(query.transpose(1, 2), key, value, bias, rank, lead)


def _shapes(query: Tensor, key: Tensor, value: Tensor, fault: str) -> str:
    return f"shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}: {fault}"


def _heads(query: int, key: int, value: int, enable_gqa: bool) -> int:
    """Heads of the result, -1 where these do not go together."""
    if key != value:
        return -1
    if enable_gqa:
        return query if key and query % key == 0 else -1
    if query == 1:
        return key
    return query if key in (1, query) else -1


def _common(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """What they broadcast to; all have the same length."""
    found = []
    for sizes in zip(*shapes, strict=True):
        size = max(sizes) if 0 not in sizes else 0
        if any(x not in (1, size) for x in sizes):
            return None
        found.append(size)
    return tuple(found)


def _one_batch(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[..., H, L, K] as [B, H, L, K]: a view, where the dimensions of B lie behind one another."""
    if x.shape[:-3] != lead:
        x = x.expand(*lead, -1, -1, -1)
    if len(lead) == 1:
        return x
    return x.flatten(0, -4) if lead else x[None]


def _mask(
    mask: Tensor,
    query: Tensor,
    keys: int,
    outer: tuple[int, ...],
    is_causal: bool,
    rank: int,
) -> Tensor | AttentionBias | str:
    """attn_mask as attn_bias, or why not; outer: the dimensions before [M, N]."""
    if is_causal:
        return "attn_mask and is_causal together"
    queries = query.shape[-2]
    if isinstance(mask, CausalBias):
        if (mask.seq_len_q, mask.seq_len_kv) != (queries, keys):
            return f"a CausalBias of {mask.seq_len_q} x {mask.seq_len_kv} for {queries} x {keys}"
        if mask.variant == CausalVariant.UPPER_LEFT:
            return LowerTriangularMask()
        return LowerTriangularFromBottomRightMask()
    refusal = _not_plain("attn_mask", mask, query)
    if refusal:
        return refusal
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"attn_mask is {mask.dtype}: expected bool, float32 or {query.dtype}"
    shape = (*outer, queries, keys)
    missing = len(shape) - mask.dim()
    fits = mask.dim() <= rank
    sizes = (1,) * missing + tuple(mask.shape)
    if not fits or any(got not in (1, want) for got, want in zip(sizes, shape, strict=True)):
        return f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {shape}"
    mask = mask.view(sizes) if missing else mask
    lead = outer[:-1]
    if len(lead) == 1:
        return mask
    if not lead:
        return mask[None]
    if all(size == 1 for size in sizes[:-3]):
        return mask.flatten(0, -4)
    if sizes[:-3] != lead:
        return f"attn_mask of shape {tuple(mask.shape)} is shared by some of the entries of {lead}"
    return mask.flatten(0, -4)
