"""memory_efficient_attention as an attention implementation of transformers.

    register_transformers()
    model = AutoModel.from_pretrained(path, attn_implementation="memeff")

transformers asks twice: once a forward pass for a mask (`visible_keys`), and in each layer for
attention (`attention`), to which it hands that mask:

    create_causal_mask, ... -> visible_keys -> None | VisibleKeys (a rule) | bool [B, 1, M, N]
    each layer's forward    -> attention    -> one attn_bias -> memory_efficient_attention
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..attention import memory_efficient_attention
from ..attn_bias import (
    UNLIMITED,
    AttentionBias,
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
)
from .calls import Calls, Counter
from .sdpa import in_autocast_dtype

_NEEDED = "transformers 5 or newer"
_counter = Counter()

# Arguments that change what attention computes and that no kernel here has, and what they are.
_REFUSED = {
    "softcap": "scores capped by tanh",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "keys chosen by index",
    "block_indices": "keys chosen by index",
    "head_mask": "weights scaled head by head",
    "output_attentions": "the weights, which are never held",
}


def register_transformers(name: str = "memeff", *, dense_masks: bool = False) -> None:
    """Makes `attn_implementation=name` of transformers' models run memory_efficient_attention.

    From `from_pretrained(..., attn_implementation=name)` or `model.set_attn_implementation(name)`
    on: causal prefill, decoding with a cache, padding, sliding windows, heads that share keys (they
    are not repeated), dropout, position biases with their gradient. transformers_calls() counts. A
    model that does not ask transformers for its attention is not changed, and not counted.

    Args:
        name: any but those that transformers reads as flash or flex attention, hub kernels or paged
            caches: it would treat masks and packed sequences their way.
        dense_masks: masks as bool tensors [B, 1, M, N] always, for models that slice or join them.
    Memory: masks of causal, sliding-window and padded models are rules and one bool [B, N]. Others
        (sequences packed by position_ids, static caches, overlays, torch.compile with windows) are
        bool [B, 1, M, N], made by transformers once a forward pass. A position bias beside padding
        is expanded to [B, H, M, N] in its dtype.
    Numerics: under autocast query, key and value are cast to its dtype. Queries that see no key
        (padding on the left) give 0, where eager attention gives a mean of all values. Whether
        padding hides anything is read from the device once a forward pass, as transformers' own
        masks do.
    Raises: ImportError without transformers 5; ValueError for such a name. In the model's forward:
        NotImplementedError for what is not served (softcap, attention sinks, output_attentions);
        ValueError where no mask came with queries and keys of different number.
    """
    taken = [part for part in ("flash", "flex", "|", "/") if part in name]
    if taken or name == "eager":
        raise ValueError(
            f"name {name!r}: transformers gives {(taken or ['eager'])[0]!r} in a name a meaning of "
            "its own. Pass another, such as 'memeff'."
        )
    transformers = _transformers()
    # Not looked up when a mask is made: torch.compile traces no import.
    masking = importlib.import_module("transformers.masking_utils")
    make_mask = _dense if dense_masks else visible_keys
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, functools.partial(make_mask, masking))


def transformers_calls(*, reset: bool = False) -> Calls:
    """The attention calls of transformers' models that came here since the start, or since they
    were last reset."""
    return _counter.read(reset)


def _transformers() -> Any:
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"register_transformers needs {_NEEDED}: pip install 'transformers>=5' ({error})"
        ) from error
    if not hasattr(found, "AttentionMaskInterface") or found.__version__.startswith("4."):
        raise ImportError(
            f"register_transformers needs {_NEEDED}, got {found.__version__}: pip install -U "
            "'transformers>=5'"
        )
    return found


# ---- masks ----


class VisibleKeys:
    """What a model hands from its mask to its layers: a window of keys around each query, and which
    keys of each batch entry are padding. No tensor [M, N].

    window: None (every key) or a mask of memeff_attn.attn_bias without a tensor.
    padding: bool [B, N], True = visible, or None.
    ndim: 4, as of the tensor [B, 1, M, N] that it stands for: generate() makes masks of static
        caches before it calls the model, which is then to take them for finished ones.
    """

    ndim = 4

    def __init__(self, window: AttentionBias | None, padding: Tensor | None) -> None:
        self.window = window
        self.padding = padding

    def attn_bias(
        self, query: Tensor, position_bias: Tensor | None
    ) -> AttentionBias | Tensor | None:
        """As memory_efficient_attention takes it; position_bias is added to the scores."""
        bias, window = position_bias, self.window
        if self.padding is not None:
            # A tensor, and no KeyPaddingMask: torch's CPU kernel takes it.
            seen = self.padding.to(query.device)[:, None, None, :]
            bias = seen if bias is None else hidden_where(seen, bias)
        if window is None or bias is None:
            return bias if window is None else window
        return window.add_bias(bias)

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        """The mask as a tensor [B, ..., M, N]: 0 where visible, -inf where not (bool: True where
        visible). For tests and for looking at."""
        seen = torch.ones(tuple(shape), dtype=torch.bool, device=device)
        if self.window is not None:
            seen &= self.window.materialize(shape, torch.bool, device)
        if self.padding is not None:
            seen &= KeyPaddingMask(self.padding).materialize(shape, torch.bool, device)
        if dtype == torch.bool:
            return seen
        zero = torch.zeros((), dtype=dtype, device=device)
        return hidden_where(seen, zero)

    def __getitem__(self, index: object) -> Any:
        raise TypeError(
            f"{self!r} is no tensor, and this model takes a part of its mask: register with "
            "register_transformers(..., dense_masks=True)"
        )

    def __repr__(self) -> str:
        padding = None if self.padding is None else tuple(self.padding.shape)
        return f"VisibleKeys(window={self.window!r}, padding={padding})"


def hidden_where(visible: Tensor, bias: Tensor) -> Tensor:
    """bias where visible, -inf elsewhere."""
    return torch.where(visible, bias, -math.inf)


def visible_keys(masking: Any, *given: Any, **named: Any) -> VisibleKeys | Tensor | None:
    """The mask function registered with transformers; masking: its module of masks; the other
    arguments as its own `sdpa_mask`.

    None where transformers' own would be, and the layer's is_causal then says all; VisibleKeys
    where the rule is known: causal, sliding window, all keys, each with padding; else bool
    [B, 1, M, N] from transformers.
    """
    finished = named.get("attention_mask")
    if isinstance(finished, VisibleKeys):
        return finished
    queries, keys, offset = (named.get(name) for name in ("q_length", "kv_length", "q_offset"))
    # A tensor is the offset of a static cache: nothing is to read it.
    if given or not type(queries) is type(keys) is type(offset) is int:
        return _dense(masking, *given, **named)
    window = _window_of(named.get("mask_function"), masking)
    if window is None or not named.get(_CAUSAL_SKIP if window[1] == 0 else _BIDIRECTIONAL_SKIP):
        return _dense(masking, *given, **named)
    return _rule(masking, window, queries, keys, offset, named)


# Arguments of sdpa_mask: whether the model takes something other than a tensor.
_CAUSAL_SKIP, _BIDIRECTIONAL_SKIP = "allow_is_causal_skip", "allow_is_bidirectional_skip"


def _dense(masking: Any, *given: Any, **named: Any) -> Tensor:
    """bool [B, 1, M, N] by transformers; never None, which says nothing of where M and N meet."""
    skips = {_CAUSAL_SKIP: False, _BIDIRECTIONAL_SKIP: False}
    result: Tensor = masking.sdpa_mask(*given, **(named | skips))
    return result


def _window_of(rule: Any, masking: Any) -> tuple[int, int] | None:
    """(left, right) of the mask functions of transformers that are a window, in keys beside the
    query's own; None for all others.

    A window is a function made of two others, known by their names and what they close over.
    """
    if rule is masking.causal_mask_function:
        return UNLIMITED, 0
    if rule is masking.bidirectional_mask_function:
        return UNLIMITED, UNLIMITED
    if torch.compiler.is_compiling() or getattr(rule, "__module__", None) != masking.__name__:
        return None
    if rule.__qualname__ != "and_masks.<locals>.and_mask":
        return None
    parts = _closed_over(rule).get("mask_functions", ())
    if len(parts) != 2 or any(part.__module__ != masking.__name__ for part in parts):
        return None
    size = _closed_over(parts[0]).get("sliding_window")
    if not isinstance(size, int) or size < 1:
        return None
    made_by = parts[0].__qualname__, parts[1]
    if made_by == ("sliding_window_overlay.<locals>.inner_mask", masking.causal_mask_function):
        return size - 1, 0
    both = "sliding_window_bidirectional_overlay.<locals>.inner_mask"
    if made_by == (both, masking.bidirectional_mask_function):
        return size, size
    return None


def _closed_over(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _rule(
    masking: Any,
    window: tuple[int, int],
    queries: int,
    keys: int,
    offset: int,
    named: dict[str, Any],
) -> VisibleKeys | Tensor | None:
    """Query i sees key j where -left <= j - (i + d) <= right, d = q_offset - kv_offset."""
    first = named.get("kv_offset", 0)
    left, right = window
    diagonal = offset - first
    mask: AttentionBias | None = None
    # Limits that reach beyond the first key of the last query, or the last key of the first one.
    left = UNLIMITED if left >= queries - 1 + diagonal else left
    right = UNLIMITED if right >= keys - 1 - diagonal else right
    if (left, right) != (UNLIMITED, UNLIMITED):
        if diagonal == keys - queries:
            mask = _from_bottom_right(left, right, max(queries, keys))
        elif diagonal == 0 and (left, right) == (UNLIMITED, 0):
            mask = LowerTriangularMask()
        else:  # keys behind the last query, as static caches have them
            return _dense(masking, **named)
    padding = _padding(named.get("attention_mask"), first, keys)
    if padding is None and (mask is None or (queries == keys and (left, right) == (UNLIMITED, 0))):
        return None
    return VisibleKeys(mask, padding)


def _from_bottom_right(left: int, right: int, longest: int) -> AttentionBias:
    if right == 0:
        if left == UNLIMITED:
            return LowerTriangularFromBottomRightMask()
        return LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
    sides = (longest if side == UNLIMITED else side for side in (left, right))
    return LocalAttentionFromBottomRightMask(*sides)


def _padding(mask: Tensor | None, first: int, keys: int) -> Tensor | None:
    """bool [B, N] of the keys from `first` on, keys beyond the mask hidden; None where all are
    seen."""
    if mask is None:
        return None
    seen = mask[:, first : first + keys].bool()
    if seen.shape[1] < keys:
        seen = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]))
    return None if _readable(seen) and bool(seen.all()) else seen


def _readable(x: Tensor) -> bool:
    """Whether Python may look at what it holds."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or isinstance(x, FakeTensor):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


# ---- attention ----


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleKeys | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers: (out [B, M, H, Kv], no weights).

    Shapes: query [B, H, M, K], key [B, Hkv, N, K], value [B, Hkv, N, Kv], as transformers has them;
        a query of one batch entry serves all.
    Args: attention_mask: what visible_keys made, or a tensor of the user's. None: is_causal, or
        the module's, says whether it is causal. position_bias: added to the scores.
    """
    try:
        bias = _attn_bias(
            module, query, key, attention_mask, is_causal, position_bias, sliding_window, others
        )
        device = query.device.type
        if torch.is_autocast_enabled(device):
            query, key, value = (in_autocast_dtype(x, device) for x in (query, key, value))
        if query.shape[0] == 1 != key.shape[0]:
            query = query.expand(key.shape[0], -1, -1, -1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = memory_efficient_attention(query, key, value, bias, dropout, scaling)
    except (NotImplementedError, ValueError) as error:
        _counter.add(query, str(error))
        raise
    _counter.add(query)
    return out, None


def _attn_bias(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: VisibleKeys | Tensor | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    sliding_window: int | None,
    others: dict[str, Any],
) -> AttentionBias | Tensor | None:
    _refuse(module, mask, others)
    if isinstance(mask, VisibleKeys):
        return mask.attn_bias(query, position_bias)
    if mask is None:
        window = _without_a_mask(module, query.shape[2], key.shape[2], is_causal, sliding_window)
        return VisibleKeys(window, None).attn_bias(query, position_bias)
    if not isinstance(mask, Tensor):
        raise NotImplementedError(
            f"attention_mask is a {type(mask).__name__}: expected None, a tensor that broadcasts "
            "to [B, H, M, N], or what the mask function of register_transformers made"
        )
    if position_bias is None:
        return mask
    return hidden_where(mask, position_bias) if mask.dtype == torch.bool else mask + position_bias


def _refuse(module: Any, mask: object, others: dict[str, Any]) -> None:
    for name, meaning in _REFUSED.items():
        given = others.get(name)  # may be a tensor
        if given is not None and given is not False:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name} ({meaning}), which "
                "memory_efficient_attention does not have. Load the model with "
                "attn_implementation='eager'."
            )
    if others.get("cu_seq_lens_q") is not None and not isinstance(mask, Tensor):
        raise NotImplementedError(
            f"{type(module).__name__} passes cu_seq_lens_q, sequences packed as flash attention "
            "takes them. Pass position_ids that start at 0 for each sequence, and no "
            "attention_mask: transformers then makes the mask."
        )


def _without_a_mask(
    module: Any, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None
) -> AttentionBias | None:
    """What None as a mask means: every key, or causal where the call or its module says so."""
    name = type(module).__name__
    if sliding_window is not None and keys > sliding_window:
        raise ValueError(
            f"{name} has a sliding window of {sliding_window} keys for {keys}, and no mask came: "
            "make one with transformers' create_sliding_window_causal_mask, or pass a tensor"
        )
    if queries == 1:
        return None
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"{name} does not say whether it is causal, and no mask came: pass attention_mask, or "
            "is_causal=True or False"
        )
    if not causal:
        return None
    if queries != keys:
        raise ValueError(
            f"{name} is causal with {queries} queries and {keys} keys, and no mask came: it may "
            "start at the first key (static caches) or end at the last one (cached prefill). Pass "
            "attention_mask, or is_causal=False for none"
        )
    return LowerTriangularMask()
