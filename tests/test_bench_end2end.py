"""`python -m bench end2end`: whole models, what their result file holds, and wrong attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import end2end, models
from bench.__main__ import main

SPEEDS = {"memeff": 200.0, "efficient": 100.0, "sdpa": 400.0}


def whole_file() -> dict[str, Any]:
    """A complete result file of full models."""
    rows = []
    for name, kind in models.MODELS.items():
        for which in end2end.PASSES:
            for attention, speed in SPEEDS.items():
                row = {"model": name, "shape": models.SIZES["full"][name].text, "dtype": "bf16"}
                row |= {"pass": which, "attention": attention, "unit": kind.unit, "ms": 1.0}
                rows.append(row | {"speed": speed, "peak_mib": 1.0, "err": 0.001})
    meta = {"gpu": "x", "versions": {"torch": "x"}, "date": "2026-11-30", "size": "full"}
    return {"meta": meta, "rows": rows}


needs_groups = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5),
    reason="SDPA takes shared key heads from torch 2.5 on",
)


@needs_groups
def test_a_whole_run(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "end2end.json"
    dtype, limit = ("fp32", 1e-4) if device == "cpu" else ("bf16", 0.1)
    command = ["end2end", "--device", device, "--size", "tiny", "--steps", "1", "--dtype", dtype]
    assert main([*command, "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    assert end2end.problems(content) == []
    rows = {(r["model"], r["pass"], r["attention"]): r for r in content["rows"]}
    assert len(rows) == len(models.MODELS) * len(end2end.PASSES) * len(models.ATTENTION)
    for (model, _, attention), row in rows.items():
        if attention == "efficient" and device == "cpu":  # PyTorch has that kernel on GPUs alone
            assert row["ms"] is None and row["error"]
            continue
        size = models.SIZES["tiny"][model]
        units = size.batch * (size.tokens if model == "llama" else 1)
        assert row["speed"] == pytest.approx(units / row["ms"] * 1e3, rel=1e-3)
        assert 0 < row["err"] < limit and "wrong" not in row
        assert (row["peak_mib"] is None) == (device == "cpu")
    text = capsys.readouterr().out
    assert "training step" in text
    assert ("failed efficient, llama fwd" in text) == (device == "cpu")
    with pytest.raises(ValueError, match="small models, which say nothing of speed"):
        end2end.checked(path)


def test_our_kernels_are_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    import memeff_attn

    calls = []
    ours = memeff_attn.memory_efficient_attention

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args[3])
        return ours(*args)

    monkeypatch.setattr(memeff_attn, "memory_efficient_attention", counted)
    for name, kind in models.MODELS.items():
        size = models.SIZES["tiny"][name]
        model = kind(size)
        model.attention = models.ATTENTION["memeff"]
        out, loss = model(*model.batch(size, torch.device("cpu"), 0))
        assert torch.isfinite(out).all() and float(loss.detach()) > 0
    assert len(calls) == sum(models.SIZES["tiny"][name].layers for name in models.MODELS)
    assert [mask is not None for mask in calls] == [True, True, False, False]  # llama is causal


@needs_groups
@pytest.mark.parametrize("name", models.MODELS)
def test_wrong_attention_is_caught(name: str) -> None:
    size = models.SIZES["tiny"][name]
    judged = end2end.check(models.MODELS[name], size, torch.device("cpu"), torch.float32)
    assert judged(models.sdpa)[1] == [] and judged(models.memeff)[1] == []

    def other_scale(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        return models.plain(q * 1.01, k, v, causal)

    def other_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return models.plain(q, k, v, not causal)

    for attention in (other_scale, other_mask):
        _, broken = judged(attention)
        assert any(line.startswith("output") for line in broken)
        assert any(line.startswith("gradient of qkv") for line in broken)


def test_a_file_must_be_whole() -> None:
    assert end2end.problems(whole_file()) == []
    for dropped in range(len(whole_file()["rows"])):
        content = whole_file()
        row = content["rows"].pop(dropped)
        assert end2end.problems(content) == [
            f"no row for {row['attention']}, {row['model']} {row['pass']}"
        ]
    for attention in SPEEDS:
        content = whole_file()
        row = next(r for r in content["rows"] if r["attention"] == attention)
        row.update(ms=None, error="refused")
        assert bool(end2end.problems(content)) == (attention == "memeff")
    content = whole_file()
    content["rows"][0]["wrong"] = "max error"
    content["meta"]["stale"] = True
    found = end2end.problems(content)
    assert "wrong result of memeff, llama fwd: max error" in found and len(found) == 2


def test_ratios_and_table() -> None:
    rows = whole_file()["rows"]
    lines = end2end.table(rows)
    assert len(lines) == len(models.MODELS) * len(end2end.PASSES)
    assert all(line[3:] == ["200", "100", "400", "2.00x", "0.50x"] for line in lines)
    rows[1]["ms"] = None
    assert end2end.table(rows)[0][4] == "-" and end2end.table(rows)[0][6] == "-"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "gpt"], "no model 'gpt'; there are llama, vit"),
        (["--attention", "flash"], "no attention 'flash'; there are memeff, efficient, sdpa"),
        (["--dtype", "int8"], "no dtype 'int8'; there are fp16, bf16, fp32"),
        (["--steps", "0"], "at least one step"),
    ],
)
def test_refusals(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["end2end", "--device", "cpu", "--size", "tiny", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_without_a_gpu_it_says_what_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["end2end"]) == 2
    assert "--device cpu --size tiny" in capsys.readouterr().err
