"""`python -m bench host`: what one small call costs the host, whole and in pieces.

On a GPU, calls of a tiny problem are queued without waiting, so that the time between two calls is
the host's. On the CPU the same pieces run, where "whole call" includes the attention itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

QUEUE = 200  # calls in flight: fewer than the launch queue holds (1024), so that no call waits
BATCHES = 31
WARM_UP = 500
SHAPE = (1, 16, 1, 64)  # [B, M, H, K]
GOAL_US = 14.0  # what torch's scaled_dot_product_attention costs on the H200's machine


def cost(call: Callable[[], object], wait: Callable[[], object]) -> tuple[float, float]:
    """(fastest, median) microseconds a call over several batches."""
    for _ in range(WARM_UP):
        call()
        wait()
    found = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(QUEUE):
            call()
        found.append((time.perf_counter() - begin) / QUEUE * 1e6)
        wait()
    return min(found), statistics.median(found)


def pieces(device: str) -> dict[str, Callable[[], Any]]:
    """{what: call}. Indented lines are parts of the first; gradients are asked for in the last two
    alone."""
    import memeff_attn

    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(SHAPE, dtype=dtype, device=device) for _ in range(3))
    scale = SHAPE[-1] ** -0.5
    op = torch.ops.memeff_attn.forward.default
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    found: dict[str, Callable[[], Any]] = {
        "memory_efficient_attention": lambda: memeff_attn.memory_efficient_attention(q, k, v),
        "  torch.ops.memeff_attn.forward": lambda: op(q, k, v, None, scale, 0, False, False, ""),
    }
    if device == "cuda":
        from memeff_attn import _C

        out = torch.empty_like(q)
        stream = torch.cuda.current_stream().cuda_stream
        found["    _C.forward"] = lambda: _C.forward(
            q, k, v, None, out, None, None, scale, 0.0, 0, False, "", None, stream
        )
        found["    torch.cuda.current_stream"] = lambda: torch.cuda.current_stream().cuda_stream
    found["    torch.empty_like"] = lambda: torch.empty_like(q)
    found["for comparison: torch SDPA"] = lambda: scaled_dot_product_attention(*transposed)
    found["forward and backward"] = _training(memeff_attn.memory_efficient_attention, q, k, v)
    found["for comparison: torch SDPA's"] = _training(scaled_dot_product_attention, *transposed)
    return found


def _training(attention: Callable[..., Any], *qkv: torch.Tensor) -> Callable[[], Any]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    grad_out = torch.randn_like(qkv[0])

    def call() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(attention(*leaves), leaves, grad_out)

    return call


def report(device: str) -> dict[str, float]:
    """Prints the table of one device; {piece: median microseconds}."""
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    print(f"{device} ({name}), torch {torch.__version__}, [B, M, H, K] = {list(SHAPE)}")
    print(f"{'':36}{'fastest us':>12}{'median us':>12}")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    medians = {}
    with torch.no_grad():
        for what, call in pieces(device).items():
            fastest, medians[what] = cost(call, wait)
            print(f"{what:36}{fastest:12.1f}{medians[what]:12.1f}", flush=True)
    return medians


def host() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: the CPU part only")
        report("cpu")
        return 0
    median = next(iter(report("cuda").values()))
    print(f"one small call: {median:.1f} us; goal: at most {GOAL_US:.0f} us")
    return int(median > GOAL_US)
