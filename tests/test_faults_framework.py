"""Public faults of the framework contract (tests/faults.py): B48, forward parts, B36 and B37
forward.

Streams, devices, graphs, compile, autocast, vmap, and the two ways tensors reach the binding.
"""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import torch
from cases import Case, Inputs
from tolerance import TOP_LEFT, Checker
from torch import Tensor

memeff_attn = pytest.importorskip("memeff_attn")

DTYPES = list(cases.DTYPES)
attention = memeff_attn.memory_efficient_attention


def tensors(device: str, dtype: str = "f16", **fields: Any) -> list[Tensor]:
    inputs = cases.make(Case(dtype, **fields), device)
    return [inputs.query, inputs.key, inputs.value]


# --- a: autocast


@pytest.mark.parametrize("low", ["f16", "bf16"])
def test_b48a_autocast(device: str, low: str) -> None:
    """Mixed dtypes under autocast are cast to its dtype, as matmul casts them."""
    kind = cases.DTYPES[low]
    query, key, value = tensors(device, "f32", K=40)
    bias = torch.randn(1, 1, 65, 77, device=device)
    with torch.autocast(device, dtype=kind):
        out = attention(query, key.to(kind), value.to(kind))
        biased = attention(query.to(kind), key, value.to(kind), bias)
    assert out.dtype == kind and biased.dtype == kind
    checker = Checker()
    rounded = [x.to(kind) for x in (query, key, value)]
    checker.attention("mixed", out, None, *rounded)
    checker.attention("bias", biased, None, *rounded, bias)
    checker.finish()


def test_b48a_no_autocast_no_quiet_cast(device: str) -> None:
    query, key, value = tensors(device, "f32")
    with pytest.raises(ValueError, match="float16"):
        attention(query, key.half(), value.half())


# --- b, c, d: compile


@pytest.mark.parametrize("mask", ["none", "top_left", "bias"])
def test_b48b_compile_without_a_break(device: str, mask: str) -> None:
    torch._dynamo.reset()
    checker = Checker()
    for k, kv in ((64, 64), (33, 5), (8, 16)):
        query, key, value = tensors(device, "f32" if device == "cpu" else "bf16", K=k, Kv=kv)
        bias: Any = {"none": None, "top_left": memeff_attn.LowerTriangularMask(), "bias": None}[
            mask
        ]
        if mask == "bias":
            bias = torch.randn(1, 1, 1, 77, device=device, dtype=query.dtype)

        def function(q: Tensor, k: Tensor, v: Tensor, bias: Any = bias) -> Tensor:
            return attention(q + 1, k, v, bias).transpose(1, 2) * 2

        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        checker.same_bits(
            f"K{k}/{kv} {mask}", compiled(query, key, value), function(query, key, value)
        )
    checker.finish()


def test_b48d_any_stride_order(device: str) -> None:
    """Every permutation of memory that a compiler may choose for the inputs."""
    checker = Checker()
    dense = tensors(device, "f16", M=20, N=20)
    expected = attention(*dense)
    for order in itertools.permutations(range(4)):
        back = [order.index(i) for i in range(4)]
        relaid = [x.permute(order).contiguous().permute(back) for x in dense]
        out = attention(*relaid)
        checker.attention(order, out, None, *dense)
        checker.that(f"{order}: strides {out.stride()}", out.stride() == expected.stride())
    checker.finish()


# --- e: the shape of LSE


def test_b48e_lse_is_not_padded(device: str) -> None:
    checker = Checker()
    for m, n, dtype in itertools.product((1, 5, 16, 31, 33), (1, 40), DTYPES):
        for rank, shape in (("bmk", (2, 1, m)), ("bmhk", (2, 3, m)), ("bmghk", (2, 2, 3, m))):
            case = Case(dtype, M=m, N=n, H=1 if rank == "bmk" else 3, rank=rank)
            with checker.case(case):
                inputs = cases.make(case, device)
                out, lse = cases.attention(inputs)
                checker.that(
                    f"{case}: LSE {tuple(lse.shape)}", lse.shape == shape and lse.is_contiguous()
                )
                checker.that(f"{case}: {lse.dtype}", lse.dtype == torch.float32)
                checker.attention(case, out, lse, *inputs.tuple())
    checker.finish()


# --- f: vmap


def test_b48f_vmap(device: str) -> None:
    """vmap equals the loop, or says that it is not supported."""
    factors = torch.arange(1, 4, device=device).view(3, 1, 1, 1, 1)
    query, key, value = (x * factors for x in tensors(device, "f32", M=5, N=7))
    try:
        out = torch.vmap(attention)(query, key, value)
    except (RuntimeError, NotImplementedError) as error:
        assert "vmap" in str(error) or "batching rule" in str(error), error
        return
    for i in range(3):
        torch.testing.assert_close(out[i], attention(query[i], key[i], value[i]))


# --- h: streams


@pytest.mark.gpu
def test_b48h_side_stream() -> None:
    """The kernel runs on the current stream: it sees what was queued there before it, and nothing
    waits for the host."""
    checker = Checker()
    for dtype in DTYPES:
        query, key, value = tensors("cuda", dtype, B=4, M=512, N=512, H=8)
        bias = torch.zeros(1, 1, 512, 512, device="cuda", dtype=query.dtype)
        expected = attention(query, key, value, bias)
        stream = torch.cuda.Stream()
        late = torch.full_like(query, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(
                100_000_000
            )  # about 50 ms: what follows is queued long before it may start
            late.copy_(query)
            out = attention(late, key, value, bias)
            queued = not stream.query()
        checker.that(f"{dtype}: the call waited for the GPU", queued)
        stream.synchronize()
        checker.same_bits(dtype, out, expected)
    checker.finish()


@pytest.mark.gpu
def test_b48h_no_host_sync() -> None:
    query, key, value = tensors("cuda", "bf16", H=8, Hkv=2)
    bias = torch.zeros(1, 1, 65, 77, device="cuda", dtype=torch.bool)
    for given in (
        None,
        bias,
        memeff_attn.LowerTriangularMask(),
        memeff_attn.LowerTriangularFromBottomRightMask(),
    ):
        attention(query, key, value, given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention(query, key, value, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- i: devices


@pytest.mark.gpu
def test_b48i_second_gpu() -> None:
    """Tensors on GPU 1 while GPU 0 is current; the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    checker = Checker()
    for dtype, bias in itertools.product(DTYPES, ("", "bhmn")):
        inputs = cases.make(Case(dtype, bias=bias), "cuda:0")
        moved = [x.to("cuda:1") if isinstance(x, Tensor) else x for x in inputs.tuple()]
        out, lse = cases.attention(inputs)
        with torch.cuda.device(0):
            out1, lse1 = cases.attention(Inputs(*moved))
            checker.that("current device", torch.cuda.current_device() == 0)
        checker.that(f"on {out1.device}", out1.device.index == 1)
        checker.same_bits(f"{dtype} {bias}", out1.to("cuda:0"), out)
        checker.same_bits(f"{dtype} {bias} LSE", lse1.to("cuda:0"), lse)
    query, key, value = tensors("cuda:0")
    with pytest.raises(ValueError, match="cuda:1"):
        attention(query, key.to("cuda:1"), value)
    with pytest.raises(ValueError, match="cuda:1"):
        attention(query, key, value, torch.zeros(65, 77, device="cuda:1", dtype=query.dtype))
    checker.finish()


@pytest.mark.gpu
def test_b48i_mixed_devices_are_refused() -> None:
    query, key, value = tensors("cuda")
    for arguments in (
        (query, key.cpu(), value),
        (query.cpu(), key, value),
        (query, key, value.cpu()),
    ):
        with pytest.raises(ValueError, match="cpu"):
            attention(*arguments)
    with pytest.raises(ValueError, match="cpu"):
        attention(query, key, value, torch.zeros(65, 77, dtype=query.dtype))


# --- j: graphs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_b48j_graph_capture_and_replay(dtype: str) -> None:
    """Captured once, replayed on other numbers: the bits of the ordinary call."""
    checker = Checker()
    for k, mask, bias in (
        (64, "none", ""),
        (33, "bottom_right", ""),
        (128, "none", "bhmn"),
        (320, "top_left", ""),
    ):
        case = Case(dtype, M=130, N=200, K=k, mask=mask, bias=bias)
        with checker.case(case):
            inputs = cases.make(case, "cuda")
            warm = torch.cuda.Stream()
            warm.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm):
                cases.attention(inputs)
            torch.cuda.current_stream().wait_stream(warm)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = cases.attention(inputs)
            for _ in range(3):
                for x in (inputs.query, inputs.key, inputs.value):
                    x.normal_()
                out.fill_(float("nan"))
                graph.replay()
                again, lse_again = cases.attention(inputs)
                checker.same_bits(f"{case} replay", out, again)
                checker.same_bits(f"{case} replay LSE", lse, lse_again)
    checker.finish()


# --- k, m: the operator


def test_b48k_not_tagged_random() -> None:
    """Selective checkpointing must not take an op without dropout for a random one."""
    assert torch.Tag.nondeterministic_seeded not in torch.ops.memeff_attn.forward.default.tags


def test_b48m_other_key_count_in_value(device: str) -> None:
    """key N = 5, value N = 6 (and each other disagreement) is an error that names both, never an
    over-read."""
    query, key, value = (torch.randn(2, n, 3, 8, device=device) for n in (4, 5, 6))
    with pytest.raises(ValueError, match=r"5.*6|6.*5"):
        attention(query, key, value)
    with pytest.raises(ValueError, match="key"):
        attention(query, key[..., :7], key)
    with pytest.raises(ValueError, match="bias"):
        attention(query, key, key, torch.zeros(4, 6, device=device))


# --- n, q: grouped heads


def test_b48q_grouped_five_dims_with_bias(device: str) -> None:
    """BMGHK with stride-0 heads and a tensor bias of every broadcast, in one layout contract."""
    checker = Checker()
    for dtype, bias in itertools.product(
        DTYPES, ("bhmn", "1hmn", "b11n", "11mn", "bhmn:bool", "1h1n:f32")
    ):
        case = Case(dtype, H=4, K=40, rank="bmghk", strides="heads0", bias=bias)
        with checker.case(case):
            inputs = cases.make(case, device)
            checker.attention(case, *cases.attention(inputs), *inputs.tuple())
    checker.finish()


# --- neg-bit, conjugate and zero-tensor views, subclasses: what the binding must not read raw


def test_b48_negative_bit_views(device: str) -> None:
    """A view with the negative bit has the un-negated numbers in memory."""
    query, key, value = tensors(device, "f32")
    negative = [torch._neg_view(x) for x in (query, key, value)]
    checker = Checker()
    checker.same_bits("neg", attention(*negative), attention(-query, -key, -value))
    checker.finish()


def test_b48_parameters(device: str) -> None:
    """nn.Parameter is another Python type than Tensor."""
    query, key, value = tensors(device)
    wrapped = [torch.nn.Parameter(x, requires_grad=False) for x in (query, key, value)]
    checker = Checker()
    checker.same_bits("parameters", attention(*wrapped), attention(query, key, value))
    checker.finish()


# --- DLPack and scalars: both ways to the binding


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields", [{}, {"H": 6, "Hkv": 2}, {"rank": "bmghk"}, {"rank": "bmk", "H": 1}], ids=str
)
def test_scalar_path(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.Tensor.__dlpack_c_exchange_api__ (older torch): the same bits."""
    from memeff_attn import _C, ops

    checker = Checker()
    for dtype, bias in itertools.product(DTYPES, ("", "bhmn", "11mn:f32", "b11n:bool")):
        inputs = cases.make(Case(dtype, K=40, bias=bias, **fields), "cuda")
        expected, expected_lse = cases.attention(inputs)
        with monkeypatch.context() as hidden:
            if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
                hidden.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
            hidden.setattr(ops, "_launch", ops.launcher())
            checker.that("launcher() takes scalars", ops._launch is not _C.forward)
            out, lse = cases.attention(inputs)
        checker.same_bits(f"{dtype} {bias}", out, expected)
        checker.same_bits(f"{dtype} {bias} LSE", lse, expected_lse)
    checker.finish()


def scalars(x: Tensor | None) -> Any:
    codes = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.bool: 3}
    return None if x is None else (x.data_ptr(), codes[x.dtype], list(x.shape), list(x.stride()))


def test_binding_reads_the_same_both_ways(device: str) -> None:
    """forward (DLPack) and forward_scalars answer alike, right input and wrong (host-only: both
    refuse alike)."""
    _C = pytest.importorskip("memeff_attn._C")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} has no DLPack C exchange API")
    if device == "cpu" and _C.is_cuda_build and not torch.cuda.is_available():
        pytest.skip("a CUDA build without a GPU")
    index = -1 if device == "cpu" else 0
    query, key, value = tensors(device)
    out, lse = torch.empty_like(query), torch.empty(2, 2, 65, device=device)
    stream = 0 if device == "cpu" else torch.cuda.current_stream().cuda_stream
    bias = torch.zeros(1, 2, 65, 77, device=device, dtype=query.dtype)
    wrong: list[tuple[Tensor | None, ...]] = [
        (query, key, value, bias, out, lse),
        (query, key, value, None, out, None),
        (query, key[:, :-1], value, None, out, lse),
        (query, key, value, bias[..., :-1], out, lse),
        (query, key, value, None, out[..., :-1], lse),
        (query.float(), key, value, None, out, lse),
        (query.transpose(-1, -2), key, value, None, out, lse),
        (query[0], key, value, None, out, lse),
    ]
    for arguments in wrong:
        rest = (None, 0.125, 0.0, TOP_LEFT, False, "", None, stream)
        by_dlpack = _C.forward(*arguments, *rest)
        by_scalars = _C.forward_scalars(
            *(scalars(x) for x in arguments), rest[0], None, *rest[1:], index
        )
        assert by_dlpack == by_scalars
    assert by_dlpack is not None and by_dlpack[0] == 1, by_dlpack


# --- B36, B37: determinism and races, forward (every variant: test_variants.py)


@pytest.mark.gpu
def test_b37_reported_shapes() -> None:
    """200 repeats of the shapes on which a shared-memory race was seen: bit-equal."""
    checker = Checker()
    for b, m, n, h in (
        (128, 64, 512, 1),
        (8, 512, 2, 8),
        (8, 512, 8, 4),
        (8, 512, 8, 8),
        (8, 512, 64, 1),
    ):
        for dtype, k in itertools.product(DTYPES, (32, 64, 128, 256)):
            query, key, value = tensors("cuda", dtype, B=b, M=m, N=n, H=h, K=k)
            expected = attention(query, key, value)
            wrong = torch.zeros((), dtype=torch.long, device="cuda")
            for _ in range(200):
                wrong += (attention(query, key, value) != expected).sum()
            checker.true(f"B{b} M{m} N{n} H{h} K{k} {dtype}", wrong == 0)
    checker.finish()


@pytest.mark.gpu
def test_b36_forward_under_load() -> None:
    """Bit-equal while other streams keep the GPU busy."""
    query, key, value = tensors("cuda", "f16", B=1, M=2048, N=2048, H=2)
    expected = attention(query, key, value)
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    other = torch.cuda.Stream()
    checker = Checker()
    for _ in range(20):
        with torch.cuda.stream(other):
            torch.mm(noise, noise)
        checker.same_bits("repeat", attention(query, key, value), expected)
    checker.finish()
    torch.cuda.synchronize()
