"""One training step of a small model in one of several processes: what test_training.py starts.

    python tests/train_step.py RANK WORLD FILE ddp|fsdp cuda|cpu

FILE: where the processes meet. Prints the largest difference to the same step in one process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memeff_attn

WIDTH, HEADS, TOKENS = 32, 2, 24


class Block(nn.Module):
    """Attention with a bias shared by the batch, causal by that bias, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        y = memeff_attn.memory_efficient_attention(query, key, value, self.bias, self.p)
        return x + self.out(y.flatten(2))


def make(device: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block()).to(device)


def step(model: nn.Module, x: Tensor) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()


def main() -> int:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    file, kind, where = sys.argv[3:]
    device = f"cuda:{rank}" if where == "cuda" else "cpu"
    if where == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if where == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    batch = torch.randn(2 * world, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    alone = make(device)
    step(alone, batch.to(device))
    model = make(device)
    mine = batch[2 * rank : 2 * rank + 2].to(device)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
        step(wrapped, mine)
        shared = dict(model.named_parameters())
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # Left out, it is of the GPU wherever one is seen: pytorch/pytorch#132471, gloo crashes.
        mesh = init_device_mesh(where, (world,))
        for block in model:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        step(wrapped, mine)
        shared = {name: p.full_tensor() for name, p in model.named_parameters()}
    off = max(float((shared[n] - p).abs().max()) for n, p in alone.named_parameters())
    moved = max(
        float((p - q).abs().max())
        for p, q in zip(alone.parameters(), make(device).parameters(), strict=True)
    )
    for block in model:  # with dropout: it runs, and gradients are finite
        block.p = 0.2
    step(wrapped, mine)
    finite = all(bool(p.isfinite().all()) for p in wrapped.parameters())
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: off by {off:.2e}, moved by {moved:.2e}, finite {finite}")
    return 0 if off < 1e-5 < 1e-3 < moved and finite else 1


if __name__ == "__main__":
    sys.exit(main())
