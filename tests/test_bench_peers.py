"""Peers on request (FA4, flex), kernel families by name, and the progress of a run."""

from __future__ import annotations

import dataclasses
import io
import sys
import types
from typing import Any

import pytest
import torch
from test_bench import CHECKED, tensors_of
from test_bench import plain as plain_unmasked
from test_bench_masks import SMALL, plain

from bench import backends, newer_peers, run, shapes, timing
from bench.__main__ import main


def test_families_are_those_of_dispatch() -> None:
    from memeff_attn import dispatch

    assert backends.families("fwd")["chained"] is dispatch.ChainedFwOp
    assert backends.families("bwd")["chained"] is dispatch.ChainedBwOp
    assert backends.families("fwd")["register"] is dispatch.RegisterFwOp
    assert "cpu" not in backends.families()
    assert backends.family_of("memeff-chained") == "chained"
    assert not any(map(backends.family_of, ("memeff", backends.FIXED, "memeff:chained_sm80_f16")))
    backends.check_names(["memeff", "memeff-chained", backends.FIXED, *backends.PEERS])
    with pytest.raises(ValueError, match=r"no kernel family 'other'; there are .*memeff-chained"):
        backends.check_names(["memeff-other"])
    with pytest.raises(ValueError, match=r"no backend 'nothing'; there are memeff, .*fa4, flex"):
        backends.check_names(["nothing"])


def test_a_family_without_a_pass_does_not_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"fwd": {"chained": None}, "bwd": {}}
    monkeypatch.setattr(backends, "families", lambda which="fwd": found[which])
    cell = shapes.cells("llm")[0]
    assert backends.not_served("memeff-chained", cell, 90, "fwd") == ""
    assert backends.not_served("memeff-chained", cell, 90, "bwd") == "no bwd kernels"


def test_a_family_without_a_row_does_not_serve_a_cell() -> None:
    pytest.importorskip("memeff_attn._C", reason="memeff_attn is not compiled")
    of_k = {c.K: c for set_ in ("llm", "anyk") for c in shapes.cells(set_)}
    no, plain = backends.not_served, shapes.cells("llm")[0]
    assert no("memeff-register", plain, 90) == "" == no("memeff", of_k[512], 90)
    for cell, sm in ((of_k[512], 90), (plain, 75)):
        assert no("memeff-register", cell, sm) == "no kernel for these sizes"
        assert no("memeff-chained", cell, sm) == ""


def test_a_family_is_forced_through_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    import memeff_attn

    seen = []

    def call(*args: Any, op: Any = None) -> torch.Tensor:
        seen.append(op)
        return args[0]

    monkeypatch.setattr(memeff_attn, "memory_efficient_attention", call)
    cell = CHECKED["plain"]
    tensors = tensors_of(cell)
    names = ("chained", "register")
    for name in ("memeff", *(f"memeff-{name}" for name in names)):
        backends.make_call(name, cell, tensors, "fwd")()
    both = [(backends.families("fwd")[x], backends.families("bwd").get(x)) for x in names]
    assert seen == [None, *both]


def test_who_of_the_newer_peers_serves_what() -> None:
    llm, fp32 = shapes.cells("llm")[0], shapes.cells("fp32")[0]
    features = {c.label: c for c in shapes.cells("features")}
    of_k = {c.K: c for c in shapes.cells("anyk")}
    for which in shapes.PASSES:
        assert not backends.not_served("fa4", llm, 90, which)
        assert not backends.not_served("flex", llm, 90, which)
        assert backends.not_served("fa4", llm, 80, which) == "sm_90 or newer"
        assert backends.not_served("fa4", fp32, 90, which) == "16-bit inputs only"
        assert backends.not_served("fa4", of_k[320], 90, which) == "K and Kv <= 256"
        assert not backends.not_served("fa4", of_k[24], 90, which)
        odd = dataclasses.replace(llm, K=20)
        assert backends.not_served("fa4", odd, 90, which) == "K and Kv in multiples of 8"
        assert backends.not_served("fa4", features["bias"], 90, which) == "no additive bias"
        assert not backends.not_served("fa4", features["window512"], 90, which)
        assert not backends.not_served("flex", features["bias"], 90, which)
        assert backends.not_served("flex", of_k[8], 90, which) == "K and Kv >= 16"
        for peer in backends.OPTIONAL:
            assert backends.not_served(peer, features["dropout"], 90, which) == "no dropout"
    assert backends.not_served("fa4", shapes.cells("decode")[0], 90, "bwd")


def test_a_peer_that_is_not_installed_is_refused_with_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert main(["run", "--backends", "memeff,fa4"]) == 2
    text = capsys.readouterr().err
    assert "'fa4' is not available here" in text and "flash-attn-4" in text

    class Broken:
        def find_spec(self, name: str, *rest: object) -> None:
            if name.startswith("flash_attn"):
                raise OSError("libcuda.so.1: cannot open")

    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.delitem(sys.modules, "flash_attn.cute")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert "OSError: libcuda.so.1: cannot open; it needs" in newer_peers.not_available("fa4")


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """flash_attn.cute as a stand-in that notes what it was given and computes plainly."""
    calls: list[dict[str, Any]] = []

    def noted(name: str, *qkv: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, None]:
        calls.append({"name": name, "shapes": [tuple(x.shape) for x in qkv], **settings})
        return qkv[0] + (qkv[1] + qkv[2]).sum() * 0, None

    cute: Any = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = lambda *qkv, **s: noted("fixed", *qkv, **s)
    cute.flash_attn_varlen_func = lambda *qkv, **s: noted("packed", *qkv, **s)
    package: Any = types.ModuleType("flash_attn")
    package.cute = cute
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    return calls


def test_what_fa4_is_given(fa4: list[dict[str, Any]]) -> None:
    assert newer_peers.not_available("fa4") == ""
    cells = {"causal": CHECKED["causal"], **SMALL}
    for label in ("causal", "window", "packed causal", "decode"):
        cell = cells[label]
        out = backends.make_call("fa4", cell, tensors_of(cell), "fwd")()
        assert out.shape == (cell.B, cell.M, cell.H, cell.Kv)
    causal, window, packed, decode = fa4
    assert causal["name"] == "fixed" and causal["causal"] and "window_size" not in causal
    assert window["window_size"] == (6, 0) and not window["causal"]  # 7 keys with the query's own
    assert packed["name"] == "packed" and packed["causal"]
    assert packed["shapes"] == [(59, 3, 16)] * 3 and packed["max_seqlen_q"] == 33
    assert packed["cu_seqlens_k"].tolist() == [0, 5, 38, 39, 59]
    assert packed["cu_seqlens_q"].dtype == torch.int32
    assert decode["shapes"] == [(3, 1, 4, 16), (3, 200, 2, 16), (3, 200, 2, 16)]
    gradients = backends.make_call("fa4", CHECKED["plain"], tensors_of(CHECKED["plain"]), "bwd")()
    assert len(gradients) == 3


FLEX = {**{k: c for k, c in CHECKED.items() if not c.p}, **SMALL}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("label", FLEX)
def test_flex_is_told_the_same_problem(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks and biases, through its eager form: compiling takes seconds a cell."""
    cell = dataclasses.replace(FLEX[label], dtype="fp32")
    pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no flex")
    asked: list[dict[str, Any]] = []  # flex itself asks for more
    monkeypatch.setattr(torch, "compile", lambda f, **s: asked.append(s) or f)
    tensors = tensors_of(cell)
    out = backends.make_call("flex", cell, tensors, "fwd")()
    assert asked[0] == {"dynamic": False, "fullgraph": True}
    torch.testing.assert_close(out.double(), plain_of(cell, tensors), atol=2e-6, rtol=1e-5)


def plain_of(cell: shapes.Cell, tensors: backends.Tensors) -> torch.Tensor:
    masked = cell.lens or cell.window or cell.Hkv != cell.H
    return plain(cell, tensors) if masked else plain_unmasked(cell, tensors, None)


def test_a_bias_is_read_by_the_indices_it_has() -> None:
    bias = torch.randn(1, 3, 1, 5)
    add = newer_peers.bias_mod(bias)
    place = [torch.tensor(i) for i in (1, 2, 4, 3)]
    assert add(torch.tensor(1.0), *place) == 1 + bias[0, 2, 0, 3]


def test_whatever_a_peer_raises_stands_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_call(name: str, which: str, problem: object) -> None:
        raise AssertionError("head_dim must be <= 128\nmore")

    monkeypatch.setattr(run, "_first_call", first_call)
    timer: Any = types.SimpleNamespace(medians=lambda calls: [])
    rows = run.run_cell(CHECKED["plain"], "fwd", ["fa4"], timer, {"fa4": None})  # type: ignore[dict-item]
    assert rows[0]["ms"] is None and rows[0]["error"] == "head_dim must be <= 128"

    def lost(name: str, which: str, problem: object) -> None:
        raise AssertionError("CUDA error: illegal address")

    monkeypatch.setattr(run, "_first_call", lost)
    with pytest.raises(RuntimeError, match="illegal address"):
        run.run_cell(CHECKED["plain"], "fwd", ["fa4"], timer, {"fa4": None})  # type: ignore[dict-item]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bar = Terminal()
    monkeypatch.setattr(sys, "stderr", bar)
    progress = timing.Progress(40, "bench")
    for i in range(40):
        progress.step(f"cell {i}")
    text = bar.getvalue()
    assert text.count("\r") == 40 and text.count("\n") == 1 and text.endswith("\n")
    assert "[" + "#" * 12 + "." * 12 + "] 20/40" in text and "s left" in text
    progress = timing.Progress(40, "bench")
    progress.step("cell 0")
    progress.clear()
    assert bar.getvalue().endswith("\r\x1b[2K")
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    progress = timing.Progress(40, "bench")
    for i in range(40):
        progress.step(f"cell {i}")
    lines = log.getvalue().splitlines()
    assert len(lines) == 11 and lines[-1].startswith("bench 40/40")  # the first, each tenth
    progress.clear()
    assert "\r" not in log.getvalue()
