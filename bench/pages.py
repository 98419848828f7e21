"""The generated parts of README.md (a short table, the support matrix) and docs/benchmarks.md (all
tables): made of the committed results and of the list of kernels alone. `python -m bench readme`
writes them, a test compares."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import backends, end2end, report, shapes
from bench.report import RESULTS, Row

ROOT = Path(__file__).resolve().parents[1]
BENCH, SUPPORT = "bench", "support"  # blocks: what stands between <!-- NAME:begin --> and its end
SHOWN_SLOWER = 6  # cells named in docs/benchmarks.md, the worst first; a run lists all
NOTHING = "No results are committed yet; `python -m bench run` writes them to `bench/results/`."
MEANING = {
    "fwd": "geometric means in TFLOP/s of useful flop, and our speed over PyTorch's "
    "memory-efficient kernel (mean, worst cell) and over the fastest peer of each cell; decoding "
    "in TB/s of keys and values.",
    "bwd": "the backward pass alone, counted as 2.5 times the forward's flop.",
}
# The lines of README's table: group of cells, and what a reader calls it.
SHORT = {
    "llm K=64": "language model, K = 64",
    "llm K=128": "language model, K = 128",
    "llm K=256": "language model, K = 256",
    "vision": "vision, audio, diffusion",
    "anyk K<=256": "any K up to 256",
    "anyk K>256": "K = 320 to 1024",
    "fp32": "fp32",
    "tf32": "fp32, TF32 allowed",
    "clients": "few queries or keys",
    "features bias": "additive bias",
    "features dropout": "dropout",
    "varlen": "packed sequences",
    "decode": "decoding",
}


# Lines of the support matrix: what a reader calls the GPUs, and the compute capabilities they are.
GPUS = {
    "V100 (sm_70)": (70,),
    "T4, RTX 20 (sm_75)": (75,),
    "A100, RTX 30 and 40, L4, L40 (sm_80, 86, 89)": (80, 86, 89),
    "H100, H200 (sm_90), and newer by PTX": (90,),
}
DTYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}


def files_by_gpu(folder: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """{folder of a GPU: its sets' files, checked}."""
    files = report.committed(folder)
    gpus = dict.fromkeys(p.parent.name for p in files)
    return {gpu: [report.checked(p) for p in files if p.parent.name == gpu] for gpu in gpus}


def heading(contents: Sequence[Mapping[str, Any]]) -> str:
    head = contents[0]["meta"]
    return f"{head['gpu']}, torch {head['versions']['torch']}"


def rows_of(contents: Iterable[Mapping[str, Any]], which: str) -> list[Row]:
    return [r for c in contents if which in c["meta"]["passes"] for r in c["rows"]]


# ---- README.md ----


def lost(rows: Sequence[Row]) -> str:
    """In how many cells we are behind, of each pass: a peer's memory-efficient kernel, any peer."""
    parts = []
    for which in report.passes_of(rows):
        cells = [of for of in report.by_cell(rows, which).values() if "memeff" in of]
        over = [report.over_best(of) for of in cells]
        behind = sum(ratio is not None and ratio < 1 for ratio in over)
        served = sum(ratio is not None for ratio in over)
        slow = report.slower(rows, "memeff", which)
        worst = f" (worst: {slow[0]})" if slow else ""
        parts.append(
            f"{report.PASS_NAMES[which].lower()}, slower than the fastest peer in {behind} of "
            f"{served} cells and than PyTorch's memory-efficient kernel in {len(slow)}{worst}"
        )
    return f"Where we lose: {'; '.join(parts)}."


def short_table(contents: Sequence[Mapping[str, Any]]) -> str:
    passes = [w for w in shapes.PASSES if any(w in c["meta"]["passes"] for c in contents)]
    tables = {w: report.groups(rows_of(contents, w), "memeff", w) for w in passes}
    heads, shown = ["shapes (cells)"], ["memeff", "over efficient", "over best"]
    for which in passes:
        heads += [report.PASS_NAMES[which].lower(), "/ efficient", "/ best peer"]
    text = [f"| {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) - 1)]
    for group, name in SHORT.items():
        lines = [table.get(group) for table in tables.values()]
        first = next((line for line in lines if line), None)
        if first is None:
            continue
        unit = "" if first["unit"] == "TFLOP/s" else f", {first['unit']}"
        figures = [f"{name}{unit} ({first['cells']})"]
        for line in lines:
            figures += report.figures(line, shown) if line else ["-"] * len(shown)
        text.append(f"| {' | '.join(figures)} |")
    return "\n".join(text)


def readme_block(folder: Path = RESULTS) -> str:
    """What stands between the markers of README.md."""
    parts = []
    for contents in files_by_gpu(folder).values():
        timed = {row["backend"] for c in contents for row in c["rows"]}
        peers = [p for p in report.PEERS if p in timed]
        named = ", ".join(report.SHOWN_NAMES.get(p, p) for p in peers)
        intro = (
            f"{heading(contents)}: TFLOP/s of useful flop, and our speed over PyTorch's "
            f"memory-efficient kernel and over the fastest peer of each cell ({named}); "
            "geometric means."
        )
        every = [row for which in shapes.PASSES for row in rows_of(contents, which)]
        unique = list({id(row): row for row in every}.values())
        parts += [intro, short_table(contents), lost(unique)]
    return "\n\n".join(parts) if parts else NOTHING


def kernels() -> list[Any]:
    """The rows of csrc/kernels_rows.py, loaded by its file: csrc is no package."""
    path = ROOT / "csrc" / "kernels_rows.py"
    spec = importlib.util.spec_from_file_location("rows_of_pages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.VARIANTS)


def support_block(folder: Path = RESULTS) -> str:
    """The matrix of GPUs and dtypes: "tensor cores" where a row of the list that computes in the
    dtype's own precision has them, "SIMT" where those that do not are all there is."""
    text = [f"| GPU | {' | '.join(DTYPES)} |", "|---|" + "---|" * len(DTYPES)]
    rows = kernels()
    for name, parts in GPUS.items():
        cells = []
        for dtype in DTYPES.values():
            kinds = {
                "SIMT"
                if all(row.arch == "simt" for row in rows if _fits(row, dtype, sm))
                else "tensor cores"
                for sm in parts
                if any(_fits(row, dtype, sm) for row in rows)
            }
            cells.append(" or ".join(sorted(kinds)) or "none")
        text.append(f"| {name} | {' | '.join(cells)} |")
    cpu = " PyTorch's kernels |" * len(DTYPES)
    return "\n".join([*text, f"| CPU |{cpu}"])


def _fits(row: Any, dtype: str, sm: int) -> bool:
    return bool(row.dtype == dtype and row.math == "ieee" and row.min_sm <= sm <= row.max_sm)


# ---- docs/benchmarks.md ----


def long_table(contents: Sequence[Mapping[str, Any]], which: str) -> str:
    claiming = [c for c in contents if which in c["meta"]["passes"]]
    if not claiming:
        return ""
    head = claiming[0]["meta"]
    date = head.get("dates", {}).get(which, head["date"])[:10]
    rows = rows_of(claiming, which)
    shown = report.columns(rows)
    text = [
        f"{report.PASS_NAMES[which]}, {heading(claiming)}, {date}: {MEANING[which]}",
        "",
        f"| cells | {' | '.join(shown.values())} |",
        "|---|" + "---|" * len(shown),
    ]
    table = report.groups(rows, "memeff", which)
    for group, line in table.items():
        label = f"{report.titled(group, line)} ({line['cells']})"
        text.append(f"| {label} | {' | '.join(report.figures(line, shown))} |")
    slow = report.slower(rows, "memeff", which)
    named = [*slow[:SHOWN_SLOWER], *(["..."] if len(slow) > SHOWN_SLOWER else [])]
    listed = f": {'; '.join(named)}" if slow else ""
    text += ["", f"Slower than PyTorch's memory-efficient kernel: {len(slow)} cells{listed}."]
    packed = report.beside_fixed(table)
    return "\n".join([*text, "", f"{packed}."] if packed else text)


FAMILY_HEADS = ("cells", "this family", "flash", "/ flash", "worst cell", "/ best peer")


def family_tables(contents: Sequence[Mapping[str, Any]]) -> str:
    """Families of ours that were timed by name, what dispatch would choose left out; empty where
    none was."""
    names = {r["backend"] for c in contents for r in c["rows"] if backends.family_of(r["backend"])}
    parts = []
    for name in sorted(names):
        for which in shapes.PASSES:
            lines = report.of_family(rows_of(contents, which), name, which)
            if not lines:
                continue
            family = backends.family_of(name)
            text = [
                f"The {family} family alone ({name}), {report.PASS_NAMES[which].lower()}, where "
                "PyTorch's flash kernel takes the shape too:",
                "",
                f"| {' | '.join(FAMILY_HEADS)} |",
                "|---|" + "---|" * (len(FAMILY_HEADS) - 1),
            ]
            parts.append("\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)]))
    return "\n\n".join(parts)


def whole_models(path: Path) -> str:
    """The table of end2end.json; empty where there is none."""
    if not path.exists():
        return ""
    content = end2end.checked(path)
    head = content["meta"]
    text = [
        f"Whole models, {head['gpu']}, torch {head['versions']['torch']}, {head['date'][:10]}:",
        "",
        f"| {' | '.join(end2end.HEADS)} |",
        "|---|" + "---|" * (len(end2end.HEADS) - 1),
    ]
    text += [f"| {' | '.join(row)} |" for row in end2end.table(content["rows"])]
    figure = picture(f"figures/{path.parent.name}/end2end", "Speed of the whole models")
    return "\n".join([*text, "", figure])


def picture(path: str, text: str) -> str:
    """A figure of docs/figures on a page, in the colours that its reader has chosen."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">'
        f'<img alt="{text}" src="{path}.svg"></picture>'
    )


def benchmarks_block(folder: Path = RESULTS) -> str:
    """What stands between the markers of docs/benchmarks.md."""
    parts = []
    for gpu, contents in files_by_gpu(folder).items():
        parts += [long_table(contents, which) for which in shapes.PASSES]
        parts += [family_tables(contents), whole_models(folder / gpu / end2end.FILE)]
    return "\n\n".join(part for part in parts if part) or NOTHING


# ---- writing ----

PAGES: dict[str, dict[str, Callable[[Path], str]]] = {
    "README.md": {SUPPORT: support_block, BENCH: readme_block},
    "docs/benchmarks.md": {BENCH: benchmarks_block},
}


def cut(text: str, name: str) -> tuple[str, str, str]:
    """A page as what stands before a block, the block, and what stands behind it."""
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    if begin not in text or end not in text.split(begin, 1)[1]:
        raise ValueError(f"the page lacks the lines {begin.strip()} and {end.strip()}")
    before, rest = text.split(begin, 1)
    block, after = rest.split(end, 1)
    return before + begin, block, end + after


def with_block(text: str, name: str, block: str) -> str:
    """A page with one of its blocks made anew."""
    before, _, after = cut(text, name)
    return f"{before}{block}{after}"


def stale(folder: Path = RESULTS, root: Path = ROOT) -> dict[Path, str]:
    """{page: what it should be} of the pages that are not as the results say."""
    found = {}
    for page, blocks in PAGES.items():
        text = new = (root / page).read_text()
        for name, made in blocks.items():
            new = with_block(new, name, made(folder))
        if new != text:
            found[root / page] = new
    return found


def write_pages(only_check: bool) -> int:
    """Exit status: 0, or 1 where --check finds a page that is stale."""
    found = stale()
    for path, text in found.items():
        name = path.relative_to(ROOT)
        print(f"{name} is stale: run `python -m bench readme`" if only_check else f"{name} written")
        if not only_check:
            path.write_text(text)
    if not found:
        print(f"{', '.join(PAGES)}: up to date")
    return int(only_check and bool(found))
