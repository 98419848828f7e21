"""What is made of result files: completeness, the summary table, comparisons, the README block."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import backends, shapes

RESULTS = Path(__file__).with_name("results")
SHOWN_SLOWER = 6  # in README.md, the worst first; a run lists all
NOISE = 0.03  # `compare` flags differences beyond this share
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
META = ("gpu", "sm", "driver", "clocks", "versions", "source_hash", "date")
FIGURES = ("ms", "tflops", "gbps", "peak_mib", "err")

Row = Mapping[str, Any]


def dumps(content: Mapping[str, Any]) -> str:
    """JSON with one row a line: diffs of result files stay readable."""
    rows = ",\n".join(json.dumps(r) for r in content["rows"])
    return f'{{"meta": {json.dumps(content["meta"], indent=1)},\n"rows": [\n{rows}\n]}}\n'


def problems(
    content: Mapping[str, Any], name: str, names: Sequence[str] = backends.DEFAULT
) -> list[str]:
    """Why a result file of the set `name` is not acceptable: empty when it is.

    It must hold every cell of the set, in each pass that it claims, for each backend of `names`
    that serves it, timed and right. A peer may stand with the error it gave in place of a time, or
    unchecked with the reason; ours may not.
    """
    head = content.get("meta", {})
    found = [f"meta lacks '{f}'" for f in META if f not in head]
    if head.get("stale"):
        found.append("the compiled module was built from other sources: build again, then time")
    if "sm" not in head:
        return found
    rows = {shapes.key(r): r for r in content.get("rows", ())}
    passes = head.get("passes", ())
    if not passes:
        found.append("meta names no passes")
    found += [f"rows of {w}, which meta does not claim" for w in _passes_of(rows.values(), passes)]
    timed = {_place(r) for r in rows.values()}
    for cell, which, backend in shapes.expected(name, passes, names, head["sm"]):
        row = rows.get(shapes.key(cell.row(which, backend)))
        if _place(cell.row(which, "")) not in timed:
            line = f"no rows at all of {which}, {cell.name}"
            found += [line] if line not in found else []
        elif row is None:
            found.append(f"no row for {backend}, {which}, {cell.name}")
        elif row.get("ms") is None:
            if backends.is_ours(backend) or not row.get("error"):
                why = row.get("error", "no reason given")
                found.append(f"no time for {backend}, {which}, {cell.name}: {why}")
        elif missing := [f for f in FIGURES if row.get(f) is None and not _excused(row, f)]:
            found.append(f"no {', '.join(missing)} for {backend}, {which}, {cell.name}")
        elif backends.is_ours(backend) and row.get("wrong"):
            found.append(f"wrong result of {backend}, {which}, {cell.name}: {row['wrong']}")
    return found


def _place(row: Row) -> tuple[Any, ...]:
    """Cell and pass of a row."""
    return shapes.key({**row, "backend": ""})


def _excused(row: Row, figure: str) -> bool:
    return figure == "err" and bool(row.get("unchecked")) and not backends.is_ours(row["backend"])


def _passes_of(rows: Iterable[Row], but: Iterable[str] = ()) -> list[str]:
    """The passes that rows are of, in order, without those of `but`."""
    seen = {r["pass"] for r in rows} - set(but)
    return [w for w in shapes.PASSES if w in seen]


SAME = ("gpu", "driver", "source_hash", "versions")  # what one file's passes must share


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The new file with the old one's rows of other passes, where both are of the same sources and
    machine; and why rows were left out, if any were."""
    head, before = new["meta"], old.get("meta", {})
    others = [r for r in old.get("rows", ()) if r["pass"] not in head["passes"]]
    if not others:
        return dict(new), ""
    differs = [f for f in SAME if before.get(f) != head.get(f)]
    if differs or before.get("stale"):
        why = ", ".join(differs) or "its module"
        return dict(new), f"rows of {', '.join(_passes_of(others))}: {why} differ"
    rows = sorted([*others, *new["rows"]], key=lambda r: shapes.PASSES.index(r["pass"]))
    dates = {**dict.fromkeys(_passes_of(others), before["date"]), **before.get("dates", {})}
    meta = {**head, "passes": _passes_of(rows), "dates": {**dates, **head["dates"]}}
    return {"meta": meta, "rows": rows}, ""


def checked(path: Path) -> dict[str, Any]:
    """A result file; ValueError when it lacks anything."""
    content: dict[str, Any] = json.loads(path.read_text())
    if found := problems(content, path.stem):
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        again = f"time the set again on its GPU: python -m bench run --set {path.stem}"
        raise ValueError(f"{path} is refused: {'; '.join(found[:5])}{more}. To mend it, {again}")
    return content


def committed(folder: Path = RESULTS) -> list[Path]:
    """Result files of the sets, partial ones left out, in the order of the sets."""
    order = {s: i for i, s in enumerate(shapes.SETS)}
    found = [p for p in folder.glob("*/*.json") if p.stem in order]
    return sorted(found, key=lambda p: (p.parent.name, order[p.stem]))


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def by_cell(rows: Iterable[Row], which: str) -> dict[shapes.Cell, dict[str, Row]]:
    """{cell: {backend: row}} of the rows of one pass that have a time."""
    found: dict[shapes.Cell, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["pass"] == which and row.get("ms"):
            found[shapes.cell_of(row)][row["backend"]] = row
    return found


def groups(
    rows: Iterable[Row], ours: str = "memeff", which: str = "fwd"
) -> dict[str, dict[str, Any]]:
    """For each group of cells: geometric means of TFLOP/s (TB/s where they decode) and of our speed
    over the peers'."""
    members: dict[str, list[dict[str, Row]]] = defaultdict(list)
    units: dict[str, str] = {}
    for cell, of in by_cell(rows, which).items():
        if ours in of:
            for group in cell.groups:
                members[group].append(of)
                units[group] = "TB/s" if cell.decoding else "TFLOP/s"
    return {group: _line(cells, ours, units[group]) for group, cells in members.items()}


def _line(cells: Sequence[Mapping[str, Row]], ours: str, unit: str) -> dict[str, Any]:
    """Of one group; a ratio is of the cells that the peer serves."""
    line: dict[str, Any] = {"cells": len(cells), "unit": unit}
    for backend in (ours, *backends.PEERS):
        if all(backend in of for of in cells):
            line[backend] = geomean(_speed(of[backend], unit) for of in cells)
    over = [of["efficient"]["ms"] / of[ours]["ms"] for of in cells if "efficient" in of]
    best = [
        min(of[p]["ms"] for p in backends.PEERS if p in of) / of[ours]["ms"]
        for of in cells
        if any(p in of for p in backends.PEERS)
    ]
    line["over efficient"], line["worst"] = geomean(over), min(over, default=math.nan)
    line["over best"] = geomean(best)
    fixed = backends.FIXED
    line["over fixed"] = geomean(
        of[ours]["tflops"] / of[fixed]["tflops"] for of in cells if fixed in of
    )
    return line


def _speed(row: Row, unit: str) -> float:
    return float(row["tflops"] if unit == "TFLOP/s" else row["gbps"] / 1000)


COLUMNS = ("memeff", *backends.PEERS, "over efficient", "worst", "over best")
HEADS = (
    "ours",
    "efficient",
    "flash",
    "cuDNN",
    "ours / efficient",
    "worst cell",
    "ours / best peer",
)
PASS_NAMES = {"fwd": "Forward", "bwd": "Backward"}


RATIOS = ("over efficient", "worst", "over best")


def _figures(line: Mapping[str, Any], ours: str) -> list[str]:
    shown = []
    for column in (ours, *COLUMNS[1:]):
        value = line.get(column, math.nan)
        digits = 0 if line["unit"] == "TFLOP/s" else 2
        text = f"{value:.2f}x" if column in RATIOS else f"{value:.{digits}f}"
        shown.append("-" if math.isnan(value) else text)
    return shown


def _titled(group: str, line: Mapping[str, Any]) -> str:
    return group if line["unit"] == "TFLOP/s" else f"{group}, {line['unit']}"


def beside_fixed(table: Mapping[str, Mapping[str, Any]]) -> str:
    """What packing costs: of each group of packed sequences, our TFLOP/s over those of our kernel
    on the fixed-length problem of the same flop. Empty where there are none."""
    found = {group: line["over fixed"] for group, line in table.items()}
    shown = [f"{group} {ratio:.2f}x" for group, ratio in found.items() if not math.isnan(ratio)]
    if not shown:
        return ""
    return f"Packed sequences over our kernel on fixed lengths of the same flop: {', '.join(shown)}"


def slower(rows: Iterable[Row], ours: str, which: str) -> list[str]:
    """The cells in which ours takes longer than PyTorch's memory-efficient kernel, worst first."""
    found = [
        (of["efficient"]["ms"] / of[ours]["ms"], f"{cell.set} {cell.name}")
        for cell, of in by_cell(rows, which).items()
        if ours in of and "efficient" in of and of[ours]["ms"] > of["efficient"]["ms"]
    ]
    return [f"{label}: {ratio:.2f}x" for ratio, label in sorted(found, key=lambda x: x[0])]


def summary(rows: Sequence[Row]) -> str:
    """The short tables that end a run: TFLOP/s and ratios, geometric means for each group."""
    timed = [b for b in dict.fromkeys(r["backend"] for r in rows) if b != backends.FIXED]
    ours = [b for b in timed if backends.is_ours(b)]
    text = []
    for which in _passes_of(rows):
        for name in ours:
            what = PASS_NAMES[which].lower()
            text.append(f"\n{name}: geometric means, TFLOP/s (useful flop), {what}")
            text.append(f"{'':30}{'cells':>6}" + "".join(f"{h:>17}" for h in HEADS))
            table = groups(rows, name, which)
            for group, line in table.items():
                figures = "".join(f"{v:>17}" for v in _figures(line, name))
                text.append(f"{_titled(group, line):30}{line['cells']:>6}{figures}")
            text += [packed] if (packed := beside_fixed(table)) else []
            slow = slower(rows, name, which)
            text.append(f"slower than efficient, {what}: {len(slow)} cells")
            text += [f"  {line}" for line in slow]
        if not ours:
            for name in timed:
                for group, line in groups(rows, name, which).items():
                    figure = _figures(line, name)[0]
                    text.append(f"{name:12} {which} {group:30} {figure:>8} {line['unit']}")
    return "\n".join(text)


def not_served(
    listed: Mapping[str, Sequence[shapes.Cell]],
    passes: Sequence[str],
    names: Sequence[str],
    sm: int,
) -> str:
    """Lines that say which backend has no kernel for how many cells of a set, and why. Without
    memeff-fixed where no sequences are packed: there it is memeff itself."""
    count: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for name, cells in listed.items():
        for which in passes:
            for backend in names:
                for cell in cells:
                    if backend == backends.FIXED and cell.lens is None:
                        continue
                    if why := backends.not_served(backend, cell, sm, which):
                        count[backend, name, which, why] += 1
    return "".join(
        f"not served: {backend}, {name} {which}, {number} of {len(listed[name])} cells: {why}\n"
        for (backend, name, which, why), number in count.items()
    )


def wrong(rows: Iterable[Row]) -> str:
    """Lines for outputs that break the tolerance rule, and for backends that refused."""
    lines = []
    for row in rows:
        where = f"{row['backend']}, {row['set']} {row['name']} {row['pass']}"
        if row.get("wrong"):
            lines.append(f"WRONG RESULT {where}: {row['wrong']}\n")
        elif row.get("error"):
            lines.append(f"failed {where}: {row['error']}\n")
    return "".join(lines)


def rows_of(path: Path) -> list[Row]:
    """Rows of one file, or of every set's file in a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [row for f in files for row in json.loads(f.read_text())["rows"]]


def compare(first: Path, second: Path) -> tuple[str, int]:
    """Lines for rows of both that differ by more than 3 %, and how many of ours got slower."""
    before = {shapes.key(r): r for r in rows_of(first) if r.get("ms")}
    after = {shapes.key(r): r for r in rows_of(second) if r.get("ms")}
    shared = [k for k in before if k in after]
    lines, slower = [], 0
    ratios: dict[str, list[float]] = defaultdict(list)
    for k in shared:
        a, b = before[k], after[k]
        ratio = b["ms"] / a["ms"]
        ratios[b["backend"]].append(ratio)
        if abs(ratio - 1) > NOISE:
            ours = backends.is_ours(b["backend"])
            slower += ours and ratio > 1
            mark = "slower" if ratio > 1 else "faster"
            label = f"{b['set']} {b.get('name') or a.get('name')} {b['pass']} {b['backend']}"
            lines.append(f"{mark} {ratio - 1:+7.1%}  {a['ms']:.4f} -> {b['ms']:.4f} ms  {label}")
    only = (
        f"{len(before) - len(shared)} only in {first}, {len(after) - len(shared)} only in {second}"
    )
    lines.append(f"{len(shared)} rows in both, {only}")
    for backend, of in ratios.items():
        lines.append(f"{backend:12} {len(of):4} rows, time {geomean(of) - 1:+.1%} (geometric mean)")
    return "\n".join(lines), slower


MEANING = {
    "fwd": "geometric means in TFLOP/s of useful flop, and our speed over PyTorch's "
    "memory-efficient kernel (mean, worst cell) and over the fastest peer of each cell; decoding "
    "in TB/s of keys and values.",
    "bwd": "the backward pass alone, counted as 2.5 times the forward's flop.",
}


def _readme_table(contents: Sequence[Mapping[str, Any]], which: str) -> list[str]:
    claiming = [c for c in contents if which in c["meta"]["passes"]]
    if not claiming:
        return []
    head = claiming[0]["meta"]
    date = head.get("dates", {}).get(which, head["date"])[:10]
    text = [
        f"{PASS_NAMES[which]}, {head['gpu']}, torch {head['versions']['torch']}, {date}: "
        f"{MEANING[which]}",
        "",
        "| cells | " + " | ".join(HEADS) + " |",
        "|---|" + "---|" * len(HEADS),
    ]
    rows = [row for content in claiming for row in content["rows"]]
    table = groups(rows, "memeff", which)
    for group, line in table.items():
        label = f"{_titled(group, line)} ({line['cells']})"
        text.append(f"| {label} | " + " | ".join(_figures(line, "memeff")) + " |")
    packed = beside_fixed(table)
    slow = slower(rows, "memeff", which)
    shown = [*slow[:SHOWN_SLOWER], *(["..."] if len(slow) > SHOWN_SLOWER else [])]
    listed = f": {'; '.join(shown)}" if slow else ""
    text += ["", f"Slower than PyTorch's memory-efficient kernel: {len(slow)} cells{listed}."]
    return [*text, "", f"{packed}."] if packed else text


def readme_block(folder: Path = RESULTS) -> str:
    """The tables between the markers of README.md, made of the committed results alone."""
    files = committed(folder)
    if not files:
        return (
            "No results are committed yet; `python -m bench run` writes them to `bench/results/`."
        )
    tables = []
    for gpu in dict.fromkeys(p.parent.name for p in files):
        contents = [checked(p) for p in files if p.parent.name == gpu]
        tables += [_readme_table(contents, which) for which in shapes.PASSES]
    return "\n\n".join("\n".join(table) for table in tables if table)


def readme_text(text: str, folder: Path = RESULTS) -> str:
    """README.md with its block made anew."""
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n{readme_block(folder)}\n{END}{after}"
