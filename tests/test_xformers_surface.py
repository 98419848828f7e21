"""memeff_attn.xformers has xFormers' names, signatures and attributes (tests/xformers_names.py);
compat/xformers has the same objects by the name xformers."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xformers_names as facts
import xformers_shim

from memeff_attn import attn_bias, dispatch
from memeff_attn.xformers.ops import fmha

OPS = {
    f"{module}.{name}": getattr(getattr(fmha, module), name)
    for module in (
        "cutlass",
        "flash",
        "flash3",
        "cutlass_blackwell",
        "triton_splitk",
        "ck",
        "ck_splitk",
    )
    for name in ("FwOp", "BwOp", "FwOp_KVSplit")
    if hasattr(getattr(fmha, module), name)
}


def module_of(name: str, package: str = "memeff_attn.xformers") -> Any:
    return importlib.import_module(f"{package}.{name}" if name else package)


@pytest.mark.parametrize("module", facts.NAMES)
def test_names(module: str) -> None:
    if module in ("", "ops.fmha"):  # xFormers' too has these after an import of theirs
        for inner in ("ops", "ops.fmha.merge_training"):
            module_of(inner)
    found = module_of(module)
    missing = [name for name in facts.NAMES[module].split() if not hasattr(found, name)]
    assert not missing


def shape_of(function: Any) -> str:
    parts, keyword_only = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        parts.append(f"{star}{name}{default}")
    return ", ".join(parts)


@pytest.mark.parametrize("where", facts.SIGNATURES)
def test_signatures(where: str) -> None:
    module, _, name = where.partition(":")
    assert shape_of(getattr(module_of(module), name)) == facts.SIGNATURES[where]


def test_masks_are_ours() -> None:
    module = module_of("ops.fmha.attn_bias")
    for name in module.__all__:
        assert getattr(module, name) is getattr(attn_bias, name), name
    assert module_of("ops").LowerTriangularMask is attn_bias.LowerTriangularMask
    assert module_of("ops").AttentionMask is attn_bias.AttentionBias


def test_operator_tuples() -> None:
    ops = module_of("ops")
    assert ops.MemoryEfficientAttentionCutlassOp == (fmha.cutlass.FwOp, fmha.cutlass.BwOp)
    assert ops.MemoryEfficientAttentionFlashAttentionOp == (fmha.flash.FwOp, fmha.flash.BwOp)
    mixed = ops.MemoryEfficientAttentionCutlassFwdFlashBwOp
    assert mixed == (fmha.cutlass.FwOp, fmha.flash.BwOp)
    assert ops.MemoryEfficientAttentionCkOp == (fmha.ck.FwOp, fmha.ck.BwOp)
    assert ops.MemoryEfficientAttentionSplitKCkOp == (fmha.ck_splitk.FwOp, fmha.ck.BwOp)
    blackwell = fmha.MemoryEfficientAttentionCutlassBlackwellOp
    assert blackwell == (fmha.cutlass_blackwell.FwOp, fmha.cutlass_blackwell.BwOp)
    assert [op.NAME.partition("@")[0] for op in fmha.ALL_FW_OPS] == [
        "cutlassF-pt", "cutlassF-blackwell", "fa2F", "fa3F", "triton_splitKF",
    ]  # fmt: skip
    assert [op.NAME.partition("@")[0] for op in fmha.ALL_BW_OPS] == [
        "cutlassB-pt", "cutlassB-blackwell", "fa2B", "fa3B",
    ]  # fmt: skip
    assert fmha._unserialize_op(fmha._serialize_op(fmha.flash.FwOp)) is fmha.flash.FwOp
    assert fmha._serialize_op(fmha.cutlass.FwOp) is fmha.cutlass.FwOp


FLAGS = (
    "SUPPORTS_DROPOUT",
    "SUPPORTS_CUSTOM_SCALE",
    "SUPPORTS_DIFFERENT_VALUE_EMBED",
    "SUPPORTS_BMGHK",
    "SUPPORTS_PARTIAL",
    "SUPPORTS_OUTPUT_DTYPE",
    "VARLEN_LSE_PACKED",
)


@pytest.mark.parametrize("name", facts.OPERATORS)
def test_operator_attributes(name: str) -> None:
    op = OPS[name]
    least, most, dtypes, answers = facts.OPERATORS[name]
    assert [least, most] == [op.SUPPORTED_MIN_K, op.SUPPORTED_MAX_K]
    assert {str(x) for x in op.SUPPORTED_DTYPES} == set(dtypes.split())
    assert set(op.SUPPORTED_DEVICES) == {"cuda"} and op.IS_DETERMINISTIC
    for flag, answer in zip(FLAGS, answers, strict=True):
        assert getattr(op, flag) is (answer != "n"), flag
    assert list(op._TEST_BATCH_SIZES) == [1, 300]


@pytest.mark.parametrize("name", OPS)
def test_tolerances_are_xformers(name: str) -> None:
    """No looser: xFormers' suite takes them from here."""
    kind = "ck" if name == "ck.FwOp" else name.partition(".")[2][:2]
    for found, wanted in zip(
        (OPS[name].ERROR_ATOL, OPS[name].ERROR_RTOL), facts.TOLERANCES[kind], strict=True
    ):
        assert {str(dtype): x for dtype, x in found.items()} == wanted


@pytest.mark.parametrize("name", facts.MASKS)
def test_masks_of_operators(name: str) -> None:
    found = {t.__name__ for t in OPS[name].SUPPORTED_ATTN_BIAS_TYPES}
    assert found == {"NoneType", *facts.MASKS[name].split()}


def test_what_is_available() -> None:
    """cutlass where there are kernels for a GPU, no other backend anywhere."""
    here = not dispatch.cuda_missing()
    for name, op in OPS.items():
        assert op.is_available() is (here and name.startswith("cutlass.")), name
    assert module_of("")._has_cpp_library is here
    assert list(fmha.cutlass.FwOp._TEST_K) == [32, 128, 256]


def test_priority_list() -> None:
    """Flash first where it would be first, so that code which looks finds what it expects."""
    x = torch.empty(1, 8, 32, 128)
    shared = torch.empty(1, 2048, 1, 128).expand(-1, -1, 32, -1)
    first = fmha.dispatch._dispatch_fw_priority_list
    assert first(fmha.Inputs(x, shared, shared), False)[0] is fmha.flash.FwOp
    kinds = [op.NAME.partition("@")[0] for op in first(fmha.Inputs(x, x, x), True)]
    assert kinds == ["fa3F", "fa2F", "memeffF-cpu", "cutlassF-pt", "memeffF"]
    try:
        fmha._set_use_fa3(False)
        assert not fmha._get_use_fa3()
        assert first(fmha.Inputs(x, x, x), True)[0] is fmha.flash.FwOp
    finally:
        fmha._set_use_fa3(True)


def test_names_that_are_not_here_say_why() -> None:
    with pytest.raises(AttributeError, match="attention only"):
        module_of("ops").RMSNorm  # noqa: B018
    with pytest.raises(RuntimeError, match="No such operator xformers::nothing"):
        module_of("ops.common").get_xformers_operator("nothing")()


# ---- by the name xformers ----

PROGRAM = """
import importlib, importlib.metadata, importlib.util
import xformers.ops.fmha.attn_bias, xformers.version
import xformers, xformers.ops
from xformers.ops import fmha
import memeff_attn.xformers as ours
import memeff_attn
assert xformers.ops is ours.ops and fmha is ours.ops.fmha
assert xformers.ops.fmha.attn_bias.BlockDiagonalMask is memeff_attn.attn_bias.BlockDiagonalMask
assert importlib.util.find_spec("xformers").origin.endswith("compat/xformers/xformers/__init__.py")
assert importlib.metadata.version("xformers") == xformers.__version__
assert xformers.version.__version__ == xformers.__version__
for name in NAMES:
    assert importlib.import_module("xformers." + name if name else "xformers"), name
fmha._memory_efficient_attention_forward = lambda inp, op: "mine"  # as kohya-ss does
import torch
x = torch.zeros(1, 2, 1, 8)
assert xformers.ops.memory_efficient_attention(x, x, x) == "mine"
print("ok")
"""


def test_compat_gives_the_same_objects(tmp_path: Path) -> None:
    env = xformers_shim.environment(tmp_path)
    code = PROGRAM.replace("NAMES", repr(list(facts.NAMES)))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr


def test_info(tmp_path: Path) -> None:
    env = xformers_shim.environment(tmp_path)
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "xformers.info"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"xFormers {xformers_shim.version()}" in done.stdout
    lines = {key: rest for key, _, rest in (x.partition(": ") for x in done.stdout.splitlines())}
    assert "available" in lines["memory_efficient_attention.cutlassF-pt"]
    assert lines["memory_efficient_attention.memeffF"].strip() == "available"
    assert "ROCm" in lines["memory_efficient_attention.ckF"]


def test_info_leaves_the_arguments_of_its_caller_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs print it in their own process, which has options of its own."""
    monkeypatch.setattr(sys, "argv", ["webui.py", "--listen"])
    module_of("info").print_info()
    assert "memory_efficient_attention.memeffF:" in capsys.readouterr().out


def test_version_passes_the_checks_of_programs() -> None:
    """diffusers asks for 0.0.29; the distribution and the module name one version."""
    assert xformers_shim.version() == module_of("version").__version__
    release = xformers_shim.version().partition("+")[0]
    assert [int(x) for x in release.split(".")] >= [0, 0, 29]
