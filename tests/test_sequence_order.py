"""Packed sequences of any number: which tile belongs to which, on the host (sequence_order.cpp) and
in calls on a GPU."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import mask_runs
import pytest
from tolerance import Checker

from memeff_attn import attn_bias as ab

ROOT = Path(__file__).resolve().parent.parent
# Around the 32 that a warp sorts, of which two are the rows before the first and behind the last.
COUNTS = (29, 30, 31, 32, 33, 62, 63, 95, 200)


def test_every_row_has_one_tile(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    stub = tmp_path / "cutlass" / "cutlass.h"  # all that sequences.h and sorted_tiles.h take of it
    stub.parent.mkdir()
    stub.write_text("#define CUTLASS_DEVICE inline\n")
    program = tmp_path / "sequence_order"
    include = [f"-I{tmp_path}", f"-I{ROOT / 'csrc'}"]
    source = ROOT / "tests" / "sequence_order.cpp"
    built = subprocess.run(
        [compiler, "-std=c++17", "-O1", "-Wall", *include, str(source), "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0 and ran.stdout == "60 calls, 20 sorted\n", ran.stdout + ran.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", mask_runs.DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_many_sequences(count: int, dtype: str) -> None:
    """Forward and every gradient, causal and not, long among short ones."""
    numbers = random.Random(count)
    lengths = [numbers.choice((0, 1, 5, 17, 64, 70)) for _ in range(count)]
    lengths[numbers.randrange(count)] = 600
    checker = Checker()
    blocks = ab.BlockDiagonalMask.from_seqlens(lengths, device="cuda")
    for label, mask in (("full", blocks), ("causal", blocks.make_causal())):
        with checker.case(label):
            run = mask_runs.make(mask, "cuda", dtype, "gqa")
            mask_runs.check(checker, f"{count} {label}", run)
    checker.finish()
