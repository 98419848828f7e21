"""Activation checkpointing around blocks whose attention is torch's SDPA, run on
memory_efficient_attention, dropout included: python examples/checkpointing.py [cpu|cuda]

A checkpointed block's attention runs again in the backward pass, with the same dropout mask. Exits
with 1 where a call was not ours."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an install wins

from memeff_attn.integrations import activate_sdpa, sdpa_calls

DEPTH, WIDTH, HEADS = 4, 128, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def step(blocks: nn.ModuleList, x: Tensor, keep: bool) -> list[Tensor]:
    """Gradients; keep: with every activation kept, else blocks are checkpointed."""
    blocks.zero_grad()
    torch.manual_seed(1)  # the dropout masks
    for block in blocks:
        x = block(x) if keep else checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()
    return [w.grad.clone() for w in blocks.parameters() if w.grad is not None]


def main(device: str) -> int:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(DEPTH)).to(device)
    x = torch.randn(2, 256, WIDTH, device=device)
    with activate_sdpa():
        pairs = zip(step(blocks, x, keep=False), step(blocks, x, keep=True), strict=True)
    apart = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    calls, expected = sdpa_calls(), 3 * DEPTH  # once where activations are kept, else twice
    ours = f"{calls.served} of {expected} calls of attention were ours"
    print(f"checkpointing on {device}: {ours}; gradients {apart:.1e} off those without")
    return 0 if calls[:2] == (expected, 0) and apart < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
