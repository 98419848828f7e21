"""Public faults of alignment, strides and special cases (tests/faults.py): B19-B23, B26-B29."""

from __future__ import annotations

import itertools
import math

import cases
import pytest
import torch
from cases import Case, Inputs
from tolerance import BOTTOM_RIGHT, NONE, TOP_LEFT, Checker
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")

DTYPES = list(cases.DTYPES)


def random(device: str, dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(cases.DTYPES[dtype])


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, causal: int = NONE
) -> tuple[Tensor, Tensor]:
    return cases.attention(Inputs(query, key, value, bias, causal, None))


def check(checker: Checker, label: object, *args: Tensor | None, causal: int = NONE) -> None:
    with checker.case(label):
        checker.attention(label, *attend(*args, causal=causal), *args, causal=causal)  # type: ignore[arg-type]


def bias_with_row_stride(bias: Tensor, stride: int) -> Tensor:
    """The same numbers with `stride` elements from row to row."""
    wide = bias.new_zeros(*bias.shape[:-1], max(stride, bias.shape[-1]))
    inner = wide[..., : bias.shape[-1]]
    inner.copy_(bias)
    return inner


# --- B19, B20: a bias of any N, any row stride, on aligned and unaligned paths


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 12, 33, 264])
def test_b19_b20_every_n_and_row_stride(device: str, dtype: str, k: int) -> None:
    checker = Checker()
    few = device == "cpu"
    for n in (*range(1, 33), 43, 77, 100, 127, 361, 700)[:: 3 if few else 1]:
        query, key, value = (random(device, dtype, 2, m, 2, k) for m in (13, n, n))
        dense = random(device, dtype, 2, 2, 13, n)
        for extra, bias_dtype in itertools.product((0, 1, 2, 4), ("same", "f32", "bool")):
            bias = bias_with_row_stride(dense, n + extra)
            if bias_dtype != "same":
                bias = bias_with_row_stride(dense.float(), n + extra)
            if bias_dtype == "bool":
                bias = bias_with_row_stride(dense > -1, n + extra)
            check(checker, f"N{n} row stride {n + extra} {bias_dtype}", query, key, value, bias)
    checker.finish()


def test_b19_reported_sizes(device: str) -> None:
    checker = Checker()
    thin = device == "cpu"
    for dtype in ("f16",) if thin else DTYPES:
        b = 9 if thin else 133
        tensors = [random(device, dtype, b, 77, 8, 64) for _ in range(3)]
        check(checker, f"B{b} N77", *tensors, random(device, dtype, b, 8, 77, 77))
        b = 5 if thin else 831
        tensors = [random(device, dtype, b, 43, 32, 8) for _ in range(3)]
        memory = random(device, dtype, b * 688 + 4096)
        check(checker, f"B{b} N43", *tensors, memory.as_strided((b, 32, 43, 43), (688, 43, 43, 1)))
        query, key, value = (random(device, dtype, 2, n, 8, 64) for n in (350, 700, 700))
        check(checker, "N700", query, key, value, random(device, dtype, 2, 1, 1, 700))
    checker.finish()


# --- B21: the address is part of the alignment


@pytest.mark.parametrize("dtype", DTYPES)
def test_b21_storage_offsets(device: str, dtype: str) -> None:
    """query, key, value and bias begin 0-7 elements into their storage, together and one at a
    time."""
    checker = Checker()

    def shifted(x: Tensor, by: int) -> Tensor:
        memory = x.new_zeros(x.numel() + by)
        return memory[by:].view_as(x).copy_(x)

    sizes = ((64, 64), (70, 77)) if device == "cuda" else ((33, 40),)
    for (m, n), k in itertools.product(sizes, (64, 128, 40)):
        query, key, value = (random(device, dtype, 3, x, 4, k) for x in (m, n, n))
        bias = random(device, dtype, 3, 4, m, n)
        for by in range(8):
            tensors = [shifted(x, by) for x in (query, key, value)]
            check(checker, f"M{m} K{k} all by {by}", *tensors)
            check(checker, f"M{m} K{k} bias by {by}", query, key, value, shifted(bias, by))
            for i, name in enumerate(("query", "key", "value")):
                tensors = [query, key, value]
                tensors[i] = shifted(tensors[i], by)
                check(checker, f"M{m} K{k} {name} by {by}", *tensors, bias)
    memory = random(device, dtype, 6 * 64 * 4 * 64 + 3)  # one buffer, three views
    views = [memory[i : i + 6 * 64 * 4 * 64].view(6, 64, 4, 64) for i in (1, 2, 3)]
    check(checker, "one buffer", *views)
    checker.finish()


# --- B22: strides that a compiler or an expand rewrites


@pytest.mark.parametrize("dtype", DTYPES)
def test_b22_insignificant_strides(device: str, dtype: str) -> None:
    """Expanded biases and size-1 dims with the strides that compilers leave there."""
    checker = Checker()
    for n, m, k in itertools.product((1, 361), (1, 65), (64, 33)):
        query, key, value = (random(device, dtype, 2, x, 4, k) for x in (m, n, n))
        row = random(device, dtype, 2, 1, 1, n)
        expanded = row.expand(2, 4, m, n)
        check(checker, f"M{m} N{n} K{k} expanded", query, key, value, expanded)
        a, b = attend(query, key, value, expanded)[0], attend(query, key, value, row)[0]
        checker.same_bits(f"M{m} N{n} K{k} expanded and broadcast", a, b)
        for strides in ((0, 0, 0), (1, 1, 1), (n, n, n), (2**33, 2**33, 2**33)):
            odd = [
                s if size == 1 else t
                for size, s, t in zip(row.shape, strides, row.stride(), strict=False)
            ]
            again = row.as_strided(row.shape, (*odd, 1))
            checker.same_bits(f"N{n} strides {strides}", attend(query, key, value, again)[0], b)
        if n == 1:
            last = row.as_strided(row.shape, (*row.stride()[:-1], 5))
            checker.same_bits("last stride of N = 1", attend(query, key, value, last)[0], b)
    checker.finish()


# --- B23: any head dim, and the scale of the user's K


@pytest.mark.parametrize("dtype", DTYPES)
def test_b23_every_small_head_dim(device: str, dtype: str) -> None:
    checker = Checker()
    few = device == "cpu"
    for k in (*range(1, 131), 132, 160, 192, 200, 256, 257)[:: 5 if few else 1]:
        case = Case(dtype, B=1, M=70, N=77, K=k)
        with checker.case(case):
            inputs = cases.make(case, device)
            query, key, value, *_ = inputs.tuple()
            out, lse = cases.attention(inputs)
            checker.attention(case, out, lse, query, key, value)
            inputs.scale = 1 / math.sqrt(k)
            checker.same_bits(f"{case}: scale of this K", cases.attention(inputs)[0], out)
    checker.finish()


def test_b23_stable_diffusion(device: str) -> None:
    checker = Checker()
    m = 4096 if device == "cuda" else 128
    for dtype, k in itertools.product(DTYPES, (40, 80, 160, 100, 36)):
        tensors = [random(device, dtype, 2, n, 8, k) for n in (m, 77, 77)]
        check(checker, f"{dtype} K{k}", *tensors)
    checker.finish()


# --- B26-B28: one query, shared key and value heads, per-head bias, LSE, masks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["stride0", "fewer_heads", "five_dims"])
def test_b26_b27_shared_heads(device: str, dtype: str, how: str) -> None:
    """Shared heads in each of the three ways equal copied ones: out and LSE of every head, another
    bias per head."""
    checker = Checker()
    sizes = [(1, 16, 128), (1, 33, 512), (1, 65, 64), (65, 65, 64), (129, 65, 40), (2, 77, 33)]
    sizes = sizes if device == "cuda" else sizes[::2]
    for (m, n, k), bias_kind, causal in itertools.product(
        sizes, ("", "bhmn", "1h1n", "bhmn:bool"), (NONE, TOP_LEFT, BOTTOM_RIGHT)
    ):
        label = f"M{m} N{n} K{k} bias={bias_kind} causal={causal}"
        with checker.case(label):
            h, hkv = 16, 2 if how != "stride0" else 1
            query = random(device, dtype, 2, m, h, k)
            key, value = (random(device, dtype, 2, n + i, hkv, k)[:, :n] for i in range(2))
            full = [x.repeat_interleave(h // hkv, dim=2) for x in (key, value)]
            bias = None
            if bias_kind:
                case = Case(dtype, M=m, N=n, H=h, K=k, bias=bias_kind)
                bias = cases.make(case, device).bias
            if how == "stride0":
                shared = (query, *(x.expand(2, n, h, k) for x in (key, value)), bias)
            elif how == "fewer_heads":
                shared = (query, key, value, bias)
            else:
                five = [x.unsqueeze(3).expand(2, n, hkv, h // hkv, k) for x in (key, value)]
                five_bias = bias
                if bias is not None:
                    five_bias = bias.unflatten(1, (hkv, h // hkv))
                shared = (query.unflatten(2, (hkv, h // hkv)), *five, five_bias)
            out, lse = attend(*shared, causal=causal)
            copied, lse_copied = attend(query, *full, bias, causal=causal)
            out, lse = out.reshape(copied.shape), lse.reshape(lse_copied.shape)
            checker.attention(label, out, lse, query, *full, bias, causal)
            checker.same_bits(f"{label}: as copied", out, copied)
            checker.same_bits(f"{label}: LSE as copied", lse, lse_copied)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b28_one_query_keeps_its_window(device: str, dtype: str) -> None:
    """A window of visible keys (as a mask; the window classes come later) is not lost with one
    query, shared heads."""
    checker = Checker()
    for n, window, k in itertools.product((512, 513), (1, 128), (64, 33)):
        query = random(device, dtype, 1, 1, 16, k)
        key, value = (random(device, dtype, 1, n, 1, k).expand(1, n, 16, k) for _ in range(2))
        visible = torch.arange(n, device=device) >= n - window
        label = f"N{n} window {window} K{k}"
        check(checker, label, query, key, value, visible.view(1, 1, 1, n))
        part = attend(query, key[:, -window:], value[:, -window:])
        some = (query, key[:, -window:], value[:, -window:])
        checker.attention(f"{label} alone", *part, *some)
        # Top-left: one query sees the first key alone.
        first = attend(query, key, value, causal=TOP_LEFT)
        checker.attention(f"{label} top-left", *first, query, key[:, :1], value[:, :1])
    checker.finish()


# --- B29: every kernel takes every layout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 32, 33, 64, 96, 128, 160, 256, 320, 512, 520])
def test_b29_layouts_at_every_head_dim(device: str, dtype: str, k: int) -> None:
    """The same numbers in each layout: the same bits where the alignment is the same, the oracle
    everywhere."""
    checker = Checker()
    m, n = (128, 128) if device == "cuda" else (33, 40)
    dense = [random(device, dtype, 2, x, 4, k) for x in (m, n, n)]
    expected, expected_lse = attend(*dense)
    checker.attention("dense", expected, expected_lse, *dense)
    memory = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "padded by 8": lambda x: torch.cat([x, x[..., :8]], -1)[..., :k],
        "packed": lambda x: torch.stack([x, x, x], 2)[:, :, 1],
        "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
        "padded by 1": lambda x: torch.cat([x, x[..., :1]], -1)[..., :k],
        "last dim strided": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    }
    for label, relay in memory.items():
        for which in ((0, 1, 2), (0,), (1,), (2,)):
            name = f"{label} {which}"
            with checker.case(name):
                tensors = [relay(x) if i in which else x for i, x in enumerate(dense)]
                for x, y in zip(tensors, dense, strict=True):
                    checker.that(f"{name}: the test's own copy", torch.equal(x, y))
                out, lse = attend(*tensors)
                if label == "padded by 1":  # another alignment, so another kernel
                    checker.attention(name, out, lse, *dense)
                else:
                    checker.same_bits(name, out, expected)
                    checker.same_bits(f"{name} LSE", lse, expected_lse)
    checker.finish()
