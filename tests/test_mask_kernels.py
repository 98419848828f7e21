"""Every mask class on the GPU (and the same on the CPU): forward and all gradients against the fp64
oracle, for every dtype, head dim and layout; what belongs to no sequence; CUDA graphs."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import mask_runs
import pytest
import torch
from backward_cases import deterministic
from mask_runs import DENSE, DTYPES, LAYOUTS, PADDING, PAGES, SEQUENCES, SIZES, Q
from tolerance import TOP_LEFT, Checker, Drop
from torch import Tensor

import memeff_attn
from memeff_attn import attn_bias as ab
from memeff_attn import backward, dropout, ops
from memeff_attn.dropout import new_seed

attention = memeff_attn.memory_efficient_attention
with_lse = memeff_attn.memory_efficient_attention_forward_requires_grad
DIMS = {
    "f16": [(64, 64), (33, 33), (128, 72), (256, 256), (320, 320)],
    "bf16": [(128, 128), (33, 65), (64, 64), (256, 256), (320, 320)],
    "f32": [(64, 64), (128, 128), (33, 33)],
}


def dims_of(dtype: str, device: str) -> list[tuple[int, int]]:
    return DIMS[dtype] if device == "cuda" else DIMS[dtype][:1]


def test_all_classes_are_here() -> None:
    """Beside those with a tensor, which have tests of their own."""
    made = {type(make("cpu")) for make in (*SEQUENCES.values(), *PAGES.values(), *DENSE.values())}
    with_tensors = {
        ab.KeyPaddingMask,
        ab.MaskWithTensorBias,
        ab.LowerTriangularMaskWithTensorBias,
    }
    assert made | with_tensors == set(ab.MASKS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(device: str, name: str, dtype: str) -> None:
    """Zero-length sequences, M far above N and below; NaN in rows of nobody changes nothing."""
    checker, mask = Checker(), SEQUENCES[name](device)
    layouts = itertools.cycle(LAYOUTS)
    for dims in dims_of(dtype, device):
        for layout in itertools.islice(layouts, 2 if device == "cuda" else 1):
            label = f"{name} {dtype} {dims} {layout}"
            with checker.case(label):
                run = mask_runs.make(mask, device, dtype, layout, dims)
                mask_runs.check(checker, label, mask_runs.poisoned(run))
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAGES)
def test_pages(device: str, name: str, dtype: str) -> None:
    """Read through the tables, whose unused entries name pages that do not exist."""
    checker, mask = Checker(), PAGES[name](device)
    for dims, layout in zip(dims_of(dtype, device), itertools.cycle(LAYOUTS)):
        label = f"{name} {dtype} {dims} {layout}"
        with checker.case(label), torch.no_grad():
            run = mask_runs.make(mask, device, dtype, layout, dims)
            mask_runs.check(checker, label, mask_runs.poisoned(run), backward=False)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DENSE)
def test_windows(device: str, name: str, dtype: str) -> None:
    """Windows of 0, 1, 64 and 1000 keys on each side, M above and below N, several entries."""
    checker, mask = Checker(), DENSE[name](device)
    layouts, dims = itertools.cycle(LAYOUTS), itertools.cycle(dims_of(dtype, device))
    for sizes in SIZES if device == "cuda" else SIZES[:4]:
        layout, width = next(layouts), next(dims)
        label = f"{name} {dtype} {sizes} {width} {layout}"
        with checker.case(label):
            run = mask_runs.make(mask, device, dtype, layout, width, sizes, batch=2)
            mask_runs.check(checker, label, run)
    checker.finish()


OWN = {  # within each sequence; L: the longest
    "shl": lambda s, m, n: (s, 6, m, n),
    "1hl": lambda s, m, n: (1, 6, m, n),
    "l": lambda s, m, n: (m, n),
    "s1l": lambda s, m, n: (s, 1, m, n),
    "1h1n": lambda s, m, n: (1, 6, 1, n),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*OWN, "all", "all_1", "all_n"])
def test_biases_over_sequences(device: str, kind: str, dtype: str) -> None:
    """ALiBi- and T5-like tensors within each sequence, and over all tokens, with their gradient."""
    checker = Checker()
    names = ("blocks_causal", "blocks_local", "padded_band", "blocks")
    for name in names if device == "cuda" else names[:1]:
        mask: Any = SEQUENCES[name](device)
        m, n = mask_runs.shape_of(mask)
        longest = mask.q_seqinfo.max_seqlen, mask.k_seqinfo.max_seqlen
        if kind in OWN:
            shape = OWN[kind](len(Q), *longest)
        else:
            shape = {"all": (1, 6, m, n), "all_1": (1, 1, m, n), "all_n": (1, 6, 1, n)}[kind]
        kinds = (False, True) if device == "cuda" else (kind == "all",)
        for wide, dims in itertools.product(kinds, dims_of(dtype, device)[:2]):
            label = f"{name} {kind} {dtype} {dims} fp32 bias {wide}"
            with checker.case(label):
                run = mask_runs.make(mask, device, dtype, "gqa", dims)
                bias = torch.float32 if wide else DTYPES[dtype]
                run = mask_runs.with_bias(run, shape, bias, kind in OWN)
                mask_runs.check(checker, label, run)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_and_biases(device: str, dtype: str) -> None:
    """A window and a tensor with a gradient, broadcast and not; the key padding mask."""
    checker = Checker()
    for name, sizes, shape in (
        ("causal", (77, 300), (2, 2, 77, 300)),
        ("band_64_1", (300, 77), (1, 2, 300, 77)),
        ("local_65", (65, 257), (2, 1, 1, 257)),
        ("band_0_64", (130, 130), (1, 1, 130, 130)),
    ):
        with checker.case(name):
            run = mask_runs.make(DENSE[name](device), device, dtype, sizes=sizes, batch=2)
            run = mask_runs.with_bias(run, shape, DTYPES[dtype], False)
            mask_runs.check(checker, f"{name} {shape} {dtype}", run)
    padding = ab.KeyPaddingMask.from_lengths([77, 3], 77, device=device)
    run = mask_runs.make(ab.LowerTriangularMask(), device, dtype, sizes=(40, 77), batch=2)
    run.mask, run.visible = padding, padding.visible[:, None, None].expand(2, 1, 40, 77)
    run.bias, run.spread = padding.bias_for(run.query), lambda x: x
    mask_runs.check(checker, "key padding", run)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["blocks", "blocks_local", "padded_causal", "gappy"])
def test_dropout_over_sequences(device: str, name: str, dtype: str) -> None:
    """Each sequence drops as a batch entry of a call of its own, forward and backward; with a bias
    too."""
    checker, mask = Checker(), SEQUENCES[name](device)
    for p, layout in ((0.3, "bmhk"), (0.6, "gqa"))[: 2 if device == "cuda" else 1]:
        label = f"{name} {dtype} p {p} {layout}"
        with checker.case(label):
            run = mask_runs.make(mask, device, dtype, layout)
            run.p, run.seed = p, new_seed(torch.device(device))
            mask_runs.check(checker, label, run)
            heads = run.query.shape[2]
            if name != "gappy":
                shape = (1, heads, mask.q_seqinfo.max_seqlen, mask.k_seqinfo.max_seqlen)
                biased = mask_runs.with_bias(run, shape, DTYPES[dtype], True)
                mask_runs.check(checker, f"{label} and bias", biased)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_is_its_packed_form(device: str, dtype: str) -> None:
    """Sequences of one length, packed, with dropout, against the oracle of the batched call."""
    batch, length = 3, 70
    x = torch.randn(batch, length, 2, 64, device=device).to(DTYPES[dtype])
    packed = x.reshape(1, batch * length, 2, 64)
    mask = ab.BlockDiagonalMask.from_seqlens([length] * batch, device=device).make_causal()
    seed, checker = new_seed(torch.device(device)), Checker()
    for p in (0.0, 0.4):
        out, lse = with_lse(packed, packed, packed, mask, p, seed=seed if p else None)
        keep = dropout.dropout_mask(seed, p, batch, 2, length, length)
        drop = Drop(keep, float(dropout.keep_scale(p))) if p else None
        sums = lse[0].unflatten(1, (batch, length)).transpose(0, 1)
        checker.attention(f"p {p}", out.view_as(x), sums, x, x, x, causal=TOP_LEFT, drop=drop)
    checker.finish()


# ---- what belongs to no sequence ----


def over_provisioned(device: str, dtype: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(query, key, value with rows behind the last sequence, starts, visible)."""
    starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 60, 200], [0, 9, 75])]
    sizes = (1, 290, 2, 64), (1, 210, 2, 64), (1, 210, 2, 64)
    tensors = [torch.randn(x, device=device).to(DTYPES[dtype]) for x in sizes]
    visible = torch.zeros(290, 210, dtype=torch.bool, device=device)
    visible[:60, :9] = visible[60:200, 9:75] = True
    return tensors, starts, visible


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_behind_the_last_sequence(device: str, dtype: str) -> None:
    """A fixed grid for any lengths: out 0, lse -inf, every gradient 0, whatever lies there."""
    tensors, starts, visible = over_provisioned(device, dtype)
    checker = Checker()
    poisoned = [x.clone() for x in tensors]
    poisoned[0][:, 200:] = poisoned[1][:, 75:] = poisoned[2][:, 75:] = math.nan
    windows = -1, -1
    settings = 0.125, 0, False
    forward = ops.forward(*poisoned, None, *settings, True, "", 0.0, None, *windows, *starts)
    out, lse = forward
    dense = visible[None, None]
    checker.attention(dtype, out, lse[0], *tensors, bias=dense, scale=0.125)
    checker.true("out behind", out[:, 200:] == 0)
    checker.true("lse behind", lse[0][..., 200:] == -math.inf)
    grad_out = torch.randn_like(out)
    needs = [True, True, True, False]
    grads = backward.backward(
        grad_out, *poisoned, None, *forward, *settings, needs, "", 0.0, None, None,
        *windows, *starts,
    )  # fmt: skip
    four = (*grads[:3], None)
    mask_runs.gradients.check(checker, dtype, four, grad_out, *tensors, bias=dense, scale=0.125)
    checker.true("dQ behind", grads[0][:, 200:] == 0)
    for grad in grads[1:3]:
        checker.true("dK, dV behind", grad[:, 75:] == 0)
    checker.finish()


# ---- CUDA: graphs, no wait ----


def with_lengths(device: str, lengths: list[int]) -> ab.BlockDiagonalPaddedKeysMask:
    make = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens
    return make([3, 60, 1, 70], PADDING, lengths, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["padded", "paged_128", "paged_16", "blocks"])
def test_a_graph_with_other_lengths(kind: str) -> None:
    """Captured once; replayed after the lengths were overwritten in place."""
    old, new = [300, 5, 0, 77], [1, 130, 304, 70]
    pages: list[Any] = [None, 0]
    if kind.startswith("paged"):
        size = int(kind.split("_")[1])
        count = -(-PADDING // size)
        pages = [torch.randperm(4 * count, device="cuda").int().view(4, count), size]

    def mask_of(lengths: list[int]) -> Any:
        if kind == "blocks":
            return ab.BlockDiagonalMask.from_seqlens(lengths, device="cuda")
        mask = with_lengths("cuda", lengths)
        if pages[0] is None:
            return mask
        return mask.make_paged(*pages, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)

    if kind == "blocks":
        old, new = [300, 5, 0, 77], [0, 380, 1, 1]
    mask = mask_of(old)
    rows, keys = mask_runs.shape_of(mask)
    query, key, value = (
        torch.randn(1, n, 4, 64, device="cuda", dtype=torch.float16) for n in (rows, keys, keys)
    )
    with_lse(query, key, value, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = with_lse(query, key, value, mask)
    checker = Checker()
    for lengths in (new, old, new):
        if kind == "blocks":
            mask.q_seqinfo.from_seqlens_inplace(lengths)
        else:
            mask.k_seqinfo.from_seqlens_padded_inplace(lengths)
        graph.replay()
        visible = mask_of(lengths).materialize((rows, keys), torch.bool, "cuda")
        checker.attention(f"{lengths}", out, lse, query, key, value, bias=visible[None, None])
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SEQUENCES, *PAGES, "band_64_1", "bias", "own"])
def test_nothing_waits_for_the_device(name: str) -> None:
    """Masks made, called forward and backward under torch's sync detector."""
    makers = {**SEQUENCES, **PAGES, **DENSE}
    plain = makers.get(name, SEQUENCES["blocks_causal"])("cuda")
    sizes = (70, 70) if name in DENSE else None
    run = mask_runs.make(plain, "cuda", sizes=sizes)
    if name in ("bias", "own"):
        m, n = mask_runs.shape_of(plain)
        shapes = {"bias": (1, 1, m, n), "own": (1, 2, max(mask_runs.Q), max(mask_runs.KV))}
        run = mask_runs.with_bias(run, shapes[name], torch.float16, name == "own")
    inputs = [x.requires_grad_(name not in PAGES) for x in run.inputs]

    def step() -> None:
        out = attention(*inputs, run.mask)
        if name not in PAGES:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        made = ab.BlockDiagonalMask.from_seqlens([30, 40], device="cuda")
        with torch.no_grad():
            attention(*(x[:, :70] for x in inputs), made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("fixed_order", [False, True])
def test_memory_of_sequences(fixed_order: bool) -> None:
    """out, lse and nothing else forward; backward the gradients and delta: nothing is split. Where
    the order of sums is free, that of the query's gradient in fp32 too."""
    mask = ab.BlockDiagonalMask.from_seqlens([4000, 100, 3900], device="cuda").make_causal()
    inputs = [
        torch.randn(1, 8000, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    ]
    with deterministic() if fixed_order else contextlib.nullcontext():
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = attention(*inputs, mask)
            grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            del out, grads
    element = inputs[0].numel() * 2
    sums = 8000 * 4 * 4
    limit = 5 * element + 3 * sums + (1 << 20)  # out, its gradient, three gradients
    assert peak <= limit + (0 if fixed_order else 2 * element)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_bias_over_all_tokens_of_packed_sequences(device: str, dtype: str, causal: bool) -> None:
    """Its rows are aligned to 16 bytes, a sequence's keys begin anywhere in them."""
    mask: Any = ab.BlockDiagonalMask.from_seqlens([300, 251, 129], [203, 302, 135], device=device)
    mask = mask.make_causal() if causal else mask
    run = mask_runs.make(mask, device, dtype, "bmhk", (64, 64))
    run = mask_runs.with_bias(run, (1, 2, 680, 640), DTYPES[dtype], False)
    checker = Checker()
    mask_runs.check(checker, f"{dtype} causal={causal}", run)
    checker.finish()
