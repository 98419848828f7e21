"""Training on streams, on a second device, in several processes: B48b, h, i of tests/faults.py."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import backward_cases
import cases
import pytest
import torch
from backward_cases import BackwardCase, by_autograd, make_grad
from cases import Inputs
from test_training import leaves_of
from tolerance import Checker
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")

attention = memeff_attn.memory_efficient_attention
TESTS = Path(__file__).resolve().parent


@pytest.mark.gpu
def test_b48h_backward_on_a_side_stream() -> None:
    """What was queued there before is seen; nothing waits for the host."""
    checker = Checker()
    for dtype, p in itertools.product(cases.DTYPES, (0.0, 0.2)):
        leaves = leaves_of("cuda", cases.DTYPES[dtype], B=4, M=512, N=512, H=8, K=64)
        bias = torch.randn(1, 8, 1, 512, device="cuda", requires_grad=True)
        grad_out = torch.randn_like(leaves[0])
        torch.manual_seed(1)
        given = [*leaves, bias]
        expected = torch.autograd.grad(attention(*given, p), given, grad_out)
        stream, late = torch.cuda.Stream(), torch.full_like(grad_out, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.manual_seed(1)
            torch.cuda._sleep(200_000_000)
            late.copy_(grad_out)
            found = torch.autograd.grad(attention(*given, p), given, late)
            queued = not stream.query()
        checker.that(f"{dtype} p={p}: the call waited for the GPU", queued)
        stream.synchronize()
        for a, b in zip(found, expected, strict=True):
            checker.same_bits(f"{dtype} p={p}", a, b)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_b48h_training_without_a_host_sync(p: float) -> None:
    leaves = leaves_of("cuda", torch.bfloat16, H=8)
    bias = torch.randn(1, 8, 33, 33, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for given in (bias, memeff_attn.LowerTriangularMask(), None):
        attention(*leaves, given, p).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention(*leaves, given, p).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_b48i_gradients_on_the_second_gpu() -> None:
    """Tensors on GPU 1 while GPU 0 is current: the bits of GPU 0, the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    checker = Checker()
    for dtype, bias in itertools.product(cases.DTYPES, ("", "1h1n")):
        case = BackwardCase(dtype, bias=bias)
        inputs = cases.make(case, "cuda:0")
        grad_out = make_grad(case, "cuda:0", inputs.query)
        moved = Inputs(*(x.to("cuda:1") if isinstance(x, Tensor) else x for x in inputs.tuple()))
        wants = backward_cases.usable(case, inputs)
        with torch.cuda.device(0):
            _, _, four = by_autograd(inputs, grad_out, 0.0, wants)
            _, _, others = by_autograd(moved, grad_out.to("cuda:1"), 0.0, wants)
            checker.that("current device", torch.cuda.current_device() == 0)
        for a, b in zip(four, others, strict=True):
            if a is not None and b is not None:
                checker.that(f"on {b.device}", b.device.index == 1)
                checker.same_bits(f"{dtype} {bias}", b.to("cuda:0"), a)
        torch.manual_seed(3)
        out, _, four = by_autograd(moved, grad_out.to("cuda:1"), 0.3, wants)
        checker.true("dropout", out.isfinite())
    checker.finish()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_b48b_two_processes(device: str, kind: str, tmp_path: Path) -> None:
    """One step of two processes moves the parameters as one process with the whole batch does."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed import fsdp

    if kind == "fsdp" and not hasattr(fsdp, "fully_shard"):
        pytest.skip(f"torch {torch.__version__} has no fully_shard")
    argv = [sys.executable, str(TESTS / "train_step.py")]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}  # CPU processes see no GPU
    running = [
        subprocess.Popen(
            [*argv, str(rank), "2", str(tmp_path / "meet"), kind, device],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | hidden,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(texts)
