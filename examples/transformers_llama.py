"""A Llama of transformers on memory_efficient_attention: one forward pass and generate().

    python examples/transformers_llama.py [cpu|cuda]

The weights are random, so that nothing is downloaded; for your model:
AutoModelForCausalLM.from_pretrained(path, attn_implementation="memeff"). Exits with 1 where the
tokens differ from those of the model's own attention, or a call was not ours."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an install wins

from memeff_attn.integrations import register_transformers, transformers_calls

LAYERS, TOKENS = 4, 32


def main(device: str) -> int:
    register_transformers()  # as attn_implementation="memeff"
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=2, initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device).eval()
    prompt = torch.randint(1, 1000, (2, 100), device=device)
    mask = torch.ones_like(prompt)
    mask[1, :40] = 0  # the second prompt is shorter: padding on the left
    found = []
    for implementation in ("eager", "memeff"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = model(prompt, attention_mask=mask).logits[mask.bool()]
            tokens = model.generate(
                prompt, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS
            )
        found.append((logits, tokens))
    calls = transformers_calls()
    expected = LAYERS * (1 + TOKENS)
    difference = (found[0][0] - found[1][0]).abs().max().item()
    same = torch.equal(found[0][1], found[1][1])
    print(
        f"Llama on {device}: {calls.served} of {expected} calls of attention were ours; logits "
        f"differ from eager attention's by {difference:.1e} at most (largest "
        f"{found[0][0].abs().max():.1f}); {TOKENS} generated tokens {'equal' if same else 'DIFFER'}"
    )
    return 0 if same and calls.served == expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
