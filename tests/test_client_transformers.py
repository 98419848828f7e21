"""transformers' own models on register_transformers(): tiny, random weights, no tokenizer.

Eager is the model with its own eager attention, exact the model in fp64 on torch's SDPA (eager
attention rounds its softmax to fp32 in some models); the rule is that of tolerance.py. Every test
says how many calls of attention were ours."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gradients
import pytest
import torch
from tolerance import FORWARD, GRADIENT, Checker
from torch import Tensor, nn

from memeff_attn import integrations, memory_efficient_attention
from memeff_attn.attn_bias import AttentionBias
from memeff_attn.integrations import transformers as integration

os.environ.setdefault("HF_HUB_OFFLINE", "1")

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs transformers 5 or newer (pip install -e .[test])"
)

VOCABULARY, WIDTH, HEADS, ROWS, LAYERS = 61, 64, 4, 40, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # wide enough that attention is no mean of all values
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    integrations.register_transformers()
    integrations.transformers_calls(reset=True)
    torch._dynamo.reset()
    transformers.logging.set_verbosity_error()
    yield
    torch._dynamo.reset()


class Client(NamedTuple):
    name: str  # of the model's class; its configuration's
    config: str
    settings: dict[str, Any]
    calls: int = LAYERS  # of attention, in one forward pass


CLIENTS = {
    "llama": Client("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral, window 7": Client(
        "MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 7}
    ),
    "bert": Client(
        "BertForMaskedLM",
        "BertConfig",
        SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "t5": Client(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        3 * LAYERS,  # encoder, decoder, and the one over the other
    ),
}


def model_of(client: Client, device: str, dtype: torch.dtype, implementation: str) -> nn.Module:
    """The same weights for each call."""
    if client.name.startswith("T5"):
        modeling = importlib.import_module("transformers.models.t5.modeling_t5")
        if not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
            pytest.skip(f"T5 of transformers {transformers.__version__} has its attention built in")
    config = getattr(transformers, client.config)(**copy.deepcopy(client.settings))
    torch.manual_seed(0)
    make = getattr(transformers, client.name)._from_config
    model = make(config, attn_implementation=implementation, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if client.name.startswith("T5") and weight.dim() == 2:
                weight.normal_(std=0.2)
    if model.can_generate():
        model.generation_config.eos_token_id = None  # all generate the same number of tokens
    return model.to(device=device, dtype=dtype)


def batch_of(client: Client, device: str, side: str) -> dict[str, Tensor]:
    """Tokens of two entries, one of them padded on that side ("" for neither)."""
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (2, ROWS))
    mask = torch.ones_like(tokens)
    if side:
        mask[1, slice(0, 11) if side == "left" else slice(-11, None)] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens * mask, "labels": labels}
    if side:
        batch["attention_mask"] = mask
    return {name: x.to(device) for name, x in batch.items()}


def run(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits where a token is, and the gradient of every weight by the loss; for each projection of
    keys the size of what a gradient of its bias sums."""
    found: dict[str, Tensor] = {}

    def size_of_bias(name: str, module: nn.Module) -> None:
        def keep(module: nn.Module, inputs: Any, outputs: Any) -> None:
            found[f"{name}.bias, terms"] = outputs[0].abs().sum((0, 1)).amax()

        module.register_full_backward_hook(keep)

    for name, module in model.named_modules():
        if name.endswith(".key"):
            size_of_bias(name, module)
    result = model.train()(**batch)
    result.loss.backward()
    seen = (batch["labels"] != -100)[..., None]
    found["logits"] = result.logits.detach() * seen
    return found | {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def compare(label: str, mine: dict[str, Tensor], *others: dict[str, Tensor]) -> None:
    """others: exact, eager, eager in fp32. The gradient of a bias of the keys is 0 in exact
    arithmetic (one number added to all scores of a query changes nothing): its terms count."""
    checker = Checker()
    for name in [name for name in mine if not name.endswith(", terms")]:
        factors = FORWARD if name == "logits" else GRADIENT
        size = others[0].get(f"{name}, terms")
        figures = [x[name] for x in (mine, *others)]
        checker.close(f"{label} {name}", *figures, factors=factors, terms=size)
    checker.finish()


PADDED = [(name, side) for name in CLIENTS for side in ("", "right", "left")]


@pytest.mark.parametrize(("name", "side"), PADDED, ids=lambda x: x or "no padding")
def test_forward_and_backward(device: str, name: str, side: str) -> None:
    client = CLIENTS[name]
    mine, exact, eager = three(client, device, batch_of(client, device, side))
    assert integrations.transformers_calls() == (client.calls, 0, 0, "")
    assert mine.keys() == exact.keys() and len(mine) > 10
    compare(name, mine, exact, eager, eager)


class Recorder:
    """In the place of memory_efficient_attention: each call's arguments, result and gradients."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Tensor]]] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Any, p: float, scale: float
    ) -> Tensor:
        found: dict[str, Tensor] = {}

        def seen(name: str, x: Tensor) -> Tensor:
            x = x.view_as(x)  # of this call alone: layers share the bias
            if x.requires_grad:
                x.register_hook(lambda gradient: found.__setitem__(name, gradient))
            return x

        inputs = [seen(*x) for x in (("query", query), ("key", key), ("value", value))]
        given = seen("bias", bias) if isinstance(bias, Tensor) else bias
        out = memory_efficient_attention(*inputs, given, p, scale)
        self.calls.append(((out.detach(), *(x.detach() for x in inputs), bias, scale), found))
        return seen("out", out)


@pytest.mark.parametrize(("name", "side"), PADDED, ids=lambda x: x or "no padding")
def test_each_call_in_bf16(
    device: str, name: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model gives each attention call, and the gradient that comes back to it, by the
    rule. The whole model in 16 bits says nothing of attention: there even attention in fp64,
    rounded once, misses the rule, because what the other layers round outweighs it."""
    client, recorder = CLIENTS[name], Recorder()
    monkeypatch.setattr(integration, "memory_efficient_attention", recorder)
    run(model_of(client, device, torch.bfloat16, "memeff"), batch_of(client, device, side))
    assert integrations.transformers_calls() == (client.calls, 0, 0, "")
    assert len(recorder.calls) == client.calls
    checker, biases = Checker(), 0
    for i, ((out, query, key, value, bias, scale), found) in enumerate(recorder.calls):
        if isinstance(bias, AttentionBias):
            shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
            bias = bias.materialize(shape, query.dtype, device)
        bias = bias.detach() if isinstance(bias, Tensor) else None
        call = (query, key, value, bias)
        checker.attention(f"call {i}", out, None, *call, scale=scale)
        three_and_bias = tuple(found.get(x) for x in ("query", "key", "value", "bias"))
        assert None not in three_and_bias[:3]
        biases += three_and_bias[3] is not None
        gradients.check(checker, f"call {i}", three_and_bias, found["out"], *call, scale=scale)
    assert biases == (LAYERS if name == "t5" else 0)  # the encoder's; masks hold the decoder's
    checker.finish()


def generate(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Tensor:
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    # No pair of tokens twice: a random model would otherwise repeat one token for ever.
    options |= {"max_new_tokens": 24, "do_sample": False, "no_repeat_ngram_size": 2}
    return model.eval().generate(**inputs, pad_token_id=0, **options)


GENERATED = [("llama", "dynamic"), ("llama", "static"), ("t5", "dynamic")] + [
    ("mistral, window 7", cache) for cache in ("dynamic", "static")
]


@pytest.mark.parametrize(("name", "cache"), GENERATED)
@pytest.mark.parametrize("side", ["", "left"], ids=lambda x: x or "no padding")
def test_generate_token_by_token(device: str, name: str, side: str, cache: str) -> None:
    """With a cache of keys: what eager attention generates, each step by us."""
    client = CLIENTS[name]
    batch = batch_of(client, device, side)
    options: dict[str, Any] = {}
    if cache == "static":
        options = {"cache_implementation": cache, "disable_compile": True}
    expected = generate(model_of(client, device, torch.float32, "eager"), batch)
    tokens = generate(model_of(client, device, torch.float32, "memeff"), batch, **options)
    calls = 24 * client.calls
    if name == "t5":
        calls -= 23 * LAYERS  # the encoder runs once
    assert integrations.transformers_calls() == (calls, 0, 0, "")
    assert torch.equal(tokens, expected)
    made = tokens[:, -24:]
    assert all(len(row.unique()) > 4 for row in made)


def test_prefill_in_two_parts(device: str) -> None:
    """Queries that follow a cache: causal from the bottom right; sliding, too."""
    for name in ("llama", "mistral, window 7"):
        client = CLIENTS[name]
        tokens = batch_of(client, device, "")["input_ids"]
        outs = {}
        for kind in ("eager", "memeff"):
            model = model_of(client, device, torch.float32, kind).eval()
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                parts = (tokens[:, :25], tokens[:, 25:])
                outs[kind] = torch.cat(
                    [model(x, past_key_values=cache).logits for x in parts], dim=1
                )
        assert integrations.transformers_calls(reset=True) == (2 * LAYERS, 0, 0, "")
        with torch.no_grad():
            exact = model_of(client, device, torch.float64, "sdpa").eval()(tokens).logits
        checker = Checker()
        checker.close(name, outs["memeff"], exact, outs["eager"], outs["eager"])
        checker.finish()


def three(client: Client, device: str, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """run() by us, exactly, and eagerly, in fp32."""
    kinds = (("memeff", torch.float32), ("sdpa", torch.float64), ("eager", torch.float32))
    return [run(model_of(client, device, dtype, kind), batch) for kind, dtype in kinds]


def test_sequences_packed_by_position(device: str) -> None:
    client = CLIENTS["llama"]
    batch = {name: x[:1] for name, x in batch_of(client, device, "").items()}
    whole = run(model_of(client, device, torch.float64, "sdpa"), batch)
    starts = torch.cat([torch.arange(13), torch.arange(ROWS - 13)])
    batch["position_ids"] = starts[None].to(device)
    mine, exact, eager = three(client, device, batch)
    assert integrations.transformers_calls() == (LAYERS, 0, 0, "")
    assert (whole["logits"] - exact["logits"])[:, 13:].abs().max() > 0.1  # it was packed
    compare("packed", mine, exact, eager, eager)


def test_dense_masks(device: str) -> None:
    """The same result with masks as tensors, for models that take them apart."""
    integrations.register_transformers("memeff_dense", dense_masks=True)
    client = CLIENTS["mistral, window 7"]
    batch = batch_of(client, device, "left")
    rule, exact, eager = three(client, device, batch)
    dense = run(model_of(client, device, torch.float32, "memeff_dense"), batch)
    assert integrations.transformers_calls() == (2 * LAYERS, 0, 0, "")
    for mine in (rule, dense):
        compare("dense", mine, exact, eager, eager)


def test_autocast(device: str) -> None:
    client = CLIENTS["llama"]
    batch = batch_of(client, device, "left")
    seen = batch["attention_mask"].bool()

    def logits(kind: str, dtype: torch.dtype, enabled: bool) -> Tensor:
        model = model_of(client, device, dtype, kind).eval()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled):
            return model(**batch).logits[seen]

    mine = logits("memeff", torch.float32, True)
    assert integrations.transformers_calls() == (LAYERS, 0, 0, "")
    exact, eager = logits("sdpa", torch.float64, False), logits("eager", torch.float32, True)
    checker = Checker()
    eager32 = logits("eager", torch.float32, False)
    checker.close("autocast", mine, exact, eager, eager32, unit=torch.bfloat16)
    checker.finish()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(device: str, reentrant: bool) -> None:
    client = CLIENTS["mistral, window 7"]
    batch = batch_of(client, device, "right")
    found = []
    for again in (False, True):
        model = model_of(client, device, torch.float32, "memeff")
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found.append(run(model, batch))
        calls = LAYERS * (2 if again else 1)
        assert integrations.transformers_calls(reset=True) == (calls, 0, 0, "")
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_dropout_reaches_the_call(device: str) -> None:
    client = CLIENTS["llama"]
    client = client._replace(settings=client.settings | {"attention_dropout": 0.3})
    batch = batch_of(client, device, "")
    model = model_of(client, device, torch.float32, "memeff")
    found = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        found.append(model.train()(**batch).logits)
    model.eval()
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], model(**batch).logits)
    assert torch.equal(model(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("name", ["llama", "mistral, window 7"])
def test_compile_without_a_break(device: str, name: str) -> None:
    client = CLIENTS[name]
    batch = batch_of(client, device, "left")
    counts: list[int] = []

    def count(module: Any, inputs: Any) -> Callable[..., Any]:
        targets = [str(node.target) for node in module.graph.nodes]
        counts.append(sum("memeff_attn.forward" in x for x in targets))
        counts.append(sum("scaled_dot_product" in x for x in targets))
        return module.forward

    theirs = torch.compile(
        model_of(client, device, torch.float32, "eager").eval(), backend="eager", fullgraph=True
    )
    try:
        with torch.no_grad():
            theirs(**batch, use_cache=False)
    except torch._dynamo.exc.Unsupported as error:
        line = str(error).splitlines()[0]
        pytest.skip(f"torch {torch.__version__} cannot trace transformers' own eager model: {line}")
    model = model_of(client, device, torch.float32, "memeff").eval()
    with torch.no_grad():
        plain = model(**batch, use_cache=False).logits
        compiled = torch.compile(model, backend=count, fullgraph=True)
        found = compiled(**batch, use_cache=False).logits
        exact, eager = (
            model_of(client, device, dtype, kind).eval()(**batch).logits
            for dtype, kind in ((torch.float64, "sdpa"), (torch.float32, "eager"))
        )
    assert counts == [LAYERS, 0]
    calls = integrations.transformers_calls()
    assert calls.served == LAYERS and calls.traced >= LAYERS and calls.refused == 0
    checker = Checker()
    seen = batch["attention_mask"].bool()
    for label, mine in (("plain", plain), ("compiled", found)):
        figures = (x[seen] for x in (mine, exact, eager, eager))
        checker.close(f"{name} {label}", *figures)
    checker.finish()
