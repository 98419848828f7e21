"""diffusers from PyPI finds compat/xformers, turns it on, and its models compute the same through
it; the number of calls says that nothing fell back."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import xformers_shim

PROGRAM = Path(__file__).parent / "clients" / "diffusers_program.py"
CASES = ["unet", "unet masked", "unet trained", "autoencoder"]
GPU_CASES = ["unet half", "autoencoder half", "unet flash"]
DISPATCH = ["plain", "causal", "padding", "bias", "shared heads", "shared heads, bias"]
HEADS = {"unet": [40, 80], "autoencoder": [512]}


@functools.cache
def run(device: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        env = xformers_shim.environment(Path(folder)) | {"HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [sys.executable, str(PROGRAM), device],
            env=env, capture_output=True, text=True, cwd=folder, timeout=600,
        )  # fmt: skip


def report(device: str) -> dict[str, Any]:
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed: pip install diffusers")
    done = run(device)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def within(found: dict[str, Any]) -> None:
    assert found["finite"] and found["size"] > 0
    assert found["error"] <= found["limit"], found


@pytest.mark.parametrize("name", CASES + GPU_CASES)
def test_model(device: str, name: str) -> None:
    if name in GPU_CASES and device == "cpu":
        pytest.skip("16 bits and Flash's operator by name: on a GPU")
    found = report(device)["cases"][name]
    assert found["heads"] == HEADS[name.split()[0]]
    assert found["layers"] > 0 and found["calls"] == found["layers"]  # one call a layer
    assert found["probes"] >= found["layers"] and found["default_calls"] == 0
    within(found["out"])
    assert bool(found["gradients"]) is ("trained" in name)
    for gradient in found["gradients"]:
        if gradient["size"] > 0:
            within(gradient)


@pytest.mark.parametrize("name", DISPATCH)
def test_dispatcher(device: str, name: str) -> None:
    rows = {k: v for k, v in report(device)["dispatch"].items() if k.rsplit(" ", 1)[0] == name}
    assert len(rows) == (2 if device == "cuda" else 1)
    for found in rows.values():
        assert found["calls"] == 1
        within(found)


def test_example(tmp_path: Path) -> None:
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed: pip install diffusers")
    script = xformers_shim.ROOT / "examples" / "diffusers_unet.py"
    assert len(script.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "1"],
        env=xformers_shim.environment(tmp_path), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    assert xformers_shim.version() in last and float(last.split()[-1]) < 1e-2, done.stdout
