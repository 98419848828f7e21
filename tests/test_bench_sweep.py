"""`python -m bench sweep`: which rows are timed, how a choice is judged, and that a run goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

memeff_attn = pytest.importorskip("memeff_attn")
ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import backends, run, shapes, sweep, timing  # noqa: E402
from bench.__main__ import main  # noqa: E402
from memeff_attn import dispatch  # noqa: E402

pytestmark = pytest.mark.skipif(
    dispatch.native()[0] is None or not dispatch.native()[0].variants(),
    reason=f"no list of variants: {dispatch.native()[1]}",
)
H200 = {"sm": 90, "sm_count": 132, "smem_optin": 232448}


def listed(*sets: str) -> list[sweep.Problem]:
    return list(sweep.problems(list(sets or shapes.SETS), list(shapes.PASSES)))


def test_every_cell_and_pass() -> None:
    keys = [p.key for p in listed()]
    assert len(set(keys)) == len(keys)
    cells = [c for s in shapes.SETS for c in shapes.cells(s)]
    assert len(keys) == 2 * len(cells) - sum(c.decoding for c in cells)


@pytest.mark.parametrize("which", shapes.PASSES)
def test_rows_that_are_timed(which: str) -> None:
    """The chosen one first, then every other row of this GPU that runs where it is named."""
    rows = {r["name"]: r for r in dispatch.native()[0].variants()}
    for name in shapes.SETS:
        problem = next(p for p in listed(name) if p.which == which or p.cell.decoding)
        choice = sweep.Choice(problem, H200)
        found = choice.serving()
        assert found[0] == choice.select() and len(set(found)) == len(found)
        for row in (rows[n] for n in found):
            assert row["arch"] in sweep.ARCHS and row["min_sm"] <= 90 <= row["max_sm"]
            dtype = dispatch._DTYPE_NAMES[backends.DTYPES[problem.cell.dtype]]
            assert row["kind"] == problem.which and row["dtype"] == dtype
        assert all(choice.select(n) == n for n in found)


def test_choice_is_what_a_call_would_run() -> None:
    """On tensors with storage, `explain` names the same row."""
    cell = shapes.Cell("x", "fp16", 2, 130, 70, 4, 2, 40, 24, True)
    tensors = sweep.without_storage(cell)
    real = [torch.zeros_like(x, device="cpu") for x in (tensors.query, tensors.key, tensors.value)]
    chosen = sweep.Choice(sweep.Problem(cell, "fwd"), {"sm": 90}).select()
    mask = memeff_attn.LowerTriangularMask()
    assert f"chosen: {chosen} " in memeff_attn.explain(*real, mask, device="sm_90")


def times(of: Callable[[int], float] = lambda place: 1 + place) -> dict[str, Any]:
    """A file of every cell, in which the row that is chosen first takes of(0) ms, the next
    of(1)."""
    rows = []
    for p in listed():
        names = sweep.Choice(p, H200).serving()
        ms = {name: of(i) for i, name in enumerate(names)}
        rows.append({"set": p.key[0], "name": p.key[1], "pass": p.which, "ms": ms})
    return {"meta": {"facts": H200, "source_hash": "x"}, "rows": rows}


def test_judging(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = times()
    assert sweep.judged(content)[1] == 0
    assert {r.ratio for r in sweep.regrets(content)[0]} == {1.0}
    row = content["rows"][0]
    chosen, other, *_ = row["ms"]
    row["ms"][other] = row["ms"][chosen] / 1.04
    assert sweep.judged(content)[1] == 0
    row["ms"][other] = row["ms"][chosen] / 1.06
    text, wrong = sweep.judged(content)
    assert wrong == 1 and f"1.06x  {row['set']} {row['name']}" in text
    assert f"{chosen}, faster is {other}" in text
    del row["ms"][other]  # of a row that was added since
    text, wrong = sweep.judged(content)
    assert (
        wrong == 1 and f"lacks {row['set']} {row['name']} {row['pass']}: no time of {other}" in text
    )
    row["ms"][other], row["ms"]["gone"] = 9.0, 0.1  # one that is no longer listed says nothing
    assert sweep.judged(content)[1] == 0
    content["rows"].remove(row)
    text, wrong = sweep.judged(content)
    assert wrong == 1 and "never timed" in text
    sweep.path_of(tmp_path).write_text(json.dumps(content))
    assert main(["sweep", "--check", "--out", str(tmp_path)]) == 1
    assert "never timed" in capsys.readouterr().out
    sweep.path_of(tmp_path).write_text(json.dumps(times()))
    assert main(["sweep", "--check", "--out", str(tmp_path)]) == 0


class FakeTimer:
    """A call's time is the number it returns, in ms."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.timed: list[tuple[float, list[Any]]] = []

    def warm_up(self) -> None: ...

    def medians(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        found = [call() for call in calls]
        self.timed.append((self.milliseconds, found))
        return found


def fake_gpu(monkeypatch: pytest.MonkeyPatch, ms: Callable[[str], float]) -> None:
    """A GPU whose rows take ms(name)."""

    def make_call(backend: str, *_: object) -> Callable[[], float]:
        taken = ms(backend.removeprefix("memeff:"))
        return lambda: taken

    facts = {"gpu": "NVIDIA H200", "source_hash": "x"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "meta", lambda: facts)
    monkeypatch.setattr(run, "inputs", sweep.without_storage)
    monkeypatch.setattr(timing, "Timer", FakeTimer)
    monkeypatch.setattr(backends, "make_call", make_call)
    monkeypatch.setattr(dispatch, "_gpu_of", lambda device: H200)
    monkeypatch.setattr(sweep, "_once", lambda call: call())


def test_near_rows_are_timed_again_and_hopeless_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"a": 2.0, "b": 2.1, "c": 3.0, "d": 90.0, "e": 1.9}
    fake_gpu(monkeypatch, lambda name: taken[name])
    timer = FakeTimer(2)
    problem = listed("decode")[0]
    found, refused = sweep.times_of(problem, list(taken), None, timer)  # type: ignore[arg-type]
    assert found == taken and refused == {}
    assert timer.timed == [(2, [2.0, 2.1, 3.0, 1.9]), (2 * sweep.LONGER, [2.0, 2.1, 1.9])]
    assert timer.milliseconds == 2
    taken = {"a": 40.0, "b": 41.0, "c": 90.0}  # long calls: a few of each are enough
    timer = FakeTimer(2)
    assert sweep.times_of(problem, list(taken), None, timer)[0] == taken  # type: ignore[arg-type]
    assert timer.timed == [(2, [40.0, 41.0])]


def test_a_row_that_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = listed("decode")[0]
    bad = sweep.Choice(problem, H200).serving()[1]

    def ms(name: str) -> float:
        if name == bad:
            raise NotImplementedError("not this one")
        return 1.0

    fake_gpu(monkeypatch, ms)
    assert main(["sweep", "--set", "decode", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"{bad} refused: not this one" in out and f"no time of {bad}" in out


def test_a_run_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def ms(name: str) -> float:
        asked.append(name)
        return float(len(asked))

    def failing(name: str) -> float:
        raise RuntimeError("CUDA error: an illegal memory access")

    fake_gpu(monkeypatch, ms)
    assert main(["sweep", "--set", "fp32", "--pass", "fwd", "--out", str(tmp_path)]) == 1
    first = json.loads(sweep.path_of(tmp_path).read_text())
    assert len(first["rows"]) == 6 and first["meta"]["facts"] == H200
    monkeypatch.setattr(backends, "make_call", lambda backend, *_: failing(backend))
    assert main(["sweep", "--out", str(tmp_path)]) == 1  # what is there stays
    assert "stopped: llm" in capsys.readouterr().out
    assert json.loads(sweep.path_of(tmp_path).read_text()) == first
    fake_gpu(monkeypatch, ms)
    before = len(asked)
    assert main(["sweep", "--set", "fp32", "--out", str(tmp_path)]) == 1
    second = json.loads(sweep.path_of(tmp_path).read_text())
    assert len(second["rows"]) == 12 and len(asked) > before
    assert [r for r in second["rows"] if r["pass"] == "fwd"] == first["rows"]
    fake_gpu(monkeypatch, lambda name: 1.0)
    monkeypatch.setattr(run, "meta", lambda: {"gpu": "NVIDIA H200", "source_hash": "other"})
    assert main(["sweep", "--out", str(tmp_path)]) == 0
    assert "of other sources" in capsys.readouterr().out
    assert len(json.loads(sweep.path_of(tmp_path).read_text())["rows"]) == len(listed())


def test_refusals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["sweep"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert main(["sweep", "--pass", "sideways"]) == 2
    monkeypatch.setattr(sweep, "committed", lambda: [])
    assert main(["sweep", "--check"]) == 2
    assert "no sweep.json" in capsys.readouterr().err
