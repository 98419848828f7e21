"""What the order and limits of csrc/kernels_rows.py choose, held against every row that was timed:
`python -m bench sweep` on a GPU writes the times, this judges today's list by them, without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

memeff_attn = pytest.importorskip("memeff_attn")
ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import sweep  # noqa: E402
from memeff_attn import dispatch  # noqa: E402

A100_SMEM = 166912

pytestmark = pytest.mark.skipif(
    dispatch.native()[0] is None, reason=f"no list of variants: {dispatch.native()[1]}"
)


def test_every_choice_is_within_5_percent_of_the_fastest_row() -> None:
    paths = sweep.committed()
    assert paths, "no bench/results/<gpu>/sweep.json: python -m bench sweep, on a GPU"
    for path in paths:
        text, wrong = sweep.judged(json.loads(path.read_text()))
        assert wrong == 0, text


def test_forward_choices_without_the_hopper_family_are_within_5_percent() -> None:
    """What an sm_80 GPU of that size would choose, by the times of the same rows."""
    for path in sweep.committed():
        content = json.loads(path.read_text())
        facts = {"sm": 80, "smem_optin": A100_SMEM, "any_build": True}
        found, lacking = sweep.regrets(content, {**content["meta"]["facts"], **facts}, ["fwd"])
        assert found and not lacking, lacking
        assert not [r for r in found if r.ratio > sweep.ALLOWED]
