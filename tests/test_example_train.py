"""examples/train_char_lm.py: a few steps of it run, learn, and agree with torch's attention."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "33", "--batch", "4"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "train_char_lm", ROOT / "examples" / "train_char_lm.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(example: ModuleType, device: str, *options: str) -> int:
    return int(example.main(["--device", device, *SMALL, *options]))


def test_it_learns_with_dropout(
    example: ModuleType, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, device, "--steps", "30", "--p", "0.2", "--rate", "0.01") == 0
    shown = capsys.readouterr()
    assert "loss on text not seen" in shown.out and "It writes:" in shown.out
    assert "30/30" in shown.err  # the progress line, tqdm's or our own


def test_losses_are_those_of_torch(
    example: ModuleType, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, device, "--steps", "12", "--p", "0", "--compare") == 0
    assert "1e-03 allowed: passed" in capsys.readouterr().out


def test_a_wrong_gradient_is_found(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = example.torch_sdpa

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
        return right(q, k.detach(), v, p)  # no gradient of the keys

    monkeypatch.setattr(example, "ours", wrong)
    assert run(example, "cpu", "--steps", "60", "--p", "0", "--compare", "--rate", "0.02") == 1
    assert "FAILED" in capsys.readouterr().out


def test_comparing_needs_no_dropout(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match="needs --p 0"):
        run(example, "cpu", "--compare")


def test_the_text_is_long_and_of_few_characters(example: ModuleType) -> None:
    text = example.Text(example.manual(), torch.device("cpu"))
    assert len(text.seen) > 200_000 and len(text.held_out) > 20_000 and len(text.alphabet) < 129
    batch = text.batch(text.seen, example.SIZES["cpu"], torch.Generator().manual_seed(0))
    assert batch.shape == (16, 97)
