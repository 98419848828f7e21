"""`python -m bench sweep`: every kernel that takes a cell, timed; and how far the choice of
csrc/dispatch.cpp is from the fastest of them.

bench/results/<gpu>/sweep.json holds one row for each cell and pass: the milliseconds of every
variant. What is chosen is not in it: `regrets` asks today's list, with or without a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import backends, oracle, report, shapes
from bench.backends import Tensors

ALLOWED = 1.05  # the time of the chosen variant over that of the fastest
ARCHS = ("sm80", "sm90")  # rows of older GPUs and SIMT are no alternative where these run
# A call this much longer than the fastest so far, and long enough that the host does not count,
# stands as it is. A first call also loads its kernel, which takes less than LOAD_MS.
HOPELESS, HOPELESS_MS, LOAD_MS = 2.0, 5.0, 60.0
# Of the fastest: timed again, LONGER times as long. Where a call takes STEADY_MS a few are enough.
CLOSE, LONGER, STEADY_MS = 1.12, 4, 3.0
SAVE_SECONDS = 10.0

Gpu = Mapping[str, int]


def path_of(folder: Path) -> Path:
    return folder / "sweep.json"


def committed(folder: Path = report.RESULTS) -> list[Path]:
    return sorted(folder.glob("*/sweep.json"))


@dataclasses.dataclass(frozen=True)
class Problem:
    cell: shapes.Cell
    which: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.cell.set, self.cell.name, self.which


def problems(sets: list[str], passes: list[str]) -> Iterator[Problem]:
    for name in sets:
        for cell in shapes.cells(name):
            for which in passes:
                if which == "fwd" or not cell.decoding:
                    yield Problem(cell, which)


def without_storage(cell: shapes.Cell) -> Tensors:
    """The cell's tensors with sizes and strides alone, aligned as a new tensor is."""
    dtype = backends.DTYPES[cell.dtype]

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    return Tensors(
        query=empty(cell.B, cell.M, cell.H, cell.K),
        key=empty(cell.B, cell.N, cell.Hkv, cell.K),
        value=empty(cell.B, cell.N, cell.Hkv, cell.Kv),
        bias=empty(*cell.bias_shape) if cell.bias_shape else None,
        grad_out=empty(cell.B, cell.M, cell.H, cell.Kv),
    )


class Choice:
    """What the compiled module's list says of a problem on a GPU, which need not be here."""

    def __init__(self, problem: Problem, gpu: Gpu) -> None:
        from memeff_attn import dispatch
        from memeff_attn.inputs import Inputs

        tensors = without_storage(problem.cell)
        tensors = tensors.leaves() if problem.which == "bwd" else tensors
        mask = backends.mask_of(problem.cell, tensors)
        parts = tensors.query, tensors.key, tensors.value, mask, problem.cell.p or 0.0
        self.inputs, self.gpu, self.which = Inputs(*parts), gpu, problem.which
        self._module, self._request = dispatch.native()[0], dispatch.request_of
        self._cell = problem.cell

    def select(self, name: str = "") -> str:
        """The row that runs; where one is named, that or nothing."""
        assert self._module is not None
        with oracle.math_of(self._cell):
            request = self._request(self.inputs, self.gpu, name, self.which)
        found: str = self._module.select(request)
        return found

    def serving(self) -> list[str]:
        """Every row of ARCHS, meant for this GPU, that takes the problem where it is named; the
        chosen one first."""
        assert self._module is not None
        chosen, sm = self.select(), self.gpu["sm"]
        rows = [
            row["name"]
            for row in self._module.variants()
            if row["kind"] == self.which
            and row["arch"] in ARCHS
            and row["min_sm"] <= sm <= row["max_sm"]
        ]
        return [chosen, *(n for n in rows if n != chosen and self.select(n))]


# ---- judging ----


@dataclasses.dataclass(frozen=True)
class Regret:
    """A chosen row beside the fastest."""

    problem: Problem
    chosen: str
    best: str
    ratio: float  # of their times


def regrets(
    content: Mapping[str, Any], gpu: Gpu | None = None, passes: Sequence[str] = shapes.PASSES
) -> tuple[list[Regret], list[str]]:
    """Of every cell of every set, worst first, by what is chosen today on the GPU of the file (or
    would be on another one, by the same rows' times); and what the file lacks for that."""
    gpu = gpu or content["meta"]["facts"]
    measured = {(r["set"], r["name"], r["pass"]): r["ms"] for r in content["rows"]}
    found, lacking = [], []
    for problem in problems(list(shapes.SETS), list(passes)):
        where = " ".join(problem.key)
        choice, times = Choice(problem, gpu), measured.get(problem.key, {})
        rows = choice.serving()
        missing = [name for name in rows if name not in times]
        if missing:
            what = "never timed" if not times else f"no time of {', '.join(missing)}"
            lacking.append(f"{where}: {what}")
            continue
        best = min(rows, key=lambda name: times[name])
        chosen = choice.select()
        found.append(Regret(problem, chosen, best, times[chosen] / times[best]))
    return sorted(found, key=lambda r: -r.ratio), lacking


def judged(content: Mapping[str, Any]) -> tuple[str, int]:
    """The text of `--check`, and how many cells are off or lack a time."""
    found, lacking = regrets(content)
    off = [r for r in found if r.ratio > ALLOWED]
    lines = [f"{len(found)} cells and passes, {len(off)} chosen more than 5 % off the fastest row"]
    lines += [
        f"  {r.ratio:.2f}x  {' '.join(r.problem.key)}: {r.chosen}, faster is {r.best}" for r in off
    ]
    lines += [f"  lacks {line}" for line in lacking]
    return "\n".join(lines), len(off) + len(lacking)


# ---- measuring ----


class Sweep:
    """The file while it grows: rows of other sources are left out, rows that are there stay."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path, self.head, self.saved = path, dict(head), time.monotonic()
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            before = json.loads(path.read_text())
            if before["meta"]["source_hash"] == head["source_hash"]:
                self.rows = before["rows"]
            else:
                print(f"{path} is of other sources: everything is timed again")

    def has(self, problem: Problem) -> bool:
        return any((r["set"], r["name"], r["pass"]) == problem.key for r in self.rows)

    def add(self, problem: Problem, times: Mapping[str, float]) -> None:
        cell, name, which = problem.key
        self.rows.append({"set": cell, "name": name, "pass": which, "ms": dict(times)})
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def content(self) -> dict[str, Any]:
        order = {p.key: i for i, p in enumerate(problems(list(shapes.SETS), list(shapes.PASSES)))}
        rows = sorted(self.rows, key=lambda r: order.get((r["set"], r["name"], r["pass"]), -1))
        return {"meta": self.head, "rows": rows}

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(report.dumps(self.content()))
        self.saved = time.monotonic()


def _once(call: Callable[[], object]) -> float:
    """Milliseconds of one call, the host's work included."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def times_of(
    problem: Problem, names: list[str], tensors: Tensors, timer: Any
) -> tuple[dict[str, float], dict[str, str]]:
    """{variant: milliseconds}, those near the fastest timed twice, in turns; {variant: why it
    refused}."""
    from bench.run import digits

    found: dict[str, float] = {}
    refused: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    best = float("inf")
    for name in names:
        try:
            call = backends.make_call(f"memeff:{name}", problem.cell, tensors, problem.which)
            first = _once(call)
            if HOPELESS_MS < first < LOAD_MS:
                first = _once(call)
        except (ValueError, NotImplementedError) as problem_of_row:
            refused[name] = str(problem_of_row).strip()[:200]
            continue
        if first > max(HOPELESS_MS, HOPELESS * best):
            found[name] = first
            continue
        best, calls[name] = min(best, first), call
    found |= zip(calls, timer.medians(list(calls.values())), strict=True)
    best = min(found.values(), default=STEADY_MS)
    if best >= STEADY_MS:
        return {name: digits(found[name]) for name in names if name in found}, refused
    near = [n for n in calls if found[n] <= CLOSE * best or n == names[0]]
    timer.milliseconds *= LONGER
    found |= zip(near, timer.medians([calls[n] for n in near]), strict=True)
    timer.milliseconds /= LONGER
    return {name: digits(found[name]) for name in names if name in found}, refused


def sweep(
    sets: list[str], passes: list[str], out: Path | None, budget: float, milliseconds: float
) -> int:
    """Exit status: 0 every cell is timed and chosen well, 1 not."""
    from bench.run import gpu_folder, inputs, meta
    from bench.timing import Progress, Timer
    from memeff_attn import dispatch

    listed = list(problems(sets, passes))
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device here; `bench sweep --check` judges the committed times")
    start = time.monotonic()
    timer = Timer(milliseconds)
    timer.warm_up()
    head = {**meta(), "facts": dict(dispatch._gpu_of(torch.device("cuda")))}
    folder = out or Path(__file__).with_name("results") / gpu_folder(head["gpu"])
    growing = Sweep(path_of(folder), head)
    left = [p for p in listed if not growing.has(p)]
    progress = Progress(len(left), "sweep")
    crash, cell, tensors = "", None, None
    for problem in left:
        if budget and time.monotonic() - start > budget:
            break
        try:
            if cell != problem.cell:
                cell, tensors = problem.cell, None
                tensors = inputs(cell)
            assert tensors is not None
            names = Choice(problem, head["facts"]).serving()
            with oracle.math_of(cell):
                times, refused = times_of(problem, names, tensors, timer)
            growing.add(problem, times)
            for name, why in refused.items():
                progress.clear()
                print(f"{' '.join(problem.key)}: {name} refused: {why}")
        except RuntimeError as failure:  # after a CUDA error nothing runs
            crash = f"{' '.join(problem.key)}: {failure}"
            break
        progress.step(" ".join(problem.key))
    progress.clear()
    growing.save()
    text, wrong = judged(growing.content())
    print(f"{growing.path}: {len(growing.rows)} rows\n{text}\n{time.monotonic() - start:.0f} s")
    if crash:
        print(f"stopped: {crash}")
    return int(bool(wrong or crash))


def check(path: Path | None) -> int:
    paths = [path] if path else committed()
    if not paths:
        raise ValueError("no sweep.json in bench/results: `python -m bench sweep` on a GPU")
    status = 0
    for at in paths:
        text, wrong = judged(json.loads(at.read_text()))
        print(f"{at}: {text}")
        status |= wrong > 0
    return int(status)
