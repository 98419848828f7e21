"""tests/peers/run_xformers_suite.py itself, on a stand-in for xFormers' files: it counts what ran,
fails where a test fails or is lost, draws masks by xFormers' module name, and packs the files."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))
import run_xformers_suite as suite  # noqa: E402
import scipy_stats  # noqa: E402

ATTENTION = """
import pytest, torch
import xformers.ops
from scipy.stats import binomtest
from xformers.attn_bias_utils import HERE
from xformers.ops import fmha
from .utils import EIGHT

@pytest.mark.parametrize("i", range(EIGHT))
def test_forward(i):
    if i == 3:
        pytest.skip("Flash3 not available")
    q = torch.randn(1, i + 1, 2, 8)
    assert xformers.ops.memory_efficient_attention(q, q, q).shape == q.shape

def test_names():
    assert HERE and str(fmha.BlockDiagonalMask).startswith("<class 'xformers.ops.fmha.attn_bias.")

def test_asks_for_a_gpu():
    if not torch.cuda.is_available():
        torch.zeros(1, device="cuda")

def test_decoder():
    assert False, "of another backend"
"""
UNKNOWN = suite.UNEXPLAINED
FILES = {
    "test_mem_eff_attention.py": ATTENTION,
    "test_fmha_merge_attentions.py": "def test_merge():\n    pass\n",
    "utils.py": "EIGHT = 8\n",
    "attn_bias_utils.py": "HERE = True\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEERS / "run_xformers_suite.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def result(done: subprocess.CompletedProcess[str], path: Path) -> Any:
    assert path.exists(), done.stderr
    return json.loads(path.read_text())


def test_counts(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(checkout, "-n", 2, "--json", out)
    found = result(done, out)
    gpu = found["gpu"] is not None
    assert done.returncode == 0 and not found["problems"], done.stdout
    assert (found["passed"], found["failed"], found["skipped"]) == (9 + gpu, 0, 2 - gpu)
    assert found["skip_reasons"]["Flash# not available"] == 1
    assert found["skip_kinds"]["other backends"] == 1 and found["skip_kinds"][UNKNOWN] == 1 - gpu
    assert ("needs a GPU, there is none here" in found["skip_reasons"]) is not gpu
    assert found["tolerances"]["cutlassF-pt ERROR_ATOL"]["torch.float32"] == 3e-4
    assert "passed" in done.stdout and "11/11 (100 %)" in done.stdout


def test_failures_and_lost_tests_fail_it(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    merge = checkout / "test_fmha_merge_attentions.py"
    lost = "def test_merge_lost():\n    os._exit(0)\n"  # no result, and pytest ends with 0
    merge.write_text(f"import os\ndef test_merge():\n    assert 1 == 2\n{lost}")
    done = run(checkout, "--tests", "merge", "-n", 2, "--json", out)
    found = result(done, out)
    assert done.returncode == 1 and found["failed"] == 1 and "assert 1 == 2" in done.stdout
    assert len(found["problems"]) == 1 and "after 0 of 1 tests" in found["problems"][0]
    merge.write_text("import nothing_of_this_name\n")
    done = run(checkout, "--json", out)
    assert done.returncode == 1 and "nothing_of_this_name" in result(done, out)["problems"][0]


def test_a_test_without_memory_runs_again(checkout: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "out.json", tmp_path / "seen"
    merge = checkout / "test_fmha_merge_attentions.py"
    merge.write_text(f"""
from pathlib import Path

def test_merge():
    seen = Path({str(seen)!r})
    seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
    if len(seen.read_text()) < 2:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB.")

def test_merge_more():
    pass
""")
    done = run(checkout, "--tests", "merge", "-n", 2, "--json", out)
    found = result(done, out)
    assert done.returncode == 0 and not found["problems"], done.stdout
    assert (found["passed"], found["failed"]) == (2, 0)
    assert "1 tests found no memory" in done.stdout and seen.read_text() == "xx"
    seen.write_text("")
    merge.write_text(merge.read_text().replace("< 2", "< 9"))  # alone too: a failure
    done = run(checkout, "--tests", "merge", "--json", out)
    assert done.returncode == 1 and result(done, out)["failed"] == 1 and seen.read_text() == "xx"


def test_kinds_of_skips() -> None:
    refused = {"cutlassF-pt: unsupported (K is #)": 2, "something new": 1}
    known = {"BMK incompatible with this bias": 7, "Op is not available": 5}
    found = suite.kinds(refused | known)
    assert list(found.values()) == [7, 5, 3] and found[UNKNOWN] == 3
    assert sum(suite.kinds({}).values()) == 0


def test_committed_result() -> None:
    """Of the H200: no failure, and every skip is of another backend or ruled out by the tests."""
    found = json.loads((PEERS / "h200.json").read_text())
    assert found["failed"] == 0 and not found["failures"] and found["passed"] > 7000
    kinds = suite.kinds(found["skip_reasons"])
    assert kinds[UNKNOWN] == 0 and sum(kinds.values()) == found["skipped"]
    assert found["passed"] + found["skipped"] > 9900 and found["commit"] == suite.COMMIT
    text = (PEERS.parents[1] / "docs" / "migrating.md").read_text()
    for number in (found["passed"], *list(kinds.values())[:2]):
        assert str(number) in text


def test_shards_and_packing(checkout: Path, tmp_path: Path) -> None:
    assert suite.shards("2/3", 2) == ["2/6", "5/6"]
    for i, n, processes in ((1, 3, 2), (2, 3, 2), (3, 3, 2)):
        parts = suite.shards(f"{i}/{n}", processes)
        taken = {k for p in parts for k in range(20) if k % 6 == int(p.split("/")[0]) - 1}
        assert taken == {k for k in range(20) if k % 3 == i - 1}
    archive = tmp_path / "files.tgz"
    assert run(checkout, "--pack", archive).returncode == 0
    other = tmp_path / "carried"
    with tarfile.open(archive) as packed:
        packed.extractall(other, filter="data")
    assert {path.name: path.read_text() for path in other.iterdir()} == FILES


def test_what_is_wrong_is_said(checkout: Path, tmp_path: Path) -> None:
    (checkout / "utils.py").unlink()
    done = run(checkout)
    assert done.returncode == 1 and "has neither tests/utils.py nor utils.py" in done.stderr
    subprocess.run(["git", "init", "-q", "--bare", str(tmp_path / "bare")], check=True)
    done = run(tmp_path / "bare")
    assert done.returncode == 1 and "at commit bed3978b" in done.stderr
    done = run(checkout, "--shard", "4/3")
    assert done.returncode == 1


def test_stand_in_for_scipy() -> None:
    """Against sums of exact terms."""
    import math

    n, p = 50, 0.3
    terms = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    wanted = sum(x for x in terms if x <= terms[20] * (1 + 1e-7))
    assert math.isclose(scipy_stats.binomtest(20, n, p).pvalue, wanted, rel_tol=1e-9)
    binom = scipy_stats.distributions.binom
    for k in range(-1, n + 2):
        inside = terms[k] if 0 <= k <= n else 0.0
        assert math.isclose(float(binom.pmf(k, n, p)), inside, rel_tol=1e-9)
        assert math.isclose(float(binom.cdf(k, n, p)), sum(terms[: max(k + 1, 0)]), abs_tol=1e-12)
        assert math.isclose(float(binom.sf(k, n, p)), sum(terms[max(k + 1, 0) :]), abs_tol=1e-12)
