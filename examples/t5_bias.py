"""T5 of transformers on memory_efficient_attention: its learned bias of relative positions is added
to the scores inside the kernel and gets its gradient there.

    python examples/t5_bias.py [cpu|cuda]

Random weights; for your model: from_pretrained(path, attn_implementation="memeff"). Exits with 1
where a call was not ours."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an install wins

from memeff_attn.integrations import register_transformers, transformers_calls

LAYERS = 2


def main(device: str) -> int:
    register_transformers()  # as attn_implementation="memeff"
    config = T5Config(
        vocab_size=1000, d_model=256, d_kv=32, d_ff=512, num_layers=LAYERS, num_heads=8,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).to(device).train()
    text, labels = (torch.randint(2, 1000, (2, n), device=device) for n in (120, 50))
    mask = torch.ones_like(text)
    mask[1, 80:] = 0  # the second text is shorter
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    for implementation in ("eager", "memeff"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(input_ids=text, attention_mask=mask, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: w.grad for n, w in model.named_parameters() if w.grad is not None})
    eager, ours = gradients
    biases = [name for name in eager if "relative_attention_bias" in name]
    apart = [((ours[n] - eager[n]).abs().max() / eager[n].abs().max()).item() for n in biases]
    calls, expected = transformers_calls(), 3 * LAYERS  # encoder, decoder, one over the other
    print(
        f"T5 on {device}: {calls.served} of {expected} calls of attention were ours; loss "
        f"{losses[1]:.6f}, eager {losses[0]:.6f}; gradients of {len(apart)} position biases differ "
        f"by {max(apart):.1e} of their largest"
    )
    return 0 if calls.served == expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
