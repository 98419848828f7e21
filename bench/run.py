"""`python -m bench run`: times sets, checks every output, writes bench/results/<gpu>/<set>.json."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import backends as backends_module
from bench import oracle, report, shapes
from bench.backends import Tensors
from bench.timing import Progress, Timer, with_peak_mib

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

    module = memeff_attn.dispatch.native()[0]
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "memeff_attn": str(getattr(memeff_attn, "__version__", "")),
        "memeff_cuda": module.cuda_version() if module is not None else "not compiled",
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


def inputs(cell: shapes.Cell) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(SEED)
    dtype = backends_module.DTYPES[cell.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)

    return Tensors(
        query=normal(cell.B, cell.M, cell.H, cell.K),
        key=normal(cell.B, cell.N, cell.Hkv, cell.K),
        value=normal(cell.B, cell.N, cell.Hkv, cell.Kv),
        bias=normal(*cell.bias_shape) if cell.bias_shape else None,
        grad_out=normal(cell.B, cell.M, cell.H, cell.Kv),
    )


@dataclasses.dataclass
class Problem:
    """A cell's tensors, and what is right there."""

    cell: shapes.Cell
    tensors: Tensors
    expected: oracle.Sample

    @classmethod
    def of(cls, cell: shapes.Cell, passes: list[str]) -> Problem:
        tensors = inputs(cell)
        return cls(cell, tensors, oracle.sample(cell, tensors, passes, SEED))


def problems_of(cell: shapes.Cell, serving: dict[str, list[str]]) -> dict[str, Problem]:
    """{backend: what it works on}: the cell, and for memeff-fixed the fixed-length problem of the
    same flop. serving: the backends of each pass."""
    passes = [w for w, names in serving.items() if names]
    names = dict.fromkeys(name for of in serving.values() for name in of)
    own = [name for name in names if name != backends_module.FIXED]
    found = dict.fromkeys(own, Problem.of(cell, passes)) if own else {}
    if backends_module.FIXED in names:
        found[backends_module.FIXED] = Problem.of(cell.fixed(), passes)
    return found


def checkable(name: str, cell: shapes.Cell) -> bool:
    """With dropout only ours: which weights a peer drops is known to the peer alone."""
    return not cell.p or backends_module.is_ours(name)


def _first_call(
    name: str, which: str, problem: Problem
) -> tuple[Callable[[], object], dict[str, Any]]:
    """The call, and what its first run shows: its error and its peak of memory."""
    torch.manual_seed(SEED)  # the dropout mask that the oracle expects
    call = backends_module.make_call(name, problem.cell, problem.tensors, which)
    result, mib = with_peak_mib(call)
    facts: dict[str, Any] = {"peak_mib": digits(mib)}
    if not checkable(name, problem.cell):
        facts["unchecked"] = "which weights a peer drops is not known"
        return call, facts
    judge = problem.expected.error if which == "fwd" else problem.expected.gradient_error
    error, broken = judge(result)
    facts["err"] = digits(error)
    if broken:
        facts["wrong"] = "; ".join(broken)
    return call, facts


def run_cell(
    cell: shapes.Cell, which: str, names: list[str], timer: Timer, problems: dict[str, Problem]
) -> list[dict[str, Any]]:
    """One row for each backend. A backend that fails gets a row with the error and no time."""
    calls, facts, failed = {}, {}, {}
    for name in names:
        try:
            calls[name], facts[name] = _first_call(name, which, problems[name])
        except Exception as problem:  # peers raise assertions and errors of their own
            if "CUDA error" in str(problem):
                raise RuntimeError(str(problem)) from problem  # the context is lost
            failed[name] = (str(problem).strip() or "no message").splitlines()[0][:300]
    medians = dict(zip(calls, timer.medians(list(calls.values())), strict=True))
    result = []
    for name in names:
        if name in failed:
            result.append(cell.row(which, name, ms=None, error=failed[name]))
            continue
        work, seconds = problems[name].cell, medians[name] * 1e-3
        figures: dict[str, Any] = {
            "ms": digits(medians[name]),
            "tflops": digits(work.flop(which) / seconds * 1e-12),
            "gbps": digits(work.bytes(which) / seconds * 1e-9),
        }
        if work != cell:
            figures["timed"] = work.name  # in place of the cell that the row stands with
        result.append(cell.row(which, name, **figures, **facts[name]))
    return result


def run_set(
    cells: list[shapes.Cell],
    passes: list[str],
    names: list[str],
    sm: int,
    timer: Timer,
    deadline: float,
    progress: Progress,
) -> tuple[list[dict[str, Any]], str]:
    """The rows, and why CUDA failed if it did; what was timed before that is kept."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        if time.monotonic() > deadline:
            break
        try:
            serving = {
                w: [b for b in names if not backends_module.not_served(b, cell, sm, w)]
                for w in passes
            }
            with oracle.math_of(cell):
                problems = problems_of(cell, serving)
                for which, served in serving.items():
                    rows += run_cell(cell, which, served, timer, problems) if served else []
                    progress.step(f"{cell.set} {cell.name} {which}")
        except RuntimeError as problem:
            return rows, f"{cell.set} {cell.name}: {problem}"
    return rows, ""


def check_asked(passes: list[str], names: list[str]) -> None:
    shapes.check_passes(passes)
    backends_module.check_names(names)


def write(
    folder: Path, name: str, head: dict[str, Any], rows: list[dict[str, Any]], passes: list[str]
) -> list[str]:
    """Writes the set's file, with the other passes' rows that it held if they are of the same
    sources; a partial file beside it where something lacks. Returns what lacks."""
    path = folder / f"{name}.json"
    mine = {**head, "set": name, "passes": passes, "dates": dict.fromkeys(passes, head["date"])}
    content = {"meta": mine, "rows": rows}
    found = report.problems(content, name)
    if found:
        path = folder / f"{name}.partial.json"
    elif path.exists():
        content, left = report.merged(json.loads(path.read_text()), content)
        if left:
            print(f"  left out of {path}: {left}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.dumps(content))
    print(f"{path}: {len(content['rows'])} rows")
    for line in found[:8]:
        print(f"  incomplete: {line}")
    return found


def run(
    sets: list[str],
    passes: list[str],
    names: list[str],
    out: Path | None,
    budget: float,
    milliseconds: float,
) -> int:
    """Exit status: 0 all complete and right, 1 something is wrong or missing."""
    check_asked(passes, names)
    listed = {s: shapes.cells(s) for s in sets}
    if not torch.cuda.is_available():
        raise ValueError(
            "no CUDA device here: `bench run` times GPUs only (`bench host` has a CPU part)"
        )
    start = time.monotonic()
    timer = Timer(milliseconds)
    timer.warm_up()
    head = {**meta(), "backends": names}
    folder = out or Path(__file__).with_name("results") / gpu_folder(head["gpu"])
    progress = Progress(sum(len(c) for c in listed.values()) * len(passes), "bench")
    deadline = start + budget if budget > 0 else float("inf")
    status, crash, everything = 0, "", []
    for name, cells in listed.items():
        rows: list[dict[str, Any]] = []
        if not crash:
            rows, crash = run_set(cells, passes, names, head["sm"], timer, deadline, progress)
        progress.clear()
        problems = write(folder, name, head, rows, passes)
        status |= bool(problems) or any(
            "wrong" in r and backends_module.is_ours(r["backend"]) for r in rows
        )
        everything += rows
    print(report.wrong(everything), end="")
    print(report.summary(everything))
    print(report.not_served(listed, passes, names, head["sm"]), end="")
    print(f"{time.monotonic() - start:.0f} s")
    if crash:
        print(f"CUDA failed, nothing was timed after it: {crash}")
    return int(bool(status or crash))
