"""Errors that a new user meets before anything works: each says what was expected, what was got and
what to do. Those of the build are in test_build.py and test_build_tools.py."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

memeff_attn = pytest.importorskip("memeff_attn")

from memeff_attn import _torch, cuda_errors, dispatch, ops  # noqa: E402
from memeff_attn.mask_rule import MaskRule  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("version", ["1.13.1", "2.0.0+cu118", "2.3.1"])
def test_old_torch_is_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        _torch.ensure_new_enough(version)
    text = str(caught.value)
    assert version in text and "2.4 or newer" in text and "pip install 'torch>=2.4'" in text


@pytest.mark.parametrize("version", ["2.4.0", "2.11.0+cu130", "3.0.0.dev2030", "main"])
def test_new_torch_is_taken(version: str) -> None:
    _torch.ensure_new_enough(version)


def test_old_torch_is_refused_before_it_breaks_the_import(tmp_path: Path) -> None:
    """A torch that is too old lacks names that the package imports: only the version is asked."""
    (tmp_path / "torch.py").write_text('__version__ = "2.3.1"\n')
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import memeff_attn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: memeff_attn needs torch 2.4")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("CUDA driver version is insufficient for CUDA runtime version", "Update the driver"),
        ("the provided PTX was compiled with an unsupported toolchain.", "MEMEFF_CUDA_ARCHS"),
        ("no kernel image is available for execution on the device", "MEMEFF_CUDA_ARCHS"),
        ("no CUDA-capable device is detected", "CUDA_VISIBLE_DEVICES"),
        ("Torch not compiled with CUDA enabled", "torch has no CUDA"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "Update the driver"),
        ("initialization error", "restart"),
    ],
)
def test_cuda_errors_say_the_way_out(error: str, words: str) -> None:
    """The words are those of cudaGetErrorString and of torch."""
    q = torch.zeros(1, 2, 1, 8)
    text = f"cudaFuncSetAttribute failed in chained_sm80_f16_k64: {error}"
    settings = ops.Settings(1.0, 0.0, 0, False, "")
    raised = ops.error_of((ops.CUDA_ERROR, text), (q, q, q, None), settings)
    assert isinstance(raised, RuntimeError)
    assert text in str(raised) and words in str(raised)


def test_other_cuda_errors_stay_as_they_are() -> None:
    assert cuda_errors.with_way_out("an illegal memory access") == "an illegal memory access"


def test_cuda_itself_has_these_words() -> None:
    """Where torch brings a CUDA runtime, its texts are compared with ours."""
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} has no CUDA runtime to ask")
    runtime: Any = torch._C._cudart  # of itself it needs no GPU
    numbers = {
        3: "initialization error",
        35: "driver version is insufficient",
        100: "no CUDA-capable device",
        209: "no kernel image",
        222: "unsupported toolchain",
    }
    known = [words for words, _ in cuda_errors.WAYS_OUT]
    for number, words in numbers.items():
        assert words in known
        said = runtime.cudaGetErrorString(runtime.cudaError(number))
        assert words.lower() in said.lower()


def test_explain_on_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    if dispatch.native()[0] is None:
        pytest.skip(dispatch.native()[1])

    def no_cuda() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", no_cuda)
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(RuntimeError) as caught:
        memeff_attn.explain(q, q, q, device="cuda")
    text = str(caught.value)
    assert "torch has no CUDA" in text and 'device="sm_80"' in text


def test_host_only_build_explains_a_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dispatch.native()[0]
    if module is None or module.is_cuda_build:
        pytest.skip("this build has GPU code" if module else dispatch.native()[1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    q = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    text = memeff_attn.explain(q, q, q, device="cuda")
    assert "host-only" in text and "chained_sm70_f16" in text


def test_gpu_tensors_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tensors on an installation without GPU code: refused with what to install."""
    for compiled, words in (
        ((None, "memeff_attn was not compiled here. " + dispatch._BUILD_HINT), "not compiled here"),
        ((type("C", (), {"is_cuda_build": False})(), ""), "host-only build"),
    ):
        monkeypatch.setattr(dispatch, "native", lambda found=compiled: found)
        failure = ops.compiled("forward", 7)()
        assert failure is not None and failure[0] == ops.UNSUPPORTED
        assert words in failure[1]
        assert "CUDA_HOME" in failure[1] and "MEMEFF_CUDA_ARCHS" in failure[1]


def test_build_without_the_gpus_code_says_what_to_build() -> None:
    """The dispatch table's words for a missing arch (a CUDA build alone has archs to miss)."""
    module = dispatch.native()[0]
    if module is None or not module.is_cuda_build:
        pytest.skip("needs a CUDA build: a host-only one answers for a build with everything")
    oldest = min(int(a.split("_")[1].rstrip("a")) for a in module.built_archs())
    if oldest <= 70:
        pytest.skip(f"this build has code from sm_70 on: {' '.join(module.built_archs())}")
    request = {"sm": 70, "dtype": "f16", "M": 64, "N": 64, "K": 64, "Kv": 64, "alignment": 8}
    text = module.explain(request)
    assert "no code for sm_70" in text and "MEMEFF_CUDA_ARCHS=70" in text


def test_a_rule_keeps_every_field_beside_its_bias() -> None:
    """with_bias names the fields one by one; none may be forgotten."""
    fields = [f.name for f in dataclasses.fields(MaskRule)]
    rule = MaskRule(**{name: number for number, name in enumerate(fields, 1)})  # type: ignore[arg-type]

    def values(x: MaskRule) -> list[Any]:
        return [getattr(x, name) for name in fields]

    assert values(rule.with_bias(None)) == values(dataclasses.replace(rule, bias=None))
    other = dataclasses.replace(rule, bias=None, bias_per_sequence=True)
    assert values(rule.with_bias(None, per_sequence=True)) == values(other)
