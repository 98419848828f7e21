"""`python -m bench plot`: docs/figures/<gpu>/<figure>.svg from the committed results.

What a figure shows is plain data (`data_of`), made of the results alone. Drawing takes nothing but
that data, and each SVG carries it as JSON in its metadata, so that a test can compare the committed
figures with the committed results without drawing anything. Each figure comes twice, for light and
for dark pages (`-dark`).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

from bench import end2end, pages, report, shapes
from bench.report import RESULTS, Row
from bench.timing import Progress

FIGURES = pages.ROOT / "docs" / "figures"
THEMES = {"light": "", "dark": "-dark"}
WHAT = {"fwd": "forward", "bwd": "backward"}
MEMORY_K = 128  # the head dimension of the figure of memory
STAMP = re.compile(r"<dc:description>(.*?)</dc:description>", re.S)

Data = dict[str, Any]


def series(
    points: Mapping[str, Sequence[tuple[float, float]]], order: Sequence[str] = report.PEERS
) -> list[Data]:
    """{backend: [(x, y)]} as lines, peers first, so that ours is drawn on top."""
    return [
        {"name": name, "x": [x for x, _ in sorted(of)], "y": [y for _, y in sorted(of)]}
        for name in (*order, "memeff")
        if (of := points.get(name))
    ]


def line_panel(
    rows: Iterable[Row],
    title: str,
    x_of: Callable[[shapes.Cell], float],
    figure: str,
    keep: Callable[[shapes.Cell], bool],
    which: str,
) -> Data:
    points: dict[str, list[tuple[float, float]]] = {}
    for cell, of in report.by_cell(rows, which).items():
        for backend, row in of.items() if keep(cell) else ():
            points.setdefault(backend, []).append((x_of(cell), row[figure]))
    return {"title": title, "lines": series(points)}


def of_set(contents: Mapping[str, Data], name: str) -> list[Row]:
    """Rows of a set; ValueError that says what to run where there are none."""
    if name not in contents:
        raise ValueError(f"no results of the set '{name}': python -m bench run --set {name}")
    return list(contents[name]["rows"])


def passes(rows: Sequence[Row]) -> list[str]:
    return report.passes_of(rows)


def speed(contents: Mapping[str, Data], causal: bool = False) -> Data:
    """TFLOP/s against the length, one panel for each pass and K of the language-model set."""
    rows = of_set(contents, "llm")
    widths = sorted({row["K"] for row in rows})
    panels = [
        line_panel(
            rows,
            f"{WHAT[which]}, K = {k}",
            lambda c: c.N,
            "tflops",
            lambda c, k=k: (c.K, c.causal) == (k, causal),  # type: ignore[misc]
            which,
        )
        for which in passes(rows)
        for k in widths
    ]
    mask = "causal mask" if causal else "no mask"
    return {
        "kind": "lines",
        "title": f"Speed by head dimension K and sequence length, {mask}",
        "note": "bf16, 16384 tokens, H · K = 2048; TFLOP/s of useful flop, higher is better",
        "x": "sequence length M = N",
        "y": "TFLOP/s",
        "columns": len(widths),
        "panels": panels,
    }


def any_k(contents: Mapping[str, Data]) -> Data:
    """TFLOP/s against K."""
    rows = of_set(contents, "anyk")
    cell = shapes.cell_of(rows[0])
    of = line_panel
    return {
        "kind": "lines",
        "title": "Speed by head dimension, from 8 to 1024",
        "note": f"{cell.dtype}, B{cell.B} M{cell.M} N{cell.N} H{cell.H}; where a line ends, that "
        "library has no kernel",
        "x": "head dimension K",
        "y": "TFLOP/s",
        "columns": 2,
        "panels": [
            of(rows, WHAT[w], lambda c: c.K, "tflops", lambda c: True, w) for w in passes(rows)
        ],
    }


def memory(contents: Mapping[str, Data]) -> Data:
    """Peak MiB against the length, beside what the scores alone would take."""
    rows = [r for r in of_set(contents, "llm") if r["K"] == MEMORY_K]
    panels = []
    for which in passes(rows):
        panel = line_panel(rows, WHAT[which], lambda c: c.N, "peak_mib", _unmasked, which)
        cells = [c for c in report.by_cell(rows, which) if _unmasked(c)]
        scores = sorted((c.N, shapes.BYTES[c.dtype] * c.B * c.H * c.M * c.N / 2**20) for c in cells)
        computed = {"x": [n for n, _ in scores], "y": [mib for _, mib in scores], "computed": True}
        panel["lines"].insert(0, {"name": "M × N scores", **computed})
        panels.append(panel)
    return {
        "kind": "lines",
        "title": "Memory that one call allocates",
        "note": f"bf16, K = {MEMORY_K}, 16384 tokens in sequences of M; forward: the output; "
        "backward: three gradients and the workspace. Dashed: computed, the scores that plain "
        "attention would hold",
        "x": "sequence length M = N",
        "y": "MiB",
        "log": True,
        "columns": 2,
        "panels": panels,
    }


def _unmasked(cell: shapes.Cell) -> bool:
    return not cell.causal


def overview(contents: Mapping[str, Data]) -> Data:
    """Our speed over that of the memory-efficient kernel and of the fastest peer, by group."""
    panels = []
    every = [row for content in contents.values() for row in content["rows"]]
    for which in passes(every):
        table = report.groups(every, "memeff", which)
        shown = [(name, table[group]) for group, name in pages.SHORT.items() if group in table]
        columns = {"over efficient": "efficient", "over best": "best peer"}
        dots = [
            {
                "name": name,
                "values": {
                    columns[c]: round(line[c], 3) for c in columns if line[c] == line[c]
                },  # NaN: no cell that the peer serves
            }
            for name, line in shown
        ]
        panels.append({"title": WHAT[which], "dots": dots})
    return {
        "kind": "dots",
        "title": "Where we are faster, and where slower",
        "note": "our speed over PyTorch's memory-efficient kernel and over the fastest peer, "
        "geometric means; right of 1×: faster",
        "x": "times as fast",
        "panels": panels,
    }


def whole(path: Path) -> Data:
    """Speeds of the whole models."""
    if not path.exists():
        raise ValueError(f"no {path.name}: python -m bench end2end")
    content = end2end.checked(path)
    rows = content["rows"]
    panels = []
    for row in (r for r in rows if r["attention"] == "memeff"):
        same = [r for r in rows if all(r[f] == row[f] for f in ("model", "pass")) and r.get("ms")]
        bars = [{"name": r["attention"], "value": r["speed"]} for r in same]
        title = f"{row['model']}, {end2end.WHAT[row['pass']]}"
        panels.append({"title": title, "unit": row["unit"], "bars": bars})
    return {
        "kind": "bars",
        "machine": pages.heading([content]),
        "title": "Whole models, by the attention they call",
        "note": "; ".join(dict.fromkeys(f"{r['model']}: {r['dtype']} {r['shape']}" for r in rows)),
        "panels": panels,
    }


MAKERS: dict[str, Callable[[Mapping[str, Data]], Data]] = {
    "overview": overview,
    "speed": speed,
    "speed-causal": lambda contents: speed(contents, causal=True),
    "any-k": any_k,
    "memory": memory,
}


def data_of(folder: Path = RESULTS) -> tuple[dict[str, Data], list[str]]:
    """{<gpu>/<figure>: its data}, and what is missing for the others."""
    found: dict[str, Data] = {}
    missing: list[str] = []
    for gpu, listed in pages.files_by_gpu(folder).items():
        contents = {c["rows"][0]["set"]: c for c in listed}
        named = {name: partial(make, contents) for name, make in MAKERS.items()}
        named["end2end"] = partial(whole, folder / gpu / end2end.FILE)
        for name, make in named.items():
            try:
                found[f"{gpu}/{name}"] = {"machine": pages.heading(listed), **make()}
            except ValueError as why:
                missing.append(f"{gpu}/{name}: {why}")
    if not found and not missing:
        missing = [f"no results in {folder}: `python -m bench run` on a GPU writes them"]
    return found, missing


def stamp_of(svg: str) -> Data | None:
    """The data that an SVG says it draws."""
    match = STAMP.search(svg)
    data: Data | None = json.loads(unescape(match[1])) if match else None
    return data


def stale(data: Mapping[str, Data], folder: Path = FIGURES) -> list[str]:
    """Figures that are missing, draw other data, or have no results any more."""
    found = []
    expected = {f"{name}{suffix}.svg": name for name in data for suffix in THEMES.values()}
    for file, name in expected.items():
        path = folder / file
        if not path.exists():
            found.append(f"{file} is missing")
        elif stamp_of(path.read_text()) != data[name]:
            found.append(f"{file} draws other numbers than the results")
    present = {p.relative_to(folder).as_posix() for p in folder.glob("*/*.svg")}
    return found + [f"{file} has no results" for file in sorted(present - set(expected))]


def plot(out: Path | None, png: bool, only_check: bool) -> int:
    """Exit status: 0, 1 where results are missing or (--check) a figure is stale."""
    folder = out or FIGURES
    data, missing = data_of()
    for line in missing:
        print(f"left out: {line}")
    if only_check:
        found = stale(data, folder)
        print("\n".join(f"{line}: run `python -m bench plot`" for line in found) or "up to date")
        return int(bool(found))
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "matplotlib is not installed: pip install '.[bench]' in the project's folder"
        )
    from bench import figures

    progress = Progress(len(data) * len(THEMES), "plot")
    for name, shown in data.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for theme, suffix in THEMES.items():
            figure = figures.draw(shown, theme)
            figures.save(figure, folder / f"{name}{suffix}.svg", json.dumps(shown))
            if png:
                figures.save(figure, folder / f"{name}{suffix}.png", "")
            progress.step(f"{name} {theme}")
    for line in stale(data, folder):
        print(line)
    required = [line for line in missing if "/end2end" not in line]
    return int(bool(required))
