"""Memory stays O(M + N): no temporary the size of the scores, no copy of what only has other
strides."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import backward_cases
import cases
import pytest
import torch
from backward_cases import BackwardCase
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


def parts_bytes(case: Case, inputs: cases.Inputs) -> int:
    """Of the results of the parts of the keys, in fp32: out and three numbers a row."""
    from memeff_attn import _C, dispatch

    query, key, value, bias, _, scale = inputs.tuple()
    gpu = _C.device_info(query.get_device())
    del gpu["name"]
    described = dispatch.Inputs(query, key, value, bias, 0.0, scale)
    _, parts = _C.forward_plan(dispatch.request_of(described, gpu))
    rows = query.shape[:-1].numel()
    return 4 * rows * parts * (case.value_dim + 3) if parts > 1 else 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("f16", B=1, M=64, N=1 << 16, H=4, K=128),
        Case("f32", B=1, M=16, N=1 << 16, H=4, K=128),
        Case("f16", B=1, M=4, N=1 << 16, H=32, Hkv=4, K=128),
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
    """Peak increase: out and LSE, and nothing more (each rounded up by the allocator) but the parts
    where the keys are cut: no more than a tile for each block that runs at once."""
    inputs = cases.make(case, "cuda")
    cases.attention(inputs)
    parts = parts_bytes(case, inputs)
    assert parts <= 24 * MIB
    allowed = result_bytes(case, inputs) + parts + 2 * MIB
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


def gradient_bytes(case: BackwardCase, inputs: cases.Inputs) -> int:
    wanted = zip("qkvb", inputs.tuple()[:4], strict=True)
    wants = backward_cases.usable(case, inputs)
    return sum(
        x.numel() * x.element_size() for letter, x in wanted if letter in wants and x is not None
    )


def workspace_bytes(case: BackwardCase, inputs: cases.Inputs) -> int:
    """What the docstring states: B * H * M floats, and partial sums in fp32 of at most 8 times a
    gradient's elements, or 64 MiB, each (where the gradient of the query is added up: its own)."""
    heads = case.H * (2 if case.rank == "bmghk" else 1)
    total = 4 * case.B * heads * case.M
    wants = backward_cases.usable(case, inputs)
    for letter, x in zip("qkvb", inputs.tuple()[:4], strict=True):
        if letter in wants and x is not None:
            total += max(8 * 4 * x.numel(), 64 * MIB)
    return total


def sums_bytes(case: BackwardCase) -> int:
    """Of the gradient of the query, in fp32; M in 8, K in 16."""
    if case.dtype == "f32":
        return 0
    return 4 * case.B * case.H * -(-case.M // 8) * 8 * -(-case.K // 16) * 16


def backward_peak(case: BackwardCase, inputs: cases.Inputs) -> int:
    """Bytes that the backward pass allocated at its peak, the gradients included."""
    wants = backward_cases.usable(case, inputs)
    leaves = [
        None if x is None else x.detach().requires_grad_(letter in wants)
        for letter, x in zip("qkvb", inputs.tuple()[:4], strict=True)
    ]
    query, key, value, bias = leaves
    mask = bias if bias is not None else backward_cases.mask_object(inputs.causal)
    out = memeff_attn.memory_efficient_attention(query, key, value, mask, case.p)
    grad_out = torch.randn_like(out)
    asked = [x for x in leaves if x is not None and x.requires_grad]
    return peak_increase(lambda: torch.autograd.grad(out, asked, grad_out, retain_graph=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        BackwardCase("f16", B=1, M=8192, N=8192, H=4, K=64),
        BackwardCase("bf16", B=1, M=8192, N=8192, H=4, K=128, mask="top_left", p=0.1),
        BackwardCase("f32", B=1, M=8192, N=8192, H=4, K=64, mask="bottom_right"),
        BackwardCase("f32", B=1, M=4096, N=8192, H=4, K=33, p=0.3),
        BackwardCase("f16", B=1, M=4096, N=8192, H=4, K=33, Kv=513),
        BackwardCase("f16", B=1, M=4096, N=8192, H=2, K=512),
        BackwardCase("f16", B=1, M=64, N=1 << 16, H=1, K=64),
        BackwardCase("f16", B=1, M=1 << 16, N=64, H=1, K=64),
        BackwardCase("bf16", B=4, M=2048, N=2048, H=8, K=64, bias="b11n:f32"),
        BackwardCase("bf16", B=4, M=2048, N=2048, H=8, K=64, bias="1111"),
        BackwardCase("f16", B=32, M=1024, N=1024, H=8, K=64, bias="11mn", wants="b"),
        BackwardCase("f16", B=32, M=1024, N=1024, H=8, K=64, bias="1hmn", p=0.1),
        BackwardCase("f16", B=2, M=2048, N=2048, H=4, K=64, bias="bhmn"),
        BackwardCase("f16", B=864, M=64, N=64, H=3, K=32, bias="1hmn:f32"),
        BackwardCase("bf16", B=4, M=256, N=12288, H=16, Hkv=2, K=512),
        BackwardCase("f16", B=2, M=2048, N=4096, H=8, K=64, strides="heads_first"),
        BackwardCase("f16", B=2, M=2048, N=4096, H=8, K=40, strides="heads0"),
        BackwardCase("f16", B=2, M=2048, N=4096, H=4, K=64, rank="bmghk"),
    ],
    ids=str,
)
def test_backward_peak_is_gradients_and_workspace(case: BackwardCase) -> None:
    """No [B, H, M, N] unless it is a gradient, no expanded key or value, no fp32 copy: the
    gradients and the stated workspace (each rounded up by the allocator)."""
    inputs = cases.make(case, "cuda")
    allowed = gradient_bytes(case, inputs) + workspace_bytes(case, inputs) + 4 * MIB
    peak = backward_peak(case, inputs)
    assert peak <= allowed, f"{peak / MIB:.0f} MiB, allowed {allowed / MIB:.0f}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_backward_workspace_of_many_blocks(dtype: str) -> None:
    """Where the blocks fill the GPU nothing is split: the gradients and delta alone; where the
    gradient of the query is added up, its sums too."""
    case = BackwardCase(dtype, B=16, M=2048, N=2048, H=16, K=64)
    inputs = cases.make(case, "cuda")
    delta = 4 * case.B * case.H * case.M
    allowed = gradient_bytes(case, inputs) + delta + 4 * MIB
    with backward_cases.deterministic(warn_only=True):
        assert backward_peak(case, inputs) <= allowed
    assert backward_peak(case, inputs) <= allowed + sums_bytes(case)


@pytest.mark.gpu
def test_strided_gradient_of_out_copies_that_tensor_alone() -> None:
    """Stride-0 and permuted gradients are read as they are; a last stride other than 1 is a copy
    of that tensor."""
    for grad, copies in (("rows0", 0), ("heads_first", 0), ("last_dim", 1), ("sum", 1)):
        case = BackwardCase("f16", B=16, M=2048, N=2048, H=16, K=64, grad=grad)
        inputs = cases.make(case, "cuda")
        query, key, value = (x.requires_grad_() for x in inputs.tuple()[:3])
        out = memeff_attn.memory_efficient_attention(query, key, value)
        grad_out = backward_cases.make_grad(case, "cuda", query)
        three = [query, key, value]

        def call(o=out, x=three, g=grad_out) -> object:
            return torch.autograd.grad(o, x, g, retain_graph=True)

        call()
        delta, copied = 4 * case.B * case.H * case.M, copies * out.numel() * 2
        allowed = gradient_bytes(case, inputs) + delta + sums_bytes(case) + copied + 4 * MIB
        assert peak_increase(call) <= allowed, grad


@pytest.mark.gpu
def test_saved_for_backward_is_out_and_lse() -> None:
    """Between the passes: the inputs, out, LSE in two parts and 16 bytes of seed; no mask, no
    copy."""
    case = Case("f16", B=2, M=4096, N=4096, H=8, K=64)
    query, key, value = (x.requires_grad_() for x in cases.make(case, "cuda").tuple()[:3])
    memeff_attn.memory_efficient_attention(query, key, value, p=0.1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = memeff_attn.memory_efficient_attention(query, key, value, p=0.1)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= out.numel() * 2 + 2 * 4 * case.B * case.H * case.M + 64 * 1024


CHILD = """
import resource, sys, torch
import memeff_attn
M, K, kv, bias, train = (int(x) for x in sys.argv[1:])
torch.set_num_threads(1)
def call(m):
    q, k, v = (torch.randn(1, m, 4, d) for d in (K, K, kv))
    b = torch.zeros(1, 1, 1, m) if bias else None
    if train:
        leaves = [x.requires_grad_() for x in (q, k, v, b) if x is not None]
        memeff_attn.memory_efficient_attention(q, k, v, b, 0.1 * bias).sum().backward()
        return
    memeff_attn.memory_efficient_attention_forward_requires_grad(q, k, v, b)
call(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call(M)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("dims", "bias", "train"),
    [(dims, bias, 0) for dims in ((16, 16), (16, 24)) for bias in (0, 1)]
    + [((16, 16), 0, 1), ((16, 24), 1, 1)],
    ids=str,
)
def test_cpu_path_is_blockwise(dims: tuple[int, int], bias: int, train: int) -> None:
    """The CPU path holds no [H, M, N] scores, nor does its backward pass (with the bias: dropout
    and a gradient summed over the rows): resident memory of a child process grows by far less."""
    rows = 6000 if not train else 5000
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    argv = [sys.executable, "-c", CHILD, *(str(n) for n in (rows, *dims, bias, train))]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    scores = 4 * rows * rows * 4  # bytes: 4 heads, fp32
    assert int(done.stdout) * 1024 < scores / 4
