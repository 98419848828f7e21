"""Public faults of hardware limits and of "no kernel found" (tests/faults.py): B45-B47, asked of
the dispatch table.

These run without a GPU: explain and select answer for a GPU that one does not have.
"""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import torch
from cases import Case

memeff_attn = pytest.importorskip("memeff_attn")
_C = pytest.importorskip("memeff_attn._C")

if not _C.variants():
    pytest.skip("the variant list is empty", allow_module_level=True)

# Shared memory a block may opt into, by compute capability (CUDA programming guide).
SMEM = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB
SIZES = [
    (1, 1),
    (33, 5),
    (40, 40),
    (64, 64),
    (72, 72),
    (80, 80),
    (128, 128),
    (136, 136),
    (256, 256),
]
SIZES += [(512, 512), (520, 520), (1024, 1024), (16, 1024), (1024, 16), (4096, 64)]


def request(sm: int, dtype: str, k: int, kv: int, **fields: Any) -> dict[str, Any]:
    alignment = next(a for a in (16, 8, 4, 2, 1) if k % a == 0 and kv % a == 0)
    return {
        "sm": sm, "smem_optin": SMEM[sm] * 1024, "dtype": dtype, "B": 2, "M": 1024, "N": 1024,
        "H": 8, "K": k, "Kv": kv, "alignment": alignment, "any_build": True, **fields,
    }  # fmt: skip


def table() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in _C.variants()}


@pytest.mark.parametrize("sm", SMEM)
def test_b45_b47_every_gpu_runs_everything(sm: int) -> None:
    """Every dtype, head dim, alignment and bias has a kernel on every GPU from sm_70 on, newer than
    any build included."""
    missing = []
    for dtype, (k, kv), bias, tf32 in itertools.product(
        cases.DTYPES, SIZES, (False, True), (False, True)
    ):
        for alignment in {1, request(sm, dtype, k, kv)["alignment"]}:
            asked = request(
                sm,
                dtype,
                k,
                kv,
                has_bias=bias,
                math="tf32" if tf32 else "ieee",
                alignment=alignment,
            )
            if not _C.select(asked):
                missing.append(asked)
    assert missing == []


@pytest.mark.parametrize("sm", SMEM)
def test_b45_shared_memory_is_the_queried_limit(sm: int) -> None:
    """The row fits the limit that the device states, not one guessed from its compute capability.

    A smaller limit changes the choice, or the reason says shared memory.
    """
    rows = table()
    for dtype, (k, kv), bias in itertools.product(cases.DTYPES, SIZES, (False, True)):
        for kib in (SMEM[sm], 99, 64, 48):
            asked = request(sm, dtype, k, kv, has_bias=bias, smem_optin=kib * 1024)
            name = _C.select(asked)
            if name:
                assert rows[name]["smem_bytes"] <= kib * 1024, (name, asked)
            else:
                assert kib < SMEM[sm] and "shared memory" in _C.explain(asked), asked


@pytest.mark.parametrize("sm", [70, 75])
def test_b46_bf16_before_sm80(sm: int) -> None:
    """bf16 on V100 and T4: it runs (in fp32 on SIMT), and explain says that it is slower."""
    for (k, kv), bias in itertools.product(SIZES, (False, True)):
        asked = request(sm, "bf16", k, kv, has_bias=bias)
        name = _C.select(asked)
        assert name and table()[name]["arch"] == "simt", asked
        assert name in _C.explain(asked) and "slower" in _C.explain(asked)


def test_b46_reported_size() -> None:
    asked = request(75, "bf16", 72, 72, B=7, M=729, N=729, H=16)
    assert _C.select(asked)


def test_b46_missing_arch_is_named() -> None:
    """A build without this GPU's code says which archs it has, which GPU this is and what to
    build."""
    if not _C.is_cuda_build:
        text = _C.explain(request(90, "f16", 64, 64))
        assert "host-only" in text
        return
    built = {int(arch.split("_")[1].rstrip("a")) for arch in _C.built_archs()}
    older = [sm for sm in SMEM if sm < min(built)]
    if not older:
        pytest.skip(f"this build has code for every GPU ({_C.built_archs()})")
    text = _C.explain(request(older[-1], "f16", 64, 64, any_build=False))
    assert f"sm_{older[-1]}" in text and "MEMEFF_CUDA_ARCHS" in text
    assert all(arch in text for arch in _C.built_archs())


def test_b46_reasons_name_limit_and_value() -> None:
    """A forced row that does not fit: which limit, and what was got."""
    row = next(row for row in _C.variants() if row["max_k"])
    asked = request(
        row["min_sm"] if row["min_sm"] in SMEM else 80, row["dtype"], row["max_k"] + 8, 8
    )
    asked |= {"variant": row["name"], "has_bias": row["bias"], "math": row["math"]}
    assert _C.select(asked) == ""
    text = _C.explain(asked)
    assert row["name"] in text and str(row["max_k"]) in text and str(row["max_k"] + 8) in text


@pytest.mark.parametrize("sm", [100, 120])
def test_b47_newer_than_the_build(sm: int) -> None:
    """Rows of sm80's instructions have no upper cap; a row of one arch's own instructions stays on
    that arch."""
    for dtype in cases.DTYPES:
        name = _C.select(request(sm, dtype, 64, 64))
        row = table()[name]
        assert row["min_sm"] <= sm <= row["max_sm"] and row["arch"] != "sm90", row


@pytest.mark.parametrize("target", ["sm_70", "sm_75", "sm_80", "sm_90", (12, 0)], ids=str)
def test_b47_explain_for_another_gpu(target: Any) -> None:
    """memeff_attn.explain answers for a GPU that is not here."""
    inputs = cases.make(Case("f16", B=4, M=128, N=128, H=8, K=64), "cpu")
    text = str(memeff_attn.explain(inputs.query, inputs.key, inputs.value, device=target))
    number = target.removeprefix("sm_") if isinstance(target, str) else f"{target[0]}{target[1]}"
    assert f"sm_{number}" in text


@pytest.mark.gpu
def test_b47_v100_size() -> None:
    """(B, M, N, K) = (1, 1, 1, 136) in fp16, which one nvcc miscompiled for sm_70: every f16
    forward variant that takes it without dropout (backward: test_faults_training.py)."""
    from test_variants import fits_here, rows
    from tolerance import Checker

    checker = Checker()
    for row in rows():
        if row["dtype"] != "f16" or fits_here(row) or 136 % row["alignment"]:
            continue
        if row["kind"] != "fwd" or row["dropout"]:
            continue
        if (row["max_k"] and row["max_k"] < 136) or (row["max_kv"] and row["max_kv"] < 136):
            continue
        inputs = cases.make(
            Case("f16", B=1, M=1, N=1, H=1, K=136, bias="bhmn" if row["bias"] else ""), "cuda"
        )
        with checker.case(row["name"]), cases.forced(row["name"]):
            checker.attention(row["name"], *cases.attention(inputs), *inputs.tuple())
    checker.finish()


def test_b46_info_names_what_is_there() -> None:
    """info names versions, archs of the binary and GPUs, on any machine."""
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "memeff_attn.info"],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout
    assert next(iter(table())) in done.stdout
