"""Every compiled variant, forced by name, against the oracle; and proof that none was left out.

A variant is one item: its shapes come from its own limits, so a new row of the list is covered
without a change here. The variants that ran are in `cases.variants_hit`, which tests/gpu_record.py
writes into the record."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import cases
import pytest
import torch
from cases import Case
from tolerance import Checker, tf32

memeff_attn = pytest.importorskip("memeff_attn")

ROOT = Path(__file__).resolve().parent.parent
WIDEST = 1030  # K or Kv tried where a row says "any"


def rows() -> list[dict[str, Any]]:
    """The rows that hold code in this build."""
    try:
        from memeff_attn import _C
    except ImportError:
        return []
    return [row for row in _C.variants() if row["built"]]


def each_row() -> pytest.MarkDecorator:
    """One item a built row; one item that is skipped or fails where there is none."""
    params = [pytest.param(row, id=row["name"]) for row in rows()]
    return pytest.mark.parametrize("row", params or [pytest.param(None, id="no_variant_built")])


def fits_here(row: dict[str, Any]) -> str:
    """Why this GPU cannot run a built row; empty where it can."""
    from memeff_attn import _C

    info = _C.device_info(torch.cuda.current_device())
    if row["smem_bytes"] > info["smem_optin"]:
        return f"needs {row['smem_bytes']} bytes of shared memory of {info['smem_optin']}"
    request = {
        "sm": info["sm"],
        "smem_optin": info["smem_optin"],
        "dtype": row["dtype"],
        "math": row["math"],
    }
    request |= {"K": row["alignment"], "Kv": row["alignment"], "alignment": 16}
    request |= {"has_bias": row["bias"], "variant": row["name"]}
    return "" if _C.select(request) else _C.explain(request)


def kernels_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memeff_kernels", ROOT / "csrc" / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def around(tile: int) -> tuple[int, ...]:
    return tuple(sorted({1, tile - 1, tile, tile + 1, 2 * tile + 1}))


def dims(limit: int, tile: int, alignment: int) -> list[int]:
    """Head dims at the ends and at the steps of a row, all multiples of its alignment."""
    top = limit or WIDEST
    wanted = {
        alignment,
        32,
        64 + alignment,
        tile - alignment,
        tile,
        tile + alignment,
        2 * tile + alignment,
    }
    wanted |= {top // 2, top - alignment, top}
    return sorted({max(alignment, n // alignment * alignment) for n in wanted if 0 < n <= top})


def shapes(row: dict[str, Any]) -> list[Case]:
    """Tile edges at the largest head dim, head dims at a tile edge, diagonals, biases and
    strides."""
    step = row["alignment"]
    ks, kvs = (dims(row[limit], row["value_tile"], step) for limit in ("max_k", "max_kv"))
    k, kv = ks[-1], kvs[-1]
    k = (
        min(k, 256 // step * step) if not row["max_k"] else k
    )  # a row of any K: its steps are in `ks`
    kv = min(kv, max(row["value_tile"] // step * step, step)) if not row["max_kv"] else kv
    m_edge, n_edge = row["tile_m"] + 1, row["tile_n"] + 1
    masks = itertools.cycle(cases.MASKS)
    broadcasts = ("bhmn", "1hmn", "11mn", "b11n", "bh1n")
    specs = ["".join(p) for p in itertools.product(broadcasts, ("", ":f32", ":bool"))]
    biases = itertools.cycle(specs if row["bias"] else [""])

    def case(**fields: Any) -> Case:
        return Case(row["dtype"], **({"bias": next(biases), "mask": next(masks)} | fields))

    found = [
        case(B=1, M=m, N=n, H=2, K=k, Kv=kv)
        for m, n in itertools.product(around(m_edge - 1), around(n_edge - 1))
    ]
    found += [
        case(B=2, M=m_edge, N=n_edge, H=1, K=x, Kv=kv, mask=m)
        for x in ks
        for m in ("none", "top_left")
    ]
    found += [
        case(B=2, M=m_edge, N=n_edge, H=1, K=k, Kv=x, mask=m)
        for x in kvs
        for m in ("none", "bottom_right")
    ]
    found += [
        case(M=m, N=n, K=k, Kv=kv, mask=mask)
        for (m, n), mask in itertools.product(
            ((1, 300), (300, 1), (2 * m_edge, n_edge), (m_edge, 5 * n_edge)), cases.MASKS
        )
    ]
    found += [case(M=70, N=300, H=4, Hkv=h, K=k, Kv=kv) for h in (1, 2)]
    layouts = [
        "heads_first",
        "packed",
        "batch0",
        "rows0",
        "heads0",
        f"padded{8 if step > 1 else 1}",
    ]
    layouts += ["offset1", "mixed", "last_dim"] if step == 1 else []
    found += [
        case(M=70, N=75, H=2, K=k, Kv=kv, strides=s, rank=r)
        for s in layouts
        for r in ("bmhk", "bmghk")
    ]
    found += [case(M=70, N=75, H=1, K=k, Kv=kv, rank="bmk")]
    found += [case(M=70, N=150, K=k, Kv=kv, scale=s) for s in (0.0, -0.3, 2.0)]
    found += [case(B=3, M=150, N=500, H=5, K=k, Kv=kv, mask=m) for m in cases.MASKS]
    if row["bias"]:
        layouts = [":padded", ":transposed", ":offset", ":expanded"]
        kinds = ["", ":f32", ":bool"]
        broadcasts = ["".join(p) for p in itertools.product("b1", "h1", "m1", "n1")]
        found += [
            case(M=m_edge, N=n_edge, K=k, Kv=kv, bias=b + d)
            for b, d in itertools.product(broadcasts, kinds)
        ]
        found += [
            case(M=70, N=77, K=k, Kv=kv, bias="bhmn" + d + s)
            for d, s in itertools.product(kinds, layouts)
        ]
    return found


def math_mode(row: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    return tf32(row["math"] == "tf32")


@pytest.mark.gpu
@each_row()
def test_variant(row: dict[str, Any]) -> None:
    if reason := fits_here(row):
        pytest.skip(reason)
    with math_mode(row):
        cases.run(shapes(row), "cuda", variant=row["name"])
    cases.variants_hit.add(row["name"])


@pytest.mark.gpu
@each_row()
def test_variant_repeats_are_bit_equal(row: dict[str, Any]) -> None:
    """50 launches each of few and of many blocks: a race between stages shows as another bit."""
    if reason := fits_here(row):
        pytest.skip(reason)
    k = min(row["max_k"] or 256, 512)
    kv = min(row["max_kv"] or row["value_tile"], 512)
    bias = "bhmn" if row["bias"] else ""
    checker = Checker()
    with math_mode(row), cases.forced(row["name"]):
        for case in [
            Case(row["dtype"], B=1, M=64, N=512, H=1, K=k, Kv=kv, bias=bias),
            Case(row["dtype"], B=16, M=300, N=700, H=4, K=k, Kv=kv, bias=bias, mask="bottom_right"),
        ]:
            with checker.case(case):
                inputs = cases.make(case, "cuda")
                out, lse = cases.attention(inputs)
                for _ in range(50):
                    again, lse_again = cases.attention(inputs)
                    checker.same_bits(f"{case} out", again, out)
                    checker.same_bits(f"{case} lse", lse_again, lse)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["", "bhmn"], ids=["no_bias", "bias"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_variants_agree(dtype: str, bias: str) -> None:
    """All variants of a dtype on one input: each within the rule, so no two are further apart than
    twice it."""
    checker = Checker()
    case = Case(dtype, B=2, M=150, N=333, H=3, K=32, Kv=32, mask="bottom_right", bias=bias)
    inputs = cases.make(case, "cuda")
    for row in rows():
        if (
            row["dtype"] != dtype
            or row["bias"] != bool(bias)
            or row["math"] != "ieee"
            or fits_here(row)
        ):
            continue
        with checker.case(row["name"]), cases.forced(row["name"]):
            checker.attention(row["name"], *cases.attention(inputs), *inputs.tuple())
    checker.finish()


@pytest.mark.gpu
@pytest.mark.whole
def test_every_variant_was_hit() -> None:
    """What was compiled, minus what ran, is empty."""
    runnable = {row["name"] for row in rows() if not fits_here(row)}
    assert runnable - cases.variants_hit == set()
    assert runnable, "this build has no variant that this GPU runs"


def test_table_is_the_list() -> None:
    """_C.variants() has the rows of `kernels.py --list`, in its order: no row is lost between list
    and binary."""
    _C = pytest.importorskip("memeff_attn._C")
    listed = [row.name for row in kernels_module().load_rows()]
    assert [row["name"] for row in _C.variants()] == listed


def test_built_is_what_was_asked() -> None:
    """Every row of the sub-families that were built has code: a unit that was dropped shows
    here."""
    built = rows()
    if not built:
        pytest.skip("no row is built here (host-only)")
    from memeff_attn import _C

    groups = {(row["arch"], row["dtype"]) for row in built}
    missing = [
        r["name"] for r in _C.variants() if (r["arch"], r["dtype"]) in groups and not r["built"]
    ]
    assert missing == []


@pytest.mark.gpu
def test_forced_name_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cases.FORCE, "chained_sm12_f8_k3")
    inputs = cases.make(Case(), "cuda")
    with pytest.raises((ValueError, NotImplementedError), match="chained_sm12_f8_k3"):
        cases.attention(inputs)


@pytest.mark.gpu
@each_row()
def test_forced_variant_that_does_not_fit(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forced variant never quietly becomes another one."""
    if reason := fits_here(row):
        pytest.skip(reason)
    monkeypatch.setenv(cases.FORCE, row["name"])
    bias = "bhmn" if row["bias"] else ""
    other = "f32" if row["dtype"] != "f32" else "f16"
    wrong = [
        Case(other, K=row["alignment"], bias=bias),
        Case(row["dtype"], bias="" if bias else "bhmn"),
    ]
    if row["max_k"]:
        wrong.append(
            Case(row["dtype"], K=row["max_k"] + row["alignment"], Kv=row["alignment"], bias=bias)
        )
    if row["alignment"] > 1:
        wrong.append(Case(row["dtype"], K=row["alignment"] + 1, Kv=row["alignment"], bias=bias))
    for case in wrong:
        with math_mode(row), pytest.raises(NotImplementedError, match=row["name"]):
            cases.attention(cases.make(case, "cuda"))
