"""The GPU record: what makes it stale, how shards merge, what --check refuses. Needs no GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_record
import pytest

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources that the hashes cover."""
    for folder in ("csrc", "memeff_attn"):
        skip = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(gpu_record.ROOT / folder, tmp_path / folder, ignore=skip)
    shutil.copy(gpu_record.ROOT / "setup.py", tmp_path)
    return tmp_path


def record(**fields: Any) -> dict[str, Any]:
    return {
        "source_hash": gpu_record.source_hash(),
        "python_hash": gpu_record.python_hash(),
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "shards": ["1/1"],
        "arguments": [],
        "seconds": 10.0,
        "exit": 0,
        "counts": {"passed": 5, "failed": 0, "skipped": 1},
        "failures": {},
        "skipped": {"one GPU here": 1},
        "slowest": {"a": 1.0},
        "variants": ["a", "b"],
        "variants_hit": ["a", "b"],
        **fields,
    }


def test_python_hash_ignores_comments_and_docstrings(tree: Path) -> None:
    path = tree / "memeff_attn" / "ops.py"
    before = gpu_record.python_hash(tree)
    assert before == gpu_record.python_hash()
    text = path.read_text()
    path.write_text("# a comment\n" + text.replace('"""', '"""Other words. ', 1))
    assert gpu_record.python_hash(tree) == before
    path.write_text(text + "\nx = 1\n")
    assert gpu_record.python_hash(tree) != before


def test_source_hash_sees_every_kernel_file(tree: Path) -> None:
    before = gpu_record.source_hash(tree)
    assert before == gpu_record.source_hash()
    (tree / "csrc" / "chained" / "forward.h").open("a").write("\n")
    after = gpu_record.source_hash(tree)
    assert after != before
    (tree / "setup.py").open("a").write("\n")
    assert gpu_record.source_hash(tree) != after


def test_a_complete_record_is_current() -> None:
    assert gpu_record.problems(record()) + gpu_record.staleness(record()) == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"failures": {"test_x": "assert"}}, "failed: test_x"),
        ({"variants_hit": ["a"]}, "variant never ran: b"),
        ({"variants": []}, "no variant"),
        ({"shards": ["1/3", "3/3"]}, "shard 2/3 is missing"),
        ({"arguments": ["-k", "x"]}, "not the whole suite"),
        ({"counts": {"passed": 0, "failed": 0, "skipped": 9}}, "no test passed"),
        ({"source_hash": "0"}, "csrc or setup.py changed"),
        ({"python_hash": "0"}, "ops.py"),
    ],
)
def test_check_refuses(
    fields: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    gpu_record.write(record(**fields), path)
    assert gpu_record.main(["--check", "--out", str(path)]) == 1
    assert text in capsys.readouterr().err


def test_check_without_a_record(tmp_path: Path) -> None:
    assert gpu_record.main(["--check", "--out", str(tmp_path / "none.json")]) == 1


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{i}.json" for i in (1, 2)]
    for i, path in enumerate(paths, 1):
        gpu_record.write(record(shards=[f"{i}/2"], variants_hit=["ab"[i - 1]]), path)
    out = tmp_path / "all.json"
    assert gpu_record.main(["--merge", *map(str, paths), "--out", str(out)]) == 0
    merged = json.loads(out.read_text())
    assert merged["counts"] == {"passed": 10, "failed": 0, "skipped": 2}
    assert merged["variants_hit"] == ["a", "b"] and merged["shards"] == ["1/2", "2/2"]
    assert gpu_record.main(["--check", "--out", str(out)]) == 0
    assert gpu_record.main(["--merge", str(paths[0]), "--out", str(out)]) == 1
    assert gpu_record.main(["--merge", str(paths[0]), str(paths[0]), "--out", str(out)]) == 2
    gpu_record.write(record(shards=["2/2"], torch="2.10"), paths[1])
    assert gpu_record.main(["--merge", *map(str, paths), "--out", str(out)]) == 2
    assert "differ in torch" in capsys.readouterr().err


def test_run_refuses_in_one_line() -> None:
    """Without pytest it says so; without a GPU or a CUDA build as well."""
    code = (
        "import sys; sys.modules['pytest'] = None; import gpu_record; sys.exit(gpu_record.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS, check=False
    )
    assert done.returncode == 2 and "pytest is not installed" in done.stderr
    import torch

    if not torch.cuda.is_available():
        done = subprocess.run(
            [sys.executable, str(TESTS / "gpu_record.py")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and "no GPU" in done.stderr
