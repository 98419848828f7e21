"""register_transformers(): the masks it makes against transformers' own, the attention call with
each of them, and what it refuses. Whole models: test_client_transformers.py."""

from __future__ import annotations

import importlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tolerance import GRADIENT, Checker, check
from torch import Tensor

from memeff_attn import integrations
from memeff_attn.attn_bias import (
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularMask,
)
from memeff_attn.integrations import transformers as ours

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs transformers 5 or newer (pip install -e .[test])"
)
masking = importlib.import_module("transformers.masking_utils")
if "q_offset" not in inspect.signature(masking.sdpa_mask).parameters:
    pytest.skip(
        f"transformers {transformers.__version__} makes masks of cache positions: there "
        "register_transformers leaves all of them to it, as tensors (test_client_transformers.py)",
        allow_module_level=True,
    )

B, H, HKV, K = 2, 4, 2, 16


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    integrations.transformers_calls(reset=True)
    yield


# ---- masks ----

RULES: dict[str, tuple[Any, bool]] = {  # function, whether it is known as a window
    "causal": (masking.causal_mask_function, True),
    "all": (masking.bidirectional_mask_function, True),
    "sliding": (masking.sliding_window_causal_mask_function(3), True),
    "wide sliding": (masking.sliding_window_causal_mask_function(40), True),
    "sliding to both sides": (masking.sliding_window_bidirectional_mask_function(2), True),
    "chunks": (masking.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.int64)), False),
    "own": (
        masking.and_masks(masking.causal_mask_function, lambda b, h, q, kv: kv != q - 1),
        False,
    ),
    "either": (
        masking.or_masks(
            masking.sliding_window_overlay(3), masking.sliding_window_causal_mask_function(2)
        ),
        False,
    ),
}
SHAPES = {  # queries, keys, the first query, the first key
    "no cache": (9, 9, 0, 0),
    "one query": (1, 9, 8, 0),
    "cached": (4, 9, 5, 0),
    "a cache that forgets": (1, 5, 8, 4),
    "more of it": (4, 8, 9, 5),
    "static, first": (9, 16, 0, 0),
    "static, later": (4, 16, 5, 0),
    "one of one": (1, 1, 0, 0),
}


def paddings(last: int) -> dict[str, Tensor | None]:
    """Of the tokens seen so far, `last` of them."""
    tokens = torch.arange(last)
    lengths = torch.tensor([last, max(1, last - 2)])[:, None]
    return {
        "none": None,
        "nothing hidden": torch.ones(B, last, dtype=torch.bool),
        "right": tokens < lengths,
        "left": tokens >= last - lengths,
    }


def by_them(rule: Any, shape: tuple[int, ...], padding: Tensor | None) -> Tensor:
    queries, keys, first_query, first_key = shape
    mask = masking.sdpa_mask(
        batch_size=B,
        q_length=queries,
        kv_length=keys,
        q_offset=first_query,
        kv_offset=first_key,
        mask_function=rule,
        attention_mask=padding,
        allow_is_causal_skip=False,
    )
    return mask.expand(B, 1, queries, keys)


def by_us(rule: Any, shape: tuple[int, ...], padding: Tensor | None, **skips: bool) -> Any:
    queries, keys, first_query, first_key = shape
    allowed = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True} | skips
    return ours.visible_keys(
        masking,
        batch_size=B,
        q_length=queries,
        kv_length=keys,
        q_offset=first_query,
        kv_offset=first_key,
        mask_function=rule,
        attention_mask=padding,
        **allowed,
    )


NEEDS_A_TENSOR = {  # rules that are known, and shapes in which no mask class says them
    ("causal", "static, later"),
    ("sliding", "static, first"),
    ("sliding", "static, later"),
    ("wide sliding", "static, later"),
    ("sliding to both sides", "static, first"),
    ("sliding to both sides", "static, later"),
}


@pytest.mark.parametrize("name", RULES)
def test_masks_are_those_of_transformers(name: str) -> None:
    rule, known = RULES[name]
    causal = name not in ("all", "sliding to both sides")
    for place, shape in SHAPES.items():
        queries, keys, first_query, _ = shape
        for kind, padding in paddings(first_query + queries).items():
            label = f"{name}, {place}, padding {kind}"
            expected = by_them(rule, shape, padding)
            mask = by_us(rule, shape, padding)
            as_rule = known and (name, place) not in NEEDS_A_TENSOR
            assert isinstance(mask, Tensor) != as_rule, label
            if mask is None:  # what the layers then do: test_no_mask
                square = queries == keys and causal
                seen = torch.ones_like(expected[:1, :1]).tril() if square else torch.tensor(True)
                if name == "sliding" and queries > 3:
                    raise AssertionError(f"{label}: None says nothing of a window")
            elif isinstance(mask, Tensor):
                seen = mask
            else:
                seen = mask.materialize((B, 1, queries, keys), torch.bool)
                assert mask.padding is None or mask.padding.shape == (B, keys)
                hidden = mask.materialize((B, 1, queries, keys))
                assert torch.equal(hidden == 0, seen) and torch.equal(hidden == -torch.inf, ~seen)
            assert torch.equal(seen.expand_as(expected), expected), label


def test_a_model_that_wants_a_tensor_gets_one() -> None:
    padding = paddings(9)["left"]
    for name, (rule, _) in RULES.items():
        one_sided = name not in ("all", "sliding to both sides")
        skip = "allow_is_causal_skip" if one_sided else "allow_is_bidirectional_skip"
        mask = by_us(rule, SHAPES["no cache"], padding, **{skip: False})
        assert torch.equal(mask, by_them(rule, SHAPES["no cache"], padding))


def test_a_finished_mask_stays() -> None:
    """generate() makes masks of static caches before it calls the model."""
    mask = ours.VisibleKeys(LowerTriangularMask(), None)
    assert by_us(masking.causal_mask_function, SHAPES["no cache"], mask) is mask
    assert mask.ndim == 4
    with pytest.raises(TypeError, match="dense_masks=True"):
        mask[:, :, :, :3]


# ---- attention ----


class Layer(torch.nn.Module):
    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def qkv(device: str, queries: int = 9, keys: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """As transformers has them: heads before the sequence."""
    sizes = ((H, queries), (HKV, keys), (HKV, keys))
    q, k, v = (torch.randn(B, *size, K, device=device) for size in sizes)
    return q, k, v


def masks(device: str, queries: int, keys: int) -> dict[str, Any]:
    padding = torch.arange(keys, device=device) < torch.tensor([[keys], [3]], device=device)
    window = LowerTriangularFromBottomRightLocalAttentionMask(3)
    return {
        "none": None,
        "window": ours.VisibleKeys(window, None),
        "padding": ours.VisibleKeys(None, padding),
        "both": ours.VisibleKeys(window, padding),
        "top left and padding": ours.VisibleKeys(LowerTriangularMask(), padding),
        "bool": torch.randn(B, 1, queries, keys, device=device) > 0,
        "float": torch.randn(B, H, queries, keys, device=device),
    }


@pytest.mark.parametrize("biased", [False, True], ids=["", "position bias"])
def test_every_mask(device: str, biased: bool) -> None:
    checker = Checker()
    for queries in (9, 4):
        q, k, v = qkv(device, queries)
        bias = torch.randn(1, H, queries, 9, device=device) if biased else None
        for name, mask in masks(device, queries, 9).items():
            out, weights = ours.attention(
                Layer(False), q, k, v, mask, scaling=0.3, position_bias=bias
            )
            assert weights is None and out.is_contiguous()
            if isinstance(mask, ours.VisibleKeys):
                mask = mask.materialize((B, 1, queries, 9), torch.float32, device)
            elif mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
            parts = [x for x in (mask, bias) if x is not None]
            total = sum(parts) if parts else None
            plain = (x.transpose(1, 2) for x in (q, k, v))
            checker.attention(f"{name} {queries}", out, None, *plain, total, scale=0.3)
    assert integrations.transformers_calls() == (14, 0, 0, "")
    checker.finish()


def test_gradient_of_a_position_bias(device: str) -> None:
    """Beside padding it is expanded to [B, H, M, N]; its gradient is the sum over the batch."""
    q, k, v = qkv(device)
    mask = masks(device, 9, 9)["both"]
    bias = torch.randn(1, H, 9, 9, device=device, requires_grad=True)
    out, _ = ours.attention(Layer(True), q, k, v, mask, position_bias=bias)
    out.square().sum().backward()

    def plain(dtype: torch.dtype) -> Tensor:
        wide, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        keys, values = (x.repeat_interleave(H // HKV, 2) for x in (keys, values))
        leaf = bias.detach().to(dtype).requires_grad_()
        scores = torch.einsum("bmhk,bnhk->bhmn", wide, keys) * K**-0.5 + leaf
        scores = scores + mask.materialize(scores.shape, dtype, device)
        dead = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
        torch.einsum("bhmn,bnhk->bmhk", weights, values).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert bias.grad is not None
    checker = Checker()
    exact, eager = plain(torch.float64), plain(torch.float32)
    checker.close("dBias", bias.grad, exact, eager, eager, factors=GRADIENT)
    checker.finish()


def test_no_mask(device: str) -> None:
    """None is what the call or the layer says of causality; of one query, every key."""
    q, k, v = qkv(device)
    causal = ours.attention(Layer(None), q, k, v, ours.VisibleKeys(LowerTriangularMask(), None))[0]
    every = ours.attention(Layer(False), q, k, v, None)[0]
    assert not torch.equal(causal, every)
    said: list[tuple[bool | None, bool | None, Tensor]] = [
        (True, None, causal),
        (False, None, every),
        (True, False, every),
        (False, True, causal),
        (None, True, causal),
    ]
    for layer, call, expected in said:
        out = ours.attention(Layer(layer), q, k, v, None, is_causal=call)[0]
        assert torch.equal(out, expected)
    last = ours.attention(Layer(True), q[:, :, -1:], k, v, None)[0]
    assert torch.equal(last, ours.attention(Layer(False), q[:, :, -1:], k, v, None)[0])
    whole = ours.attention(Layer(True), q, k, v, None, sliding_window=9)[0]
    assert torch.equal(whole, causal)  # a window that hides nothing


def test_queries_shared_by_the_batch(device: str) -> None:
    q, k, v = qkv(device)
    shared = ours.attention(Layer(False), q[:1], k, v, None)[0]
    assert torch.equal(shared, ours.attention(Layer(False), q[:1].expand_as(q), k, v, None)[0])


@pytest.mark.gpu
def test_cuda_graph_of_a_padded_call() -> None:
    """Under capture nothing is read from the device; the padding may change between replays.

    Outside it a padding that hides nothing is left out, for another kernel: the rule compares."""
    q, k, v = qkv("cuda")
    padding = torch.ones(B, 9, dtype=torch.bool, device="cuda")

    def call() -> Tensor:
        mask = by_us(masking.causal_mask_function, SHAPES["no cache"], padding)
        return ours.attention(Layer(True), q, k, v, mask)[0]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    causal = torch.ones(9, 9, dtype=torch.bool, device="cuda").tril()
    given = [x.transpose(1, 2) for x in (q, k, v)]
    found = []
    for length in (9, 4):
        padding[:, length:] = False
        graph.replay()
        found.append(out.clone())
        check(found[-1], None, *given, bias=causal & padding[:, None, None])
    assert (found[0] - found[1]).abs().amax() > 0.1  # the padding was read at the replay


# ---- what is refused ----


def refusals() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    return {
        "softcap": ({"softcap": 30.0}, NotImplementedError, "softcap.*eager"),
        "sinks": ({"s_aux": torch.zeros(H)}, NotImplementedError, "attention sinks"),
        "weights": ({"output_attentions": True}, NotImplementedError, "never held"),
        "packed": ({"cu_seq_lens_q": torch.tensor([0, 9])}, NotImplementedError, "position_ids"),
        "mask": ({"attention_mask": "all"}, NotImplementedError, "attention_mask is a str"),
        "window": ({"sliding_window": 4}, ValueError, "sliding window of 4 keys for 9"),
        "silent": ({"module": Layer(None)}, ValueError, "does not say whether it is causal"),
    }


@pytest.mark.parametrize("name", refusals())
def test_refused(name: str) -> None:
    given, kind, text = refusals()[name]
    q, k, v = qkv("cpu")
    arguments = {"module": Layer(True), "attention_mask": None} | given
    with pytest.raises(kind, match=text) as raised:
        ours.attention(query=q, key=k, value=v, **arguments)
    assert integrations.transformers_calls() == (0, 1, 0, str(raised.value))


def test_causal_of_other_lengths_is_refused() -> None:
    q, k, v = qkv("cpu", 4)
    with pytest.raises(ValueError, match="4 queries and 9 keys"):
        ours.attention(Layer(True), q, k, v, None)


def tiny(model: str, config: str, **settings: Any) -> Any:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    found = getattr(transformers, config)(**sizes, **settings)
    return getattr(transformers, model)._from_config(found, attn_implementation="memeff")


MODELS: dict[str, Callable[[], Any]] = {
    "softcap": lambda: tiny("Gemma2ForCausalLM", "Gemma2Config", pad_token_id=0),
    "attention sinks": lambda: tiny("GptOssForCausalLM", "GptOssConfig", num_local_experts=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_refused(name: str) -> None:
    """The real ones: Gemma 2 caps its scores, gpt-oss has sinks."""
    integrations.register_transformers()
    model = MODELS[name]()
    with pytest.raises(NotImplementedError, match=f"{name}.*attn_implementation='eager'"):
        model(torch.arange(5)[None])
    assert integrations.transformers_calls()[:2] == (0, 1)


def test_names() -> None:
    for name in ("flash_attention_2", "my_flex", "paged|memeff", "me/attn", "eager"):
        with pytest.raises(ValueError, match="Pass another"):
            integrations.register_transformers(name)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(ours.importlib, "import_module", missing)
    with pytest.raises(ImportError, match="pip install 'transformers>=5'"):
        integrations.register_transformers()
    old = types.SimpleNamespace(__version__="4.57.0", AttentionMaskInterface=None)
    monkeypatch.setattr(ours.importlib, "import_module", lambda name: old)
    with pytest.raises(ImportError, match=r"got 4\.57\.0"):
        integrations.register_transformers()


def test_every_window_is_known_by_name() -> None:
    """transformers may rename what its masks are made of: rules would then become tensors."""
    for size, queries in itertools.product((1, 3), (5, 9)):
        one = masking.sliding_window_causal_mask_function(size)
        assert ours._window_of(one, masking) == (size - 1, 0)
        both = masking.sliding_window_bidirectional_mask_function(size)
        assert ours._window_of(both, masking) == (size, size)
        mask = by_us(one, (queries, 9, 9 - queries, 0), None)
        assert isinstance(mask, ours.VisibleKeys)
