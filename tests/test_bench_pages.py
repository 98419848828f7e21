"""What is made of committed results: README's short table, docs/benchmarks.md, and figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from test_bench import result
from test_bench_end2end import whole_file

from bench import backends, pages, plot, report, shapes
from bench.__main__ import main

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws; it is not installed"
)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Result files of every set, in which ours takes 1 ms, efficient 2, flash 0.5, cuDNN 0.8."""
    folder = tmp_path / "results"
    (folder / "h200").mkdir(parents=True)
    for name in shapes.SETS:
        content = result(name)
        content["meta"]["set"] = name
        for row in content["rows"]:
            row["ms"] = {"efficient": 2.0, "flash": 0.5, "cudnn": 0.8}.get(row["backend"], 1.0)
            row["tflops"] = row["N"] / row["ms"]
            row["peak_mib"] = float(row["M"])
        (folder / "h200" / f"{name}.json").write_text(report.dumps(content))
    return folder


def test_blocks_of_results(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    assert pages.benchmarks_block(tmp_path) == pages.readme_block(tmp_path) == pages.NOTHING
    (folder / "clients.json").write_text(report.dumps(result("clients", passes=("fwd",))))
    block = pages.benchmarks_block(tmp_path)
    assert "| clients (5) | 1 | 1 |" in block and block.startswith("Forward, x")
    assert "Backward, " not in block
    assert "| few queries or keys (5) | 1 | 1.00x | 1.00x |" in pages.readme_block(tmp_path)
    (folder / "clients.json").write_text(report.dumps(result("clients")))
    block = pages.benchmarks_block(tmp_path)
    assert block.count("| clients (5) | 1 | 1 |") == 2 and "\n\nBackward, x" in block
    assert block.count("Slower than PyTorch's memory-efficient kernel: 0 cells.") == 2
    begin, end = "a\n<!-- bench:begin -->\n", "\n<!-- bench:end -->\nb\n"
    assert pages.with_block(f"{begin}old{end}", "bench", block) == f"{begin}{block}{end}"
    with pytest.raises(ValueError, match="bench:begin"):
        pages.with_block("a page without markers", "bench", block)


def test_readme_says_where_we_lose(results: Path) -> None:
    block = pages.readme_block(results)
    assert "| language model, K = 64 (12) |" in block and "| 2.00x | 0.50x |" in block
    assert "| decoding, TB/s (4) |" in block and block.count("| - | - | - |") == 1
    cells = {
        w: [c for s in shapes.SETS for c in shapes.cells(s) if not (w == "bwd" and c.decoding)]
        for w in shapes.PASSES
    }
    for which, name in (("fwd", "forward"), ("bwd", "backward")):
        served = [
            c
            for c in cells[which]
            if any(not backends.not_served(p, c, 90, which) for p in ("flash", "cudnn"))
        ]
        any_peer = [
            c
            for c in cells[which]
            if any(not backends.not_served(p, c, 90, which) for p in backends.PEERS)
        ]
        found = f"{name}, slower than the fastest peer in {len(served)} of {len(any_peer)} cells"
        assert found in block
    assert block.count("memory-efficient kernel in 0") == 2


def add_backend(results: Path, backend: str, ms: float) -> None:
    """To the set llm, beside each row of flash's."""
    path = results / "h200" / "llm.json"
    content = json.loads(path.read_text())
    like = [r for r in content["rows"] if r["backend"] == "flash"]
    content["rows"] += [{**row, "backend": backend, "ms": ms} for row in like]
    path.write_text(report.dumps(content))


def test_peers_on_request_have_a_column_where_they_were_timed(results: Path) -> None:
    assert "FA4" not in pages.benchmarks_block(results)
    before = pages.readme_block(results)
    add_backend(results, "fa4", 0.25)
    block = pages.benchmarks_block(results)
    assert "| ours | efficient | flash | cuDNN | FA4 |" in block
    assert "| llm K=64 (12) |" in block and "0.25x" in block  # the best peer now
    after = pages.readme_block(results)
    assert after != before and "FA4" in after
    lines = plot.data_of(results)[0]["h200/speed"]["panels"][0]["lines"]
    assert [line["name"] for line in lines] == ["efficient", "flash", "cudnn", "fa4", "memeff"]


def test_a_family_timed_by_name_has_a_table(results: Path) -> None:
    assert "family alone" not in pages.benchmarks_block(results)
    before = pages.readme_block(results)
    flash = {r["ms"] for r in report.rows_of(results / "h200") if r["backend"] == "flash"}
    assert len(flash) == 1
    add_backend(results, "memeff-register", flash.pop() / 2)
    block = pages.benchmarks_block(results)
    assert block.count("The register family alone (memeff-register)") == 2  # forward, backward
    assert "| llm (36) |" in block.split("family alone")[1] and "| 2.00x | 2.00x |" in block
    assert pages.readme_block(results) == before  # README's figures are of what dispatch chooses


def test_whole_models_have_a_table_and_a_figure(results: Path) -> None:
    assert "Whole models" not in pages.benchmarks_block(results)
    (results / "h200" / "end2end.json").write_text(report.dumps(whole_file()))
    block = pages.benchmarks_block(results)
    assert (
        block.count("| llama ") == 2 and "| images/s | 200 | 100 | 400 | 2.00x | 0.50x |" in block
    )
    assert 'src="figures/h200/end2end.svg"' in block
    data, missing = plot.data_of(results)
    assert not missing and "h200/end2end" in data
    assert len(report.rows_of(results / "h200")) == sum(
        len(json.loads(p.read_text())["rows"]) for p in report.committed(results)
    )  # `compare` reads sets alone


def test_data_of_figures_is_that_of_the_results(results: Path) -> None:
    data, missing = plot.data_of(results)
    assert missing == ["h200/end2end: no end2end.json: python -m bench end2end"]
    assert set(data) == {f"h200/{name}" for name in plot.MAKERS}
    speed = data["h200/speed"]
    titles = [f"{w}, K = {k}" for w in ("forward", "backward") for k in (64, 128, 256)]
    assert [p["title"] for p in speed["panels"]] == titles
    flash = next(line for line in speed["panels"][0]["lines"] if line["name"] == "flash")
    assert flash["x"] == [512, 1024, 2048, 4096, 8192, 16384]
    assert flash["y"] == [2.0 * n for n in flash["x"]]  # as the fixture wrote them
    ends = {line["name"]: line["x"][-1] for line in data["h200/any-k"]["panels"][0]["lines"]}
    assert ends == {"efficient": 1024, "flash": 192, "cudnn": 192, "memeff": 1024}
    scores, *measured = data["h200/memory"]["panels"][0]["lines"]
    assert scores["computed"] and scores["y"][-1] == 16 * 2 * 16384**2 / 2**20
    assert all(line["y"] == line["x"] for line in measured)
    dots = {d["name"]: d["values"] for d in data["h200/overview"]["panels"][0]["dots"]}
    assert dots["language model, K = 64"] == {"efficient": 2.0, "best peer": 0.5}
    assert dots["K = 320 to 1024"] == {"efficient": 2.0, "best peer": 2.0}


def test_missing_results_are_named(
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (results / "h200" / "llm.json").unlink()
    data, missing = plot.data_of(results)
    assert "h200/speed" not in data and "h200/any-k" in data
    assert any("no results of the set 'llm': python -m bench run --set llm" in m for m in missing)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert plot.data_of(empty) == (
        {},
        [f"no results in {empty}: `python -m bench run` on a GPU writes them"],
    )
    monkeypatch.setattr(plot, "data_of", lambda: ({}, ["no results"]))
    monkeypatch.setitem(sys.modules, "bench.figures", None)  # must not be needed for --check
    assert main(["plot", "--check", "--out", str(empty)]) == 0
    assert "left out: no results" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plot", "--out", str(empty)]) == 2
    assert "pip install" in capsys.readouterr().err


@needs_matplotlib
@pytest.mark.parametrize("theme", plot.THEMES)
def test_figures_draw_their_data(results: Path, tmp_path: Path, theme: str) -> None:
    from bench import figures

    (results / "h200" / "end2end.json").write_text(report.dumps(whole_file()))
    data, _ = plot.data_of(results)
    for name, shown in data.items():
        figure = figures.draw(shown, theme)
        assert len(figure.axes) == len(shown["panels"]), name
        for axes, panel in zip(figure.axes, shown["panels"], strict=True):
            drawn = {line.get_gid(): line for line in axes.get_lines() if line.get_gid()}
            for line in (x for x in panel.get("lines", ()) if not x.get("computed")):
                assert list(drawn[line["name"]].get_xdata()) == line["x"]
                assert list(drawn[line["name"]].get_ydata()) == line["y"]
            points = [x for x in axes.get_lines() if str(x.get_gid()).startswith("dot ")]
            wanted = [v for dot in panel.get("dots", ()) for v in dot["values"].values()]
            assert [float(x.get_xdata()[0]) for x in points] == wanted
            widths = [bar.get_width() for bar in axes.patches]
            assert widths == [b["value"] for b in reversed(panel.get("bars", []))]
            texts = {t.get_text() for t in axes.texts}
            names = {figures.NAMES.get(x["name"], x["name"]) for x in panel.get("lines", ())}
            assert names <= texts, "every line has its name at its end"
        path = tmp_path / f"{theme}.svg"
        figures.save(figure, path, json.dumps(shown))
        assert plot.stamp_of(path.read_text()) == shown


@needs_matplotlib
def test_plot_writes_and_notices_what_is_stale(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, _ = plot.data_of(results)
    data = {name: data[name] for name in ("h200/memory", "h200/overview")}
    monkeypatch.setattr(plot, "data_of", lambda: (data, []))
    out = tmp_path / "figures"
    command = ["plot", "--out", str(out)]
    assert main([*command, "--check"]) == 1
    assert "h200/memory.svg is missing: run `python -m bench plot`" in capsys.readouterr().out
    assert main([*command, "--png"]) == 0
    written = sorted(p.name for p in (out / "h200").iterdir())
    names = ("memory", "memory-dark", "overview", "overview-dark")
    assert written == sorted(f"{n}.{end}" for n in names for end in ("svg", "png"))
    assert main([*command, "--check"]) == 0
    before = (out / "h200" / "memory.svg").read_text()
    assert main(command) == 0
    assert (out / "h200" / "memory.svg").read_text() == before, "the same file for the same data"
    data["h200/memory"]["panels"][0]["lines"][1]["y"][0] += 1
    (out / "h200" / "old.svg").write_text("<svg/>")
    found = plot.stale(data, out)
    assert found == [
        "h200/memory.svg draws other numbers than the results",
        "h200/memory-dark.svg draws other numbers than the results",
        "h200/old.svg has no results",
    ]


@needs_matplotlib
def test_labels_are_kept_apart() -> None:
    from bench import figures

    for heights in ([0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.01], [0.1, 0.9]):
        places = figures._apart(heights)
        gaps = [b - a for a, b in pairwise(places)]
        assert min(gaps) >= figures.LABEL_GAP - 0.005 and places[0] >= 0
    assert figures._spaced([8, 24, 96, 192, 320, 384, 512, 1024])[-1] == 1024
