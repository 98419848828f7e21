"""The host part of the backward pass: checks before any launch, splits, workspace. CPU tensors are
enough: a host-only build checks everything but the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_C = pytest.importorskip("memeff_attn._C", reason="memeff_attn is not compiled")

INVALID, UNSUPPORTED = 1, 2
SEED = torch.zeros(2, dtype=torch.int64)
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.bool: 3, torch.int64: 4}
ROWS = [row for row in _C.variants() if row["kind"] == "bwd"]
TENSORS = [
    "grad_out", "query", "key", "value", "bias", "out", "lse", "seed", "delta",
    "grad_query", "grad_key", "grad_value", "grad_bias",
]  # fmt: skip

exchange = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason=f"torch {torch.__version__} has no DLPack C exchange API",
)
needs_rows = pytest.mark.skipif(not ROWS, reason="the list has no backward row")


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def arguments(
    query: tuple[int, ...] = (2, 5, 8),
    key: tuple[int, ...] = (2, 7, 8),
    width: int = 6,
    **changes: Any,
) -> dict[str, Any]:
    """Every tensor of a valid call with all gradients; `changes` replace or add."""
    heads = query[2:-1] or (1,)
    out, value = (*query[:-1], width), (*key[:-1], width)
    given: dict[str, Any] = {"lse": torch.zeros(query[0], *heads, query[1])}
    for name, shape in [("query", query), ("key", key), ("value", value), ("out", out)]:
        given[name], given[f"grad_{name}"] = half(*shape), half(*shape)
    given |= changes
    if given.get("bias") is not None and "grad_bias" not in changes:
        given["grad_bias"] = torch.empty(given["bias"].shape, dtype=given["bias"].dtype)
    return given


def scalars(t: torch.Tensor | None) -> Any:
    if t is None:
        return None
    return t.data_ptr(), CODES.get(t.dtype, -1), tuple(t.shape), t.stride()


def unasked(elements: int) -> Any:
    raise AssertionError("a workspace was asked for, of a call that cannot be launched")


def answer(given: dict[str, Any]) -> Any:
    """What backward answers, by tensors and by scalars."""
    tensors = [given.get(name) for name in TENSORS]
    rest = (False, 1.0, given.get("p", 0.0), 0, False, given.get("variant", ""), None, 0)
    said = _C.backward(*tensors, unasked, *rest)
    assert _C.backward_scalars(*map(scalars, tensors), unasked, *rest, -1) == said
    return said


GROUPED = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8)}
GROUPS = {"query": (2, 5, 3, 2, 8), "key": (2, 7, 3, 2, 8)}


@exchange
@pytest.mark.parametrize(
    "given",
    [
        arguments(),
        arguments(**GROUPED, bias=half(1, 4, 1, 7)),
        arguments(**GROUPS, bias=torch.zeros(1, 3, 1, 5, 7), seed=SEED, p=0.5),
        arguments(grad_query=None, grad_key=None),
        arguments(grad_out=half(2, 5, 12)[..., :6]),
        arguments(grad_out=half(5, 2, 6).transpose(0, 1)),
        arguments(grad_query=half(2, 1, 5, 8)[:, 0]),
        arguments((1, 5, 8), (1, 7, 8), grad_query=half(2, 5, 8)[1:]),
    ],
)
def test_valid_calls_pass_every_check_but_that_of_the_device(given: dict[str, Any]) -> None:
    code, message = answer(given)
    if _C.is_cuda_build:
        assert (code, message) == (INVALID, "a tensor is not on a CUDA device")
    else:
        assert code == UNSUPPORTED and "host-only" in message


@exchange
@pytest.mark.skipif(_C.is_cuda_build, reason="a CUDA build refuses CPU tensors first")
def test_no_gradient_needs_nothing_and_runs_nothing() -> None:
    names = ("grad_query", "grad_key", "grad_value")
    assert answer(arguments(**dict.fromkeys(names))) is None


BOOL = torch.zeros(2, 5, 7, dtype=torch.bool)


@exchange
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lse": None}, "lse is missing"),
        ({"lse": torch.zeros(2, 2, 5)}, "lse has shape"),
        ({"grad_out": half(2, 5, 7)}, "grad_out has shape [2, 5, 7], expected [2, 5, 6]"),
        ({"grad_out": torch.zeros(2, 5, 6)}, "grad_out has another dtype"),
        ({"grad_out": half(2, 6, 5).mT}, "grad_out has last stride 5"),
        ({"grad_out": half(2, 5, 1, 6)}, "grad_out has rank 4"),
        ({"grad_query": half(2, 5, 9)}, "grad_query has shape"),
        ({"grad_query": half(2, 5, 16)[..., :8]}, "grad_query [2, 5, 8] is not contiguous"),
        ({"grad_key": half(2, 5, 8)}, "grad_key has shape"),
        ({"grad_key": half(7, 2, 8).transpose(0, 1)}, "grad_key [2, 7, 8] is not contiguous"),
        ({"grad_value": torch.zeros(2, 7, 6)}, "grad_value has another dtype"),
        ({"grad_bias": half(2, 5, 7)}, "grad_bias is given, attn_bias is not"),
        ({"bias": BOOL}, "a bool attn_bias has no gradient"),
        ({"bias": half(1, 5, 7), "grad_bias": half(2, 5, 7)}, "expected [1, 5, 7]"),
        ({"bias": half(1, 5, 7), "grad_bias": torch.zeros(1, 5, 7)}, "grad_bias has another dtype"),
        (
            {"bias": half(1, 5, 7), "grad_bias": half(1, 7, 5).mT},
            "grad_bias [1, 5, 7] is not contiguous",
        ),
        ({"p": 0.5}, "seed is missing"),
        ({"seed": SEED}, "seed is given, p is 0"),
        ({"key": (2, 7, 9)}, "key has shape"),
    ],
)
def test_invalid_calls_are_named(changes: dict[str, Any], message: str) -> None:
    code, text = answer(arguments(**changes))
    assert code == INVALID and message in text


@exchange
@pytest.mark.gpu
def test_the_workspace_is_checked() -> None:
    """Asked for once, on the tensors' device; what allocate raises is raised."""
    given = arguments()
    tensors = [t if t is None else t.cuda() for t in map(given.get, TENSORS)]
    rest = (False, 1.0, 0.0, 0, False, "", None, torch.cuda.current_stream().cuda_stream)
    asked: list[int] = []

    def refusal(make: Any) -> str:
        def allocate(elements: int) -> Any:
            asked.append(elements)
            return make(elements)

        code, text = _C.backward(*tensors, allocate, *rest)
        assert code == INVALID
        return str(text)

    assert "workspace is missing" in refusal(lambda n: None)
    assert "not float32" in refusal(lambda n: torch.empty(n, device="cuda").half())
    assert "at least" in refusal(lambda n: torch.empty(n - 1, device="cuda"))
    assert "contiguous" in refusal(lambda n: torch.empty(2 * n, device="cuda")[::2])
    assert "16 bytes" in refusal(lambda n: torch.empty(n + 1, device="cuda")[1:])
    assert "CUDA device" in refusal(torch.empty)
    assert len(asked) == 6 and set(asked) == {12}  # B * H * M = 10, in 16 bytes
    with pytest.raises(AssertionError, match="cannot be launched"):
        _C.backward(*tensors, unasked, *rest)


@pytest.mark.gpu
def test_the_alignment_of_out_does_not_choose_the_row() -> None:
    """No row reads out, and the delta kernel takes any address: rows for aligned tensors launch."""
    query, key, value, grad_out = torch.randn(4, 2, 70, 3, 64, device="cuda").half()
    padded = torch.zeros(query.numel() + 1, device="cuda", dtype=torch.float16)
    unaligned = padded[1:].view_as(query)
    settings = 0.125, 0, False
    out, lse = torch.ops.memeff_attn.forward(query, key, value, None, *settings, True, "")
    unaligned.copy_(out)
    chip = {x: n for x, n in _C.device_info(torch.cuda.current_device()).items() if x != "name"}
    request = {"dtype": "f16", "M": 70, "N": 70, "K": 64, "Kv": 64, "alignment": 8, "pass": "bwd"}
    row = _C.select({**chip, **request})
    assert next(r["alignment"] for r in ROWS if r["name"] == row) == 8

    def gradients(out: torch.Tensor) -> Any:
        operator = torch.ops.memeff_attn.backward
        rest = (lse, *settings, [True, True, True, False], row)
        return operator(grad_out, query, key, value, None, out, *rest)[:3]

    torch.testing.assert_close(gradients(unaligned), gradients(out), atol=1e-3, rtol=1e-2)


# ---- splits and workspace: a pure function ----


def plan(
    bias: tuple[int, int, int, int] = (0, 0, 0, 0), per_key: int = 1, **fields: Any
) -> dict[str, Any]:
    """backward_plan, checked against the rule as the documentation states it; of rows that sum in
    a fixed order, unless `deterministic` says otherwise."""
    asked = {
        "sm": 90, "sm_count": 132, "dtype": "f16", "B": 1, "M": 1024, "N": 1024, "H": 8,
        "K": 64, "Kv": 64, "alignment": 8, "any_build": True, "has_bias": any(bias),
        "deterministic": True, **fields,
    }  # fmt: skip
    got: dict[str, Any] = _C.backward_plan({**asked, "pass": "bwd"}, per_key, bias)
    assert got == _C.backward_plan({**asked, "pass": "bwd"}, per_key, bias)
    assert got == expected_plan(got["row"], asked, per_key, bias)
    return got


def up(a: int, b: int) -> int:
    return -(-a // b)


def splits(blocks: int, loop_tiles: int, numel: int, sm_count: int) -> int:
    if blocks >= 2 * sm_count:
        return 1
    cap = max(8, (64 << 20) // 4 // (up(numel, 4) * 4))
    return min(up(2 * sm_count, blocks), max(1, loop_tiles // 4), 64, cap)


def expected_plan(
    name: str, r: dict[str, Any], per_key: int, bias: tuple[int, int, int, int]
) -> dict[str, Any]:
    row = next(row for row in ROWS if row["name"] == name)
    tile_m, tile_n = row["tile_m"], row["tile_n"]
    b, h, m, n = r["B"], r["H"], r["M"], r["N"]
    key_heads = h // per_key
    columns_k = 1 if row["max_k"] else up(r["K"], row["value_tile"])
    columns_v = 1 if row["max_kv"] else up(r["Kv"], row["value_tile"])
    sizes = {
        "query": b * m * h * r["K"],
        "key": b * n * key_heads * r["K"],
        "value": b * n * key_heads * r["Kv"],
        "bias": bias[0] * bias[1] * bias[2] * bias[3],
    }
    query_blocks = b * h * up(m, tile_m) * columns_k
    query = splits(query_blocks, up(n, tile_n), sizes["query"], r["sm_count"])
    if row["adds_query"]:
        query = 1
    key_value = splits(
        b * key_heads * up(n, tile_m) * max(columns_k, columns_v),
        per_key * up(m, tile_n),
        max(sizes["key"], sizes["value"]),
        r["sm_count"],
    )
    bias_splits = 1
    if sizes["bias"]:
        blocks = loop = 1
        tile_b = tile_n if row["adds_query"] else tile_m  # dBias has a kernel of its own
        for own, full, tile in zip(bias, (b, h, m, n), (1, 1, tile_b, tile_n), strict=True):
            if own == 1 and full > 1:
                loop *= up(full, tile)
            else:
                blocks *= up(full, tile)
        bias_splits = splits(blocks, loop, sizes["bias"], r["sm_count"])
    total = up(b * h * m, 4) * 4
    total += b * h * up(m, 8) * 8 * up(r["K"], 16) * 16 if row["adds_query"] else 0
    for count, numel in zip(
        (query, key_value, key_value, bias_splits), sizes.values(), strict=True
    ):
        total += count * up(numel, 4) * 4 if count > 1 else 0
    return {
        "row": name, "query": query, "key_value": key_value, "bias": bias_splits, "workspace": total
    }  # fmt: skip


def counts(got: dict[str, Any]) -> tuple[int, int, int]:
    return got["query"], got["key_value"], got["bias"]


@needs_rows
def test_a_full_gpu_splits_nothing() -> None:
    got = plan(B=64, H=16)
    assert counts(got) == (1, 1, 1) and got["workspace"] == 64 * 16 * 1024


@needs_rows
def test_few_queries_split_the_keys_and_few_keys_the_queries() -> None:
    got = plan(B=1, H=1, M=64, N=1 << 16)
    assert got["query"] == 64 and got["key_value"] == 1
    got = plan(B=1, H=1, M=1 << 16, N=64)
    assert got["query"] == 1 and got["key_value"] == 64


@needs_rows
@pytest.mark.parametrize("width", [8, 64, 72, 128, 256])
def test_rows_that_add_up_the_gradient_of_the_query_sum_in_the_workspace(width: int) -> None:
    """In rows rounded up to 8, columns to 16; the loop of the keys' gradients is split as ever."""
    fields = {"K": width, "Kv": width, "deterministic": False}
    got = plan(B=8, H=16, M=1001, **fields)
    assert next(r for r in ROWS if r["name"] == got["row"])["adds_query"]
    assert counts(got) == (1, 1, 1)
    assert got["workspace"] == 8 * 16 * (1001 + 1008 * up(width, 16) * 16)
    assert plan(B=1, H=1, M=1 << 16, N=64, **fields)["key_value"] > 1


@needs_rows
def test_short_loops_are_not_split() -> None:
    assert counts(plan(B=1, H=1, M=64, N=64)) == (1, 1, 1)


@needs_rows
def test_shared_key_heads_lengthen_the_loop() -> None:
    alone, shared = plan(H=32, M=128, N=128), plan(H=32, M=128, N=128, per_key=32)
    assert alone["key_value"] == 1 and shared["key_value"] > 1


@needs_rows
def test_a_broadcast_bias_splits_what_it_is_summed_over() -> None:
    assert plan((8, 8, 1024, 1024), B=8)["bias"] == 1
    assert plan((1, 1, 64, 64), B=512, M=64, N=64)["bias"] == 64
    assert plan((1, 8, 1, 1024), M=1 << 16)["bias"] > 1
    assert plan((64, 8, 1, 1), B=64)["bias"] == 1


@needs_rows
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 64, 100_000, 1_000_000])
@pytest.mark.parametrize("width", [8, 128, 1024])
def test_workspace_is_bounded(heads: int, queries: int, width: int) -> None:
    for fields in ({"M": queries, "N": 1 << 20}, {"M": 1 << 20, "N": queries}):
        got = plan(H=heads, K=width, Kv=width, **fields)
        lengths = (fields["M"], fields["N"], fields["N"])
        limits = [max(8 * heads * width * length, 16 << 20) for length in lengths]
        assert got["workspace"] <= heads * fields["M"] + sum(limits)


@needs_rows
def test_sizes_beyond_32_bits() -> None:
    got = plan((1, 1, 1, 1 << 20), B=4096, H=64, M=1 << 20, N=1 << 20, K=256, Kv=256)
    assert counts(got)[:2] == (1, 1)
    assert got["workspace"] >= 4096 * 64 << 20
