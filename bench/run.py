"""`python -m bench run`: times sets, checks every output, writes bench/results/<gpu>/<set>.json."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import backends as backends_module
from bench import oracle, report, shapes
from bench.timing import Progress, Timer, peak_mib

SEED = 20
BUSY_CYCLES = 2_000_000_000  # about a second, in which nvidia-smi reads the clocks
ROOT = Path(__file__).resolve().parents[1]


def gpu_folder(name: str) -> str:
    """'NVIDIA H200' -> 'h200'."""
    return "-".join(w.lower() for w in name.split() if w.lower() not in ("nvidia", "tesla"))


def nvidia_smi(fields: str) -> str:
    command = [
        "nvidia-smi",
        f"--query-gpu={fields}",
        "--format=csv,noheader",
        f"--id={torch.cuda.current_device()}",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def hash_of_sources() -> str:
    """What _C.source_hash would be if it were built now; csrc/kernels.py computes both."""
    command = [sys.executable, str(ROOT / "csrc" / "kernels.py"), "--hash"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def versions() -> dict[str, str]:
    import memeff_attn
    from memeff_attn import _C

    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "memeff_attn": str(getattr(memeff_attn, "__version__", "")),
        "memeff_cuda": _C.cuda_version(),
        "python": sys.version.split()[0],
    }


def meta() -> dict[str, Any]:
    """Read while the GPU is busy, so that the clocks are those of work."""
    from memeff_attn import _C

    torch.cuda._sleep(BUSY_CYCLES)
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "sm": 10 * major + minor,
        "driver": nvidia_smi("driver_version"),
        "clocks": nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm,power.limit"),
        "versions": versions(),
        "source_hash": _C.source_hash,
        "stale": _C.source_hash != hash_of_sources(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "how": "CUDA events, L2 flushed, medians, backends interleaved, normal data, BMHK tensors",
    }


def digits(value: float) -> float:
    """Five significant digits: more would be noise in a committed file."""
    return float(f"{value:.5g}")


def inputs(cell: shapes.Cell) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(SEED)
    dtype = backends_module.DTYPES[cell.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)

    return (
        normal(cell.B, cell.M, cell.H, cell.K),
        normal(cell.B, cell.N, cell.Hkv, cell.K),
        normal(cell.B, cell.N, cell.Hkv, cell.Kv),
    )


def run_cell(cell: shapes.Cell, which: str, names: list[str], timer: Timer) -> list[dict[str, Any]]:
    """One row for each backend. A backend that fails gets a row with the error and no time."""
    q, k, v = inputs(cell)
    expected = oracle.sample(cell, q, k, v)
    calls, rows, failed = {}, {}, {}
    for name in names:
        call = backends_module.make_call(name, cell, q, k, v)
        try:
            out = call()
            error, broken = expected.error(out)
            del out
            rows[name] = {"err": digits(error), "peak_mib": digits(peak_mib(call))}
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            if "CUDA error" in str(problem):
                raise  # the context is lost
            failed[name] = str(problem).strip().splitlines()[0][:300]
            continue
        calls[name] = call
        if broken:
            rows[name]["wrong"] = "; ".join(broken)
    medians = dict(zip(calls, timer.medians(list(calls.values())), strict=True))
    result = []
    for name in names:
        if name in failed:
            result.append(cell.row(which, name, ms=None, error=failed[name]))
            continue
        seconds = medians[name] * 1e-3
        figures = {
            "ms": digits(medians[name]),
            "tflops": digits(cell.flop / seconds * 1e-12),
            "gbps": digits(cell.bytes / seconds * 1e-9),
        }
        result.append(cell.row(which, name, **figures, **rows[name]))
    return result


def run(
    sets: list[str],
    passes: list[str],
    names: list[str],
    out: Path | None,
    budget: float,
    milliseconds: float,
) -> int:
    """Exit status: 0 all complete and right, 1 something is wrong or missing."""
    for which in passes:
        if which not in shapes.PASSES:
            raise ValueError(
                f"the pass '{which}' is not served yet: {shapes.LATER_PASSES.get(which, 'unknown')}"
            )
    backends_module.check_names(names)
    listed = {s: shapes.cells(s) for s in sets}
    if not torch.cuda.is_available():
        raise ValueError(
            "no CUDA device here: `bench run` times GPUs only (`bench host` has a CPU part)"
        )
    deadline = time.monotonic() + budget if budget > 0 else float("inf")
    timer = Timer(milliseconds)
    timer.warm_up()
    head = meta()
    folder = out or Path(__file__).with_name("results") / gpu_folder(head["gpu"])
    progress = Progress(sum(len(c) for c in listed.values()) * len(passes), "bench")
    status, crash, everything = 0, "", []
    for name, cells in listed.items():
        rows: list[dict[str, Any]] = []
        for which in passes:
            for cell in cells:
                if crash or time.monotonic() > deadline:
                    break
                serving = [b for b in names if not backends_module.not_served(b, cell, head["sm"])]
                try:
                    rows += run_cell(cell, which, serving, timer)
                except RuntimeError as problem:  # the context is lost; what was timed is kept
                    crash = f"{name} {cell.name}: {problem}"
                progress.step(f"{name} {cell.name}")
        content = {"meta": {**head, "set": name, "passes": passes, "backends": names}, "rows": rows}
        problems = report.problems(content, name)
        status |= bool(problems) or any(
            "wrong" in r and backends_module.is_ours(r["backend"]) for r in rows
        )
        path = folder / f"{name}{'.partial' if problems else ''}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.dumps(content))
        print(f"{path}: {len(rows)} rows")
        for line in problems[:8]:
            print(f"  incomplete: {line}")
        everything += rows
    print(report.wrong(everything), end="")
    print(report.summary(everything))
    if crash:
        print(f"CUDA failed, nothing was timed after it: {crash}")
    return int(bool(status or crash))
