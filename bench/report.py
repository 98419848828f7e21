"""What is made of result files: completeness, groups of cells, summary of a run, comparisons."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import backends, shapes

RESULTS = Path(__file__).with_name("results")
NOISE = 0.03  # `compare` flags differences beyond this share
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
    found += [f"rows of {w}, which meta does not claim" for w in passes_of(rows.values(), passes)]
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


def passes_of(rows: Iterable[Row], but: Iterable[str] = ()) -> list[str]:
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
        return dict(new), f"rows of {', '.join(passes_of(others))}: {why} differ"
    rows = sorted([*others, *new["rows"]], key=lambda r: shapes.PASSES.index(r["pass"]))
    dates = {**dict.fromkeys(passes_of(others), before["date"]), **before.get("dates", {})}
    meta = {**head, "passes": passes_of(rows), "dates": {**dates, **head["dates"]}}
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
    for backend in (ours, *PEERS):
        if all(backend in of for of in cells):
            line[backend] = geomean(speed(of[backend], unit) for of in cells)
    over = [of["efficient"]["ms"] / of[ours]["ms"] for of in cells if "efficient" in of]
    best = [ratio for of in cells if (ratio := over_best(of, ours)) is not None]
    line["over efficient"], line["worst"] = geomean(over), min(over, default=math.nan)
    line["over best"] = geomean(best)
    fixed = backends.FIXED
    line["over fixed"] = geomean(
        of[ours]["tflops"] / of[fixed]["tflops"] for of in cells if fixed in of
    )
    return line


def over_best(of: Mapping[str, Row], ours: str = "memeff") -> float | None:
    """Our speed over the fastest peer's in one cell; None where no peer serves it."""
    times = [of[p]["ms"] for p in PEERS if p in of]
    return min(times) / of[ours]["ms"] if times else None


def speed(row: Row, unit: str) -> float:
    return float(row["tflops"] if unit == "TFLOP/s" else row["gbps"] / 1000)


PEERS = (*backends.PEERS, *backends.OPTIONAL)  # the fastest of them is the best peer
PASS_NAMES = {"fwd": "Forward", "bwd": "Backward"}
SHOWN_NAMES = {"memeff": "ours", "cudnn": "cuDNN", "fa4": "FA4"}
RATIOS = {
    "over efficient": "ours / efficient",
    "worst": "worst cell",
    "over best": "ours / best peer",
}


def columns(rows: Iterable[Row], ours: str = "memeff") -> dict[str, str]:
    """{column of a group's line: its head}; peers that are timed on request where they were."""
    timed = {row["backend"] for row in rows}
    shown = [ours, *(p for p in PEERS if p in backends.PEERS or p in timed)]
    heads = {name: SHOWN_NAMES.get(name, name) for name in shown}
    return {**heads, ours: "ours", **RATIOS}


def figures(line: Mapping[str, Any], shown: Iterable[str]) -> list[str]:
    """The columns `shown` of a group's line, as text."""
    texts = []
    for column in shown:
        value = line.get(column, math.nan)
        digits = 0 if line["unit"] == "TFLOP/s" else 2
        text = f"{value:.2f}x" if column in RATIOS else f"{value:.{digits}f}"
        texts.append("-" if math.isnan(value) else text)
    return texts


def titled(group: str, line: Mapping[str, Any]) -> str:
    return group if line["unit"] == "TFLOP/s" else f"{group}, {line['unit']}"


def beside_fixed(table: Mapping[str, Mapping[str, Any]]) -> str:
    """What packing costs: of each group of packed sequences, our TFLOP/s over those of our kernel
    on the fixed-length problem of the same flop. Empty where there are none."""
    found = {group: line["over fixed"] for group, line in table.items()}
    shown = [f"{group} {ratio:.2f}x" for group, ratio in found.items() if not math.isnan(ratio)]
    if not shown:
        return ""
    return f"Packed sequences over our kernel on fixed lengths of the same flop: {', '.join(shown)}"


def of_family(rows: Sequence[Row], ours: str, which: str) -> list[list[str]]:
    """One kernel family of ours, timed by name: of each group of cells that it and flash serve, its
    TFLOP/s and flash's, its speed over flash (mean, worst cell) and over the fastest peer."""
    members: dict[str, list[dict[str, Row]]] = defaultdict(list)
    for cell, of in by_cell(rows, which).items():
        if ours in of and "flash" in of and not cell.decoding:
            for group in cell.groups:
                members[group].append(of)
    lines = []
    for group, cells in members.items():
        over = [of["flash"]["ms"] / of[ours]["ms"] for of in cells]
        best = [ratio for of in cells if (ratio := over_best(of, ours)) is not None]
        speeds = [geomean(of[b]["tflops"] for of in cells) for b in (ours, "flash")]
        ratios = [geomean(over), min(over), geomean(best)]
        lines.append(
            [
                f"{group} ({len(cells)})",
                *(f"{x:.0f}" for x in speeds),
                *(f"{x:.2f}x" for x in ratios),
            ]
        )
    return lines


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
    for which in passes_of(rows):
        for name in ours:
            what = PASS_NAMES[which].lower()
            text.append(f"\n{name}: geometric means, TFLOP/s (useful flop), {what}")
            shown = columns(rows, name)
            text.append(f"{'':30}{'cells':>6}" + "".join(f"{h:>17}" for h in shown.values()))
            table = groups(rows, name, which)
            for group, line in table.items():
                values = "".join(f"{v:>17}" for v in figures(line, shown))
                text.append(f"{titled(group, line):30}{line['cells']:>6}{values}")
            text += [packed] if (packed := beside_fixed(table)) else []
            slow = slower(rows, name, which)
            text.append(f"slower than efficient, {what}: {len(slow)} cells")
            text += [f"  {line}" for line in slow]
        if not ours:
            for name in timed:
                for group, line in groups(rows, name, which).items():
                    figure = figures(line, [name])[0]
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
    """Rows of one file, or of every set's file in a folder (whole models' are of another kind)."""
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.glob("*.json") if f.stem.split(".")[0] in shapes.SETS)
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
