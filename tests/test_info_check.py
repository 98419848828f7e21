"""`python -m memeff_attn.info --check`: every kind of machine by description, this one for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tolerance
import torch

memeff_attn = pytest.importorskip("memeff_attn")

from memeff_attn import dispatch, info, machine, selftest  # noqa: E402
from memeff_attn.machine import Driver, Finding, Gpu, Torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
V100, A100, A40, H200 = (
    Gpu(0, "V100", 70), Gpu(0, "A100", 80), Gpu(0, "A40", 86), Gpu(0, "H200", 90),
)  # fmt: skip
B200 = Gpu(0, "B200", 100)
TORCH_ARCHS = ("sm_70", "sm_75", "sm_80", "sm_90", "compute_90")
CUDA_TORCH = Torch("2.6.0+cu124", "12.4", 1, TORCH_ARCHS)
CPU_TORCH = Torch("2.13.0+cpu", None, 0)
NO_DRIVER = Driver(None)
ARCHS = ("sm_70", "sm_75", "sm_80", "sm_90", "compute_90")


def driver(*gpus: Gpu, cuda: tuple[int, int] = (12, 4), **fields: Any) -> Driver:
    return Driver(cuda, "550.54.15", gpus, hardware=True, **fields)


def compiled_module() -> Any:
    module, reason = dispatch.native()
    if module is None:
        pytest.skip(reason)
    return module


def build(*archs: str, cuda: str = "12.4") -> Any:
    """A compiled module whose only rows, one for each pass, have code for these archs."""
    rows = [{"name": which, "built_archs": list(archs)} for which in ("fwd", "bwd")]

    def select(request: dict[str, Any]) -> str:
        runs = machine.runs_on(compiled_module(), archs, request["sm"])
        return str(request["pass"]) if runs else ""

    return SimpleNamespace(
        is_cuda_build=bool(archs),
        cuda_version=lambda: cuda if archs else "none",
        built_archs=lambda: list(archs),
        variants=lambda: rows,
        select=select,
        code_runs=lambda *code: compiled_module().code_runs(*code),
    )


def bad(*args: Any, compiled: Any = None, **named: Any) -> list[Finding]:
    return [f for f in machine.findings(*args, compiled=(compiled, "why"), **named) if not f.ok]


@pytest.mark.parametrize("gpu", [V100, A100, A40, H200, B200], ids=lambda gpu: gpu.name)
def test_one_build_serves_every_gpu(gpu: Gpu) -> None:
    found = list(machine.findings(CUDA_TORCH, driver(gpu), (build(*ARCHS), "")))
    assert all(f.ok for f in found), found
    line = next(f.what for f in found if f.what.startswith("GPU 0"))
    assert ("PTX" in line) == (gpu is B200) and f"sm_{gpu.sm}" in line


def test_no_gpu_is_fine_unless_one_is_needed() -> None:
    for compiled in (build(), build(*ARCHS), None):
        assert bad(CPU_TORCH, NO_DRIVER, compiled=compiled) == []
    found = bad(CPU_TORCH, NO_DRIVER, compiled=build(), need_gpu=True)
    assert len(found) == 1 and "no GPU" in found[0].what
    assert "CUDA_VISIBLE_DEVICES" in found[0].way_out and "--gpus all" in found[0].way_out


def test_host_only_build_on_a_gpu_machine() -> None:
    for compiled, words in ((build(), "host-only"), (None, "none. why")):
        (found,) = bad(CUDA_TORCH, driver(V100), compiled=compiled)
        assert words in found.what
        assert "CUDA_HOME" in found.way_out and "MEMEFF_CUDA_ARCHS" in found.way_out


@pytest.mark.parametrize(
    ("cuda", "of_build", "oldest"),
    [((11, 4), "12.4", "525.60.13"), ((12, 9), "13.0", "580.65.06")],
)
def test_old_driver(cuda: tuple[int, int], of_build: str, oldest: str) -> None:
    old = Driver(cuda, "470.82.01", (V100,), hardware=True)
    (found,) = bad(CUDA_TORCH, old, compiled=build(*ARCHS, cuda=of_build))
    assert f"{cuda[0]}.{cuda[1]}" in found.what and of_build in found.what
    assert "470.82.01" in found.what and oldest in found.what
    assert "update the driver" in found.way_out and f"CUDA {cuda[0]}.x" in found.way_out


def test_older_minor_version_runs_machine_code_but_no_ptx() -> None:
    assert bad(CUDA_TORCH, driver(H200, cuda=(12, 0)), compiled=build(*ARCHS)) == []
    (found,) = bad(CUDA_TORCH, driver(B200, cuda=(12, 0)), compiled=build(*ARCHS))
    assert "PTX of CUDA 12.4" in found.what and "12.0" in found.what
    assert "update the driver" in found.way_out and "MEMEFF_CUDA_ARCHS=100" in found.way_out


def test_missing_arch() -> None:
    (found,) = bad(CUDA_TORCH, driver(V100), compiled=build("sm_80", "compute_80"))
    assert "sm_70" in found.what and "sm_80 compute_80" in found.what and "f16" in found.what
    assert "MEMEFF_CUDA_ARCHS=70 pip install ." in found.way_out
    (found,) = bad(CUDA_TORCH, driver(Gpu(0, "P100", 60)), compiled=build(*ARCHS))
    assert "older than sm_70" in found.what and found.way_out


def test_wrong_torch() -> None:
    (found,) = bad(CPU_TORCH, driver(A100), compiled=build(*ARCHS))
    assert "build for the CPU" in found.what and "torch with CUDA" in found.way_out
    blind = Torch("2.11.0+cu130", "13.0", 0, (), "The NVIDIA driver on your system is too old")
    (found,) = bad(blind, driver(A100), compiled=build(*ARCHS))
    assert "too old" in found.what and "13.0" in found.what
    assert "update the driver" in found.way_out and "12.4 or older" in found.way_out
    new = Torch("2.11.0+cu130", "13.0", 1, ("sm_75", "sm_80", "compute_120"))
    (found,) = bad(new, driver(V100, cuda=(13, 0)), compiled=build(*ARCHS))
    assert "no code for it" in found.what and "sm_75" in found.what and "12.6" in found.way_out


def test_driver_without_its_library_or_devices() -> None:
    (found,) = bad(CPU_TORCH, Driver(None, "550.54.15", hardware=True), compiled=build(*ARCHS))
    assert "libcuda.so.1" in found.what and "--gpus all" in found.way_out
    for problem, words in (
        ("cuInit fails with CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"),
        ("cuInit fails with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "two versions"),
        ("cuInit fails with CUDA_ERROR_UNKNOWN (999)", "nvidia-smi"),
    ):
        (found,) = bad(CPU_TORCH, driver(problem=problem), compiled=build(*ARCHS))
        assert problem in found.what and words in found.way_out


@pytest.mark.parametrize(
    ("archs", "sm", "runs"),
    [
        (("sm_80",), 86, True), (("sm_86",), 80, False), (("sm_80",), 90, False),
        (("compute_80",), 120, True), (("compute_90",), 80, False), (("sm_90a",), 90, True),
        (("sm_100a",), 103, False), (("what",), 90, False), ((), 90, False),
    ],
)  # fmt: skip
def test_where_code_runs(archs: tuple[str, ...], sm: int, runs: bool) -> None:
    assert machine.runs_on(compiled_module(), archs, sm) == runs


def test_report_says_the_way_out_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Finding(True, "one"), Finding(False, "two\nlines", "do this"), Finding(True, "three")]
    assert info.report(iter(found)) == 1
    printed = capsys.readouterr().out
    assert "FAIL  two\n      lines\n      way out: do this" in printed
    assert "1 of 3 checks failed" in printed
    assert info.report(iter(found[:1])) == 0
    assert "ready: 1 checks passed" in capsys.readouterr().out


def test_a_wrong_result_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of the output off by a few percent: said, with the case and the numbers."""
    real = selftest.memory_efficient_attention

    def broken(*args: Any) -> torch.Tensor:
        out = real(*args)
        index = torch.zeros(out.numel()).index_fill_(0, torch.tensor([7]), 1.0).view(out.shape)
        return out + 0.05 * index

    assert selftest.run("cpu", torch.float32) == []
    monkeypatch.setattr(selftest, "memory_efficient_attention", broken)
    wrong = selftest.run("cpu", torch.float32)
    assert any(line.startswith("plain: out: largest error 5.") for line in wrong), wrong
    finding = info._self_test("cpu", torch.float32)
    assert not finding.ok and "disagree" in finding.what and "report" in finding.way_out

    def fails(*args: Any) -> torch.Tensor:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(selftest, "memory_efficient_attention", fails)
    finding = info._self_test("cpu", torch.float32)
    assert not finding.ok and "Update the driver" in finding.what


def test_the_self_test_has_the_rule_of_the_tests() -> None:
    """selftest.judge and tolerance.measure with tolerance.judge agree, near the limit too."""
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0):
            exact = torch.randn(64, generator=generator, dtype=torch.float64)
            u = float(tolerance.ulp(exact.abs().amax(), dtype))
            noise = torch.randn(3, 64, generator=generator, dtype=torch.float64)
            mine, eager = (exact + size * u * noise[0]).to(dtype), (exact + u * noise[1]).to(dtype)
            wide = exact.float()
            figures = tolerance.measure(mine, exact, eager, wide).tolist()
            theirs = tolerance.judge("x", figures, 0.0, tolerance.FORWARD)
            ours = selftest.judge("x", mine, exact, eager, wide, selftest.FORWARD)
            assert len(ours) == len(theirs), (dtype, size, ours, theirs)
            seen.add(len(ours))
    assert {0, 2} <= seen
    assert (selftest.FORWARD, selftest.GRADIENT) == (tolerance.FORWARD, (3.0, 2.0))
    nan = torch.tensor([0.0, torch.nan])
    assert "not finite" in selftest.judge("x", nan, nan.double(), nan, nan, (2.0, 1.5))[0]


@pytest.mark.parametrize("dtype", list(machine.DTYPES.values()), ids=list(machine.DTYPES))
def test_self_test(device: str, dtype: torch.dtype) -> None:
    assert selftest.run(device, dtype) == []


def test_speed_is_that_of_the_device(device: str) -> None:
    s = selftest.speed(device)
    assert s.B * s.M * s.H * s.K > 0 and s.forward > 0 and s.backward > 0
    if device == "cuda":  # no GPU since V100 is slower, none before 2030 is faster
        assert 1 < s.forward < 5000


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memeff_attn.info", "--check", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_command_on_this_machine() -> None:
    done = run_check()
    host_only_beside_gpu = bool(machine.driver_facts().gpus) and bool(dispatch.cuda_missing())
    if host_only_beside_gpu:
        assert done.returncode == 1 and "way out:" in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout and "ready:" in done.stdout
    for words in ("float16 forward and backward agree", "bfloat16", "float32", "speed of"):
        assert words in done.stdout


def test_command_where_a_gpu_is_needed() -> None:
    done = run_check("--need-gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no GPU is visible" in done.stdout and "way out:" in done.stdout
