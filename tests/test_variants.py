"""Every compiled variant, forced by name, against the oracle; and proof that none was left out.

Forward rows run the forward pass (rows of dropout with it), backward rows every gradient. A
variant is one item: its shapes come from its own limits, so a new row of the list is covered
without a change here. The variants that ran are in `cases.variants_hit`, which tests/gpu_record.py
writes into the record."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import backward_cases
import cases
import gradients
import pytest
import torch
from backward_cases import BackwardCase
from bias_shapes import aligned_shapes, biased_shapes
from cases import Case
from companions import forward_row, scores, within
from tolerance import Checker, tf32, ulp

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


def each_row(kind: str = "", dropout: bool = False) -> pytest.MarkDecorator:
    """One item a built row ("fwd", "bwd" or either; of dropout or all); one that is skipped or
    fails where there is none."""
    found = [r for r in rows() if kind in ("", r["kind"]) and (r["dropout"] or not dropout)]
    params = [pytest.param(row, id=row["name"]) for row in found]
    return pytest.mark.parametrize("row", params or [pytest.param(None, id="no_variant_built")])


def fits_here(row: dict[str, Any], k: int = 0) -> str:
    """Why this GPU cannot run a built row (with this K: the least); empty where it can."""
    from memeff_attn import _C

    info = _C.device_info(torch.cuda.current_device())
    if row["smem_bytes"] > info["smem_optin"]:
        return f"needs {row['smem_bytes']} bytes of shared memory of {info['smem_optin']}"
    request = {
        "sm": info["sm"],
        "smem_optin": info["smem_optin"],
        "dtype": row["dtype"],
        "math": row["math"],
        "pass": row["kind"],
        "dropout": row["dropout"],
        "bias_grad": row["kind"] == "bwd" and row["bias"],
    }
    request |= {"K": k or row["alignment"], "Kv": k or row["alignment"], "alignment": 16}
    request |= {"has_bias": row["bias"], "variant": row["name"]}
    request["bias_alignment"] = row["bias_alignment"]
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


def head_dims(row: dict[str, Any]) -> tuple[list[int], list[int], int, int]:
    """K and Kv to try, and the one of each for everything else: the largest, or one tile and more
    where any is taken."""
    step = row["alignment"]
    ks, kvs = (dims(row[limit], row["value_tile"], step) for limit in ("max_k", "max_kv"))
    k, kv = ks[-1], kvs[-1]
    if not row["max_k"]:  # a row of any K: its steps are in `ks`
        k = min(k, 256 // step * step)
    if not row["max_kv"]:
        kv = min(kv, max(row["value_tile"] // step * step, step))
    return ks, kvs, k, kv


def strides_of(row: dict[str, Any]) -> list[str]:
    step = row["alignment"]
    layouts = ["heads_first", "packed", "batch0", "rows0", "heads0"]
    odd = ["padded1", "offset1", "mixed", "last_dim"]
    return layouts + (odd if step == 1 else ["padded8"])


def bias_kinds(row: dict[str, Any]) -> list[str]:
    """What a bias that the row takes may be."""
    return [":rows8"] if row["bias_alignment"] else ["", ":f32", ":bool"]


def shapes(row: dict[str, Any]) -> list[Case]:
    """Tile edges at the largest head dim, head dims at a tile edge, diagonals, biases and
    strides."""
    ks, kvs, k, kv = head_dims(row)
    m_edge, n_edge = row["tile_m"] + 1, row["tile_n"] + 1
    masks = itertools.cycle(cases.MASKS)
    broadcasts = ("bhmn", "1hmn", "11mn", "b11n", "bh1n")
    specs = ["".join(p) for p in itertools.product(broadcasts, bias_kinds(row))]
    biases = itertools.cycle(specs if row["bias"] else [""])

    def case(**fields: Any) -> Case:
        fields = {"bias": next(biases), "mask": next(masks)} | fields
        return within(row, Case(row["dtype"], **fields))

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
    found += [
        case(M=70, N=75, H=2, K=k, Kv=kv, strides=s, rank=r)
        for s in strides_of(row)
        for r in ("bmhk", "bmghk")
    ]
    found += [case(M=70, N=75, H=1, K=k, Kv=kv, rank="bmk")]
    found += [case(M=70, N=150, K=k, Kv=kv, scale=s) for s in (0.0, -0.3, 2.0)]
    found += [case(B=3, M=150, N=500, H=5, K=k, Kv=kv, mask=m) for m in cases.MASKS]
    if row["bias"]:
        kinds = bias_kinds(row)
        layouts = [":padded", ":transposed", ":offset", ":expanded"] if len(kinds) > 1 else []
        keys = "n1" if len(kinds) > 1 else "n"  # an aligned bias has a keys' stride of 1
        broadcasts = ["".join(p) for p in itertools.product("b1", "h1", "m1", keys)]
        found += [
            case(M=m_edge, N=n_edge, K=k, Kv=kv, bias=b + d)
            for b, d in itertools.product(broadcasts, kinds)
        ]
        found += [
            case(M=70, N=77, K=k, Kv=kv, bias="bhmn" + d + s)
            for d, s in itertools.product(kinds, layouts)
        ]
    return found


def with_dropout(found: list[Case]) -> list[BackwardCase]:
    """The same shapes for a row of dropout: with a bias and without."""
    drops = itertools.cycle(backward_cases.DROPOUTS[1:])
    made = []
    for i, case in enumerate(found):
        fields = dataclasses.asdict(case) | {"p": next(drops)}
        made.append(BackwardCase(**fields | ({"bias": ""} if i % 2 else {})))
    return made


def backward_shapes(row: dict[str, Any]) -> list[BackwardCase]:
    """Edges of the owner's and the loop's tile both ways round, head dims, diagonals, few and many
    blocks (splits), strides; dropout for rows of dropout; biases and their gradients for full
    rows, which serve either or both."""
    ks, kvs, k, kv = head_dims(row)
    tiles = around(row["tile_m"]), around(row["tile_n"])
    pairs = {*itertools.product(*tiles), *itertools.product(*tiles[::-1])}
    edge = row["tile_m"] + 1, row["tile_n"] + 1
    masks = itertools.cycle(cases.MASKS)
    biases = ("bhmn", "", "1h1n", "bhmn:f32", "", "b1m1:bool", "11mn:f32", "bh11")
    if row["bias_alignment"]:
        biases = tuple(
            x and x + ":rows8" for x in ("bhmn", "", "1h1n", "1hmn", "", "b1mn", "11mn", "b11n")
        )
    drops = (0.0, 0.3, 0.1, 0.0, 0.7, 0.0, 0.2, 0.5)
    features: list[dict[str, Any]] = [{}]
    if row["bias"] and row["dropout"]:
        features = [{"bias": b, "p": p} for b, p in zip(biases, drops, strict=True)]
    elif row["bias"]:
        features = [{"bias": b} for b in biases if b]
    elif row["dropout"]:
        features = [{"p": p} for p in backward_cases.DROPOUTS]
    extras = itertools.cycle(features)

    def case(**fields: Any) -> BackwardCase:
        fields = {"mask": next(masks)} | next(extras) | fields
        return within(row, BackwardCase(row["dtype"], **fields))

    found = [case(B=1, M=m, N=n, H=2, K=k, Kv=kv) for m, n in sorted(pairs)]
    found += [case(M=edge[0], N=edge[1], H=1, K=x, Kv=kv) for x in ks for _ in range(2)]
    found += [case(M=edge[1], N=edge[0], H=1, K=k, Kv=x) for x in kvs for _ in range(2)]
    found += [
        case(M=m, N=n, K=k, Kv=kv, mask=mask)
        for (m, n), mask in itertools.product(((1, 300), (300, 1), (257, 70)), cases.MASKS)
    ]
    found += [case(B=1, M=m, N=n, H=1, K=k, Kv=kv) for m, n in ((70, 2000), (2000, 70))]
    found += [case(B=3, M=150, N=500, H=5, K=k, Kv=kv, mask=m) for m in cases.MASKS]
    found += [case(M=70, N=300, H=4, Hkv=h, K=k, Kv=kv) for h in (1, 2)]
    found += [
        case(M=70, N=75, H=2, K=k, Kv=kv, strides=s, rank=r)
        for s, r in itertools.product(strides_of(row), ("bmhk", "bmghk"))
    ]
    grads = ["heads_first", "rows0", "sum", "last_dim"] + ["offset1"] * (row["alignment"] == 1)
    found += [case(M=70, N=75, H=2, K=k, Kv=kv, grad=g) for g in grads]
    found += [case(M=70, N=75, H=1, K=k, Kv=kv, rank="bmk")]
    found += [case(M=70, N=150, K=k, Kv=kv, scale=s) for s in (0.0, -0.3, 2.0)]
    found += [case(M=70, N=150, K=k, Kv=kv, wants=w) for w in ("q", "k", "v", "qv", "kv")]
    if row["bias"]:
        shaped = aligned_shapes if row["bias_alignment"] else biased_shapes
        found += shaped(case, edge, k, kv, 0.2 if row["dropout"] else 0.0)
    return found


def math_mode(row: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    return tf32(row["math"] == "tf32")


@pytest.mark.gpu
@each_row()
def test_variant(row: dict[str, Any]) -> None:
    if reason := fits_here(row):
        pytest.skip(reason)
    with math_mode(row):
        if row["kind"] == "bwd":
            backward_cases.run(backward_shapes(row), "cuda", variant=row["name"])
        elif row["dropout"]:
            backward_cases.run_forward(with_dropout(shapes(row)), "cuda", variant=row["name"])
        else:
            cases.run(shapes(row), "cuda", variant=row["name"])
    cases.variants_hit.add(row["name"])


def small_dims(row: dict[str, Any]) -> tuple[int, int]:
    k = min(row["max_k"] or 256, 512)
    return k, min(row["max_kv"] or row["value_tile"], 512)


@pytest.mark.gpu
@each_row()
def test_variant_repeats_are_bit_equal(row: dict[str, Any]) -> None:
    """50 launches each of few and of many blocks: a race between stages shows as another bit. A
    gradient of the query that is added up in any order stays within one rounding."""
    if reason := fits_here(row):
        pytest.skip(reason)
    k, kv = small_dims(row)
    extra: dict[str, Any] = {"bias": "bhmn" + bias_kinds(row)[0]} if row["bias"] else {}
    extra |= {"p": 0.2} if row["dropout"] else {}
    force = backward_cases.forced_backward if row["kind"] == "bwd" else cases.forced
    wants = ("qkvb" if row["bias"] else "qkv") if row["kind"] == "bwd" else ""
    checker = Checker()
    with math_mode(row), force(row["name"]):
        for case in [
            BackwardCase(row["dtype"], B=1, M=64, N=512, H=1, K=k, Kv=kv, **extra),
            BackwardCase(
                row["dtype"], B=16, M=300, N=700, H=4, K=k, Kv=kv, mask="bottom_right", **extra
            ),
        ]:
            case = within(row, case)
            with checker.case(case):
                inputs = cases.make(case, "cuda")
                seed = backward_cases.new_seed(1, "cuda") if case.p else None
                grad_out = backward_cases.make_grad(case, "cuda", inputs.query)
                arguments = (inputs, grad_out, case.p, seed, wants)
                out, lse, four = backward_cases.by_operators(*arguments)
                for _ in range(50):
                    again, lse_again, others = backward_cases.by_operators(*arguments)
                    checker.same_bits(f"{case} out", again, out)
                    checker.same_bits(f"{case} lse", lse_again, lse)
                    for name, x, y in zip(gradients.NAMES, four, others, strict=True):
                        if x is None or y is None:
                            continue
                        if name == "query" and row["adds_query"]:
                            far = (y.double() - x.double()).abs()
                            checker.true(f"{case} dquery", far <= ulp(x.abs().amax(), x.dtype))
                        else:
                            checker.same_bits(f"{case} d{name}", y, x)
    checker.finish()


@pytest.mark.gpu
@each_row(dropout=True)
def test_variant_drops_the_same(row: dict[str, Any]) -> None:
    """The mask is a function of seed, head, query and key alone: read off by identity, it is the
    Python one whatever the row's tile."""
    if reason := fits_here(row):
        pytest.skip(reason)
    width = min(row["max_kv"] or 64, 64)
    force = backward_cases.forced_backward if row["kind"] == "bwd" else cases.forced
    checker = Checker()
    with math_mode(row), force(row["name"]):
        for number, (m, n) in enumerate(
            ((row["tile_m"] + 1, 2 * row["tile_n"] + 1), (row["tile_n"] + 1, row["tile_m"] - 1))
        ):
            k = min(row["max_k"] or 64, 64)
            bias = "1hmn" + bias_kinds(row)[0] if number and row["bias"] else ""
            case = BackwardCase(
                row["dtype"], M=m, N=n, H=3, K=k, Kv=width, p=0.4, bias=bias, gain=0.5
            )
            with checker.case(case):
                backward_cases.check_identity(checker, case, "cuda", number)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("extra", ["", "bias", "dropout"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_variants_agree(dtype: str, extra: str) -> None:
    """All variants of a dtype on one input: each within the rule, so no two are further apart than
    twice it."""
    fields: dict[str, Any] = {"": {}, "bias": {"bias": "bhmn:rows8"}, "dropout": {"p": 0.3}}[extra]
    case = BackwardCase(dtype, M=150, N=333, H=3, K=32, Kv=32, mask="bottom_right", **fields)
    checker = Checker()
    for row in rows():
        plain = not row["bias"] and not row["dropout"]
        serves = {"": plain, "bias": row["bias"], "dropout": row["dropout"]}[extra]
        serves &= row["kind"] == "bwd" or extra == "dropout" or not row["dropout"]
        if row["dtype"] != dtype or not serves or row["math"] != "ieee" or fits_here(row, case.K):
            continue
        with checker.case(row["name"]):
            if row["kind"] == "bwd":
                with backward_cases.forced_backward(row["name"]):
                    backward_cases.check_case(checker, within(row, case), "cuda")
            else:
                backward_cases.run_forward([within(row, case)], "cuda", row["name"])
    checker.finish()


@pytest.mark.gpu
@pytest.mark.whole
def test_every_variant_was_hit() -> None:
    """What was compiled, minus what ran, is empty."""
    runnable = {row["name"] for row in rows() if not fits_here(row)}
    assert not runnable - cases.variants_hit
    assert runnable, "this build has no variant that this GPU runs"


def test_table_is_the_list() -> None:
    """_C.variants() has the rows of `kernels.py --list`, in its order: no row is lost between list
    and binary."""
    _C = pytest.importorskip("memeff_attn._C")
    listed = [row.name for row in kernels_module().load_rows()]
    assert [row["name"] for row in _C.variants()] == listed


def test_a_forward_row_goes_with_each_backward_row() -> None:
    """Whatever a backward row takes, a forward row of its sub-family takes too (companions.py)."""
    _C = pytest.importorskip("memeff_attn._C")
    table = {row["name"]: row for row in _C.variants()}
    for row in (row for row in table.values() if row["kind"] == "bwd"):
        ks, kvs, _, _ = head_dims(row)
        features = [(False, 0.0), (True, 0.0), (False, 0.3), (True, 0.3)]
        if not (row["bias"] and row["dropout"]):
            features = [(row["bias"], 0.3 if row["dropout"] else 0.0)]
        for k, kv, (bias, p) in itertools.product(ks, kvs, features):
            found = table[forward_row(row, table.values(), bias, p, k, kv)]
            assert found["kind"] == "fwd" and found["dropout"] == bool(p)
            assert all(found[x] == row[x] for x in ("arch", "dtype", "math"))
            assert (found["bias"] == bias) or p
            assert scores(found) == scores(row)
            request = {"sm": 90, "smem_optin": 1 << 20, "pass": "fwd", "any_build": True}
            request |= {x: row[x] for x in ("dtype", "math", "alignment")}
            request |= {"K": k, "Kv": kv, "has_bias": bias, "dropout": bool(p)}
            assert _C.select({**request, "variant": found["name"]}) == found["name"]


def test_named_companions() -> None:
    """The same tile where there is one, three parts with three parts, compensated sums with
    themselves; never a tile that the GPU has no shared memory for."""
    _C = pytest.importorskip("memeff_attn._C")
    table = {row["name"]: row for row in _C.variants()}

    def goes_with(name: str, *call: Any) -> str:
        return forward_row(table["chained_bwd_" + name], table.values(), *call)

    for name, call, expected in (
        ("sm80_f32_few", (False, 0.0, 300, 300), "chained_sm80_f32_few"),
        ("sm80_f32_few_full", (True, 0.0, 8, 8), "chained_sm80_f32_few_bias"),
        ("sm80_f32_few_full", (False, 0.3, 8, 8), "chained_sm80_f32_few_full"),
        ("sm80_f32_k32", (False, 0.0, 32, 8), "register_sm80_f32_k32"),
        ("sm80_f32_k32_full", (True, 0.3, 32, 8), "register_sm80_f32_k32_full"),
        ("sm80_f32_k64", (False, 0.0, 8, 8), "register_sm80_f32_k64"),
        ("sm80_f32_k128", (False, 0.0, 128, 128), "register_sm80_f32_k128"),
        ("sm80_f32_any", (False, 0.0, 8, 8), "chained_sm80_f32_unaligned"),
        ("sm80_f32_any_full", (True, 0.0, 7, 7), "chained_sm80_f32_unaligned_bias"),
        ("sm80_f16_k64", (False, 0.0, 64, 64), "register_sm80_f16_k64"),
        ("sm80_f16_v512", (False, 0.0, 600, 600, 227 << 10), "chained_sm80_f16_v512"),
        ("sm80_f16_v512", (False, 0.0, 600, 600, 163 << 10), "chained_sm80_f16_v512_small"),
        ("sm70_f16_v64", (False, 0.0, 64, 64), "chained_sm70_f16_v64"),
    ):
        assert goes_with(name, *call) == expected


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
    backward = row["kind"] == "bwd"
    name = backward_cases.FORCE_BACKWARD if backward else cases.FORCE
    monkeypatch.setenv(name, row["name"])
    fits: dict[str, Any] = {"bias": "bhmn"} if row["bias"] else {}
    fits |= {"p": 0.3} if row["dropout"] else {}
    step, dtype = row["alignment"], row["dtype"]
    wrong = [
        BackwardCase("f32" if dtype != "f32" else "f16", K=step, **fits),
        BackwardCase(dtype, bias="" if row["bias"] else "bhmn"),
    ]
    if not row["dropout"]:
        wrong.append(BackwardCase(dtype, bias=fits.get("bias", ""), p=0.3))
    elif not row["bias"]:
        wrong.append(BackwardCase(dtype))
    if row["max_k"]:
        wrong.append(BackwardCase(dtype, K=row["max_k"] + step, Kv=step, **fits))
    if step > 1:
        wrong.append(BackwardCase(dtype, K=step + 1, Kv=step, **fits))
    for case in wrong:
        inputs = cases.make(case, "cuda")
        grad_out = backward_cases.make_grad(case, "cuda", inputs.query)
        seed = backward_cases.new_seed(0, "cuda") if case.p else None
        wants = backward_cases.usable(case, inputs) if backward else ""
        with math_mode(row), pytest.raises(NotImplementedError, match=row["name"]):
            backward_cases.by_operators(inputs, grad_out, case.p, seed, wants)
