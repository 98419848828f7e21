"""The benchmark's own rules: which cells, what a result file must hold, how files are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from math import inf
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


def result(name: str, sm: int = 90, passes: tuple[str, ...] = shapes.PASSES) -> dict:
    """A complete result file of a set."""
    listed = shapes.expected(name, passes, backends.DEFAULT, sm)
    rows = [cell.row(which, backend, **FIGURES) for cell, which, backend in listed]
    dates = dict.fromkeys(passes, META["date"])
    return {"meta": {**META, "sm": sm, "passes": list(passes), "dates": dates}, "rows": rows}


def test_sets_and_cells() -> None:
    sizes = {name: len(shapes.cells(name)) for name in shapes.SETS}
    counts = {"llm": 36, "vision": 19, "anyk": 8, "fp32": 6, "tf32": 6}
    assert sizes == {**counts, "clients": 5, "features": 5, "varlen": 2, "decode": 4}
    for name in shapes.SETS:
        names = [c.name for c in shapes.cells(name)]
        assert len(set(names)) == len(names)
    listed = json.loads(shapes.CELLS.read_text())
    assert {name: len(cells) for name, cells in listed.items()} == sizes


def test_cells_with_features() -> None:
    cells = {c.label: c for c in shapes.cells("features")}
    assert list(cells) == ["bias", "bias_row", "evoformer", "dropout", "window512"]
    assert cells["bias"].bias_shape == (4, 16, 2048, 2048)
    assert cells["evoformer"].bias_shape == (1, 3, 512, 512)
    assert cells["dropout"].p == 0.1 and cells["dropout"].bias_shape is None
    assert cells["evoformer"].name.startswith("evoformer: bf16 B864")
    assert cells["evoformer"].groups == ["features evoformer", "features"]
    for cell in cells.values():
        assert shapes.cell_of(cell.row("fwd", "memeff")) == cell
    old = {k: v for k, v in shapes.cells("llm")[0].row("fwd", "memeff").items() if k != "label"}
    assert shapes.cell_of(old) == shapes.cells("llm")[0]
    assert "anyk K>256" in next(c for c in shapes.cells("anyk") if c.K == 320).groups


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pass", "sideways"],
        ["--backends", "nothing"],
        ["--backends", "memeff-nothing"],
        ["--set", "nothing"],
    ],
)
def test_refusals(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert "bench:" in capsys.readouterr().err


def test_work_counted() -> None:
    full = shapes.Cell("x", "bf16", 2, 100, 60, 3, 3, 64, 64, False)
    assert full.flop() == 4 * 2 * 3 * 100 * 60 * 64
    assert full.flop("bwd") == 2.5 * full.flop()
    assert full.bytes() == 2 * (2 * 2 * 100 * 3 * 64 + 2 * 2 * 60 * 3 * 64)
    # query, output, their gradients; key, value, their gradients
    assert full.bytes("bwd") == 2 * (4 * 2 * 100 * 3 * 64 + 4 * 2 * 60 * 3 * 64)
    causal = shapes.Cell("x", "bf16", 2, 100, 100, 3, 3, 64, 64, True)
    assert causal.flop() == 4 * 2 * 3 * 100 * 100 * 64 / 2
    biased = shapes.Cell("x", "bf16", 2, 100, 60, 3, 3, 64, 64, False, "1,H,M,N")
    assert biased.bytes() == full.bytes() + 2 * 3 * 100 * 60


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


def test_a_file_is_complete_for_the_passes_it_claims() -> None:
    for passes in (("fwd",), ("bwd",), ("fwd", "bwd")):
        assert report.problems(result("anyk", passes=passes), "anyk") == []
    forward = result("anyk", passes=("fwd",))
    forward["meta"]["passes"] = ["fwd", "bwd"]
    assert any("bwd" in line for line in report.problems(forward, "anyk"))
    both = result("anyk")
    both["meta"]["passes"] = ["fwd"]
    assert report.problems(both, "anyk") == ["rows of bwd, which meta does not claim"]
    del both["meta"]["passes"]
    assert report.problems(both, "anyk")


def test_a_run_of_one_pass_keeps_the_rows_of_the_other() -> None:
    old, new = result("clients", passes=("fwd",)), result("clients", passes=("bwd",))
    old["meta"]["dates"], new["meta"]["dates"] = {"fwd": "before"}, {"bwd": "now"}
    content, left = report.merged(old, new)
    assert not left and report.problems(content, "clients") == []
    assert content["meta"]["passes"] == ["fwd", "bwd"]
    assert content["meta"]["dates"] == {"fwd": "before", "bwd": "now"}
    again, left = report.merged(content, result("clients", passes=("fwd",)))  # newer rows replace
    assert not left and len(again["rows"]) == len(content["rows"])
    assert again["meta"]["dates"] == {"fwd": META["date"], "bwd": "now"}
    # Rows of other sources, or of another GPU, do not mix.
    for field in ("source_hash", "gpu"):
        other = {**old, "meta": {**old["meta"], field: "y"}}
        content, left = report.merged(other, new)
        assert content["meta"]["passes"] == ["bwd"] and field in left
        assert report.problems(content, "clients") == []
    stale = {**old, "meta": {**old["meta"], "stale": True}}
    assert report.merged(stale, new)[0]["meta"]["passes"] == ["bwd"]


def test_errors_are_allowed_to_peers_only(tmp_path: Path) -> None:
    for backend in ("memeff", *backends.PEERS):
        content = result("clients")
        row = next(r for r in content["rows"] if r["backend"] == backend)
        row.update(ms=None, error="refused")
        assert bool(report.problems(content, "clients")) == backends.is_ours(backend)
        row.update(error="")
        assert report.problems(content, "clients")
    content = result("features")
    for row in content["rows"]:
        if row["p"] and row["backend"] in backends.PEERS:
            del row["err"]
            assert report.problems(content, "features")
            row["unchecked"] = "its mask is not known"
    assert report.problems(content, "features") == []
    content["rows"][0].update(err=None, unchecked="ours is always checked")
    assert report.problems(content, "features")
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
    features = {c.label: c for c in shapes.cells("features")}
    for peer in ("flash", "cudnn"):
        assert backends.not_served(peer, wide, 90)
        assert backends.not_served(peer, single, 90)
        assert backends.not_served(peer, usual, 75)
        assert not backends.not_served(peer, usual, 90)
        for which in shapes.PASSES:
            assert not backends.not_served(peer, features["dropout"], 90, which)
        assert backends.not_served(peer, features["evoformer"], 90, "bwd")
    assert backends.not_served("flash", features["bias"], 90, "fwd")
    assert not backends.not_served("cudnn", features["bias"], 90, "fwd")
    for backend in ("memeff", "memeff-chained", "efficient"):
        for cell in (wide, single, usual, *features.values()):
            assert not any(backends.not_served(backend, cell, 70, w) for w in shapes.PASSES)
    text = report.not_served({"features": list(features.values())}, ["bwd"], ["flash"], 90)
    assert text == "not served: flash, features bwd, 3 of 5 cells: no additive bias\n"


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


@pytest.mark.parametrize("which", shapes.PASSES)
def test_summary_ratios(which: str) -> None:
    content = result("anyk")
    for row in content["rows"]:
        row["ms"] = {"memeff": 1.0, "efficient": 2.0, "flash": 0.5, "cudnn": 0.8}[row["backend"]]
        row["ms"] *= 1 if row["pass"] == which else 100 if row["backend"] == "memeff" else 1
    table = report.groups(content["rows"], which=which)
    assert set(table) == {"anyk K<=256", "anyk K=320..512", "anyk K=1024", "anyk K>256"}
    assert table["anyk K<=256"]["over best"] == pytest.approx(0.5)
    assert table["anyk K=1024"]["over best"] == pytest.approx(2.0)
    assert table["anyk K>256"]["cells"] == 4
    assert all(line["over efficient"] == pytest.approx(2.0) for line in table.values())
    assert "flash" not in table["anyk K=1024"]
    other = "bwd" if which == "fwd" else "fwd"
    assert report.slower(content["rows"], "memeff", which) == []
    slow = report.slower(content["rows"], "memeff", other)
    assert len(slow) == len(shapes.cells("anyk")) and slow[0].endswith("K8: 0.02x")
    text = report.summary(content["rows"])
    assert f"slower than efficient, {report.PASS_NAMES[which].lower()}: 0 cells" in text
    assert f"slower than efficient, {report.PASS_NAMES[other].lower()}: 8 cells" in text


def tensors_of(cell: shapes.Cell) -> backends.Tensors:
    dtype = backends.DTYPES[cell.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    return backends.Tensors(
        normal(cell.B, cell.M, cell.H, cell.K),
        normal(cell.B, cell.N, cell.Hkv, cell.K),
        normal(cell.B, cell.N, cell.Hkv, cell.Kv),
        normal(*cell.bias_shape) if cell.bias_shape else None,
        normal(cell.B, cell.M, cell.H, cell.Kv),
    )


def plain(cell: shapes.Cell, tensors: backends.Tensors, keep: torch.Tensor | None) -> torch.Tensor:
    """Attention in fp64 as a user would write it, [B, M, H, Kv]."""
    q, k, v = (x.double().transpose(1, 2) for x in (tensors.query, tensors.key, tensors.value))
    scores = q @ k.transpose(-1, -2) * cell.K**-0.5
    if tensors.bias is not None:
        scores = scores + tensors.bias.double()
    if cell.causal:
        hidden = torch.ones(cell.M, cell.N, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -inf)
    weights = torch.softmax(scores, -1)
    if keep is not None:
        weights = weights * keep / (1 - KEEP_P)
    return (weights @ v).transpose(1, 2)


KEEP_P = 0.25
CHECKED = {
    "plain": shapes.Cell("x", "bf16", 2, 70, 70, 3, 3, 16, 16, False),
    "causal": shapes.Cell("x", "bf16", 2, 70, 70, 3, 3, 16, 16, True),
    "fp32, other N and Kv": shapes.Cell("x", "fp32", 1, 90, 75, 1, 1, 16, 24, False),
    "bias": shapes.Cell("x", "fp16", 2, 80, 72, 3, 3, 16, 16, False, "B,H,M,N"),
    "shared bias": shapes.Cell("x", "fp16", 5, 80, 72, 3, 3, 16, 16, False, "1,H,M,N"),
    "dropout": shapes.Cell("x", "fp16", 2, 80, 72, 3, 3, 16, 16, False, None, KEEP_P),
}


@pytest.mark.parametrize("label", CHECKED)
def test_oracle_passes_right_and_catches_wrong(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = CHECKED[label]
    tensors = tensors_of(cell)
    monkeypatch.setitem(oracle.tolerance().MAX_SCORES, "cpu", 70 * 100)  # several blocks
    keep, kept = None, (None, 1.0)
    if cell.p:
        keep = torch.rand(cell.B, cell.H, cell.M, cell.N) > KEEP_P
        pairs = oracle.pairs_of(cell)
        kept = (torch.stack([keep[b, h] for b, h in pairs]), 1 / (1 - KEEP_P))
    found = oracle.sample(cell, tensors, ["fwd", "bwd"], dropout=kept)
    leaves = tensors.leaves()
    exact = plain(cell, leaves, keep)
    grads = torch.autograd.grad(exact, leaves.wanted(), tensors.grad_out.double())
    right = exact.detach().to(tensors.query.dtype)
    error, broken = found.error(right)
    assert not broken and error < 0.01
    right[-1, -1, cell.H - 1] += 0.1  # one row of the sampled last head
    assert found.error(right)[1]
    error, broken = found.gradient_error(grads)
    assert not broken and error < 0.01, broken
    assert len(grads) == len(found.gradients)
    for i, name in enumerate(oracle.GRADIENTS[: len(grads)]):
        wrong = [g.clone() for g in grads]
        wrong[i][-1, -1, cell.H - 1] += 1.0  # a row (or a bias' head) of the last pair
        if name == "grad_bias":
            wrong[i][-1, cell.H - 1, -1] += 1.0
        broken = found.gradient_error(tuple(wrong))[1]
        assert broken and all(line.startswith(name) for line in broken)


def test_dropout_mask_is_that_of_the_next_call() -> None:
    import memeff_attn

    cell = CHECKED["dropout"]
    tensors = tensors_of(cell)
    pairs = oracle.pairs_of(cell)
    kept, scale = oracle.dropout_of(cell, pairs, 7, torch.device("cpu"))
    assert kept is not None and abs(float(kept.double().mean()) - 1 + KEEP_P) < 0.05
    assert scale == pytest.approx(1 / (1 - KEEP_P))
    found = oracle.sample(cell, tensors, ["fwd"], seed=7)
    torch.manual_seed(7)
    out = memeff_attn.memory_efficient_attention(
        tensors.query, tensors.key, tensors.value, p=KEEP_P
    )
    assert not found.error(out)[1]


def test_backward_call_is_the_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = CHECKED["shared bias"]
    tensors = tensors_of(cell)
    ran = []

    def forward(backend: str, cell: shapes.Cell, given: backends.Tensors) -> Callable:
        def call() -> torch.Tensor:
            ran.append(backend)
            return plain(cell, given, None)

        return call

    monkeypatch.setattr(backends, "_peer", forward)
    call = backends.make_call("efficient", cell, tensors, "bwd")
    first, second = call(), call()
    assert ran == ["efficient"]
    assert [tuple(g.shape) for g in first] == [tuple(x.shape) for x in tensors.wanted()]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not tensors.query.requires_grad


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


SMALL = [
    shapes.Cell("features", "fp16", 1, m, 40, 2, 2, 16, 16, m == 40, bias)
    for m, bias in ((30, "1,H,M,N"), (40, None))
]


@pytest.fixture
def cpu_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`bench run` with the GPU's parts replaced: small cells on the CPU, one peer that fails."""
    from bench import run

    def call(backend: str, cell: shapes.Cell, given: backends.Tensors, which: str) -> Callable:
        wrong = backend == "memeff-wrong"

        def forward() -> torch.Tensor:
            if backend == "flash":
                raise RuntimeError("no such kernel")
            return plain(cell, given, None).half() + wrong

        def backward() -> tuple[torch.Tensor, ...]:
            if backend == "flash":
                raise RuntimeError("no such kernel")
            leaves = given.leaves()
            grads = torch.autograd.grad(
                plain(cell, leaves, None), leaves.wanted(), given.grad_out.double()
            )
            return tuple(g + wrong for g in grads)

        return forward if which == "fwd" else backward

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shapes, "cells", lambda name: SMALL)
    monkeypatch.setattr(backends, "make_call", call)
    monkeypatch.setattr(run, "Timer", StubTimer)
    monkeypatch.setattr(run, "meta", lambda: META | {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(run, "with_peak_mib", lambda call: (call(), 1.0))
    monkeypatch.setattr(run, "inputs", tensors_of)
    return tmp_path


def test_run_writes_a_complete_file(
    cpu_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "--set", "features", "--out", str(cpu_run)]) == 0
    content = report.checked(cpu_run / "features.json")
    with_bias = ["memeff", "efficient", "cudnn", "memeff", "efficient"]
    plain_cell = ["memeff", *backends.PEERS]
    assert [r["backend"] for r in content["rows"]] == [*with_bias, *(2 * plain_cell)]
    assert {r.get("error") for r in content["rows"]} == {None, "no such kernel"}
    assert all(r["tflops"] > 0 for r in content["rows"] if r["ms"])
    text = capsys.readouterr().out
    assert "failed flash" in text and text.count("ours / efficient") == 2
    assert "not served: cudnn, features bwd, 1 of 2 cells: no gradient of a bias" in text
    # A subset of the backends, or a budget that ends early, gives a file that says it is partial.
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**6, 50)).__next__)
    short = ["--out", str(cpu_run / "short")]
    assert main(["run", "--set", "features", *short, "--budget", "120"]) == 1
    assert main(["run", "--set", "features", *short, "--backends", "memeff"]) == 1
    assert [p.name for p in (cpu_run / "short").iterdir()] == ["features.partial.json"]


def test_run_of_one_pass_after_the_other(
    cpu_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import run

    path = cpu_run / "features.json"
    command = ["run", "--set", "features", "--out", str(cpu_run)]
    assert main([*command, "--pass", "fwd"]) == 0
    forward = report.rows_of(path)
    assert main([*command, "--pass", "bwd"]) == 0
    both = report.checked(path)
    assert both["meta"]["passes"] == ["fwd", "bwd"]
    assert [r for r in both["rows"] if r["pass"] == "fwd"] == forward
    # A partial run does not touch the file; other sources replace it, and the run says so.
    before = path.read_text()
    assert main([*command, "--pass", "bwd", "--backends", "memeff"]) == 1
    assert path.read_text() == before
    other = META | {"gpu": "NVIDIA H200", "source_hash": "y"}
    monkeypatch.setattr(run, "meta", lambda: other)
    capsys.readouterr()
    assert main([*command, "--pass", "bwd"]) == 0
    assert report.checked(path)["meta"]["passes"] == ["bwd"]
    assert "rows of fwd: source_hash differ" in capsys.readouterr().out


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
    assert main(["run", "--set", "features", "--out", str(cpu_run), "--pass", "fwd"]) == 1
    assert len(report.rows_of(cpu_run / "features.partial.json")) == 3
    assert "illegal address" in capsys.readouterr().out


def test_run_says_what_is_wrong(
    cpu_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "families", lambda which="fwd": {"wrong": None})
    monkeypatch.setattr(backends, "_has_row", lambda *asked: True)
    names = ",".join([*backends.DEFAULT, "memeff-wrong"])
    assert main(["run", "--set", "features", "--out", str(cpu_run), "--backends", names]) == 1
    text = capsys.readouterr().out
    assert text.count("WRONG RESULT memeff-wrong") == 4
    assert "fwd: sampled rows" in text and "bwd: grad_query" in text


def test_peers_with_dropout_are_timed_unchecked() -> None:
    from bench import run

    cell = CHECKED["dropout"]
    assert run.checkable("memeff-chained", cell) and not run.checkable("efficient", cell)
    assert run.checkable("efficient", CHECKED["bias"])
