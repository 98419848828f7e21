"""`make docs`: what is refused, how a docstring reads on the page, and the build where pdoc is."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

import memeff_attn

ROOT = Path(__file__).resolve().parents[1]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / "build_tools" / "api_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api_docs = load()

GOOD = """out = f(x), exactly.

    Shapes:
        query [B, M]; * stays
        as it is.
    Dtypes: float16 or
        float32.
    Args:
        bias: None, or a tensor
            of many.
        p: a probability.
    Raises: ValueError where x is bad.
    """


def test_a_docstring_as_markdown() -> None:
    assert api_docs.as_markdown(GOOD).split("\n\n") == [
        "out = f(x), exactly.",
        "**Shapes**: query [B, M]; * stays\nas it is.",
        "**Dtypes**: float16 or\nfloat32.",
        "**Args**",
        "- `bias`: None, or a tensor\n    of many.\n- `p`: a probability.",
        "**Raises**: ValueError where x is bad.\n",
    ]
    assert api_docs.as_markdown("One sentence.") == "One sentence.\n"
    assert api_docs.sections_of("Text.\n\nShapes, Args: as there.") == ["Shapes", "Args"]


def test_faults_of_docstrings() -> None:
    module: Any = types.ModuleType("made_up", "A module.")

    def good() -> None: ...
    def silent() -> None: ...
    def mixed() -> None: ...

    good.__doc__, mixed.__doc__ = GOOD, "Text.\n\nRaises: never.\nArgs: none.\n"
    module.__all__ = ["good", "mixed", "silent"]
    module.good, module.silent, module.mixed = good, silent, mixed
    wanted = ", ".join(api_docs.SECTIONS)
    assert api_docs.faults(module) == [
        f"made_up.mixed: its sections are not in the order {wanted}",
        "made_up.silent: no docstring",
    ]
    module.__doc__ = None
    assert "made_up: no docstring" in api_docs.faults(module)


def test_the_public_calls_have_what_the_house_asks() -> None:
    assert api_docs.faults(memeff_attn) == []
    sections = api_docs.sections_of(memeff_attn.memory_efficient_attention.__doc__)
    assert sections == list(api_docs.SECTIONS)


def test_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pdoc", reason="pdoc is not installed: `make docs` installs and runs it")
    monkeypatch.setattr(sys, "argv", ["api_docs.py", "--out", str(tmp_path)])
    assert api_docs.main() == 0, capsys.readouterr().err
    page = (tmp_path / "memeff_attn.html").read_text()
    assert "memory_efficient_attention_partial" in page and "<strong>Numerics</strong>" in page
    # What the tool warns of is a fault; what torch deprecates is not.
    import pdoc

    def warning(*names: str, output_directory: Path) -> None:
        warnings.warn("type Nowhere is not defined", stacklevel=1)
        warnings.warn("torch.old is going", DeprecationWarning, stacklevel=1)

    monkeypatch.setattr(pdoc, "pdoc", warning)
    assert api_docs.main() == 1
    text = capsys.readouterr().err
    assert "docs: type Nowhere is not defined" in text and "torch.old" not in text
