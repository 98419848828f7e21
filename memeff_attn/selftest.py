"""Small calls, forward and backward, judged against the fp64 oracle; and how fast a large one is.

The rule is that of the project's tests (docs/design.md, "Tests"): against the oracle on the same
rounded inputs, the largest error at most 2 times that of plain PyTorch in the same dtype plus 2u,
the rms at most 1.5 times plus u; for gradients 3 and 2. u is the ulp of the dtype at the oracle's
largest value. Where plain PyTorch is off by more than 64u, the same in fp32, rounded once, takes
its place.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .attention import (
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward_requires_grad,
)
from .attn_bias import LowerTriangularMask

FORWARD, GRADIENT = (2.0, 1.5), (3.0, 2.0)  # factors of the largest error and of the rms
OUTLIER = 64.0  # u: what rounding in the dtype does not explain


class Case(NamedTuple):
    name: str
    M: int
    N: int
    H: int
    Hkv: int
    K: int
    Kv: int
    bias: bool = False
    causal: bool = False  # forward only: few keys a row have a baseline of their own in the tests


CASES = (
    Case("plain", 256, 256, 4, 4, 64, 64),
    Case("causal", 256, 256, 2, 2, 128, 128, causal=True),
    Case("odd sizes, shared heads", 197, 131, 4, 2, 36, 52),
    Case("bias", 129, 192, 3, 3, 64, 64, bias=True),
)
# Enough work to fill any one GPU; of a CPU, well under a second.
SPEED = {"cuda": (4, 4096, 16, 64, torch.float16), "cpu": (1, 512, 4, 64, torch.float32)}
WARMUP, REPEATS = 3, 10


class Speed(NamedTuple):
    """TFLOP/s of useful flop: 4 B H M N K, and 2.5 times that for the gradients."""

    B: int
    M: int
    H: int
    K: int
    dtype: str
    forward: float
    backward: float


def run(device: str, dtype: torch.dtype) -> list[str]:
    """What is wrong with the cases' outputs and gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    return [line for case in CASES for line in _case(case, device, dtype, generator)]


def _case(case: Case, device: str, dtype: torch.dtype, generator: torch.Generator) -> list[str]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query = normal(2, case.M, case.H, case.K)
    key, value = normal(2, case.N, case.Hkv, case.K), normal(2, case.N, case.Hkv, case.Kv)
    tensor = normal(1, case.H, case.M, case.N) if case.bias else None
    grad_out = normal(2, case.M, case.H, case.Kv)
    leaves = [x.requires_grad_() for x in (query, key, value, tensor) if x is not None]
    mask = LowerTriangularMask() if case.causal else tensor
    out = memory_efficient_attention(query, key, value, mask)
    with torch.no_grad():
        exact, _ = reference.attention(query, key, value, mask)
    eager, wide = (_eager(leaves, case, grad_out, kind) for kind in (dtype, torch.float32))
    found = judge(f"{case.name}: out", out.detach(), exact, eager[0], wide[0], FORWARD)
    if case.causal:
        return found
    mine = torch.autograd.grad(out, leaves, grad_out)
    oracle = reference.attention_backward(grad_out, query, key, value, mask)
    names = ("query", "key", "value", "bias")
    for name, got, want, plain, fp32 in zip(names, mine, oracle, eager[1:], wide[1:], strict=False):
        assert want is not None
        found += judge(f"{case.name}: gradient of {name}", got, want, plain, fp32, GRADIENT)
    return found


def _eager(leaves: list[Tensor], case: Case, grad_out: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of plain PyTorch, everything in `dtype`."""
    own = [x.detach().to(dtype).requires_grad_() for x in leaves]
    bias = LowerTriangularMask() if case.causal else own[3] if case.bias else None
    query, key, value = own[:3]
    out = reference.eager(query, key, value, bias)
    if case.causal:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, own, grad_out.to(dtype))]


def judge(
    label: str,
    mine: Tensor,
    exact: Tensor,
    eager: Tensor,
    wide: Tensor,
    factors: tuple[float, float],
) -> list[str]:
    """The rule; wide: eager in fp32."""
    if not bool(mine.isfinite().all()):
        return [f"{label}: {int((~mine.isfinite()).sum())} of {mine.numel()} are not finite"]
    info = torch.finfo(mine.dtype)
    exponent = math.frexp(float(exact.abs().amax()))[1] - 1
    unit = max(info.eps * 2.0**exponent, info.tiny * info.eps)
    plain = (eager.double() - exact).abs()
    rounded = (wide.to(mine.dtype).double() - exact).abs()
    plain = torch.where(plain.isfinite() & (plain <= OUTLIER * unit), plain, rounded)
    error = (mine.double() - exact).abs()
    found = []
    for what, got, base, factor, units in (
        ("largest error", error.amax(), plain.amax(), factors[0], 2),
        ("rms error", _rms(error), _rms(plain), factors[1], 1),
    ):
        limit = factor * float(base) + units * unit
        if not float(got) <= limit:
            found.append(f"{label}: {what} {float(got):.3e}, at most {limit:.3e}")
    return found


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def speed(device: str) -> Speed:
    """Of one forward and one backward pass, medians of a few runs."""
    batch, length, heads, dim, dtype = SPEED[torch.device(device).type]
    query, key, value, grad = (
        torch.randn(batch, length, heads, dim, device=device, dtype=dtype) for _ in range(4)
    )
    out, lse = memory_efficient_attention_forward_requires_grad(query, key, value)
    flop = 4.0 * batch * heads * length * length * dim

    def forward() -> None:
        memory_efficient_attention(query, key, value)

    def backward() -> None:
        memory_efficient_attention_backward(grad, out, lse, query, key, value)

    forward_s, backward_s = (_seconds(call, device) for call in (forward, backward))
    name = str(dtype).removeprefix("torch.")
    return Speed(
        batch, length, heads, dim, name, flop / forward_s / 1e12, 2.5 * flop / backward_s / 1e12
    )


def _seconds(call: Callable[[], None], device: str) -> float:
    for _ in range(WARMUP):
        call()
    if torch.device(device).type == "cpu":
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    with torch.cuda.device(device):
        new = torch.cuda.Event
        marks = [new(enable_timing=True) for _ in range(REPEATS + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        between = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return float(statistics.median(between)) / 1e3
