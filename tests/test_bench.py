"""The benchmark's own rules: which cells, what a result file must hold, how files are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import backends, oracle, report, shapes  # noqa: E402
from bench.__main__ import main  # noqa: E402

META = dict.fromkeys(report.META, "x") | {"sm": 90, "versions": {"torch": "x"}}
FIGURES = dict.fromkeys(report.FIGURES, 1.0)


def result(name: str, sm: int = 90) -> dict:
    """A complete result file of a set."""
    listed = shapes.expected(name, shapes.PASSES, backends.DEFAULT, sm)
    rows = [cell.row(which, backend, **FIGURES) for cell, which, backend in listed]
    return {"meta": {**META, "sm": sm}, "rows": rows}


def test_sets_and_cells() -> None:
    sizes = {name: len(shapes.cells(name)) for name in shapes.SETS}
    assert sizes == {"llm": 36, "vision": 19, "anyk": 8, "fp32": 6, "clients": 5}
    for name in shapes.SETS:
        names = [c.name for c in shapes.cells(name)]
        assert len(set(names)) == len(names)
    listed = json.loads(shapes.CELLS.read_text())
    assert set(listed) == {*shapes.SETS, *shapes.LATER}


@pytest.mark.parametrize("name", shapes.LATER)
def test_sets_of_later_work_say_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--set", name]) == 2
    assert "not served yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--pass", "bwd"], ["--backends", "fa4"], ["--backends", "nothing"], ["--set", "nothing"]],
)
def test_refusals(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert "bench:" in capsys.readouterr().err


def test_work_counted() -> None:
    full = shapes.Cell("x", "bf16", 2, 100, 60, 3, 3, 64, 64, False)
    assert full.flop == 4 * 2 * 3 * 100 * 60 * 64
    assert full.bytes == 2 * (2 * 2 * 100 * 3 * 64 + 2 * 2 * 60 * 3 * 64)
    causal = shapes.Cell("x", "bf16", 2, 100, 100, 3, 3, 64, 64, True)
    assert causal.flop == 4 * 2 * 3 * 100 * 100 * 64 / 2


@pytest.mark.parametrize("name", shapes.SETS)
def test_result_file_must_be_complete(name: str) -> None:
    whole = result(name)
    assert report.problems(whole, name) == []
    for dropped in range(len(whole["rows"])):
        rows = [r for i, r in enumerate(whole["rows"]) if i != dropped]
        found = report.problems({**whole, "rows": rows}, name)
        assert len(found) == 1 and whole["rows"][dropped]["backend"] in found[0]
    assert report.problems({**whole, "meta": {**whole["meta"], "stale": True}}, name)
    for field in report.META:
        less = {f: v for f, v in whole["meta"].items() if f != field}
        assert report.problems({**whole, "meta": less}, name)


def test_errors_are_allowed_to_peers_only(tmp_path: Path) -> None:
    for backend in backends.DEFAULT:
        content = result("clients")
        row = next(r for r in content["rows"] if r["backend"] == backend)
        row.update(ms=None, error="refused")
        assert bool(report.problems(content, "clients")) == backends.is_ours(backend)
        row.update(error="")
        assert report.problems(content, "clients")
    content = result("clients")
    content["rows"][0]["wrong"] = "max error"
    path = tmp_path / "clients.json"
    path.write_text(report.dumps(content))
    with pytest.raises(ValueError, match="refused: wrong result of memeff"):
        report.checked(path)


def test_who_serves_what() -> None:
    wide = next(c for c in shapes.cells("anyk") if c.K == 512)
    single = shapes.cells("fp32")[0]
    usual = shapes.cells("llm")[0]
    for peer in ("flash", "cudnn"):
        assert backends.not_served(peer, wide, 90)
        assert backends.not_served(peer, single, 90)
        assert backends.not_served(peer, usual, 75)
        assert not backends.not_served(peer, usual, 90)
    for backend in ("memeff", "memeff-chained", "efficient"):
        assert not any(backends.not_served(backend, c, 70) for c in (wide, single, usual))


def test_committed_results_are_complete() -> None:
    for path in report.committed():
        report.checked(path)


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = result("clients"), result("clients")
    mine = [r for r in after["rows"] if r["backend"] == "memeff"]
    mine[0]["ms"], mine[1]["ms"], mine[2]["ms"] = 1.04, 0.9, 1.02
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(paths, (before, after), strict=True):
        path.write_text(report.dumps(content))
    assert main(["compare", *map(str, paths)]) == 1
    text = capsys.readouterr().out
    assert text.count("slower") == 1 and text.count("faster") == 1
    assert main(["compare", str(paths[0]), str(paths[0])]) == 0


def test_summary_ratios() -> None:
    content = result("anyk")
    for row in content["rows"]:
        row["ms"] = {"memeff": 1.0, "efficient": 2.0, "flash": 0.5, "cudnn": 0.8}[row["backend"]]
    table = report.groups(content["rows"])
    assert set(table) == {"anyk K<=256", "anyk K=320..512", "anyk K=1024"}
    assert table["anyk K<=256"]["over best"] == pytest.approx(0.5)
    assert table["anyk K=1024"]["over best"] == pytest.approx(2.0)
    assert all(line["over efficient"] == pytest.approx(2.0) for line in table.values())
    assert "flash" not in table["anyk K=1024"]
    assert "1.00" not in report.summary(content["rows"]).splitlines()[-1]


def test_readme_block_of_results(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "clients.json").write_text(report.dumps(result("clients")))
    block = report.readme_block(tmp_path)
    assert "| clients (5) | 1 | 1 |" in block
    text = f"a\n{report.BEGIN}\nold\n{report.END}\nb\n"
    assert report.readme_text(text, tmp_path) == f"a\n{report.BEGIN}\n{block}\n{report.END}\nb\n"


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_passes_right_and_catches_wrong(causal: bool) -> None:
    cell = shapes.Cell("x", "bf16", 2, 70, 70, 3, 3, 16, 16, causal)
    q, k, v = (torch.randn(2, 70, 3, 16, dtype=torch.bfloat16) for _ in range(3))
    found = oracle.sample(cell, q, k, v)
    right = oracle.tolerance().plain_attention(q, k, v, causal=int(causal))[0].bfloat16()
    error, broken = found.error(right)
    assert not broken and error < 0.01
    right[1, -1, 2] += 0.1  # one row of the sampled last head
    assert found.error(right)[1]


def test_host_cost_runs_on_the_cpu() -> None:
    from bench import host

    if torch.cuda.is_available():
        pytest.skip("the GPU part is a benchmark: python -m bench host")
    assert host.cost(lambda: None, lambda: None)[0] < 1000


def test_help_needs_no_gpu() -> None:
    command = [sys.executable, "-m", "bench", "run", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--backends" in done.stdout


class StubTimer:
    def __init__(self, milliseconds: float) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def medians(self, calls: list) -> list[float]:
        return [0.5 for call in calls if call() is not None]


@pytest.fixture
def cpu_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`bench run` with the GPU's parts replaced: small cells on the CPU, one peer that fails."""
    from bench import run

    def call(backend: str, cell: shapes.Cell, *qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
        def failing() -> torch.Tensor:
            raise RuntimeError("no such kernel")

        def plain() -> torch.Tensor:
            exact = oracle.tolerance().plain_attention(*qkv, causal=int(cell.causal))[0]
            return exact.half() + (backend == "memeff-wrong")

        return failing if backend == "flash" else plain

    small = [shapes.Cell("clients", "fp16", 1, m, 40, 2, 2, 16, 16, m == 40) for m in (30, 40)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shapes, "cells", lambda name: small)
    monkeypatch.setattr(backends, "make_call", call)
    monkeypatch.setattr(run, "Timer", StubTimer)
    monkeypatch.setattr(run, "meta", lambda: META | {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(run, "peak_mib", lambda call: 1.0)
    monkeypatch.setattr(
        run,
        "inputs",
        lambda c: tuple(
            torch.randn(c.B, n, c.H, c.K, dtype=torch.float16) for n in (c.M, c.N, c.N)
        ),
    )
    return tmp_path


def test_run_writes_a_complete_file(
    cpu_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "--set", "clients", "--out", str(cpu_run)]) == 0
    content = report.checked(cpu_run / "clients.json")
    assert [r["backend"] for r in content["rows"]] == 2 * list(backends.DEFAULT)
    assert {r.get("error") for r in content["rows"]} == {None, "no such kernel"}
    text = capsys.readouterr().out
    assert "failed flash" in text and "ours / efficient" in text
    # A subset of the backends, or a budget that ends early, gives a file that says it is partial.
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**6, 50)).__next__)
    short = ["--out", str(cpu_run / "short")]
    assert main(["run", "--set", "clients", *short, "--budget", "120"]) == 1
    assert main(["run", "--set", "clients", *short, "--backends", "memeff"]) == 1
    assert [p.name for p in (cpu_run / "short").iterdir()] == ["clients.partial.json"]


def test_run_keeps_what_it_has_when_cuda_fails(
    cpu_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import run

    whole = run.run_cell

    def fails_later(cell: shapes.Cell, *args: object) -> list:
        if cell.causal:
            raise RuntimeError("CUDA error: illegal address")
        return whole(cell, *args)

    monkeypatch.setattr(run, "run_cell", fails_later)
    assert main(["run", "--set", "clients", "--out", str(cpu_run)]) == 1
    assert len(report.rows_of(cpu_run / "clients.partial.json")) == len(backends.DEFAULT)
    assert "illegal address" in capsys.readouterr().out


def test_run_says_what_is_wrong(cpu_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ",".join([*backends.DEFAULT, "memeff-wrong"])
    assert main(["run", "--set", "clients", "--out", str(cpu_run), "--backends", names]) == 1
    assert capsys.readouterr().out.count("WRONG RESULT memeff-wrong") == 2
