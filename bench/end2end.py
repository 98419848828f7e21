"""`python -m bench end2end`: two whole models with our attention and with PyTorch's.

Result file, bench/results/<gpu>/end2end.json: {"meta": as in the sets' files, and "size", "rows":
[row, ...]}; a row is one model, pass and attention:

    model       llama | vit
    shape       batch, tokens, heads, head dimension and layers, as text
    dtype       fp16 | bf16 | fp32
    pass        fwd: the forward pass without gradients | train: forward, backward and AdamW's step
    attention   memeff | efficient (SDPA held to its memory-efficient kernel; shared key heads are
                copied, as clients do) | sdpa (whichever kernel SDPA chooses)
    ms          median milliseconds of a step; null where it failed
    speed, unit tokens/s or images/s
    peak_mib    what a step allocates on top of what there was before it; null on the CPU
    err         relative error against fp64 on a smaller check, where `wrong` would stand beside it
    error       why there is no time, if it failed
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import models, oracle
from bench.backends import DTYPES
from bench.report import dumps
from bench.timing import Progress, with_peak_mib

FILE = "end2end.json"
PASSES = ("fwd", "train")
SEED = 30
WARM_UP = 2
FIELDS = ("model", "shape", "dtype", "pass", "attention", "ms", "speed", "unit", "peak_mib", "err")
Row = Mapping[str, Any]
Step = Callable[[], object]


def check(
    kind: type[models.Model], size: models.Size, device: torch.device, dtype: torch.dtype
) -> Callable[[models.Attention], tuple[float, list[str]]]:
    """A function of an attention: the output's relative error and what breaks the tolerance rule,
    of the output and of the first layer's projection gradient, against the model in fp64 with
    plain attention; plain PyTorch in the dtype is what the rule measures by."""
    torch.manual_seed(SEED)
    model = kind(size).to(device, dtype)
    batch = model.batch(size, device, SEED)

    def found(attention: models.Attention, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        twin = copy.deepcopy(model).to(kind)
        twin.attention = attention
        out, loss = twin(*batch)
        weight = next(p for name, p in twin.named_parameters() if "qkv.weight" in name)
        return out.detach(), torch.autograd.grad(loss, weight)[0]

    kinds = (torch.float64, dtype, torch.float32)
    exact = zip(*(found(models.plain, kind) for kind in kinds), strict=True)
    out, gradient = (oracle.Exact(*three) for three in exact)

    def judged(attention: models.Attention) -> tuple[float, list[str]]:
        rule = oracle.tolerance()
        mine, mine_gradient = found(attention, dtype)
        figures = out.figures(mine)
        broken = rule.judge("output", figures, 0.0)
        broken += rule.judge("gradient of qkv", gradient.figures(mine_gradient), 0.0, rule.GRADIENT)
        return out.relative(figures[0]), broken

    return judged


def step_of(model: models.Model, batch: models.Batch, which: str) -> Step:
    if which == "fwd":

        def forward() -> None:
            with torch.no_grad():
                model(*batch)

        return forward
    fused = batch[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(*batch)[1].backward()
        optimizer.step()

    return train


def with_attention(model: models.Model, attention: models.Attention, step: Step) -> Step:
    def call() -> object:
        model.attention = attention
        return step()

    return call


def milliseconds(call: Step, device: torch.device) -> float:
    """Of one call, wall time: a whole step waits for nothing in between."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - begin) * 1e3


def peak_of(call: Step, device: torch.device) -> float | None:
    if device.type != "cuda":
        call()
        return None
    return with_peak_mib(call)[1]


def failed(problem: Exception) -> dict[str, Any]:
    """What a row holds in place of figures."""
    if "CUDA error" in str(problem):
        raise problem  # the context is lost
    text = (str(problem).strip() or "no message").splitlines()[0][:300]
    return {"ms": None, "speed": None, "peak_mib": None, "error": text}


def time_pass(
    model: models.Model,
    batch: models.Batch,
    which: str,
    names: Sequence[str],
    steps: int,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """{attention: ms and peak_mib, or error}; the attentions take turns."""
    device = batch[0].device
    step = step_of(model, batch, which)
    calls, facts = {}, {}
    for name in names:
        call = with_attention(model, models.ATTENTION[name], step)
        try:
            for _ in range(WARM_UP):
                call()
            facts[name] = {"peak_mib": peak_of(call, device)}
            calls[name] = call
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            facts[name] = failed(problem)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(steps):
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
        progress.step(f"{type(model).__name__} {which}, step {turn + 1}")
    for name, of in times.items():
        ms = statistics.median(of)
        facts[name] |= {"ms": ms, "speed": model.units(batch) / ms * 1e3}
    return facts


def rows_of_model(
    name: str,
    size_name: str,
    names: Sequence[str],
    device: torch.device,
    dtype_name: str,
    steps: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    kind, size, dtype = models.MODELS[name], models.SIZES[size_name][name], DTYPES[dtype_name]
    batch_size, tokens, layers = models.CHECKED[size_name][name]
    small = dataclasses.replace(size, batch=batch_size, tokens=tokens, layers=layers)
    judged = check(kind, small, device, dtype)
    verdicts, refused = {}, {}
    for attention in names:
        try:
            verdicts[attention] = judged(models.ATTENTION[attention])
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            refused[attention] = failed(problem)
    torch.manual_seed(SEED)
    model = kind(size).to(device, dtype)
    batch = model.batch(size, device, SEED)
    rows = []
    for which in PASSES:
        facts = refused | time_pass(model, batch, which, list(verdicts), steps, progress)
        for attention in names:
            error, broken = verdicts.get(attention, (None, []))
            row = {"model": name, "shape": size.text, "dtype": dtype_name, "pass": which}
            row |= {"attention": attention, "unit": kind.unit, **facts[attention], "err": error}
            row = {f: rounded(v) for f, v in row.items()}
            rows.append(row | ({"wrong": "; ".join(broken)} if broken else {}))
    return rows


def rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def problems(content: Mapping[str, Any]) -> list[str]:
    """Why a result file is not acceptable: empty where it is. It holds each model, pass and
    attention; ours is timed and right, a peer may stand with its error."""
    rows = {(r["model"], r["pass"], r["attention"]): r for r in content.get("rows", ())}
    head = content.get("meta", {})
    found = ["the compiled module was built from other sources"] if head.get("stale") else []
    found += [f"meta lacks '{f}'" for f in ("gpu", "versions", "date", "size") if f not in head]
    for model in models.MODELS:
        for which in PASSES:
            for attention in models.ATTENTION:
                row = rows.get((model, which, attention))
                where = f"{attention}, {model} {which}"
                if row is None:
                    found.append(f"no row for {where}")
                elif row.get("ms") is None and (attention == "memeff" or not row.get("error")):
                    found.append(f"no time for {where}: {row.get('error', 'no reason given')}")
                elif attention == "memeff" and row.get("wrong"):
                    found.append(f"wrong result of {where}: {row['wrong']}")
                elif missing := [f for f in FIELDS if f not in row]:
                    found.append(f"no {', '.join(missing)} for {where}")
    return found


def ratio(rows: Iterable[Row], row: Row, over: str) -> float | None:
    """Speed of a row over that of another attention in the same model and pass."""
    for other in rows:
        same = all(other[f] == row[f] for f in ("model", "pass"))
        if same and other["attention"] == over and other.get("ms") and row.get("ms"):
            return float(row["speed"] / other["speed"])
    return None


WHAT = {"fwd": "forward", "train": "training step"}
HEADS = ("model", "pass", "unit", *models.ATTENTION, "ours / efficient", "ours / sdpa")


def table(rows: Sequence[Row]) -> list[list[str]]:
    """One line for each model and pass: speeds, our ratios, peak memory."""
    lines = []
    for row in (r for r in rows if r["attention"] == "memeff"):
        same = {
            r["attention"]: r
            for r in rows
            if (r["model"], r["pass"]) == (row["model"], row["pass"])
        }
        speeds = [
            f"{same[a]['speed']:,.0f}" if a in same and same[a].get("ms") else "-"
            for a in models.ATTENTION
        ]
        ratios = [ratio(rows, row, over) for over in ("efficient", "sdpa")]
        shown = ["-" if r is None else f"{r:.2f}x" for r in ratios]
        name = f"{row['model']} {row['dtype']} ({row['shape']})"
        lines.append([name, WHAT[row["pass"]], row["unit"], *speeds, *shown])
    return lines


def checked(path: Path) -> dict[str, Any]:
    """A result file; ValueError where it lacks anything."""
    content: dict[str, Any] = json.loads(path.read_text())
    found = problems(content)
    if content["meta"].get("size") != "full":
        found.append("it is of small models, which say nothing of speed")
    if found:
        raise ValueError(
            f"{path} is refused: {'; '.join(found[:5])}. Time it again: python -m bench end2end"
        )
    return content


def meta(device: torch.device) -> dict[str, Any]:
    from bench import run

    if device.type == "cuda":
        return run.meta()
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return {"gpu": "none: CPU", "versions": run.versions(), "date": date}


def end2end(
    names: list[str],
    attentions: list[str],
    size: str,
    device_name: str,
    dtype: str,
    steps: int,
    out: Path | None,
) -> int:
    """Exit status: 0 all complete and right, 1 something is wrong or missing."""
    known: Iterable[str]
    for asked, known, what in (
        (names, models.MODELS, "model"),
        (attentions, models.ATTENTION, "attention"),
        ([dtype], DTYPES, "dtype"),
    ):
        if unknown := [x for x in asked if x not in known]:
            raise ValueError(f"no {what} '{unknown[0]}'; there are {', '.join(known)}")
    if steps < 1:
        raise ValueError(f"--steps is {steps}; at least one step is timed")
    if device_name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; `--device cpu --size tiny` runs the same code")
    device = torch.device(device_name)
    progress = Progress(len(names) * len(PASSES) * steps, "end2end")
    head = {**meta(device), "size": size, "steps": steps}
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += rows_of_model(name, size, attentions, device, dtype, steps, progress)
    content = {"meta": head, "rows": rows}
    found = problems(content)
    if out is None and device.type == "cuda":
        from bench.report import RESULTS
        from bench.run import gpu_folder

        file = FILE if not found and size == "full" else f"end2end.{size}.partial.json"
        out = RESULTS / gpu_folder(head["gpu"]) / file
    print_table(rows)
    for line in found:
        print(f"incomplete: {line}")
    for row in rows:
        if row.get("error"):
            print(f"failed {row['attention']}, {row['model']} {row['pass']}: {row['error']}")
        if row.get("wrong"):
            print(f"WRONG RESULT {row['attention']}, {row['model']}: {row['wrong']}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(dumps(content))
        print(f"{out}: {len(rows)} rows")
    return int(bool(found))


def print_table(rows: Sequence[Row]) -> None:
    lines = [list(HEADS), *table(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
