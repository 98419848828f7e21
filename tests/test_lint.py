"""The house rules that build_tools/lint.py checks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "build_tools"))
import lint


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("csrc/a.h", "#include <torch/extension.h>\n", "torch header"),
        ("csrc/a.h", 'asm volatile("ret;");\n', "inline PTX"),
        ("csrc/a.cpp", "  throw 1;\n", "throws"),
        ("csrc/a.cpp", '  printf("x");\n', "prints"),
        ("csrc/a.cpp", "  std::cerr << 1;\n", "prints"),
        ("csrc/a.cpp", "  std::exit(1);\n", "ends the process"),
        ("csrc/a.cpp", '  getenv("X");\n', "environment"),
        ("csrc/a.cpp", "#include <pybind11/pybind11.h>\n", "Python"),
        ("csrc/binding.cpp", "\n" * 251, "251 lines"),
        ("memeff_attn/a.py", "\n" * 501, "501 lines"),
        ("csrc/common/ptx.h", 'asm volatile("ret;");\n', ""),
        ("csrc/a.h", "// throws, prints, exit(1), asm\n/* getenv\n printf( */\n", ""),
        ("csrc/a.cpp", 'const char* text = "exit(1) throw";\n', ""),
    ],
)
def test_house_rules(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    faults = lint.check(tmp_path)
    assert (len(faults) == 1 and message in faults[0]) if message else faults == []
