"""The documentation is true: its code runs, links and files exist, numbers are committed ones."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
for folder in (str(ROOT), str(ROOT / "csrc")):
    if folder not in sys.path:
        sys.path.append(folder)

from bench import pages, plot, report  # noqa: E402

README = ROOT / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
FIGURE = re.compile(r"\d(?:\.\d+)?\s?(?:×|x faster|TFLOP/s|TB/s|GB/s|µs|us\b|ms\b)")
PARTS = {"sm_70": 70, "sm_75": 75, "sm_80": 80, "86": 86, "89": 89, "sm_90": 90}
DTYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}


# (bias, dropout) of the rows that must take any K at any alignment: plain calls, those with a bias
# (forward), those with dropout; a row with both serves either.
CALLS = {
    "fwd": {(False, False), (True, False), (True, True)},
    "bwd": {(False, False), (True, True)},
}


@pytest.mark.parametrize("code", CODE, ids=[f"block{i}" for i in range(len(CODE))])
def test_readme_code_runs(code: str) -> None:
    if "sm_70" in code:
        from memeff_attn import dispatch

        if dispatch.native()[0] is None:
            pytest.skip(f"needs the compiled module: {dispatch.native()[1]}")
    exec(compile(code, str(README), "exec"), {})


def test_readme_has_the_short_use() -> None:
    lines = [line for line in CODE[0].splitlines() if line.strip()]
    assert len(lines) <= 5


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *pictures]:
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        assert to.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(to), f"{path.name} links to {target}"


def test_map_of_the_code_is_complete() -> None:
    """Every file of csrc stands in the map of docs/design.md, and the map names no other."""
    text = (ROOT / "docs" / "design.md").read_text()
    drawn = text.split("## Map")[1].split("```")[1].split("memeff_attn/")[0]
    named: set[str] = set()
    folder = ""
    for line in drawn.splitlines():
        if not (match := re.match(r"( *)([\w./]+)", line)) or line.startswith("csrc"):
            continue
        depth, name = len(match[1]), match[2]
        if name.endswith("/"):
            folder = name if depth == 2 else folder
            named.add(name)
            continue
        stem, _, ends = name.partition(".")
        prefix = folder if depth == 4 else ""
        named |= {f"{prefix}{stem}.{end.strip('./')}" for end in ends.split("/")}
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix not in (".h", ".cpp", ".py", ".cu", ".cuh"):
            continue
        relative = path.relative_to(ROOT / "csrc").as_posix()
        assert relative in named or relative.startswith("common/"), f"{relative} is not in the map"
    missing = [n for n in named if not (ROOT / "csrc" / n).exists()]
    assert not missing, f"the map names {missing}"


def test_every_kernel_is_drawn() -> None:
    """docs/design.md has a diagram in the section of each kernel."""
    text = (ROOT / "docs" / "design.md").read_text()
    sections = dict(re.findall(r"^#{2,3} ([^\n]+)\n(.*?)(?=^#{2,3} |\Z)", text, re.M | re.S))
    drawn = {
        "The forward kernel",
        "Parts of the keys and their merge",
        "The backward kernels",
        "One step of the loop",
        "Gradient of the bias",
        "Short sequences",
    }
    for name in drawn:
        assert "```" in sections[name] and "->" in sections[name], f"no diagram in {name!r}"


def variants() -> list[Any]:
    # By its file: other tests load lists of their own under the same module name.
    spec = importlib.util.spec_from_file_location("rows_of_docs", ROOT / "csrc" / "kernels_rows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.VARIANTS)


def test_support_matrix_is_that_of_the_variant_list() -> None:
    rows = variants()
    table = README.read_text().split("<!-- support:begin -->")[1].split("<!-- support:end -->")[0]
    lines = [[c.strip() for c in x.strip("| ").split("|")] for x in table.strip().splitlines()]
    head, *body = (line for line in lines if not line[0].startswith("---"))
    seen = set()
    for gpu, *cells in body:
        for part in (n for word, n in PARTS.items() if re.search(rf"\b{word}\b", gpu)):
            for dtype, cell in zip(head[1:], cells, strict=True):
                seen.add(part)
                fitting = [
                    r
                    for r in rows
                    if r.dtype == DTYPES[dtype]
                    and r.min_sm <= part <= r.max_sm
                    and r.math == "ieee"
                ]
                whole = [r for r in fitting if r.alignment == 1 and r.max_k == 0 and r.max_m == 0]
                for pass_, expected in CALLS.items():
                    served = {(r.bias, r.dropout) for r in whole if r.kind == pass_}
                    assert served == expected, f"{dtype} on sm_{part}, {pass_}: any K"
                kinds = {"SIMT" if r.arch == "simt" else "tensor cores" for r in fitting}
                best = "tensor cores" if "tensor cores" in kinds else "SIMT"
                assert cell == best, f"{dtype} on sm_{part} is {best}"
    assert seen == set(PARTS.values())


def test_numbers_on_pages_are_the_committed_results() -> None:
    stale = [path.name for path in pages.stale()]
    assert not stale, f"stale tables in {stale}: run `python -m bench readme`"
    for name in pages.PAGES:
        before, _, after = pages.cut((ROOT / name).read_text(), pages.BENCH)
        loose = FIGURE.findall(before + after)
        assert not loose, f"figures outside the checked table of {name}: {loose}"
    if not report.committed():
        pytest.skip("no results are committed, so there is no number to compare")


def test_figures_draw_the_committed_results() -> None:
    data, missing = plot.data_of()
    assert data or "no results in" in missing[0]
    stale = plot.stale(data)
    assert not stale, f"{stale}: run `python -m bench plot`"


def test_readme_is_short_and_says_where_we_lose() -> None:
    text = README.read_text()
    assert len(text.splitlines()) < 150
    if report.committed():
        assert "Where we lose: forward, slower than the fastest peer in" in text
    assert "docs/figures/" in text and "docs/limits.md" in text


def test_no_document_names_this_machine() -> None:
    for path in [*DOCUMENTS, *(ROOT / "bench").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        assert "/work/" not in path.read_text(), f"{path} names a path of one machine"


def test_no_document_says_that_training_is_missing() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        assert "[training]" not in text and "issue 3" not in text, path.name


def test_demo_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--device", "cpu", "--model"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert f"expected a model folder with config.json, got {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr
