"""Public faults of the backward pass (tests/faults.py): numerics and layouts.

Biases and dropout: test_faults_dropout.py. Sizes, determinism, launch limits:
test_faults_training.py."""

from __future__ import annotations

import itertools
import math

import backward_cases
import cases
import gradients
import pytest
import torch
from backward_cases import BackwardCase, make_grad
from cases import Inputs
from gradients import Four
from tolerance import BOTTOM_RIGHT, NONE, TOP_LEFT, Checker
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")

DTYPES = list(cases.DTYPES)
attention = memeff_attn.memory_efficient_attention


def random(device: str, dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(cases.DTYPES[dtype])


def grads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: int = NONE,
    grad_out: Tensor | None = None,
    wants: str = "",
) -> tuple[Tensor, Four]:
    """(grad_out, gradients), from NaN-filled memory."""
    inputs = Inputs(query, key, value, bias, causal, None)
    if grad_out is None:
        grad_out = torch.randn(*query.shape[:-1], value.shape[-1], device=query.device)
        grad_out = grad_out.to(query.dtype)
    wants = wants or ("qkvb" if gradients.has_gradient(bias) else "qkv")
    with backward_cases.deterministic(warn_only=True):
        return grad_out, backward_cases.call(inputs, grad_out, 0.0, 0, wants)[2]


def finite(checker: Checker, label: object, four: Four) -> None:
    for name, x in zip(gradients.NAMES, four, strict=True):
        if x is not None:
            checker.true(f"{label} d{name} finite", x.isfinite())


def same(checker: Checker, label: object, mine: Four, other: Four) -> None:
    for name, a, b in zip(gradients.NAMES, mine, other, strict=True):
        if a is not None and b is not None:
            checker.same_bits(f"{label} d{name}", a, b)


# --- B01-B04: rows that see nothing, leading keys hidden


@pytest.mark.parametrize("dtype", DTYPES)
def test_b01_gradients_with_leading_keys_hidden(device: str, dtype: str) -> None:
    checker = Checker()
    for hidden in ((0, 64), (0, 128), (64, 128), (1, 130)):
        query, key, value = (random(device, dtype, 1, n, 2, 32) for n in (64, 130, 130))
        bias = random(device, dtype, 1, 2, 64, 130) * 3
        bias[..., hidden[0] : hidden[1]] = -math.inf
        bias[:, 1, ::2] = 0.5
        grad_out, four = grads(query, key, value, bias)
        gradients.check(checker, hidden, four, grad_out, query, key, value, bias)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b02_gradients_of_fully_masked_rows(device: str, dtype: str) -> None:
    """A dead row adds exactly nothing, even where its gradient is huge; the others are as without
    it."""
    checker = Checker()
    for m, n, k in ((4, 4, 8), (3, 3, 4), (70, 77, 40)):
        query, key, value = (random(device, dtype, 2, x, 1, k) for x in (m, n, n))
        bias = random(device, dtype, 2, 1, m, n)
        bias[1, 0, 2] = -math.inf
        grad_out = random(device, dtype, 2, m, 1, k)
        grad_out[1, 2] = 1000.0
        _, four = grads(query, key, value, bias, grad_out=grad_out)
        gradients.check(checker, (m, n), four, grad_out, query, key, value, bias)
        for x, index in ((four[0], (1, 2)), (four[3], (1, 0, 2))):
            assert x is not None
            checker.true(f"{m, n}: dead row", x[index] == 0)
        rest = [i for i in range(m) if i != 2]
        some = (query[1:, rest], key[1:], value[1:], bias[1:, :, rest])
        gradients.check(
            checker, "without it", (None, four[1][1:], four[2][1:], None), grad_out[1:, rest], *some
        )  # fmt: skip
        whole = bias.clone().fill_(-math.inf)
        _, none = grads(query, key, value, whole, grad_out=grad_out)
        for x in none:
            assert x is not None
            checker.true(f"{m, n}: all dead", x == 0)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b03_gradients_at_finite_sentinels(device: str, dtype: str) -> None:
    """finfo.min is a number: a row of nothing else has the gradients of equal scores."""
    lowest = torch.finfo(cases.DTYPES[dtype]).min
    query, key, value = (random(device, dtype, 2, n, 2, 40) for n in (65, 77, 77))
    checker = Checker()
    for columns, row in ((40, None), (0, 5), (77, None)):
        bias = torch.zeros(1, 1, 65, 77, device=device, dtype=query.dtype)
        bias[..., :columns] = lowest
        if row is not None:
            bias[..., row, :] = lowest
        grad_out, four = grads(query, key, value, bias)
        finite(checker, columns, four)
        if row is None or dtype != "f16":  # fp16's lowest absorbs no score: as ordinary as any
            gradients.check(checker, columns, four, grad_out, query, key, value, bias)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [torch.finfo(torch.float32).min, -1e5])
def test_b03_gradients_of_rows_of_one_large_bias(device: str, dtype: str, level: float) -> None:
    """An ordinary softmax, though fp32's log-sum-exp has lost the logarithm of the sum."""
    checker = Checker()
    for m, k, columns in ((65, 40, 77), (65, 40, 1), (128, 64, 77), (3, 300, 77)):
        query, key, value = (random(device, dtype, 2, n, 2, k) for n in (m, 77, 77))
        for every in (1, 2):
            bias = torch.zeros(1, 1, m, columns, device=device)
            bias[:, :, ::every] = level
            grad_out, four = grads(query, key, value, bias)
            gradients.check(checker, (k, every), four, grad_out, query, key, value, bias)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b04_gradients_of_bottom_right_with_more_queries(device: str, dtype: str) -> None:
    checker = Checker()
    for m, n in ((100, 64), (128, 64), (2048, 1024) if device == "cuda" else (200, 100), (130, 1)):
        query, key, value = (random(device, dtype, 1, x, 1, 64) for x in (m, n, n))
        grad_out, four = grads(query, key, value, causal=BOTTOM_RIGHT)
        gradients.check(checker, (m, n), four, grad_out, query, key, value, None, BOTTOM_RIGHT)
        assert four[0] is not None
        checker.true(f"{m, n}: queries before the first key", four[0][:, : m - n] == 0)
    checker.finish()


# --- B05: a partial last tile where every logit is far below 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [65, 127, 129, 704, 705])
def test_b05_padded_keys_are_not_zero_scores(device: str, dtype: str, n: int) -> None:
    """All logits near -120, by the data or by the bias: exp(0 - LSE) would overflow."""
    if device == "cpu" and n > 129:
        n //= 4
    checker = Checker()
    query, key, value = (random(device, dtype, 1, n, 1, 64) * 0.1 for _ in range(3))
    tril = torch.zeros(n, n, device=device, dtype=query.dtype)
    tril.masked_fill_(torch.ones(n, n, device=device).triu(1).bool(), -math.inf)
    for how in ("data", "bias"):
        bias = tril[None, None].clone()
        if how == "data":
            query[..., 0], key[..., 0] = 1.0, -120 * 8.0
        else:
            query[..., 0], key[..., 0] = 0.1, -0.1
            bias -= 120
        for causal, given in (
            (NONE, bias),
            (TOP_LEFT, bias[..., :1, :] if how == "bias" else None),
        ):
            given = None if given is None else given.nan_to_num(neginf=-120.0) if causal else given
            grad_out, four = grads(query, key, value, given, causal)
            finite(checker, how, four)
            # Column 0 of dQ is 120 times the sum of a row of dS, which is 0: rounding alone.
            inputs = (query, key, value, given, causal)
            if how == "data":
                exact = gradients.oracle(grad_out, *inputs).gradients[0]
                assert exact is not None and four[0] is not None
                off = (four[0].double() - exact)[..., 1:].abs().amax()
                checker.true(f"dquery {off}", off <= 0.02 * exact[..., 1:].abs().amax())
                four = (None, *four[1:])
            gradients.check(checker, how, four, grad_out, *inputs)
    checker.finish()


def test_b05_shift_of_all_logits(device: str) -> None:
    """fp32: logits shifted by -120, by 0 and by +60: the same gradients within fp32's LSE."""
    query, key, value = (random(device, "f32", 1, 129, 2, 64) * 0.5 for _ in range(3))
    grad_out = random(device, "f32", 1, 129, 2, 64)
    found = []
    for shift in (0.0, -120.0, 60.0):
        bias = torch.full((1, 1, 1, 129), shift, device=device)
        found.append(grads(query, key, value, bias, grad_out=grad_out, wants="qkv")[1][:3])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- B06: large finite logits


def test_b06_weights_stay_below_one(device: str) -> None:
    """At |s| of 1e5 an ulp of LSE is 0.008: P, rebuilt, is clamped at 1, so that gradients stay
    within the bounds that P <= 1 gives."""
    checker = Checker()
    for m, k, gain in ((50, 64, 300.0), (129, 64, 300.0), (50, 40, 1000.0), (200, 128, 30.0)):
        query, key, value = (random(device, "f32", 4, m, 4, k) for _ in range(3))
        query, key = query * gain, key * gain
        grad_out, four = grads(query, key, value)
        label = f"M{m} K{k} gain {gain}"
        finite(checker, label, four)
        dq, dk, dv = (x.double() for x in four[:3] if x is not None)
        g, v = grad_out.double().transpose(1, 2), value.double().transpose(1, 2)
        checker.true(
            f"{label} dV", dv.abs() <= 1.001 * grad_out.double().abs().sum(1, keepdim=True)
        )
        spread = 2.001 * torch.matmul(g.abs(), v.abs().transpose(-1, -2))  # [B, H, M, N]
        delta = spread.amax(-1, keepdim=True)
        for name, x, other, sums in (
            ("dQ", dq, key, (spread + delta).sum(-1)),
            ("dK", dk, query, (spread + delta).sum(-2)),
        ):
            bound = sums[..., None] * other.double().abs().amax() * k**-0.5
            checker.true(f"{label} {name}", x.transpose(1, 2).abs() <= bound)
    checker.finish()


def test_b06_training_on_constant_input(device: str) -> None:
    """The report: an encoder layer on inputs of 1000, three steps of SGD."""
    linear = torch.nn.Linear(64, 192, device=device)
    optimiser = torch.optim.SGD(linear.parameters(), lr=1e-9)
    x = torch.full((5, 32, 64), 1000.0, device=device)
    for _ in range(3):
        query, key, value = linear(x).unflatten(-1, (3, 4, 16)).unbind(2)
        loss = attention(query, key, value).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for p in linear.parameters())
        optimiser.step()
    assert bool(loss.isfinite())


# --- B07: partial tile, position bias, causal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1024, 1025])
def test_b07_position_bias_on_a_partial_tile(device: str, dtype: str, n: int) -> None:
    checker = Checker()
    sizes = (n,) if device == "cuda" else (n - 1024 + 64, n - 1024 + 128)
    for size in sizes:
        query, key, value = (random(device, dtype, 1, size, 1, 64) for _ in range(3))
        i = torch.arange(size, device=device)
        bias = (i[:, None] - i).to(query.dtype)[None, None]
        for causal, given in ((TOP_LEFT, bias), (NONE, bias), (TOP_LEFT, None), (NONE, -bias)):
            grad_out, four = grads(query, key, value, given, causal)
            finite(checker, size, four)
            gradients.check(checker, size, four, grad_out, query, key, value, given, causal)
    checker.finish()


# --- B08: splits that see nothing


@pytest.mark.parametrize("dtype", DTYPES)
def test_b08_splits_without_a_visible_key(device: str, dtype: str) -> None:
    """Few blocks, so that the loops are split: over keys for dQ, over queries for dK and dV, over
    batches for a bias; most splits, or all, see nothing."""
    long = 4096 if device == "cuda" else 600
    checker = Checker()
    for m, n in ((1, long), (3, long), (long, 1), (long, 70)):
        query, key, value = (random(device, dtype, 1, x, 1, 64) for x in (m, n, n))
        for first in (0, 1, 512, min(m, n)):
            bias = torch.zeros(1, 1, m, n, device=device, dtype=query.dtype)
            bias[..., first:] = -math.inf
            bias[:, :, 512:] = -math.inf
            grad_out, four = grads(query, key, value, bias)
            gradients.check(checker, (m, n, first), four, grad_out, query, key, value, bias)
    query, key, value = (random(device, dtype, 40, 33, 2, 16) for _ in range(3))
    bias = random(device, dtype, 1, 2, 33, 33)
    hidden = torch.zeros(40, 2, 33, 33, dtype=query.dtype, device=device)
    hidden[5:] = -math.inf
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    shared = bias.clone().requires_grad_()
    grad_out = random(device, dtype, 40, 33, 2, 16)
    attention(query, key, value, shared + hidden).backward(grad_out)
    some = (x.detach()[:5] for x in (query, key, value))
    exact = gradients.oracle(grad_out[:5], *some, bias).gradients
    for x, want in zip((query, key, value), exact[:3], strict=True):
        assert want is not None
        checker.true("hidden batches", x.grad[5:] == 0)
        off = (x.grad[:5].double() - want).abs().amax()
        checker.true("seen batches", off <= 0.02 * want.abs().amax())
    checker.finish()


# --- B24: any gradient of out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", backward_cases.GRAD_STRIDES)
def test_b24_gradient_of_any_strides(device: str, dtype: str, grad: str) -> None:
    """Equals the contiguous one, bit for bit; out is read with its own strides."""
    checker = Checker()
    for fields in ({"H": 4, "Hkv": 1, "K": 128}, {"H": 4, "K": 40}, {"rank": "bmghk", "K": 33}):
        case = BackwardCase(dtype, M=32, N=32, grad=grad, **fields)
        inputs = cases.make(case, device)
        grad_out = make_grad(case, device, inputs.query)
        _, strided = grads(*inputs.tuple()[:3], grad_out=grad_out)
        _, dense = grads(*inputs.tuple()[:3], grad_out=grad_out.contiguous())
        same(checker, case, strided, dense)
        gradients.check(checker, case, strided, grad_out, *inputs.tuple())
    checker.finish()


def test_b24_as_autograd_makes_them(device: str) -> None:
    """sum(), a transposed result, a slice, rows that nothing uses: what reaches a real backward."""
    checker = Checker()
    three = [random(device, "f32", 2, 32, 4, 40) for _ in range(3)]
    weights = random(device, "f32", 2, 4, 32, 40)
    for name, function in {
        "sum": lambda x: x.sum(),
        "transposed": lambda x: (x.transpose(1, 2) * weights).sum(),
        "last dim": lambda x: x.transpose(-1, -2).square().sum(),
        "slice": lambda x: x[:, ::2, 1:3, ::3].square().sum(),
        "one element": lambda x: x[1, 5, 2, 7],
    }.items():
        leaves = [x.clone().requires_grad_() for x in three]
        out = attention(*leaves)
        seen: list[Tensor] = []
        out.register_hook(seen.append)
        function(out).backward()
        four = (*(x.grad for x in leaves), None)
        gradients.check(checker, name, four, seen[0], *three)
    checker.finish()


# --- B25, B27, B30, B31: layouts of the inputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_b25_packed(device: str, dtype: str) -> None:
    """q, k, v unbound from one tensor, whichever way it is packed: its gradient is the stack of
    the three, and nothing is taken for packed that merely shares a storage."""
    checker = Checker()
    for b, m, h, k in ((3, 65, 5, 40), (2, 33, 4, 64), (1, 1, 1, 8)):
        for shape, dim in (
            ((b, m, 3, h, k), 2), ((b, m, h, 3, k), 3), ((3, b, m, h, k), 0), ((b, 3, m, h, k), 1),
        ):  # fmt: skip
            packed = random(device, dtype, *shape).requires_grad_()
            three = packed.unbind(dim)
            dense = [x.detach().clone().requires_grad_() for x in three]
            grad_out = random(device, dtype, b, m, h, k)
            (got,) = torch.autograd.grad(attention(*three), packed, grad_out)
            want = torch.autograd.grad(attention(*dense), dense, grad_out)
            checker.same_bits((shape, dim), got, torch.stack(want, dim))
    kv = random(device, dtype, 2, 77, 2, 3, 40).requires_grad_()
    query = random(device, dtype, 2, 33, 3, 40).requires_grad_()
    key, value = kv.unbind(2)
    grad_out = random(device, dtype, 2, 33, 3, 40)
    got = torch.autograd.grad(attention(query, key, value), [query, kv], grad_out)
    four = (got[0], *(x.contiguous() for x in got[1].unbind(2)), None)
    plain = [x.detach() for x in (query, key, value)]
    gradients.check(checker, "kv packed", four, grad_out, *plain)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b25_sharing_a_storage_is_not_packed(device: str, dtype: str) -> None:
    """Views of one buffer in any order, with gaps, overlapping, or one and the same tensor."""
    checker = Checker()
    buffer = random(device, dtype, 2, 40, 8, 40)
    views = {
        "order": (buffer[:, :, 4:6], buffer[:, :, 0:2], buffer[:, :, 2:4]),
        "gaps": (buffer[:, :, 0:2], buffer[:, :, 3:5], buffer[:, :, 6:8]),
        "overlap": (buffer[:, :, 0:2], buffer[:, :, 1:3], buffer[:, :, 2:4]),
        "one": (buffer[:, :, 0:2],) * 3,
        "Kv": (buffer[:, :, 0:2, :24], buffer[:, :, 2:4, :24], buffer[:, :, 4:6, :]),
        "rows": (buffer[:, :16, :2], buffer[:, 16:32, :2], buffer[:, 24:, :2]),
    }
    for name, three in views.items():
        grad_out, four = grads(*three)
        _, dense = grads(*(x.clone() for x in three), grad_out=grad_out)
        gradients.check(checker, name, four, grad_out, *three)
        for x, y in zip(four[:3], dense[:3], strict=True):
            assert x is not None and y is not None
            checker.true(f"{name}: own memory", torch.tensor(x.data_ptr() != buffer.data_ptr()))
            if dtype == "f32":
                checker.same_bits(name, x, y)
    leaf = random(device, dtype, 2, 33, 2, 40).requires_grad_()  # self attention of one tensor
    out = attention(leaf, leaf, leaf)
    (total,) = torch.autograd.grad(out.float().sum(), leaf)
    ones = torch.ones_like(leaf.detach())
    exact = gradients.oracle(ones, *(leaf.detach(),) * 3).gradients
    want = sum(x for x in exact[:3] if x is not None)
    off = (total.double() - want).abs().amax()
    checker.true(f"one leaf: {off}", off <= 0.02 * want.abs().amax())
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b27_shared_heads_when_rows_are_one_over_a_tile(device: str, dtype: str) -> None:
    checker = Checker()
    for m in (1, 65, 129):
        for rank, strides in (("bmhk", "heads0"), ("bmghk", "heads0")):
            case = BackwardCase(dtype, B=1, M=m, N=max(m, 2), H=8, rank=rank, strides=strides)
            backward_cases.check_case(checker, case, device)
        backward_cases.check_case(
            checker, BackwardCase(dtype, B=1, M=m, N=max(m, 2), H=8, Hkv=1), device
        )
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b30_sliced_key_and_value(device: str, dtype: str) -> None:
    """Keys cut from a longer tensor: zeros in give zeros out, and the tail's gradient is 0."""
    checker = Checker()
    m, cut = (1024, 128) if device == "cuda" else (96, 32)
    for heads_first, zeros in itertools.product((False, True), (True, False)):
        shape = (1, 4, m, 64) if heads_first else (1, m, 4, 64)
        full = [random(device, dtype, *shape) * (not zeros) for _ in range(3)]
        leaves = [x.requires_grad_() for x in full]
        query, key, value = (x.transpose(1, 2) if heads_first else x for x in leaves)
        key, value = key[:, :-cut], value[:, :-cut]
        grad_out = random(device, dtype, *query.shape) * (not zeros)
        for _ in range(3):
            found = torch.autograd.grad(attention(query, key, value), leaves, grad_out)
            dq, dk, dv = (x.transpose(1, 2) if heads_first else x for x in found)
            checker.true("tail", (dk[:, -cut:] == 0) & (dv[:, -cut:] == 0))
            if zeros:
                checker.true("zeros", dk == 0)
        four = (dq.contiguous(), *(x[:, :-cut].contiguous() for x in (dk, dv)), None)
        plain = [x.detach() for x in (query, key, value)]
        gradients.check(checker, (heads_first, zeros), four, grad_out, *plain)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b31_each_of_another_contiguity(device: str, dtype: str) -> None:
    size = 513 if device == "cuda" else 65
    names = ("dense", "heads_first", "padded8", "last_dim")
    checker = Checker()
    for combination in itertools.product(names, repeat=3):
        if len(set(combination)) == 1:
            continue
        made = [
            cases.STRIDES[name]((2, size, 4, 64), lambda *shape: random(device, dtype, *shape))
            for name in combination
        ]
        grad_out, four = grads(*made)
        _, dense = grads(*(x.contiguous() for x in made), grad_out=grad_out)
        same(checker, combination, four, dense)
    gradients.check(checker, "last", four, grad_out, *made)
    checker.finish()


# --- B42, B43: bounds and keys that nobody sees


@pytest.mark.parametrize("dtype", DTYPES)
def test_b42_many_queries_few_keys(device: str, dtype: str) -> None:
    checker = Checker()
    for m, n, causal in itertools.product(
        (256, 257) if device == "cuda" else (129,), (1, 2, 3, 63), (TOP_LEFT, BOTTOM_RIGHT)
    ):
        query, key, value = (random(device, dtype, 1, x, 2, 64) for x in (m, n, n))
        grad_out, four = grads(query, key, value, causal=causal)
        finite(checker, (m, n), four)
        gradients.check(checker, (m, n), four, grad_out, query, key, value, None, causal)
    checker.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_b43_keys_nobody_attends_to(device: str, dtype: str) -> None:
    """Their gradients are written, as exact zeros, in memory that held NaN."""
    checker = Checker()
    for m, n, heads, kv_heads, k in ((32, 200, 1, 1, 64), (1, 130, 4, 2, 40), (65, 300, 2, 2, 256)):
        query = random(device, dtype, 2, m, heads, k)
        key, value = (random(device, dtype, 2, n, kv_heads, k) for _ in range(2))
        _, four = grads(query, key, value, causal=TOP_LEFT)
        for x in four[1:3]:
            assert x is not None
            checker.true(f"{m, n}", x[:, m:] == 0)
            checker.true(f"{m, n}: seen", x[:, :m].isfinite())
        checker.true(f"{m, n}: seen", (four[2][:, :m] != 0).any(-1))
        mask = torch.zeros(1, 1, 1, n, dtype=torch.bool, device=device)
        mask[..., ::3] = True
        _, four = grads(query, key, value, mask)
        checker.true(f"{m, n} bool dV", (four[2] == 0).all(-1).all(-1) == ~mask[0, 0])
        checker.true(f"{m, n} bool dK", (four[1] == 0).all(-1).all(-1) | mask[0, 0])
    checker.finish()
