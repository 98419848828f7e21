"""Public faults of bias gradients and of dropout (tests/faults.py): B32, B33; B34 and B35 are in
test_faults_training.py."""

from __future__ import annotations

import itertools
import math
from typing import Any

import backward_cases
import cases
import gradients
import pytest
import torch
from backward_cases import BackwardCase, by_autograd, by_operators
from cases import Inputs
from test_faults_backward import grads, random
from tolerance import NONE, Checker, Drop
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")

DTYPES = list(cases.DTYPES)
attention = memeff_attn.memory_efficient_attention


# --- B32: gradients of broadcast biases


@pytest.mark.parametrize("dtype", DTYPES)
def test_b32_every_way_to_write_a_bias(device: str, dtype: str) -> None:
    """2-D, 3-D, [B * H, M, N], scalars, slices of a padded tensor, a Parameter: the gradient has
    the shape of what was passed."""
    b, h, m, n = 3, 2, 33, 47
    query, key, value = (random(device, dtype, b, x, h, 40) for x in (m, n, n))
    grad_out = random(device, dtype, b, m, h, 40)
    full = torch.nn.Parameter(random(device, dtype, b * h, m, n + 5))
    views = {
        "M, N": (m, n), "1, M, N": (1, m, n), "B, M, N": (b, m, n), "B*H, M, N": (b * h, m, n),
        "scalar": (1, 1, 1, 1), "H": (1, h, 1, 1), "keys": (b, 1, 1, n), "H, N": (1, h, 1, n),
    }  # fmt: skip
    checker = Checker()
    for name, shape in views.items():
        bias = torch.nn.Parameter(random(device, dtype, *shape))
        (got,) = torch.autograd.grad(attention(query, key, value, bias), bias, grad_out)
        rank4 = {2: (1, 1, *shape), 3: (1, *shape), 4: shape}[len(shape)]
        if name == "B*H, M, N":
            rank4 = (b, h, m, n)
        elif name == "B, M, N":
            rank4 = (b, 1, m, n)
        checker.that(f"{name}: {tuple(got.shape)}", got.shape == shape)
        four = (None, None, None, got.reshape(rank4))
        same_bias = bias.detach().reshape(rank4)
        gradients.check(checker, name, four, grad_out, query, key, value, same_bias)
    (got,) = torch.autograd.grad(attention(query, key, value, full[..., :n]), full, grad_out)
    checker.true("padding", got[..., n:] == 0)
    plain = full.detach()[..., :n].reshape(b, h, m, n)
    four = (None, None, None, got[..., :n].reshape(b, h, m, n).contiguous())
    gradients.check(checker, "slice", four, grad_out, query, key, value, plain)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b32_evoformer_and_swin(device: str, dtype: str) -> None:
    """AlphaFold's triangle and MSA attention: a pair bias shared by all rows of an alignment, also
    beside a mask of keys; Swin's relative position bias shared by all windows."""
    checker = Checker()
    b, s, n, h, c = (1, 64, 130, 4, 32) if device == "cuda" else (2, 6, 33, 2, 16)
    five = [random(device, dtype, b, n, s, h, c) for _ in range(3)]
    pair = random(device, dtype, b, 1, h, n, n)
    grad_out, four = grads(*five, pair)
    gradients.check(checker, "5-D pair bias", four, grad_out, *five, pair)
    four_d = [x.movedim(2, 1).flatten(0, 1)[:s] for x in five]
    grad_out, four = grads(*four_d, pair[0])
    gradients.check(checker, "pair bias over rows", four, grad_out, *four_d, pair[0])
    mask = torch.zeros(s, 1, 1, n, device=device, dtype=grad_out.dtype)
    mask[:, ..., n // 2 :] = torch.finfo(grad_out.dtype).min / 2
    summed = pair[0].clone().requires_grad_()
    out = attention(*four_d, mask + summed)
    (got,) = torch.autograd.grad(out, summed, grad_out)
    dense = gradients.oracle(grad_out, *four_d, (mask + summed.detach())).gradients[3]
    assert dense is not None
    off = (got.double() - dense.sum(0, keepdim=True)).abs().amax()
    size = dense.abs().sum(0).amax()
    checker.true(f"pair bias and mask: {off} of {size}", off <= 0.01 * size)
    windows, heads, tokens = (864, 3, 49) if device == "cuda" else (30, 3, 49)
    swin = [random(device, dtype, windows, tokens, heads, 32) for _ in range(3)]
    position = random(device, "f32", 1, heads, tokens, tokens)
    for bias in (position.to(grad_out.dtype), position):
        grad_out, four = grads(*swin, bias)
        gradients.check(checker, "Swin", four, grad_out, *swin, bias)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["per batch", "shared"])
def test_b32_reported_sizes(shape: str, gpu_memory: Any) -> None:
    """B = 16, M = N = 4096 with a bias a batch; B = 864, M = N = 512, H = 3 with one for all: by
    slices against the oracle, and no temporary of [B, H, M, N]."""
    gpu_memory(12)
    checker = Checker()
    if shape == "per batch":
        query, key, value = (random("cuda", "f16", 16, 4096, 1, 80) for _ in range(3))
        bias = torch.empty(16, 1, 4096, 4096, dtype=torch.float16, device="cuda").normal_()
        grad_out = torch.randn_like(query)
        inputs = Inputs(query, key, value, bias, NONE, None)
        _, _, four = by_autograd(inputs, grad_out, 0.0, "qkvb")
        some = (query[9:10], key[9:10], value[9:10], bias[9:10])
        part = tuple(None if x is None else x[9:10] for x in four)
        gradients.check(checker, "batch 9", part, grad_out[9:10], *some)
    else:
        query, key, value = (random("cuda", "f16", 864, 512, 3, 16) for _ in range(3))
        bias = random("cuda", "f16", 1, 3, 512, 512)
        grad_out = torch.randn_like(query)
        total = torch.zeros(1, 3, 512, 512, dtype=torch.float64, device="cuda")
        for b in range(0, 864, 72):
            part = slice(b, b + 72)
            some = (query[part], key[part], value[part], bias)
            found = gradients.oracle(grad_out[part], *some).gradients[3]
            assert found is not None
            total += found
        inputs = Inputs(query, key, value, bias, NONE, None)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, _, four = by_autograd(inputs, grad_out, 0.0, "b")
        peak = torch.cuda.max_memory_allocated() - before
        assert four[3] is not None
        off = (four[3].double() - total).abs().amax() / total.abs().amax()
        checker.true(f"sum over 864 windows: off by {off}", off < 2e-3)
        checker.that(f"peak {peak >> 20} MiB", peak < 864 * 3 * 512 * 512)
    checker.finish()


# --- B33: dropout, forward and backward alike


def philox_4x32_10(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Salmon et al. 2011, in Python's integers."""
    c, k, word = list(counter), list(key), 0xFFFFFFFF
    for i in range(10):
        if i:
            k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & word, (a >> 32) ^ c[3] ^ k[1], a & word]
    return c


def test_b33_philox_of_the_paper() -> None:
    """Known answers of the reference implementation (Random123, kat_vectors)."""
    word = 0xFFFFFFFF
    zero = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox_4x32_10((0,) * 4, (0,) * 2) == zero
    assert philox_4x32_10((word,) * 4, (word,) * 2) == ones


@pytest.mark.parametrize("p", [0.1, 0.5, 1e-6, 1.0])
def test_b33_the_mask_is_the_stated_function(device: str, p: float) -> None:
    from memeff_attn import dropout

    t = 65536 if p == 1 else min(65535, math.floor(p * 65536 + 0.5))
    assert dropout.threshold(p) == t
    expected_scale = 0.0 if t == 65536 else 1 / (1 - t / 65536)
    assert dropout.keep_scale(p) == pytest.approx(expected_scale, rel=1e-12)
    for seed, offset in ((0, 0), (2**62 + 12345, 2**61 + 99), (-5, 2**40), (7, -1)):
        state = torch.tensor([seed, offset], device=device)
        mask = dropout.dropout_mask(state, p, 2, 3, 37, 41).cpu()
        seed, offset = seed % 2**64, offset % 2**64
        key = (seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32))
        for b, h, m, n in itertools.product((0, 1), (0, 2), (0, 1, 2, 36), (0, 1, 7, 8, 17, 40)):
            group = (n // 16) * 4 + (n % 8) // 2
            words = philox_4x32_10((group, m // 2, b * 3 + h, offset & 0xFFFFFFFF), key)
            word = words[(m % 2) * 2 + (n // 8) % 2]
            number = word >> 16 if n % 2 else word & 0xFFFF
            assert bool(mask[b, h, m, n]) == (number >= t)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b33_forward_and_backward_drop_the_same(device: str, dtype: str) -> None:
    """By identity: the zeros of out and of dV are the mask's, at every p, head dim and size."""
    checker = Checker()
    sizes = ((3, 248), (248, 3), (65, 129), (256, 33)) if device == "cuda" else ((3, 40), (33, 17))
    dims = (16, 33, 64, 128, 256) if device == "cuda" else (16, 33)
    turn, ps = itertools.cycle(cases.MASKS), (1e-6, 0.3, 0.7, 0.999, 1.0)
    for number, ((m, n), k, p) in enumerate(itertools.product(sizes, dims, ps)):
        for fields in ({}, {"bias": "1hmn"}, {"rank": "bmghk"}):
            case = BackwardCase(dtype, M=m, N=n, K=k, Kv=64, p=p, mask=next(turn), gain=0.5,
                                **fields)  # fmt: skip
            with checker.case(case):
                backward_cases.check_identity(checker, case, device, number)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b33_reported_sizes(device: str, dtype: str) -> None:
    checker = Checker()
    sizes = (3, 248, 256) if device == "cuda" else (3, 65)
    dims = (16, 128, 256) if device == "cuda" else (16,)
    for b, m, n, k, p in itertools.product((1, 2), sizes, sizes, dims, (1e-6, 0.3, 0.7)):
        with checker.case((b, m, n, k, p)):
            case = BackwardCase(dtype, B=b, M=m, N=n, H=1, K=k, p=p)
            backward_cases.check_case(checker, case, device)
    causal = BackwardCase(dtype, M=128, N=128, p=0.3, mask="top_left")
    backward_cases.check_case(checker, causal, device)
    checker.finish()


def test_b33_p_of_one_and_of_nothing(device: str) -> None:
    """p = 1: zeros, gradients too; p too small for a 65536th: the bits of p = 0."""
    three = [random(device, "f32", 2, 33, 2, 40) for _ in range(3)]
    inputs = Inputs(*three, None, NONE, None)
    grad_out = random(device, "f32", 2, 33, 2, 40)
    out, _, four = by_autograd(inputs, grad_out, 1.0, "qkv")
    assert bool((out == 0).all())
    assert all(bool((x == 0).all()) for x in four[:3] if x is not None)
    seed = backward_cases.new_seed(0, device)
    out, lse, four = by_operators(inputs, grad_out, 1e-7, seed, "qkv")
    checker = Checker()
    checker.attention("p = 1e-7", out, lse, *three)
    gradients.check(checker, "p = 1e-7", four, grad_out, *three)
    checker.finish()
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError):
            attention(*three, p=p)


def test_b33_statistics(device: str) -> None:
    """Not proof, but a wrong counter would show: the share kept, no two heads, batches, rows or
    seeds alike, neighbours independent."""
    seed = backward_cases.new_seed(11, device)
    size = (2, 3, 256, 512)
    inputs = Inputs(
        *(torch.empty(2, n, 3, 1, device=device) for n in (256, 512, 512)), None, 0, 1.0
    )
    mask = _mask(inputs, seed)
    count = mask.numel()
    assert abs(float(mask.double().mean()) - 0.7) < 5 * math.sqrt(0.21 / count)
    for a, b in (
        (mask[0], mask[1]), (mask[:, 0], mask[:, 1]), (mask[:, :, 1:], mask[:, :, :-1]),
        (mask[..., 1:], mask[..., :-1]), (mask[..., 8:], mask[..., :-8]),
        (mask[..., 16:], mask[..., :-16]), (mask, _mask(inputs, seed + 1)),
    ):  # fmt: skip
        agree = float((a == b).double().mean())
        assert abs(agree - 0.58) < 6 * math.sqrt(0.58 * 0.42 / a.numel())
    assert mask.shape == size


def _mask(inputs: Inputs, seed: Tensor) -> Tensor:
    drop = backward_cases.drop_of(inputs, 0.3, seed)
    assert isinstance(drop, Drop)
    return drop.keep
