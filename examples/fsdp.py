"""Sharded training (FSDP2, torch 2.6 or newer) of an encoder whose attention is torch's SDPA, on
memory_efficient_attention: python examples/fsdp.py [cpu|cuda]. Two processes on the CPU, else one a
GPU. Exits with 1 where a call was not ours or gradients are not those of one process."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an install wins

from memeff_attn.integrations import activate_sdpa, sdpa_calls


def model_of(device: str) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).exp().mean().backward()
    return [getattr(w.grad, "full_tensor", w.grad.clone)() for w in model.parameters()]


def worker(kind: str, rank: int, world: int, file: str) -> int:
    torch.cuda.set_device(rank if kind == "cuda" else -1)  # -1: none
    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=world)
    x = torch.randn(2 * world, 96, 64, generator=torch.Generator().manual_seed(1)).to(kind)
    mesh, sharded = dist.device_mesh.init_device_mesh(kind, (world,)), model_of(kind)
    for part in (*sharded.layers, sharded):
        fully_shard(part, mesh=mesh)
    with activate_sdpa():
        ours = gradients(sharded, x[2 * rank : 2 * rank + 2])
    calls, pairs = sdpa_calls(), zip(ours, gradients(model_of(kind), x), strict=True)
    apart = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    print(
        f"rank {rank}: {calls.served} of 2 calls of attention were ours, gradients {apart:.1e} off"
    )
    dist.destroy_process_group()
    return 0 if calls[:2] == (2, 0) and apart < 1e-3 else 1


def main(kind: str) -> int:
    world = torch.cuda.device_count() if kind == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable, __file__, kind]
        each = [[*start, str(rank), str(world), f"{folder}/meet"] for rank in range(world)]
        return max(process.wait() for process in [subprocess.Popen(line) for line in each])


if __name__ == "__main__":
    kind, *rest = sys.argv[1:] or ["cpu"]
    sys.exit(worker(kind, int(rest[0]), int(rest[1]), rest[2]) if rest else main(kind))
