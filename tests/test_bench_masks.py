"""The benchmark on packed sequences, windows and decoding: work, right results, who serves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_bench import META, StubTimer, result, tensors_of

from bench import backends, oracle, pages, peers, report, shapes
from bench.__main__ import main

LENS = (5, 33, 1, 20)
SMALL = {
    "packed": shapes.Cell("varlen", "bf16", 1, 59, 59, 3, 3, 16, 16, False, lens=LENS),
    "packed causal": shapes.Cell("varlen", "bf16", 1, 59, 59, 3, 3, 16, 16, True, lens=LENS),
    "window": shapes.Cell("features", "fp16", 2, 90, 90, 3, 3, 16, 16, False, window=7),
    "window, more keys": shapes.Cell("x", "fp16", 1, 40, 90, 4, 4, 16, 16, False, window=30),
    "decode": shapes.Cell("decode", "bf16", 3, 1, 200, 4, 2, 16, 16, False),
}


def visible(cell: shapes.Cell) -> torch.Tensor:
    """[M, N], pair by pair."""
    seen = torch.zeros(cell.M, cell.N, dtype=torch.bool)
    of = [s for s, n in enumerate(cell.lens or (cell.N,)) for _ in range(n)]
    for i in range(cell.M):
        own = i + cell.N - cell.M
        for j in range(cell.N):
            past = not (cell.causal or cell.window) or j <= own
            near = cell.window is None or own - j < cell.window
            seen[i, j] = past and near and (not cell.lens or of[i] == of[j])
    return seen


def plain(cell: shapes.Cell, tensors: backends.Tensors) -> torch.Tensor:
    """Attention in fp64, [B, M, H, Kv]."""
    q, k, v = (x.double().transpose(1, 2) for x in (tensors.query, tensors.key, tensors.value))
    k, v = (x.repeat_interleave(cell.H // cell.Hkv, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * cell.K**-0.5).masked_fill(~visible(cell), -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def test_cells_of_masks() -> None:
    full, causal = shapes.cells("varlen")
    assert (full.B, full.M, full.N) == (1, 12720, 12720) and sum(full.lens or ()) == 12720
    assert full.groups == ["varlen"] and causal.groups == ["varlen causal"]
    assert {c.groups[-1] for c in shapes.cells("decode")} == {"decode"}
    assert all(c.decoding for c in shapes.cells("decode"))
    window = next(c for c in shapes.cells("features") if c.window)
    assert window.window == 512 and window.groups == ["features window512", "features"]
    for cell in (full, causal, window, *shapes.cells("decode")):
        row = cell.row("fwd", "memeff")
        assert shapes.cell_of(row) == cell
        written = json.loads(json.dumps(row))
        assert shapes.cell_of(written) == cell and shapes.key(written) == shapes.key(row)


@pytest.mark.parametrize("label", SMALL)
def test_work_counted_is_what_is_seen(label: str) -> None:
    cell = SMALL[label]
    pairs = int(visible(cell).sum())
    if cell.causal:  # counted as half, the diagonal left out of account
        pairs = sum(n * n for n in LENS) / 2
    assert cell.flop() == 4 * cell.B * cell.H * cell.K * pairs
    assert cell.flop("bwd") == 2.5 * cell.flop()


def test_decoding_counts_the_heads_of_the_keys() -> None:
    cell = shapes.cells("decode")[0]
    keys = 2 * 2 * cell.B * cell.N * 8 * 128  # key and value, two bytes
    assert keys < cell.bytes() < 1.001 * keys


@pytest.mark.parametrize("index", [0, 1])
def test_fixed_lengths_of_the_same_flop(index: int) -> None:
    cell = shapes.cells("varlen")[index]
    fixed = cell.fixed()
    assert abs(fixed.flop() / cell.flop() - 1) <= 0.01
    assert fixed.M == fixed.N and fixed.M % 128 == 0 and abs(fixed.M - 2048) <= 512
    same = ("dtype", "H", "Hkv", "K", "Kv", "causal", "set")
    assert all(getattr(fixed, f) == getattr(cell, f) for f in same) and fixed.lens is None
    with pytest.raises(ValueError, match="no fixed length"):
        shapes.Cell("x", "bf16", 1, 3, 3, 1, 1, 16, 16, False, lens=(1, 2)).fixed()


def test_who_serves_masks() -> None:
    no = backends.not_served
    for cell in shapes.cells("varlen"):
        assert no("cudnn", cell, 90) == "no packed sequences"
        for backend in ("memeff", "memeff-chained", backends.FIXED, "flash", "efficient"):
            assert not any(no(backend, cell, 90, w) for w in shapes.PASSES)
        assert no("flash", cell, 75)
    for cell in shapes.cells("decode"):
        for backend in ("memeff", "flash", "cudnn"):
            assert not no(backend, cell, 90)
        assert bool(no("efficient", cell, 90)) == (cell.Hkv != cell.H)
        for backend in backends.DEFAULT[:-1]:
            assert "no backward" in no(backend, cell, 90, "bwd")
    window = next(c for c in shapes.cells("features") if c.window)
    assert no("cudnn", window, 90) == "no window"
    assert not any(no(b, window, 90, w) for b in ("flash", "efficient") for w in shapes.PASSES)
    for name in shapes.SETS[:-2]:
        assert all(no(backends.FIXED, c, 90) for c in shapes.cells(name))
    listed = {"llm": shapes.cells("llm"), "varlen": shapes.cells("varlen")}
    assert report.not_served(listed, ["fwd"], [backends.FIXED], 90) == ""


@pytest.mark.parametrize("label", SMALL)
def test_oracle_knows_masks(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = SMALL[label]
    tensors = tensors_of(cell)
    monkeypatch.setitem(oracle.tolerance().MAX_SCORES, "cpu", 70 * 100)  # several blocks
    passes = ["fwd"] if cell.decoding else ["fwd", "bwd"]
    found = oracle.sample(cell, tensors, passes)
    leaves = tensors.leaves()
    exact = plain(cell, leaves)
    right = exact.detach().to(tensors.query.dtype)
    error, broken = found.error(right)
    assert not broken and error < 0.01
    if cell.decoding:
        return
    # The same without the mask's rule is wrong.
    bare = dataclasses.replace(cell, causal=False, window=None, lens=None)
    assert found.error(plain(bare, tensors).to(right.dtype))[1]
    grads = torch.autograd.grad(exact, leaves.wanted(), tensors.grad_out.double())
    error, broken = found.gradient_error(grads)
    assert not broken and error < 0.01, broken
    other = tensors.leaves()
    wrong = torch.autograd.grad(plain(bare, other), other.wanted(), tensors.grad_out.double())
    labels = {line.split(":")[0] for line in found.gradient_error(wrong)[1]}
    assert labels == set(oracle.GRADIENTS[:3])


def test_gradients_of_grouped_heads_are_refused() -> None:
    cell = dataclasses.replace(SMALL["decode"], M=4)
    with pytest.raises(NotImplementedError, match="grouped heads"):
        oracle.sample(cell, tensors_of(cell), ["bwd"])


@pytest.mark.parametrize("lens", [LENS, (1, 1, 57)])
def test_sampled_rows_hold_every_edge(lens: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    long = tuple(1000 * n for n in lens)
    cell = shapes.Cell("x", "bf16", 1, sum(long), sum(long), 1, 1, 8, 8, False, lens=long)
    queries, keys = oracle._inner(cell)
    assert queries == keys == [sum(long[:i]) for i in range(1, len(long))]
    chosen = oracle._chosen(cell.M, queries, generator)
    assert all({at - 1, at} <= set(chosen) for at in queries)
    window = next(c for c in shapes.cells("features") if c.window)
    assert oracle._inner(window) == ([512], [window.N - 512])


@pytest.mark.parametrize("label", SMALL)
def test_our_call(label: str) -> None:
    cell = SMALL[label]
    tensors = tensors_of(cell)
    passes = ["fwd"] if cell.decoding else ["fwd", "bwd"]
    found = oracle.sample(cell, tensors, passes)
    out = backends.make_call("memeff", cell, tensors, "fwd")()
    assert isinstance(out, torch.Tensor) and not out.requires_grad
    assert not found.error(out)[1]
    if not cell.decoding:
        grads = backends.make_call("memeff", cell, tensors, "bwd")()
        assert isinstance(grads, tuple) and not found.gradient_error(grads)[1]


class Recorder:
    """In place of an operator of torch: keeps its arguments and answers with shapes that fit."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[..., tuple]
    ) -> None:
        schema = getattr(torch.ops.aten, name).default._schema
        self.names = [argument.name for argument in schema.arguments]
        self.answer, self.given = answer, {}
        monkeypatch.setattr(torch.ops.aten, name, self)

    def __call__(self, *args: object, **keywords: object) -> tuple:
        assert set(keywords) <= set(self.names[len(args) :])
        self.given = {**dict(zip(self.names, args, strict=False)), **keywords}
        return self.answer(*args)


@pytest.mark.parametrize("label", ["packed", "packed causal", "window"])
def test_flash_call(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = SMALL[label]
    flash = Recorder(monkeypatch, "_flash_attention_forward", lambda q, *_: (q,))
    out = backends.make_call("flash", cell, tensors_of(cell), "fwd")()
    assert isinstance(out, torch.Tensor) and out.shape == (cell.B, cell.M, cell.H, cell.Kv)
    given = flash.given
    ends = [5, 38, 39, 59] if cell.lens else [90, 180]
    assert given["cum_seq_q"].tolist() == given["cum_seq_k"].tolist() == [0, *ends]
    assert given["max_q"] == given["max_k"] == (33 if cell.lens else 90)
    assert given["is_causal"] == cell.causal and given["dropout_p"] == 0
    assert given.get("window_size_left") == (6 if cell.window else None)
    assert given.get("window_size_right") == (0 if cell.window else None)


@pytest.mark.parametrize("label", ["packed", "packed causal", "window"])
def test_efficient_calls(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = SMALL[label]
    lse = torch.zeros(())
    forward = Recorder(
        monkeypatch, "_efficient_attention_forward", lambda q, *_: (q, lse, lse, lse, 90, 90)
    )
    backward = Recorder(
        monkeypatch, "_efficient_attention_backward", lambda g, q, k, v, *_: (q, k, v, None)
    )
    tensors = tensors_of(cell)
    out = backends.make_call("efficient", cell, tensors, "fwd")()
    assert isinstance(out, torch.Tensor) and out.shape == tensors.query.shape
    given = forward.given
    kind = {"packed": 0, "packed causal": 1, "window": 2}[label]
    assert (given["custom_mask_type"], given["window_size"]) == (kind, cell.window)
    assert given["compute_log_sumexp"] is False
    if cell.lens:
        assert given["cu_seqlens_q"].tolist() == [0, 5, 38, 39, 59]
        assert given["max_seqlen_q"] == 33
        assert peers.own_backward("efficient", cell, tensors) is None  # autograd's is right
        return
    assert given["cu_seqlens_q"] is None
    grads = backends.make_call("efficient", cell, tensors, "bwd")()
    assert forward.given["compute_log_sumexp"] is True and len(grads) == 3
    given = backward.given
    assert given["window_size"] == 7 and given["custom_mask_type"] == 2
    assert (given["max_seqlen_q"], given["bias_requires_grad"]) == (90, False)
    assert given["grad_out_"] is tensors.grad_out and given["logsumexp"] is lse


def test_cudnn_says_what_it_does_not_take() -> None:
    cell = SMALL["packed"]
    with pytest.raises(ValueError, match="neither packed sequences nor windows"):
        backends.make_call("cudnn", cell, tensors_of(cell), "fwd")


def test_decoding_through_sdpa_groups_heads() -> None:
    cell = SMALL["decode"]
    tensors = tensors_of(cell)
    seen = {}

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **named: object):
        seen.update(named, heads=(q.shape[1], k.shape[1]))
        return q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
        backends.make_call("flash", cell, tensors, "fwd")()
    assert seen == {"is_causal": False, "enable_gqa": True, "heads": (4, 2)}


def test_summary_of_masks(tmp_path: Path) -> None:
    contents = {name: result(name) for name in ("varlen", "decode")}
    for row in contents["varlen"]["rows"]:
        row["tflops"] = 240.0 if row["backend"] == backends.FIXED else 228.0
    for row in contents["decode"]["rows"]:
        row["gbps"] = {"memeff": 3900.0, "cudnn": 4000.0}.get(row["backend"], 3000.0)
    folder = tmp_path / "h200"
    folder.mkdir()
    for name, content in contents.items():
        assert report.problems(content, name) == []
        (folder / f"{name}.json").write_text(report.dumps(content))
    block = pages.benchmarks_block(tmp_path)
    assert "| varlen (1) | 228 | 228 | 228 | - | 1.00x | 1.00x | 1.00x |" in block
    assert "| varlen causal (1) | 228 |" in block
    assert "| decode, TB/s (4) | 3.90 | - | 3.00 | 4.00 | 1.00x | 1.00x | 1.00x |" in block
    packed = "fixed lengths of the same flop: varlen 0.95x, varlen causal 0.95x."
    assert block.count(packed) == 2  # forward, backward
    assert "decode" not in block.split("Backward, ")[1]
    text = report.summary([r for c in contents.values() for r in c["rows"]])
    assert packed[:-1] in text and "memeff-fixed:" not in text and "decode, TB/s" in text
    less = report.summary([r for r in contents["decode"]["rows"] if r["backend"] == "cudnn"])
    assert "4.00 TB/s" in less


def test_fixed_rows_are_held_to_the_rule_of_ours() -> None:
    content = result("varlen")
    row = next(r for r in content["rows"] if r["backend"] == backends.FIXED)
    row["wrong"] = "max error"
    assert report.problems(content, "varlen")


def test_a_file_from_before_a_cell_says_what_to_do(tmp_path: Path) -> None:
    content = result("features")
    rows = [r for r in content["rows"] if not r["window"]]
    path = tmp_path / "features.json"
    path.write_text(report.dumps({**content, "rows": rows}))
    with pytest.raises(ValueError) as caught:
        report.checked(path)
    text = str(caught.value)
    assert text.count("window512") == 2  # one line a pass
    assert "no rows at all of fwd" in text and "python -m bench run --set features" in text


def test_run_of_masks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench run` on small cells of the CPU: memeff itself, and peers as plain attention."""
    from bench import run

    small = {"varlen": [SMALL["packed"]], "decode": [SMALL["decode"]]}
    fixed = shapes.Cell("varlen", "bf16", 1, 35, 35, 3, 3, 16, 16, False)
    monkeypatch.setattr(shapes.Cell, "fixed", lambda cell: fixed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shapes, "cells", small.__getitem__)
    monkeypatch.setattr(
        backends, "_peer", lambda b, cell, x: lambda: plain(cell, x).to(x.query.dtype)
    )
    monkeypatch.setattr(run, "Timer", StubTimer)
    monkeypatch.setattr(run, "meta", lambda: META | {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(run, "with_peak_mib", lambda call: (call(), 1.0))
    monkeypatch.setattr(run, "inputs", tensors_of)
    assert main(["run", "--set", "varlen,decode", "--out", str(tmp_path)]) == 0
    packed = report.checked(tmp_path / "varlen.json")["rows"]
    names = ["memeff", "efficient", "flash", backends.FIXED]
    assert [r["backend"] for r in packed] == 2 * names
    for row in packed:
        work = fixed if row["backend"] == backends.FIXED else SMALL["packed"]
        assert row["tflops"] == run.digits(work.flop(row["pass"]) / 0.5e-3 * 1e-12)
        assert row.get("timed") == (fixed.name if work is fixed else None)
        assert row["lens"] == list(LENS) and not row.get("wrong")
    decode = report.checked(tmp_path / "decode.json")
    assert [r["backend"] for r in decode["rows"]] == ["memeff", "flash", "cudnn"]
    text = capsys.readouterr().out
    assert "not served: memeff, decode bwd, 1 of 1 cells: decoding has no backward pass" in text
