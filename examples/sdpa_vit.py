"""A vision transformer whose attention is torch's SDPA, trained one step on
memory_efficient_attention, with no line of it changed: python examples/sdpa_vit.py [cpu|cuda]

timm's where timm is installed, else torch's own encoder. Exits with 1 where a call was not ours."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an install wins

from memeff_attn.integrations import activate_sdpa, sdpa_calls

DEPTH = 4


def build() -> tuple[nn.Module, str, tuple[int, ...]]:
    """The model, its name, the shape of its input."""
    try:
        import timm
    except (ImportError, RuntimeError):  # RuntimeError: a torchvision of another torch
        layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, DEPTH), "torch's encoder", (2, 196, 192)
    model = timm.create_model("vit_tiny_patch16_224", depth=DEPTH, num_classes=10)
    return model, "timm's ViT", (2, 3, 224, 224)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(x)
    out.exp().mean().backward()
    return [out.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]


def main(device: str) -> int:
    torch.manual_seed(0)
    model, name, shape = build()
    model, x = model.to(device), torch.randn(shape, device=device)
    torchs = step(model, x)
    with activate_sdpa():
        ours = step(model, x)
    calls = sdpa_calls()
    pairs = zip(ours, torchs, strict=True)
    out, *grads = (((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    print(
        f"{name} on {device}: {calls.served} of {DEPTH} calls of attention were ours, "
        f"{calls.refused} refused; relative difference to torch's: output {out:.1e}, gradients of "
        f"{len(grads)} weights {max(grads):.1e} at most"
    )
    return 0 if calls[:2] == (DEPTH, 0) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
