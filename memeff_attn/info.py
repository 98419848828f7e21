"""`python -m memeff_attn.info`: versions, the compiled part, the GPUs here, every kernel.

With --check: whether this machine can run it, and runs it right; exit status 1 where not.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from typing import Any

import torch

from . import __version__, dispatch, machine, ops, selftest
from .cuda_errors import with_way_out
from .machine import Finding


def lines() -> Iterator[str]:
    """The report, line by line."""
    python = platform.python_version()
    yield f"memeff_attn {__version__}, torch {torch.__version__}, Python {python}"
    module, reason = dispatch.native()
    if module is None:
        yield f"compiled part: none. {reason}"
        yield "The CPU path needs none: it runs on PyTorch's own attention."
        return
    yield f"compiled part: {module.__file__}"
    yield f"  source hash: {module.source_hash}"
    yield f"  CUDA: {module.cuda_version()}"
    yield f"  built for: {' '.join(module.built_archs()) or 'no GPU (host-only build)'}"
    exchange = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    how = (
        "DLPack C exchange"
        if exchange
        else "addresses and strides (this torch has no DLPack exchange)"
    )
    yield f"  tensors handed over by: {how}"
    yield from _gpus(module)
    yield from _variants(module.variants())


def _gpus(module: Any) -> Iterator[str]:
    count = torch.cuda.device_count() if module.is_cuda_build else 0
    if count == 0:
        seen = torch.cuda.device_count()
        yield f"GPUs: {seen} seen by torch, none used" if seen else "GPUs: none seen by torch"
    for index in range(count):
        try:
            facts = module.device_info(index)
        except RuntimeError as error:
            yield f"GPU {index}: {error}"
            continue
        yield (
            f"GPU {index}: {facts['name']}, sm_{facts['sm']}, {facts['sm_count']} SMs, "
            f"{facts['smem_optin'] // 1024} KB of shared memory a block"
        )
        for dtype in ("f16", "bf16", "f32"):
            request = {k: v for k, v in facts.items() if k != "name"}
            request |= {"dtype": dtype, "B": 1, "M": 1024, "N": 1024, "H": 16, "alignment": 16}
            request |= {"K": 64, "Kv": 64}
            names = [module.select(request | {"pass": which}) for which in ("fwd", "bwd")]
            forward, gradients = (name or "no kernel" for name in names)
            yield f"  {dtype}, K 64, M 1024: {forward}, backward {gradients}"


def _variants(rows: list[dict[str, Any]]) -> Iterator[str]:
    built = sum(bool(row["built"]) for row in rows)
    yield f"kernels: {len(rows)} listed, {built} built, in order of preference"
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        limits = [f"K <= {row['max_k'] or 'any'}", f"Kv <= {row['max_kv'] or 'any'}"]
        limits.append(f"alignment {row['alignment']}")
        tile = f"{row['tile_m']} x {row['tile_n']}"
        archs = " ".join(row["built_archs"]) or "not built"
        yield f"  {row['name']:{width}}  {', '.join(limits)}, tile {tile}; {archs}"
    for setting, what in ((ops.FORCE_FORWARD, "GPU call"), (ops.FORCE_BACKWARD, "backward pass")):
        if forced := ops.forced_variant(setting):
            yield f"{setting} is set: every {what} runs {forced} or fails"


def check(need_gpu: bool = False) -> Iterator[Finding]:
    """Whether this machine can run memeff_attn: its parts, then a self-test against the fp64 oracle
    and a speed line on each GPU; on the CPU where there is none.

    Args: need_gpu: no GPU is a failure.
    """
    driver = machine.driver_facts()
    failed = False
    for found in machine.findings(driver=driver, need_gpu=need_gpu):
        failed |= not found.ok
        yield found
    if failed and driver.gpus:
        return  # a self-test would only say the same in CUDA's words
    for device in [f"cuda:{gpu.number}" for gpu in driver.gpus] or ["cpu"]:
        for dtype in machine.DTYPES.values():
            yield _self_test(device, dtype)
        yield _speed(device)


def _self_test(device: str, dtype: torch.dtype) -> Finding:
    what = f"{device}: {str(dtype).removeprefix('torch.')} forward and backward"
    try:
        wrong = selftest.run(device, dtype)
    except Exception as error:
        return Finding(False, f"{what} raise {type(error).__name__}: {with_way_out(str(error))}")
    if not wrong:
        return Finding(True, f"{what} agree with the fp64 oracle")
    return Finding(
        False,
        "\n".join([f"{what} disagree with the fp64 oracle:", *wrong]),
        "a broken GPU (ECC errors: nvidia-smi -q), or a fault of this build: please report it "
        "with the output of python -m memeff_attn.info",
    )


def _speed(device: str) -> Finding:
    try:
        s = selftest.speed(device)
    except Exception as error:
        text = with_way_out(str(error))
        return Finding(False, f"{device}: timing raises {type(error).__name__}: {text}")
    sizes = f"{s.dtype} B {s.B} M {s.M} H {s.H} K {s.K}"
    unit, scale = ("TFLOP/s", 1.0) if s.forward >= 1 else ("GFLOP/s", 1e3)
    figures = f"forward {scale * s.forward:.3g}, backward {scale * s.backward:.3g} {unit}"
    return Finding(True, f"{device}: speed of {sizes}: {figures}")


def report(found: Iterator[Finding]) -> int:
    """Prints each finding as it comes, then the verdict; the number of bad ones."""
    total = bad = 0
    for one in found:
        total, bad = total + 1, bad + (not one.ok)
        first, *rest = one.what.splitlines()
        print(f"{'ok  ' if one.ok else 'FAIL'}  {first}", *rest, sep="\n      ", flush=True)
        if not one.ok and one.way_out:
            print(f"      way out: {one.way_out}", flush=True)
    print(f"{bad} of {total} checks failed" if bad else f"ready: {total} checks passed")
    return bad


def main(arguments: list[str] | None = None) -> int:
    """Prints the report, or checks the machine; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m memeff_attn.info", description="what of memeff_attn is here"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="verify driver, build and GPUs, compare with the oracle, time it; status 1 on failure",
    )
    parser.add_argument(
        "--need-gpu", action="store_true", help="with --check: having no GPU is a failure"
    )
    a = parser.parse_args(arguments)
    if a.check:
        print(f"memeff_attn {__version__}")
        return 1 if report(check(a.need_gpu)) else 0
    print("\n".join(lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
