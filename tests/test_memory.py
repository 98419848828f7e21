"""Memory stays O(M + N): no temporary the size of the scores, no copy of what only has other
strides."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cases
import pytest
import torch
from cases import Case

memeff_attn = pytest.importorskip("memeff_attn")

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent


def peak_increase(call: Callable[[], object]) -> int:
    """Bytes that `call` allocated at its peak, its results included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return peak - before


def result_bytes(case: Case, inputs: cases.Inputs) -> int:
    groups = 2 if case.rank == "bmghk" else 1
    rows = case.B * case.M * case.H * groups
    return rows * (case.value_dim * inputs.query.element_size() + 4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("f16", B=1, M=8192, N=8192, H=4, K=64),
        Case("bf16", B=1, M=8192, N=8192, H=4, K=128, mask="top_left"),
        Case("f32", B=1, M=8192, N=8192, H=4, K=64, mask="bottom_right"),
        Case("f32", B=1, M=4096, N=8192, H=4, K=33),
        Case("f16", B=1, M=4096, N=8192, H=4, K=33, Kv=513),
        Case("f16", B=1, M=4096, N=8192, H=2, K=512),
        Case("f16", B=1, M=4096, N=8192, H=4, K=64, bias="11mn:padded"),
        Case("bf16", B=4, M=2048, N=2048, H=8, K=64, bias="b11n:f32"),
        Case("bf16", B=4, M=2048, N=2048, H=8, K=64, bias="11mn:bool:transposed"),
        Case("f16", B=4, M=2048, N=2048, H=8, K=36, bias="11mn:offset"),
        Case("bf16", B=4, M=256, N=12288, H=16, Hkv=2, K=512),
        Case("f16", B=2, M=2048, N=4096, H=8, K=64, strides="heads_first"),
        Case("f16", B=2, M=2048, N=4096, H=8, K=64, strides="batch0"),
        Case("f16", B=2, M=2048, N=4096, H=8, K=40, strides="heads0"),
        Case("f16", B=2, M=2048, N=4096, H=8, K=64, strides="padded1"),
        Case("f16", B=2, M=2048, N=4096, H=4, K=64, rank="bmghk"),
    ],
    ids=str,
)
def test_peak_is_the_result(case: Case) -> None:
    """Peak increase: out and LSE, and nothing more (each rounded up by the allocator)."""
    inputs = cases.make(case, "cuda")
    cases.attention(inputs)
    allowed = result_bytes(case, inputs) + 2 * MIB
    assert peak_increase(lambda: cases.attention(inputs)) <= allowed


@pytest.mark.gpu
def test_last_stride_copies_that_tensor_alone() -> None:
    case = Case("f16", B=2, M=2048, N=4096, H=8, K=64)
    inputs = cases.make(case, "cuda")
    inputs.key = inputs.key.transpose(-1, -2).contiguous().transpose(-1, -2)
    cases.attention(inputs)
    copied = inputs.key.numel() * inputs.key.element_size()
    assert (
        peak_increase(lambda: cases.attention(inputs))
        <= result_bytes(case, inputs) + copied + 2 * MIB
    )


@pytest.mark.gpu
def test_without_lse_none_is_allocated() -> None:
    case = Case("f16", B=1, M=1 << 20, N=16, H=8, K=8, Kv=1)
    inputs = cases.make(case, "cuda")

    def call() -> torch.Tensor:
        return memeff_attn.memory_efficient_attention(inputs.query, inputs.key, inputs.value)

    call()
    assert peak_increase(call) <= case.B * case.M * case.H * 2 + 2 * MIB


CHILD = """
import resource, sys, torch
import memeff_attn
M, K, kv, bias = (int(x) for x in sys.argv[1:])
torch.set_num_threads(1)
def call(m):
    q, k, v = (torch.randn(1, m, 4, d) for d in (K, K, kv))
    b = torch.zeros(1, 1, 1, m) if bias else None
    memeff_attn.memory_efficient_attention_forward_requires_grad(q, k, v, b)
call(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call(M)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("dims", [(16, 16), (16, 24)], ids=["same_dims", "other_value_dim"])
@pytest.mark.parametrize("bias", [0, 1], ids=["no_bias", "bias"])
def test_cpu_path_is_blockwise(dims: tuple[int, int], bias: int) -> None:
    """The CPU path holds no [H, M, N] scores: resident memory of a child process grows by far
    less."""
    rows = 6000
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    argv = [sys.executable, "-c", CHILD, *(str(n) for n in (rows, *dims, bias))]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    scores = 4 * rows * rows * 4  # bytes: 4 heads, fp32
    assert int(done.stdout) * 1024 < scores / 4
