"""Public faults of width and launch limits (tests/faults.py): B09-B11, B15-B18 forward, B39.

The big ones need no reference: a slice of the call equals the call on the slice. Those run on a GPU
that has the memory; the same classes run in a small form on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import cases
import pytest
import torch
from cases import Inputs
from tolerance import BOTTOM_RIGHT, NONE, TOP_LEFT, Checker
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")

DTYPES = list(cases.DTYPES)
Memory = Callable[[float], None]


def random(device: str, dtype: str, *shape: int) -> Tensor:
    """Normal numbers made in place: no fp32 copy of a large tensor."""
    return torch.empty(shape, dtype=cases.DTYPES[dtype], device=device).normal_()


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, causal: int = NONE
) -> tuple[Tensor, Tensor]:
    return cases.attention(Inputs(query, key, value, bias, causal, None))


# --- B09: counts of keys and queries wider than 16 bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [32767, 32769, 65535, 65537])
def test_b09_many_keys(device: str, dtype: str, n: int) -> None:
    if device == "cpu" and dtype == "f32" and n > 32769:
        pytest.skip("PyTorch's CPU kernel sums so many keys less accurately than eager")
    checker = Checker()
    for m, causal in ((3, NONE), (64, BOTTOM_RIGHT)):
        with checker.case(f"M{m} N{n}"):
            query, key, value = (random(device, dtype, 1, x, 1, 8) for x in (m, n, n))
            out, lse = attend(query, key, value, causal=causal)
            checker.attention(f"M{m} N{n}", out, lse, query, key, value, None, causal)
    checker.finish()


@pytest.mark.parametrize("n", [32769, 65537])
def test_b09_many_queries(device: str, n: int) -> None:
    checker = Checker()
    for dtype, causal in itertools.product(
        DTYPES if device == "cuda" else ["f32"], (NONE, TOP_LEFT)
    ):
        with checker.case(f"M{n} {dtype}"):
            query, key, value = (random(device, dtype, 1, x, 1, 8) for x in (n, 65, 65))
            out, lse = attend(query, key, value, causal=causal)
            checker.attention(f"M{n} {dtype}", out, lse, query, key, value, None, causal)
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_b09_square_zeros_and_numbers(dtype: str, gpu_memory: Memory) -> None:
    """The reported size: M = N = 33728, K = 512."""
    gpu_memory(4)
    shape = (1, 33728, 1, 512)
    zeros = torch.zeros(shape, dtype=cases.DTYPES[dtype], device="cuda")
    out, lse = attend(zeros, zeros, zeros)
    assert bool((out == 0).all())
    assert bool((lse - math.log(33728) < 1e-3).all())
    query, key, value = (random("cuda", dtype, *shape) for _ in range(3))
    out, lse = attend(query, key, value)
    checker = Checker()
    checker.attention("last rows", out[:, -64:], lse[..., -64:], query[:, -64:], key, value)
    checker.finish()


# --- B10: a bias stride beyond 2^31


@pytest.mark.gpu
def test_b10_bias_batch_stride(gpu_memory: Memory) -> None:
    gpu_memory(14)
    bias = random("cuda", "f16", 32, 12180, 12184)[..., :12180].view(2, 16, 12180, 12180)
    assert bias.stride(0) > 2**31
    query, key, value = (random("cuda", "f16", 2, 12180, 16, 64) for _ in range(3))
    out, _ = attend(query, key, value, bias)
    checker = Checker()
    name = cases.automatic(Inputs(query, key, value, bias, NONE, None))
    for b in range(2):
        with cases.forced(name):
            part, _ = attend(query[b : b + 1], key[b : b + 1], value[b : b + 1], bias[b : b + 1])
        checker.same_bits(f"batch {b}", out[b : b + 1], part)
    rows = slice(-64, None)
    some = (query[1:, rows], key[1:], value[1:], bias[1:, :, rows])
    checker.attention("last rows", out[1:, rows], None, *some)
    checker.finish()


@pytest.mark.parametrize("dim", ["batch", "head"])
def test_b10_bias_stride_over_a_hole(device: str, dim: str, gpu_memory: Memory) -> None:
    """Two batches, or two heads, that lie more than 2^31 elements apart (the hole between them is
    never touched)."""
    if device == "cuda":
        gpu_memory(6)
    gap = 2**31 + 8
    count = gap + 70 * 80
    try:
        memory = torch.empty(
            count, dtype=torch.bool, device=device
        )  # one byte an element; a CPU commits no page
    except RuntimeError as error:
        pytest.skip(f"cannot reserve {count >> 20} MiB: {error}")
    shape = (2, 1, 70, 77) if dim == "batch" else (1, 2, 70, 77)
    strides = (gap, 0, 80, 1) if dim == "batch" else (0, gap, 80, 1)
    bias = memory.as_strided(shape, strides)
    bias.copy_(random(device, "f32", *shape) > -0.5)
    heads = 1 if dim == "batch" else 2
    query, key, value = (random(device, "f32", shape[0], x, heads, 40) for x in (70, 77, 77))
    checker = Checker()
    out, lse = attend(query, key, value, bias)
    checker.attention("hole", out, lse, query, key, value, bias)
    checker.finish()


# --- B11: row offsets in a bias beyond 2^31 and 2^32


@pytest.mark.gpu
@pytest.mark.parametrize("size", [46400, 65537, 73728, 90000])
@pytest.mark.parametrize("kind", ["bf16", "bool"])
def test_b11_bias_row_offset(size: int, kind: str, gpu_memory: Memory) -> None:
    """M = N = size: every block of rows, with enough tiles that its keys are not cut into parts,
    equals the call on those rows alone, the last one the oracle."""
    gpu_memory(2 * size * size / 2**30 + 4)
    bias = torch.empty(
        1, 1, size, size, dtype=torch.bool if kind == "bool" else torch.bfloat16, device="cuda"
    )
    bias.random_(0, 2) if kind == "bool" else bias.normal_()
    query, key, value = (random("cuda", "bf16", 1, size, 1, 64) for _ in range(3))
    out, lse = attend(query, key, value, bias)
    checker = Checker()
    name = cases.automatic(Inputs(query, key, value, bias, NONE, None))
    step = 256 * torch.cuda.get_device_properties("cuda").multi_processor_count
    for first in (*range(0, size - step, step), size - step):
        rows = slice(first, first + step)
        with cases.forced(name):
            part, part_lse = attend(query[:, rows], key, value, bias[:, :, rows])
        checker.same_bits(f"rows {first}", out[:, rows], part)
        checker.same_bits(f"LSE rows {first}", lse[..., rows], part_lse)
    last = slice(-64, None)
    checker.attention(
        "last rows", out[:, last], lse[..., last], query[:, last], key, value, bias[:, :, last]
    )
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
def test_b11_row_strides(unaligned: bool, gpu_memory: Memory) -> None:
    """Bias, query, key and value whose row stride alone carries the last rows beyond 2^32
    elements."""
    gpu_memory(14)
    stride = 2**26 + (1 if unaligned else 0)
    rows = 70
    memory = torch.zeros(rows * stride + 4096, dtype=torch.bool, device="cuda")
    bias = memory.as_strided((1, 1, rows, 77), (0, 0, stride, 1))
    bias.copy_(random("cuda", "f32", 1, 1, rows, 77) > -0.5)
    checker = Checker()
    query, key, value = (random("cuda", "f16", 1, x, 1, 40) for x in (rows, 77, 77))
    checker.attention("bias", *attend(query, key, value, bias), query, key, value, bias)
    del memory, bias
    half = torch.zeros(rows * stride + 4096, dtype=torch.float16, device="cuda")
    for name in ("query", "key", "value"):
        tensors = {x: random("cuda", "f16", 1, rows, 1, 40) for x in ("query", "key", "value")}
        far = half.as_strided((1, rows, 1, 40), (0, stride, 0, 1))
        far.copy_(tensors[name])
        tensors[name] = far
        with checker.case(name):
            checker.attention(name, *attend(**tensors), **tensors)
    checker.finish()


@pytest.mark.gpu
def test_b11_output_offset(gpu_memory: Memory) -> None:
    """out, and separately LSE's rows, beyond 2^31 elements: the last rows equal the call on
    them."""
    gpu_memory(8)
    rows = 300_001
    query, key, value = (
        random("cuda", "f16", 1, m, 64, k) for m, k in ((rows, 8), (16, 8), (16, 128))
    )
    out, lse = attend(query, key, value)
    assert out.numel() > 2**31
    checker = Checker()
    for part in (slice(0, 128), slice(rows - 1000, rows)):
        checker.attention(
            f"rows {part.start}", out[:, part], lse[..., part], query[:, part], key, value
        )
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("operand", ["query", "key", "value"])
def test_b11_batch_and_head_offset(operand: str, gpu_memory: Memory) -> None:
    """Batches and heads of one operand further than 2^31 elements apart."""
    gpu_memory(14)
    gap = 2**31 + 8
    checker = Checker()
    memory = torch.zeros(gap + 2**20, dtype=torch.float16, device="cuda")
    for dim in ("batch", "head"):
        shape = (2, 70, 1, 40) if dim == "batch" else (1, 70, 2, 40)
        strides = (gap, 40, 0, 1) if dim == "batch" else (0, 40, gap, 1)
        tensors = {x: random("cuda", "f16", *shape) for x in ("query", "key", "value")}
        far = memory.as_strided(shape, strides)
        far.copy_(tensors[operand])
        tensors[operand] = far
        with checker.case(f"{operand} {dim}"):
            checker.attention(f"{operand} {dim}", *attend(**tensors), **tensors)
    checker.finish()


# --- B15: strides of size-1 dims mean nothing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [0, 1, 3, 2**31 + 1, 2**40 + 1])
def test_b15_stride_of_a_size_1_dim(device: str, dtype: str, stride: int) -> None:
    """Batch, head, query or key of size 1 with any stride: accepted, the same bits."""
    checker = Checker()
    for (b, m, n, h), k in itertools.product(
        ((1, 5, 70, 1), (1, 1, 70, 2), (2, 70, 1, 1), (1, 1, 1, 1)), (64, 33)
    ):
        label = f"B{b} M{m} N{n} H{h} K{k}"
        with checker.case(label):
            dense = [random(device, dtype, b, x, h, k) for x in (m, n, n)]
            bias = random(device, dtype, b, h, m, n)
            odd = [with_stride(x, stride) for x in (*dense, bias)]
            checker.same_bits(f"{label} no bias", attend(*odd[:3])[0], attend(*dense)[0])
            checker.same_bits(f"{label} bias", attend(*odd)[0], attend(*dense, bias)[0])
    for k in (64, 33):
        dense = [random(device, dtype, 1, x, k) for x in (1, 70, 70)]
        odd = [with_stride(x, stride) for x in dense]
        checker.same_bits("BMK", attend(*odd)[0], attend(*dense)[0])
    query, key, value = (random(device, dtype, 2, x, 1, 1) for x in (5, 9, 9))
    last = [x.as_strided(x.shape, (*x.stride()[:-1], 7)) for x in (query, key, value)]
    checker.same_bits("K = 1", attend(*last)[0], attend(query, key, value)[0])
    checker.finish()


def with_stride(x: Tensor, stride: int) -> Tensor:
    """x with every size-1 dim but the last given this stride."""
    strides = [stride if n == 1 else s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return x.as_strided(x.shape, (*strides, x.stride(-1)))


@pytest.mark.gpu
def test_b15_batch_of_one_beyond_32_bits(gpu_memory: Memory) -> None:
    """The reported case, N = 299521, H = 56, K = 128, a little longer: one batch of more than 2^31
    elements."""
    gpu_memory(12)
    key, value = (random("cuda", "f16", 1, 299601, 56, 128) for _ in range(2))
    assert key.stride(0) > 2**31
    query = random("cuda", "f16", 1, 64, 56, 128)
    out, lse = attend(query, key, value)
    checker = Checker()
    heads = slice(-2, None)
    part = (
        out[:, :, heads],
        lse[:, heads],
        query[:, :, heads],
        key[:, :, heads],
        value[:, :, heads],
    )
    checker.attention("last heads", *part)
    checker.finish()


# --- B16, B17: more batches, heads or query tiles than a grid axis has


@pytest.mark.parametrize("b", [65535, 65536, 70001])
def test_b16_many_batches(device: str, b: int) -> None:
    checker = Checker()
    for dtype in DTYPES if device == "cuda" else ["f32"]:
        with checker.case(f"B{b} {dtype}"):
            query, key, value = (random(device, dtype, b, 2, 1, 4) for _ in range(3))
            bias = random(device, dtype, b, 1, 1, 2)
            for given in (None, bias):
                checker.attention(
                    f"B{b} {dtype}", *attend(query, key, value, given), query, key, value, given
                )
    checker.finish()


@pytest.mark.gpu
def test_b16_reported_sizes(gpu_memory: Memory) -> None:
    gpu_memory(14)
    checker = Checker()
    query, key, value = (random("cuda", "f32", 65536, 16, 1, 80) for _ in range(3))
    out, lse = attend(query, key, value)
    for part in (slice(0, 64), slice(-64, None)):
        some = (query[part], key[part], value[part])
        checker.attention(f"B65536 {part.start}", out[part], lse[part], *some)
    query, key, value = (random("cuda", "f16", 262144, n, 40) for n in (1, 121, 121))
    bias = random("cuda", "f16", 262144, 1, 121)
    out, lse = attend(query, key, value, bias)
    for part in (slice(0, 64), slice(65530, 65540), slice(-64, None)):
        some = (query[part], key[part], value[part], bias[part])
        checker.attention(f"B262144 {part.start}", out[part], lse[part], *some)
    checker.finish()


@pytest.mark.parametrize("h", [65535, 65536, 70001])
def test_b17_many_heads(device: str, h: int) -> None:
    checker = Checker()
    for dtype in DTYPES if device == "cuda" else ["f32"]:
        with checker.case(f"H{h} {dtype}"):
            query, key, value = (random(device, dtype, 1, 3, h, 4) for _ in range(3))
            out, lse = attend(query, key, value)
            checker.that(f"H{h} {dtype}: LSE {tuple(lse.shape)}", lse.shape == (1, h, 3))
            checker.attention(f"H{h} {dtype}", out, lse, query, key, value)
            some = (query, key[:, :, :1], value[:, :, :1])
            checker.attention(f"H{h}/1 {dtype}", *attend(*some), *some)
    checker.finish()


@pytest.mark.gpu
def test_b17_reported_sizes(gpu_memory: Memory) -> None:
    gpu_memory(8)
    checker = Checker()
    query, key, value = (random("cuda", "f32", 1, 10, 65536, 16) for _ in range(3))
    checker.attention("H65536", *attend(query, key, value), query, key, value)
    rows = 64 * 65535 + 1
    query, key, value = (random("cuda", "f16", 1, n, 1, 8) for n in (rows, 5, 5))
    out, lse = attend(query, key, value)
    checker.attention(f"M{rows}", out, lse, query, key, value)
    checker.finish()


def test_b18_fake_has_the_strides_of_the_real_op(device: str) -> None:
    """Sizes, strides and dtypes of the fake kernel, for every rank, layout and a batch beyond
    65535."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: list[str] = []
    layouts = ("dense", "heads_first", "padded8", "batch0", "heads0")
    sizes = [
        (2, 65, 77, 4, 40, 72),
        (1, 1, 70, 2, 64, 64),
        (65536, 2, 2, 1, 4, 4),
        (2, 70, 1, 2, 33, 5),
    ]
    for (b, m, n, h, k, kv), rank, strides in itertools.product(
        sizes, ("bmk", "bmhk", "bmghk"), layouts
    ):
        case = cases.Case(
            "f32", b, m, n, 1 if rank == "bmk" else h, k, kv, rank=rank, strides=strides
        )
        inputs = cases.make(case, device)
        for need_lse in (False, True):
            args = (None, k**-0.5, 0, False, need_lse, "")
            operator = torch.ops.memeff_attn.forward
            real = operator(inputs.query, inputs.key, inputs.value, *args)
            with FakeTensorMode() as mode:
                faked = (mode.from_tensor(x) for x in (inputs.query, inputs.key, inputs.value))
                fake = operator(*faked, *args)
            for name, x, y in zip(("out", "lse"), real, fake, strict=True):
                facts = [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in (x, y)]
                if facts[0] != facts[1]:
                    found.append(
                        f"{case} {name} need_lse={need_lse}: real {facts[0]}, fake {facts[1]}"
                    )
    assert not found, "\n".join(found[:10])


# --- B39: nothing to do


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", ["bmk", "bmhk", "bmghk"])
def test_b39_empty(device: str, dtype: str, rank: str) -> None:
    """Empty B, M, N, H, K or Kv: the shape the contract says, zeros and -inf where a row sees
    nothing."""
    checker = Checker()
    sizes = {"B": 2, "M": 5, "N": 7, "H": 3, "K": 16, "Kv": 8}
    if rank == "bmk":
        sizes["H"] = 1
    for empty, with_bias in itertools.product(
        ("B", "M", "N", "H", "K", "Kv", "MN", "BN"), (False, True)
    ):
        s = dict(sizes)
        s |= dict.fromkeys((empty,) if empty == "Kv" else tuple(empty), 0)
        if rank == "bmk" and s["H"] == 0:
            continue
        label = f"{rank} {dtype} {empty} = 0" + (" with bias" if with_bias else "")
        with checker.case(label):
            middle = {"bmk": (), "bmhk": (s["H"],), "bmghk": (2, s["H"])}[rank]
            query = random(device, dtype, s["B"], s["M"], *middle, s["K"])
            key = random(device, dtype, s["B"], s["N"], *middle, s["K"])
            value = random(device, dtype, s["B"], s["N"], *middle, s["Kv"])
            bias = random(device, dtype, s["B"], *middle, s["M"], s["N"]) if with_bias else None
            out, lse = cases.attention(Inputs(query, key, value, bias, 0, 0.5))
            checker.that(
                f"{label}: out {tuple(out.shape)}", out.shape == (s["B"], s["M"], *middle, s["Kv"])
            )
            checker.that(
                f"{label}: {out.dtype}", out.dtype == query.dtype and lse.dtype == torch.float32
            )
            heads = middle or (1,)
            checker.that(f"{label}: lse {tuple(lse.shape)}", lse.shape == (s["B"], *heads, s["M"]))
            if s["N"] == 0:
                checker.true(f"{label}: out is 0", out == 0)
                checker.true(f"{label}: LSE is -inf", lse == -math.inf)
            elif empty != "Kv":
                checker.attention(label, out, lse, query, key, value, bias, 0, 0.5)
    checker.finish()


@pytest.mark.parametrize("mask", ["LowerTriangularMask", "LowerTriangularFromBottomRightMask"])
def test_b39_empty_with_a_diagonal(device: str, mask: str) -> None:
    for m, n in ((0, 5), (5, 0), (0, 0)):
        query, key, value = (random(device, "f32", 2, x, 3, 8) for x in (m, n, n))
        attn_bias = getattr(memeff_attn, mask)()
        out, lse = memeff_attn.memory_efficient_attention_forward_requires_grad(
            query, key, value, attn_bias
        )
        assert out.shape == query.shape
        assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.gpu
def test_b39_reported_size_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding refuses empty inputs, so nothing is launched; the operator fills the result."""
    from memeff_attn import ops

    launch, answers = ops.launcher(), []

    def spy(*args: object) -> object:
        answers.append(launch(*args))
        return answers[-1]

    monkeypatch.setattr(ops, "_launch", spy)
    query = random("cuda", "f16", 0, 3952, 10, 64)
    key = random("cuda", "f16", 0, 16, 10, 64)
    assert memeff_attn.memory_efficient_attention(query, key, key).shape == query.shape
    assert None not in answers  # None: launched
    full = random("cuda", "f16", 1, 5, 10, 64)
    memeff_attn.memory_efficient_attention(full, full, full)
    assert answers[-1] is None
