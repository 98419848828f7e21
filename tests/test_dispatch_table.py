"""The compiled module's table; no GPU needed: the answers of a build with every row."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

_C = pytest.importorskip("memeff_attn._C", reason="memeff_attn is not compiled")

ROOT = Path(__file__).resolve().parent.parent
INVALID, UNSUPPORTED = 1, 2
SMS = [70, 75, 80, 86, 89, 90, 100, 120]
DTYPES = ["f16", "bf16", "f32"]
ROWS: list[dict[str, Any]] = _C.variants()
BY_NAME = {row["name"]: row for row in ROWS}
FORWARD = [row for row in ROWS if row["kind"] == "fwd"]
CALLS = [  # what decides between plain and full rows
    {"pass": kind, "has_bias": bias, "dropout": dropout}
    for kind, bias, dropout in itertools.product(("fwd", "bwd"), (False, True), (False, True))
    if any(row["kind"] == kind and row["dropout"] >= dropout for row in ROWS)
]
FAMILIES = {(row["arch"], row["dtype"]) for row in ROWS}

pytestmark = pytest.mark.skipif(not ROWS, reason="the variant list is empty")


def kernels_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_kernels", ROOT / "csrc" / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def request(**fields: Any) -> dict[str, Any]:
    base = {"sm": 80, "dtype": "f16", "B": 2, "M": 1024, "N": 1024, "H": 8, "K": 64, "Kv": 64}
    base |= {"alignment": 8, "has_bias": False, "bias_alignment": 16, "any_build": True}
    return {**base, **fields}


def request_for(row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """One that the row takes, at its own limits."""
    return request(
        sm=row["min_sm"],
        smem_optin=1 << 20,  # rows of large tiles are for the largest GPUs of their range
        dtype=row["dtype"],
        math=row["math"],
        K=row["max_k"] or 1024,
        Kv=row["max_kv"] or 1024,
        N=row["max_n"] or 1024,
        M=row["max_n"] or 1024,
        alignment=row["alignment"],
        has_bias=row["bias"],
        bias_alignment=row["bias_alignment"],
        dropout=row["dropout"],
        variant=row["name"],
        **{"pass": row["kind"], **fields},
    )


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def test_variants_are_the_list_in_its_order() -> None:
    listed = kernels_py().load_rows()
    assert names(ROWS) == names([{"name": row.name} for row in listed])
    for row, told in zip(listed, ROWS, strict=True):
        for field, value in told.items():
            if field not in ("built", "built_archs"):
                assert getattr(row, field) == value, (row.name, field)


def test_built_rows_have_archs_and_others_have_none() -> None:
    archs = set(_C.built_archs())
    for row in ROWS:
        assert row["built"] == bool(row["built_archs"])
        assert {a.rstrip("a") for a in row["built_archs"]} <= {a.rstrip("a") for a in archs}
    assert any(row["built"] for row in ROWS) == _C.is_cuda_build == (_C.cuda_version() != "none")


@pytest.mark.parametrize("name", names(ROWS))
def test_every_row_can_be_forced_within_its_limits(name: str) -> None:
    row = BY_NAME[name]
    assert _C.select(request_for(row)) == name
    assert f"chosen: {name} (forced" in _C.explain(request_for(row))


@pytest.mark.parametrize("name", names(ROWS))
def test_a_forced_row_beyond_its_limits_says_why(name: str) -> None:
    row = BY_NAME[name]
    other = next(d for d in DTYPES if d != row["dtype"])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dtype": other}, f"takes {row['dtype']}, not {other}"),
        ({"pass": "bwd" if row["kind"] == "fwd" else "fwd"}, "pass"),
        ({"smem_optin": 1}, "shared memory"),
    ]
    if row["bias"] and row["dropout"]:
        wrong.append(({"has_bias": False, "dropout": False}, "is for"))
    else:
        wrong.append(({"has_bias": not row["bias"]}, "bias"))
        wrong.append(({"dropout": not row["dropout"]}, "dropout"))
    if row["max_k"]:
        wrong.append(({"K": row["max_k"] + 1}, f"takes K up to {row['max_k']}, K is"))
    if row["max_kv"]:
        wrong.append(({"Kv": row["max_kv"] + 1}, f"takes Kv up to {row['max_kv']}, Kv is"))
    if row["max_n"]:
        wrong.append(({"N": row["max_n"] + 1}, f"takes N up to {row['max_n']}, N is"))
        if row["kind"] == "bwd":
            wrong.append(({"M": row["max_n"] + 1}, f"takes M up to {row['max_n']}, M is"))
            wrong.append(({"heads_per_kv": 2}, "a key head for each query head, here 2"))
    if not row["sequences"]:
        wrong.append(({"sequences": True}, "takes no packed sequences"))
    if row["alignment"] > 1:
        wrong.append(({"alignment": row["alignment"] // 2}, "in multiples of"))
    if row["math"] == "tf32":
        wrong.append(({"math": "ieee"}, "TF32"))
    for fields, reason in wrong:
        asked = {**request_for(row), **fields}
        assert _C.select(asked) == ""
        text = _C.explain(asked)
        assert f"chosen: none; forced {name}" in text and reason in text


def test_a_forced_row_ignores_the_archs_it_is_preferred_on() -> None:
    for row in ROWS:
        assert _C.select({**request_for(row), "sm": 90, "smem_optin": 1 << 20}) == row["name"]


def test_an_unknown_name_is_said_to_be_unknown() -> None:
    asked = request(variant="chained_sm99_f16_k64")
    assert _C.select(asked) == ""
    assert 'no kernel variant is named "chained_sm99_f16_k64"' in _C.explain(asked)


def serves(row: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Bias and dropout alone: full rows are for every call that plain ones do not take."""
    bias, dropout = asked["has_bias"], asked["dropout"]
    if row["kind"] != asked["pass"]:
        return False
    if row["bias"] and row["dropout"]:
        return dropout if row["kind"] == "fwd" else bias or dropout
    return bool(row["bias"] == bias and row["dropout"] == dropout)


@pytest.mark.parametrize("family", sorted({row["family"] for row in ROWS}))
@pytest.mark.parametrize("kind", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_family_is_the_first_fitting_row_of_its_own(family: str, kind: str, dtype: str) -> None:
    """And where it has none, every row says why, those of others that they are of others."""
    own = [
        row for row in ROWS if (row["family"], row["kind"], row["dtype"]) == (family, kind, dtype)
    ]
    for sm, k, alignment in itertools.product(SMS, (1, 64, 128, 200, 512), (1, 8)):
        asked = request(
            sm=sm, dtype=dtype, K=k, Kv=k, alignment=alignment, variant=f"family:{family}",
            **{"pass": kind},
        )  # fmt: skip
        free = {**asked, "variant": ""}
        chosen, best = _C.select(asked), _C.select(free)
        if not chosen:
            assert not best or BY_NAME[best]["family"] != family
            text = _C.explain(asked)
            assert f"of the family {family} takes {dtype}" in text
            others = {row["family"] for row in ROWS if row["kind"] == kind} - {family}
            assert all(
                f"is of the family {other}, asked for is {family}" in text for other in others
            )
            continue
        fits = [row for row in own if _C.select({**asked, "variant": row["name"]}) == row["name"]]
        assert chosen in names(fits)
        if best and BY_NAME[best]["family"] == family:
            assert chosen == best
        assert f"chosen: {chosen} (the first of the list that fits in the family {family};" in (
            _C.explain(asked)
        )


def test_an_unknown_family_is_said_to_be_unknown() -> None:
    text = _C.explain(request(variant="family:nonesuch"))
    assert 'no kernel family is named "nonesuch"; there are ' in text
    assert all(row["family"] in text for row in ROWS)
    assert _C.select(request(variant="family:nonesuch")) == ""


@pytest.mark.parametrize(("code", "sm", "runs"), [
    ((80, False, False), 86, True), ((86, False, False), 80, False),
    ((80, False, False), 90, False), ((80, False, True), 120, True),
    ((90, False, True), 80, False), ((90, True, False), 90, True),
    ((100, True, False), 103, False), ((90, True, True), 100, False),
])  # fmt: skip
def test_where_code_runs(code: tuple[int, bool, bool], sm: int, runs: bool) -> None:
    assert _C.code_runs(*code, sm) == runs


@pytest.mark.parametrize("name", names(ROWS))
def test_bias_and_dropout_pick_plain_or_full_rows(name: str) -> None:
    row = BY_NAME[name]
    for kind, bias, dropout in itertools.product(("fwd", "bwd"), (False, True), (False, True)):
        asked = {**request_for(row), "pass": kind, "has_bias": bias, "dropout": dropout}
        assert (_C.select(asked) == name) == serves(row, asked)
        if row["kind"] == kind and not serves(row, asked):
            assert re.search("bias|dropout", _C.explain(asked).split("forced ")[1])


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_choice_fits_and_is_the_first_that_does(sm: int, dtype: str) -> None:
    sizes = [1, 8, 63, 64, 65, 128, 256, 384, 512, 513, 1024, 2048]
    for k, kv, alignment, call in itertools.product(sizes, sizes, (1, 2, 4, 8), CALLS):
        asked = request(sm=sm, dtype=dtype, K=k, Kv=kv, alignment=alignment, **call)
        name = _C.select(asked)
        if not name:
            continue
        row = BY_NAME[name]
        assert row["dtype"] == dtype and serves(row, asked) and row["math"] == "ieee"
        assert row["min_sm"] <= sm <= row["max_sm"]
        assert row["max_k"] in (0, max(k, row["max_k"])) and row["max_kv"] in (
            0,
            max(kv, row["max_kv"]),
        )
        assert alignment % row["alignment"] == 0


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_alignment_and_bias_has_a_kernel(sm: int, dtype: str) -> None:
    """The contract: any K and Kv, any alignment, any dtype, on every GPU from sm_70 on."""
    none = [
        (k, kv, alignment, call)
        for k, kv in [
            (1, 1),
            (7, 9),
            (64, 64),
            (128, 64),
            (96, 200),
            (256, 256),
            (640, 64),
            (64, 2050),
        ]
        for alignment in (1, 2, 4, 8)
        for call in CALLS
        if not _C.select(request(sm=sm, dtype=dtype, K=k, Kv=kv, alignment=alignment, **call))
    ]
    assert none == []


def test_tf32_rows_run_only_when_allowed() -> None:
    for sm, bias in itertools.product(SMS, (False, True)):
        strict = _C.select(request(sm=sm, dtype="f32", has_bias=bias, alignment=4))
        loose = _C.select(request(sm=sm, dtype="f32", has_bias=bias, alignment=4, math="tf32"))
        if strict:
            assert BY_NAME[strict]["math"] == "ieee" and loose
    asked = request(sm=90, dtype="f32", alignment=4, math="tf32")
    if any(row["math"] == "tf32" for row in ROWS):
        assert BY_NAME[_C.select(asked)]["math"] == "tf32"


@pytest.mark.skipif(("simt", "bf16") not in FAMILIES, reason="no SIMT bf16 row in the list")
@pytest.mark.parametrize("sm", [70, 75])
def test_bf16_before_sm80_says_what_it_costs(sm: int) -> None:
    text = _C.explain(request(sm=sm, dtype="bf16"))
    assert f"sm_{sm} has no tensor-core path for bf16" in text and "slower" in text
    assert f"is for sm_80 and newer, the GPU is sm_{sm}" in text


def test_backward_requests_are_told_as_such() -> None:
    fields = {"pass": "bwd", "has_bias": True, "bias_grad": True, "dropout": True}
    text = _C.explain(request(dtype="bf16", **fields))
    line = text.splitlines()[0]
    assert line.startswith("backward, bf16, B 2, ")
    assert "with bias and its gradient, with dropout, on sm_80" in line
    assert f"is for the forward pass: {FORWARD[0]['name']}, " in text
    text = _C.explain(request(sm=61, **fields))
    assert "chosen: none; no backward kernel takes f16 on sm_61" in text
    if any(row["kind"] == "bwd" for row in ROWS):
        assert "is for the backward pass: " in _C.explain(request())


def test_an_old_gpu_has_no_kernel_and_says_so() -> None:
    text = _C.explain(request(sm=61, dtype="bf16"))
    assert "chosen: none; no kernel takes bf16 on sm_61" in text


def test_explain_names_every_row_or_counts_it() -> None:
    text = _C.explain(request())
    shown = sum(row["name"] in text for row in ROWS)
    assert "chosen: " in text and shown >= min(len(ROWS), 4)
    assert len(text.splitlines()) < 40


def test_a_request_refuses_unknown_fields_and_dtypes() -> None:
    with pytest.raises(KeyError, match="heads"):
        _C.select(request(heads=3))
    with pytest.raises(ValueError, match="f64"):
        _C.select(request(dtype="f64"))
    with pytest.raises(ValueError, match="backward"):
        _C.select(request(**{"pass": "backward"}))


def test_without_its_code_a_gpu_is_told_the_arch_to_build() -> None:
    if not _C.is_cuda_build:
        pytest.skip("a host-only build answers for every GPU")
    built = {a.split("_")[1] for a in _C.built_archs()}
    if "70" in built or "75" in built:
        pytest.skip("this build has code for old GPUs")
    asked = request(sm=70, any_build=False)
    assert _C.select(asked) == ""
    assert "no code for sm_70" in _C.explain(asked) and "MEMEFF_CUDA_ARCHS=70" in _C.explain(asked)


# ---- forward(): what the binding checks before any launch; CPU tensors are enough ----


def call(
    q: Any, k: Any, v: Any, bias: Any = None, lse: Any = None, out: Any = None, **kw: Any
) -> Any:
    if out is None:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    tensors = (q, k, v, bias, out, lse, kw.get("seed"))
    rest = (1.0, kw.get("p", 0.0), kw.get("causal", 0), False, kw.get("variant", ""), None, 0)
    answer = _C.forward(*tensors, *rest)
    assert _C.forward_scalars(*map(scalars, tensors), None, *rest, -1) == answer
    return answer


CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.bool: 3, torch.int64: 4}


def scalars(t: torch.Tensor | None) -> Any:
    if t is None:
        return None
    return t.data_ptr(), CODES.get(t.dtype, -1), tuple(t.shape), t.stride()


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def qkv(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"q": half(*q), "k": half(*k), "v": half(*v), **more}


def small(**more: Any) -> dict[str, Any]:
    return {**qkv((2, 5, 8), (2, 7, 8), (2, 7, 8)), **more}


exchange = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason=f"torch {torch.__version__} has no DLPack C exchange API",
)
ZEROS = torch.zeros
SEED = ZEROS(2).long()
GROUPED = ((2, 5, 4, 64), (2, 7, 2, 64), (2, 7, 2, 8))
ONE_KV_HEAD = ((2, 5, 4, 64), (2, 7, 1, 64), (2, 7, 1, 8))
GROUPS = ((2, 5, 3, 2, 8), (2, 7, 3, 2, 8), (2, 7, 3, 2, 8))


@exchange
@pytest.mark.parametrize(
    "arguments",
    [
        qkv((2, 5, 64), (2, 7, 64), (2, 7, 32), lse=ZEROS(2, 1, 5)),
        qkv((2, 5, 4, 64), (2, 7, 4, 64), (2, 7, 4, 64)),
        qkv(*GROUPED, lse=ZEROS(2, 4, 5)),
        qkv((2, 5, 64), (2, 7, 64), (2, 7, 32), lse=ZEROS(2, 2, 1, 5)),
        qkv(*GROUPED, lse=ZEROS(2, 2, 4, 5)),
        qkv(*GROUPED, lse=ZEROS(2, 2, 4, 10)[..., :5]),
        qkv(*GROUPS, lse=ZEROS(2, 2, 3, 2, 5)),
        qkv(*ONE_KV_HEAD, bias=half(1, 4, 1, 7)),
        qkv(*GROUPS, lse=ZEROS(2, 3, 2, 5), bias=ZEROS(1, 3, 1, 5, 7)),
        {**qkv(*GROUPS), "k": half(2, 7, 3, 1, 8).expand(2, 7, 3, 2, 8)},
        small(bias=ZEROS(2, 5, 7).bool(), causal=2),
        small(q=half(2, 5, 8).requires_grad_()),
        small(seed=SEED, p=0.1),
        small(seed=SEED, p=1.0),
        small(seed=SEED, p=1e-9),
    ],
)
def test_valid_inputs_pass_every_check_but_that_of_the_device(arguments: dict[str, Any]) -> None:
    code, message = call(**arguments)
    if _C.is_cuda_build:
        assert (code, message) == (INVALID, "a tensor is not on a CUDA device")
    else:
        assert code == UNSUPPORTED and "host-only" in message


@exchange
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (qkv((5, 64), (7, 64), (7, 64)), "rank 2, not 3, 4 or 5"),
        (qkv((2, 5, 4, 64), (2, 7, 3, 64), (2, 7, 3, 64)), "do not divide"),
        (qkv((2, 5, 64), (2, 7, 32), (2, 7, 64)), "key has shape [2, 7, 32]"),
        (qkv((2, 5, 64), (2, 7, 64), (2, 6, 64)), "value has shape [2, 6, 64]"),
        (qkv((2, 5, 64), (3, 7, 64), (3, 7, 64)), "expected [2, 7, 64]"),
        (small(k=ZEROS(2, 7, 8)), "another dtype"),
        (small(q=ZEROS(2, 5, 8).double()), "float16, bfloat16 or float32"),
        (small(v=half(2, 8, 7).mT), "last stride 7"),
        (small(q=half(2, 0, 8)), "is empty"),
        (small(bias=half(2, 5, 6)), "attn_bias has shape"),
        (small(bias=ZEROS(2, 5, 7).int()), "attn_bias has a dtype"),
        (small(lse=ZEROS(2, 5)), "lse has shape"),
        (small(lse=half(2, 1, 5)), "lse is not float32"),
        (small(lse=half(2, 2, 1, 5)), "lse is not float32"),
        (small(lse=ZEROS(2, 1, 10)[..., ::2]), "lse has a last stride other than 1"),
        (small(lse=ZEROS(2, 2, 1, 10)[..., ::2]), "lse has a last stride other than 1"),
        (small(lse=ZEROS(1, 2, 1, 5)), "lse has shape [1, 2, 1, 5], expected [2, 2, 1, 5]"),
        (small(lse=ZEROS(3, 2, 1, 5)), "lse has shape [3, 2, 1, 5], expected [2, 2, 1, 5]"),
        (small(lse=ZEROS(2, 2, 1, 1, 5)), "lse has shape [2, 2, 1, 1, 5], expected [2, 2, 1, 5]"),
        (small(lse=ZEROS(1, 2, 2, 1, 1, 5)), "expected [2, 2, 1, 5]"),
        (qkv(*GROUPED, lse=ZEROS(2, 2, 5, 4)), "expected [2, 2, 4, 5]"),
        (qkv(*GROUPS, lse=ZEROS(2, 6, 5)), "expected [2, 3, 2, 5]"),
        (qkv(*GROUPS, lse=ZEROS(3, 2, 3, 2, 5)), "expected [2, 2, 3, 2, 5]"),
        (small(out=half(2, 5, 9)), "out has shape"),
        (small(causal=3), "causal is 3"),
        (small(p=0.1), "seed is missing"),
        (small(seed=SEED), "p is 0"),
        (small(seed=SEED, p=1.5), "p is 1.5"),
        (small(seed=SEED, p=float("nan")), "p is nan"),
        (small(seed=SEED.int(), p=0.1), "seed is not int64"),
        (small(seed=SEED[:1], p=0.1), "seed has shape [1], expected [2]"),
        (small(seed=ZEROS(4).long()[::2], p=0.1), "seed [2] is not contiguous"),
        (small(q=ZEROS(2, 5, 8).long()), "float16, bfloat16 or float32"),
    ],
)
def test_invalid_inputs_are_named(arguments: dict[str, Any], message: str) -> None:
    code, text = call(**arguments)
    assert code == INVALID and message in text


def test_an_object_that_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="__dlpack_c_exchange_api__"):
        _C.forward(1, 2, 3, None, 4, None, None, 1.0, 0.0, 0, False, "", None, 0)


def test_the_module_loads_without_torch_and_without_a_cuda_driver() -> None:
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", {_C.__file__!r})
c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c)
c.variants(), c.built_archs(), c.explain(dict(sm=90, dtype="f16"))
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libtorch" not in maps, maps
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_device_info_without_a_gpu_says_why() -> None:
    if torch.cuda.is_available() and _C.is_cuda_build:
        assert _C.device_info(0)["sm"] >= 70
    else:
        with pytest.raises(RuntimeError, match=r"host-only|cudaDeviceGetAttribute"):
            _C.device_info(0)
