"""Each compiled variant once, forward and backward, on one small ragged shape: what
compute-sanitizer watches.

    compute-sanitizer --tool memcheck  python tests/sanitizer_cases.py [--match REGEX]
    compute-sanitizer --tool racecheck python tests/sanitizer_cases.py [--match REGEX] [--shard 1/8]

No pytest; torch only makes the tensors. PYTORCH_NO_CUDA_MEMORY_CACHING=1 (set here) gives each
tensor an allocation of its own, so that an access beyond its end is seen."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from companions import forward_name

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def shape_of(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """M, N, K, Kv: a partial last tile in every dim, more than one tile of each."""
    step = row["alignment"]
    k = row["max_k"] or 72
    kv = row["max_kv"] or row["value_tile"] + step
    k, kv = (max(step, x // step * step) for x in (k - (step if k > step else 0), kv))
    n = 2 * row["tile_n"] + 5
    if not row["max_n"]:
        return row["tile_m"] + 3, n, k, kv
    return row["max_n"] - 5 if row["kind"] == "bwd" else row["tile_m"] + 3, row["max_n"] - 3, k, kv


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).cuda()


def unwritten(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def calls(row: dict[str, Any], bias: torch.Tensor) -> list[tuple[torch.Tensor | None, float]]:
    """(bias, p) of each launch: every dtype of bias that the row takes, dropout with and without
    one."""
    p = 0.3 if row["dropout"] else 0.0
    if not row["bias"]:
        return [(None, p)]
    if row["bias_alignment"]:  # rows of the query's dtype that wide copies take, nothing else
        return [(padded(bias), p)]
    found: list[tuple[torch.Tensor | None, float]] = [
        (bias, 0.0 if row["kind"] == "bwd" else p),
        (bias.float(), p),
        (bias > -1, p),
    ]
    if row["kind"] == "bwd":  # a gradient summed over heads and queries
        found.append((bias[:, :1, :1].contiguous(), p))
    return found + ([(None, p)] if row["dropout"] else [])


def padded(bias: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows that wide copies can take."""
    rows = bias.new_zeros(*bias.shape[:-1], -(-bias.shape[-1] // 16) * 16)
    rows[..., : bias.shape[-1]] = bias
    return rows[..., : bias.shape[-1]]


Launch = tuple[int, int, torch.Tensor | None, float, int, Any]


def launches(row: dict[str, Any]) -> list[Launch]:
    """(M, N, bias, p, causal, mask) of each: plain calls, a bias by wide copies, a short sequence,
    a window, packed sequences of which one is empty."""
    m, n, _, _ = shape_of(row)
    bias = random(DTYPES[row["dtype"]], 1, 2, m, n)
    plain = calls(row, bias)
    found: list[Launch] = [(m, n, b, p, 1, None) for b, p in plain]
    first, p = plain[0]
    if row["bias"]:
        found.append((m, n, padded(bias), p, 1, None))
    if row["kind"] == "bwd" and not row["bias"]:
        found.append((m, m, None, p, 1, None))
    found.append((m, n, first, p, 2, (n // 3, 2, None, None, None, None, 0, False)))
    if not row["sequences"] or row["bias_alignment"]:  # no such bias of packed sequences
        return found
    starts = [
        torch.tensor(x, dtype=torch.int32, device="cuda")
        for x in ([0, m // 2, m // 2, m], [0, 3, n // 2, n])
    ]
    return [*found, (m, n, first, p, 0, (-1, -1, *starts, None, None, 0, False))]


def run(row: dict[str, Any], binding: Any) -> str:
    """Launches one variant with LSE; a backward variant with every gradient. Returns what went
    wrong."""
    _, _, k, kv = shape_of(row)
    dtype = DTYPES[row["dtype"]]
    tf32 = row["math"] == "tf32"
    state = torch.tensor([1234567890123, 987654321], device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for m, n, bias, p, causal, mask in launches(row):
        query = random(dtype, 1, m, 2, k)
        key, value = random(dtype, 1, n, 2, k), random(dtype, 1, n, 2, kv)
        seed = state if p else None
        out, lse = unwritten(dtype, 1, m, 2, kv), unwritten(torch.float32, 2, 1, 2, m)
        numbers = (k**-0.5, p, causal, tf32)
        name = row["name"]
        if row["kind"] == "bwd":
            name = forward_name(name, bias is not None, p, k, kv)
        inputs = (query, key, value, bias, out, lse, seed)
        failed = binding.forward(*inputs, *numbers, name, mask, stream)
        results = [out, lse]
        if failed is None and row["kind"] == "bwd":
            failed, results = backward(row, binding, inputs, numbers, mask, stream)
        torch.cuda.synchronize()
        if failed is not None:
            return str(failed)
        if any(bool(x.isnan().any()) for x in results):
            return "a result is NaN, or was not written"
    return ""


def backward(
    row: dict[str, Any],
    binding: Any,
    inputs: tuple[Any, ...],
    numbers: tuple[Any, ...],
    mask: Any,
    stream: int,
) -> tuple[Any, list[torch.Tensor]]:
    query, key, value, bias, out = inputs[:5]
    grads = [unwritten(x.dtype, *x.shape) for x in (query, key, value)]
    if bias is not None and bias.dtype != torch.bool:
        # of packed sequences only what a query and a key of one sequence share is written
        sequences = mask is not None and mask[2] is not None
        fill = 0.0 if sequences else float("nan")
        grads.append(torch.full(bias.shape, fill, dtype=bias.dtype, device="cuda"))
    wanted = (*grads, *[None] * (4 - len(grads)))
    given = (random(out.dtype, *out.shape), *inputs, None, *wanted)

    def allocate(elements: int) -> torch.Tensor:
        return unwritten(torch.float32, elements)

    return binding.backward(*given, allocate, False, *numbers, row["name"], mask, stream), grads


def main() -> int:
    parser = argparse.ArgumentParser(description="one launch of each compiled variant")
    parser.add_argument(
        "--match", default="", metavar="REGEX", help="only variants whose name matches"
    )
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="each N-th variant, from I on"
    )
    args = parser.parse_args()
    first, step = map(int, args.shard.split("/"))
    from memeff_attn import _C

    rows = [row for row in _C.variants() if row["built"] and re.search(args.match, row["name"])]
    rows = rows[first - 1 :: step]
    limit = _C.device_info(torch.cuda.current_device())["smem_optin"]
    failures, ran = 0, 0
    for row in rows:
        if row["smem_bytes"] > limit:
            print(f"{row['name']}: skipped, needs {row['smem_bytes']} of {limit} bytes a block")
            continue
        failed = run(row, _C)
        ran += 1
        failures += bool(failed)
        print(f"{row['name']}: {failed or 'ok'}", flush=True)
    print(f"{ran} variants ran, {failures} failed")
    return 1 if failures or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
