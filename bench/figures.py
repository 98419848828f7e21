"""How figures look: little ink, labels at the lines, colours that colour-blind readers tell apart
(those of Okabe and Ito), ours the strongest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench import report

matplotlib.use("Agg")

INK = {"light": "#1f2328", "dark": "#e6edf3"}
FAINT = {"light": "#59636e", "dark": "#9198a1"}
GRID = {"light": "#d8dee4", "dark": "#30363d"}
PAGE = {"light": "#ffffff", "dark": "#0d1117"}  # behind PNG files; SVG files are transparent
COLOURS = {
    "light": {
        "memeff": "#0072b2",
        "efficient": "#b87a00",
        "flash": "#009e73",
        "cudnn": "#b8578f",
        "fa4": "#d55e00",
        "flex": "#3d8fc4",
    },
    "dark": {
        "memeff": "#58b4f0",
        "efficient": "#e69f00",
        "flash": "#1fbf92",
        "cudnn": "#dd92b8",
        "fa4": "#f0824a",
        "flex": "#8fc8ee",
    },
}
MARKERS = {"memeff": "o", "efficient": "s", "flash": "^", "cudnn": "D", "fa4": "v", "flex": "P"}
NAMES = {"memeff": "memeff_attn", **{k: v for k, v in report.SHOWN_NAMES.items() if k != "memeff"}}
LABEL_GAP = 0.075  # of a panel's height: the least distance of two labels
# Inches. A figure of three columns is as wide as a page of GitHub shows it, so letters keep their
# size.
PANELS = {3: (2.72, 2.25), 2: (4.1, 2.7)}
TOP, BOTTOM, SIDE = 0.62, 0.42, 0.5
NOTE_LINE = 0.15


def draw(data: dict[str, Any], theme: str = "light") -> Figure:
    settings = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "svg.hashsalt": "memeff_attn",  # the same file for the same data
        "text.color": INK[theme],
        "axes.labelcolor": FAINT[theme],
        "xtick.color": FAINT[theme],
        "ytick.color": FAINT[theme],
    }
    with matplotlib.rc_context(settings):
        kind = {"lines": _lines, "dots": _dots, "bars": _bars}[data["kind"]]
        return kind(data, theme)


def save(figure: Figure, path: Path, stamp: str) -> None:
    """An SVG with its data in the metadata, or a PNG."""
    if path.suffix == ".svg":
        with matplotlib.rc_context({"svg.hashsalt": "memeff_attn"}):
            metadata = {"Date": None, "Creator": "python -m bench plot", "Description": stamp}
            figure.savefig(path, transparent=True, metadata=metadata)
        return
    dark = "-dark" in path.name
    figure.savefig(path, dpi=110, facecolor=PAGE["dark" if dark else "light"])


class Canvas:
    """A figure of equal panels, with title, note and machine."""

    def __init__(
        self, data: dict[str, Any], columns: int, panel: tuple[float, float], theme: str
    ) -> None:
        count = len(data["panels"])
        self.theme, self.columns, self.panel = theme, columns, panel
        self.rows = math.ceil(count / columns)
        width = columns * panel[0] + SIDE
        note = _wrapped(data["note"], int(width * 14))
        self.top = TOP + NOTE_LINE * note.count("\n")
        height = self.rows * panel[1] + self.top + BOTTOM
        self.size = width, height
        self.figure = Figure(figsize=self.size)
        left = 0.15 / width
        self.figure.text(left, 1 - 0.1 / height, data["title"], size=12, weight="bold", va="top")
        self.figure.text(
            left, 1 - 0.36 / height, note, size=8.5, va="top", color=FAINT[theme], linespacing=1.3
        )
        machine = {"size": 7.5, "ha": "right", "color": FAINT[theme]}
        self.figure.text(1 - left, 0.08 / height, data["machine"], **machine)

    def axes(self, place: int, left: float, right: float, top: float, bottom: float) -> Axes:
        """A panel with these margins, in inches."""
        row, column = divmod(place, self.columns)
        (width, height), (wide, high) = self.size, self.panel
        box = (
            (SIDE + column * wide + left) / width,
            (BOTTOM + (self.rows - 1 - row) * high + bottom) / height,
            (wide - left - right) / width,
            (high - bottom - top) / height,
        )
        axes = self.figure.add_axes(box)
        axes.patch.set_visible(False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT[self.theme])
        axes.tick_params(length=0, labelsize=8)
        axes.set_axisbelow(True)
        return axes


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(line.rstrip() for line in lines)


def _lines(data: dict[str, Any], theme: str) -> Figure:
    columns = data["columns"]
    canvas = Canvas(data, columns, PANELS[min(3, max(2, columns))], theme)
    log = data.get("log", False)
    panels = data["panels"]
    for place, panel in enumerate(panels):
        row = place // columns * columns
        of_row = [line for p in panels[row : row + columns] for line in p["lines"]]
        axes = canvas.axes(place, left=0.12, right=0.85, top=0.42, bottom=0.42)
        axes.set_title(panel["title"], size=9.5, loc="left", color=INK[theme], pad=8)
        axes.grid(axis="y", color=GRID[theme], linewidth=0.7)
        axes.set_xscale("log", base=2)
        (_scale_of_bytes if log else _scale_from_zero)(axes, of_row)
        for line in panel["lines"]:
            _line(axes, line, theme)
        ticks = _spaced(sorted({x for line in panel["lines"] for x in line["x"]}))
        axes.set_xticks(ticks, [_short(x) for x in ticks])
        axes.xaxis.minorticks_off()
        if place % columns:  # the scale is that of the first panel of the row
            axes.tick_params(axis="y", labelleft=False)
        elif not log:
            axes.set_ylabel(data["y"], size=8)
        if place // columns == canvas.rows - 1:
            axes.set_xlabel(data["x"], size=8)
        _labels(axes, panel["lines"], theme)
    return canvas.figure


def _scale_from_zero(axes: Axes, lines: Sequence[dict[str, Any]]) -> None:
    axes.set_ylim(0, 1.06 * max(max(line["y"]) for line in lines))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _scale_of_bytes(axes: Axes, lines: Sequence[dict[str, Any]]) -> None:
    values = [y for line in lines for y in line["y"]]
    first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    ticks = [2.0**e for e in range(first, last + 1, 2)]
    axes.set_yscale("log", base=2)
    axes.set_ylim(2.0 ** (first - 1.5), 2.0 ** (last + 0.5))
    names = [f"{t / 1024:.0f} GiB" if t >= 1024 else f"{t:.0f} MiB" for t in ticks]
    axes.set_yticks(ticks, names)
    axes.yaxis.minorticks_off()


def _spaced(values: Sequence[float]) -> list[float]:
    """Those that leave room for the text of a tick on a logarithmic axis; the last always."""
    room = math.log2(values[-1] / values[0]) / 11 if len(values) > 1 else 0
    kept: list[float] = [values[-1]]
    for value in values[:-1]:
        if all(abs(math.log2(value / other)) >= room for other in kept):
            kept.append(value)
    return sorted(kept)


def _line(axes: Axes, line: dict[str, Any], theme: str) -> None:
    name, ours = line["name"], line["name"] == "memeff"
    if line.get("computed"):
        axes.plot(line["x"], line["y"], color=FAINT[theme], linewidth=1.2, dashes=(4, 3))
        return
    axes.plot(
        line["x"],
        line["y"],
        color=COLOURS[theme][name],
        linewidth=2.6 if ours else 1.4,
        marker=MARKERS[name],
        markersize=5.5 if ours else 3.5,
        gid=name,
    )


def _short(x: float) -> str:
    return f"{x / 1024:.0f}k" if x >= 1024 and x % 1024 == 0 else f"{x:.0f}"


def _labels(axes: Axes, lines: Sequence[dict[str, Any]], theme: str) -> None:
    """Each line's name at its end, those of one column moved apart."""
    by_end: dict[float, list[tuple[float, dict[str, Any]]]] = {}
    for line in lines:
        x, y = line["x"][-1], line["y"][-1]
        to_axes = axes.transData.transform((x, y))
        height = float(axes.transAxes.inverted().transform(to_axes)[1])
        by_end.setdefault(x, []).append((height, line))
    for x, of in by_end.items():
        of.sort(key=lambda item: item[0])
        places = _apart([height for height, _ in of])
        for place, (_, line) in zip(places, of, strict=True):
            name, ours = line["name"], line["name"] == "memeff"
            at = float(axes.transAxes.inverted().transform(axes.transData.transform((x, 1)))[0])
            axes.text(
                at + 0.035,
                place,
                NAMES.get(name, name),
                transform=axes.transAxes,
                color=FAINT[theme] if line.get("computed") else COLOURS[theme][name],
                weight="bold" if ours else "normal",
                size=8,
                va="center",
            )


def _apart(heights: Sequence[float]) -> list[float]:
    """Sorted heights, moved as little as keeps them LABEL_GAP apart."""
    places = list(heights)
    for _ in range(500):
        moved = places[0] < 0.03  # not into the axis
        places[0] = max(places[0], 0.03)
        for i in range(len(places) - 1):
            lack = LABEL_GAP - (places[i + 1] - places[i])
            if lack > 1e-6:
                places[i] -= lack / 2
                places[i + 1] += lack / 2
                moved = True
        if not moved:
            break
    return places


def _dots(data: dict[str, Any], theme: str) -> Figure:
    panels = data["panels"]
    names = list(dict.fromkeys(dot["name"] for p in panels for dot in p["dots"]))
    names_width = 1.75  # inches, beside the first panel
    canvas = Canvas(data, len(panels), (4.1, 0.27 * len(names) + 1.1), theme)
    values = [v for p in panels for dot in p["dots"] for v in dot["values"].values()]
    low, high = min(0.5, *values) / 1.25, max(2.0, *values) * 1.25
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    ticks = [2.0**e for e in exponents]
    step = (canvas.size[0] - names_width) / len(panels)
    for place, panel in enumerate(panels):
        begin = names_width + place * step - SIDE - place * canvas.panel[0]
        end = canvas.panel[0] - begin - step
        axes = canvas.axes(place, left=begin, right=end + 0.35, top=0.6, bottom=0.45)
        axes.set_title(panel["title"], size=9.5, loc="left", color=INK[theme], pad=18)
        axes.set_xscale("log", base=2)
        axes.set_xlim(low, high)
        axes.set_xticks(ticks, [f"{t:g}×" for t in ticks])
        axes.xaxis.minorticks_off()
        axes.grid(axis="x", color=GRID[theme], linewidth=0.7)
        axes.axvline(1, color=INK[theme], linewidth=1.0)
        axes.set_xlabel(data["x"], size=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names, color=INK[theme])
        axes.tick_params(axis="y", labelleft=place == 0)
        _rows_of_dots(axes, panel["dots"], names, theme)
    return canvas.figure


DOTS = {"efficient": ("efficient", "s"), "best peer": ("memeff", "o")}
OVER = {"efficient": "vs efficient", "best peer": "vs fastest peer"}


def _rows_of_dots(
    axes: Axes, dots: Sequence[dict[str, Any]], names: Sequence[str], theme: str
) -> None:
    for dot in dots:
        y, found = names.index(dot["name"]), dot["values"]
        if len(found) > 1:
            axes.plot(list(found.values()), [y] * len(found), color=GRID[theme], linewidth=2.5)
        for peer, value in found.items():
            colour, marker = DOTS[peer]
            axes.plot(
                [value],
                [y],
                marker,
                color=COLOURS[theme][colour],
                markersize=6.5,
                gid=f"dot {peer}",
            )
    first = dots[0]["values"]
    for peer, value in first.items():
        left = value == min(first.values())
        text = {"color": COLOURS[theme][DOTS[peer][0]], "size": 8, "va": "bottom"}
        axes.text(value, -0.75, OVER[peer], ha="right" if left else "left", **text)


def _bars(data: dict[str, Any], theme: str) -> Figure:
    panels = data["panels"]
    canvas = Canvas(data, 2, (4.1, 1.35), theme)
    for place, panel in enumerate(panels):
        axes = canvas.axes(place, left=0.55, right=1.0, top=0.4, bottom=0.1)
        axes.set_title(panel["title"], size=9.5, loc="left", color=INK[theme], pad=6)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        bars = list(reversed(panel["bars"]))
        names = [{"memeff": "memeff_attn", "sdpa": "SDPA"}.get(b["name"], b["name"]) for b in bars]
        colours = [COLOURS[theme].get(b["name"], FAINT[theme]) for b in bars]
        axes.barh(range(len(bars)), [b["value"] for b in bars], color=colours, height=0.62)
        axes.set_yticks(range(len(bars)), names, color=INK[theme])
        for y, bar in enumerate(bars):
            text = f" {bar['value']:,.0f} {panel['unit']}"
            axes.text(bar["value"], y, text, va="center", size=8, color=INK[theme])
    return canvas.figure
