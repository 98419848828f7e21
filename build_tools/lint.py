"""House rules that no other linter knows; one line each, with file and line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 500
SUFFIXES = {".py", ".pyi", ".h", ".cuh", ".cpp", ".cu", ".sh"}
FOLDERS = ("csrc", "memeff_attn", "tests", "bench", "examples", "build_tools")
PTX_HEADERS = ("csrc/common/ptx.h", "csrc/common/grid_order.h")  # the second without CUTLASS
BINDING = ("csrc/binding.cpp", "csrc/binding_tensors.h")
MAX_BINDING_LINES = 250

# Rules on csrc: (pattern, files it does not bind, what to say).
CSRC_RULES = [
    (r'#\s*include\s*[<"](torch|ATen|c10|THC)', (), "a torch header: csrc knows no torch"),
    (r"\basm\b", PTX_HEADERS, f"inline PTX: all of it is in {' and '.join(PTX_HEADERS)}"),
    (r"#\s*include\s*<(pybind11|Python\.h)", BINDING, "Python: only the binding knows it"),
    (r"\bthrow\b", BINDING, "throws: launchers return a Status"),
    (r"\b(printf|fprintf|puts|perror)\s*\(", (), "prints"),
    (r"std::(cout|cerr|clog)\b", (), "prints"),
    (r"\b(exit|abort|_exit|quick_exit)\s*\(", (), "ends the process: return a Status"),
    (r"\b(getenv|secure_getenv)\b", (), "reads the environment: Python does"),
]


def without_comments(text: str) -> str:
    """The same lines with // and /* */ comments and string literals blanked."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    literal = r'"(?:\\.|[^"\\\n])*"'
    # An include's name stays: a rule reads it.
    return re.sub(
        rf"//[^\n]*|/\*.*?\*/|(?<!include )(?<!include){literal}", blank, text, flags=re.DOTALL
    )


def check_file(path: Path, root: Path = ROOT) -> list[str]:
    name = path.relative_to(root).as_posix()
    text = path.read_text()
    faults = []
    lines = text.count("\n")
    limit = MAX_BINDING_LINES if name in BINDING else MAX_LINES
    if lines > limit:
        faults.append(f"{name}: {lines} lines, at most {limit}")
    if name.startswith("csrc/") and path.suffix in {".h", ".cuh", ".cpp", ".cu"}:
        for number, line in enumerate(without_comments(text).split("\n"), 1):
            for pattern, exempt, message in CSRC_RULES:
                if name not in exempt and re.search(pattern, line):
                    faults.append(f"{name}:{number}: {message}")
    return faults


def check(root: Path = ROOT) -> list[str]:
    files = [root / "setup.py"]
    for folder in FOLDERS:
        files += sorted(p for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)
    return [fault for path in files if path.is_file() for fault in check_file(path, root)]


def requirements() -> list[str]:
    """pyproject.toml's extra "lint" (its lines are simple; tomllib comes only with Python 3.11)."""
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r"^lint = \[(.*?)\]", text, flags=re.MULTILINE | re.DOTALL)
    assert match is not None
    return re.findall(r'"([^"]+)"', match.group(1))


def main() -> int:
    if "--requirements" in sys.argv:
        print(" ".join(requirements()))
        return 0
    faults = check()
    print("\n".join(faults) or "house rules: no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
