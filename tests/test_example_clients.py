"""examples/ of integrations: short, and true: each says how many calls were ours."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from memeff_attn import integrations

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CALLS = {"transformers_llama": 4 * 33, "sdpa_vit": 4, "t5_bias": 6}
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
    figures = [float(x) for x in re.findall(r"\d\.\de-\d\d", shown)]
    assert figures and max(figures) < 1e-3  # rounding, not another result; the rule: test_client_*


@pytest.mark.parametrize("name", CALLS)
def test_it_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_the_code_of_the_documentation_runs() -> None:
    text = (EXAMPLES.parent / "docs" / "integrations.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 1
    integrations.sdpa_calls(reset=True)
    exec(compile(blocks[0], "docs/integrations.md", "exec"), {})
    shown = re.search(r"# (Calls\(.*\))", blocks[0])
    assert shown is not None and repr(integrations.sdpa_calls()) == shown.group(1)
