"""examples/ of integrations: short, and true: each says how many calls were ours."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from memeff_attn import integrations

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CALLS = {"transformers_llama": 4 * 33, "sdpa_vit": 4, "t5_bias": 6, "checkpointing": 12}
NEEDS = {"transformers_llama": "transformers", "t5_bias": "transformers"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CALLS)
def test_it_runs(device: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], minversion="5", reason="needs transformers 5 or newer")
    if name == "t5_bias":
        modeling = importlib.import_module("transformers.models.t5.modeling_t5")
        if not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
            pytest.skip("T5 of this transformers has its attention built in: the example says so")
    integrations.transformers_calls(reset=True)
    integrations.sdpa_calls(reset=True)
    code = load(name).main(device)
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert f": {CALLS[name]} of {CALLS[name]} calls of attention were ours" in shown
    figures = [float(x) for x in re.findall(r"\d\.\de[-+]\d\d", shown)]
    assert figures and max(figures) < 1e-3  # rounding, not another result; the rule: test_client_*


def test_sharded_training(device: str) -> None:
    """examples/fsdp.py starts its processes itself."""
    fsdp = pytest.importorskip("torch.distributed.fsdp", reason="no torch.distributed here")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip(f"torch {torch.__version__} has no fully_shard")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    line = [sys.executable, str(EXAMPLES / "fsdp.py"), device]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=300, env={**os.environ, **hidden}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = torch.cuda.device_count() if device == "cuda" else 2
    assert done.stdout.count(": 2 of 2 calls of attention were ours") == ranks


def test_they_are_short() -> None:
    long = {"demo", "train_char_lm"}  # programs, not examples
    found = {p.stem: len(p.read_text().splitlines()) for p in EXAMPLES.glob("*.py")}
    assert {*CALLS, "fsdp", "diffusers_unet"} == found.keys() - long
    assert max(lines for name, lines in found.items() if name not in long) < 60


def test_the_code_of_the_documentation_runs() -> None:
    text = (EXAMPLES.parent / "docs" / "integrations.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 1
    integrations.sdpa_calls(reset=True)
    exec(compile(blocks[0], "docs/integrations.md", "exec"), {})
    shown = re.search(r"# (Calls\(.*\))", blocks[0])
    assert shown is not None and repr(integrations.sdpa_calls()) == shown.group(1)
