"""Each compiled variant once, forward and backward, on one small ragged shape: what
compute-sanitizer watches.

    compute-sanitizer --tool memcheck  python tests/sanitizer_cases.py [--match REGEX]
    compute-sanitizer --tool racecheck python tests/sanitizer_cases.py [--match REGEX]

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
    return row["tile_m"] + 3, 2 * row["tile_n"] + 5, k, kv


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
    found: list[tuple[torch.Tensor | None, float]] = [
        (bias, 0.0 if row["kind"] == "bwd" else p),
        (bias.float(), p),
        (bias > -1, p),
    ]
    if row["kind"] == "bwd":  # a gradient summed over heads and queries
        found.append((bias[:, :1, :1].contiguous(), p))
    return found + ([(None, p)] if row["dropout"] else [])


def run(row: dict[str, Any], binding: Any) -> str:
    """Launches one variant, top-left causal, with LSE; a backward variant with every gradient.

    Returns what went wrong.
    """
    m, n, k, kv = shape_of(row)
    dtype = DTYPES[row["dtype"]]
    query, key, value = (
        random(dtype, 1, m, 2, k),
        random(dtype, 1, n, 2, k),
        random(dtype, 1, n, 2, kv),
    )
    tf32 = row["math"] == "tf32"
    state = torch.tensor([1234567890123, 987654321], device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for bias, p in calls(row, random(dtype, 1, 2, m, n)):
        seed = state if p else None
        out, lse = unwritten(dtype, 1, m, 2, kv), unwritten(torch.float32, 2, 1, 2, m)
        numbers = (k**-0.5, p, 1, tf32)
        name = row["name"]
        if row["kind"] == "bwd":
            name = forward_name(name, bias is not None, p, k, kv)
        inputs = (query, key, value, bias, out, lse, seed)
        failed = binding.forward(*inputs, *numbers, name, stream)
        results = [out, lse]
        if failed is None and row["kind"] == "bwd":
            failed, results = backward(row, binding, inputs, numbers, stream)
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
    stream: int,
) -> tuple[Any, list[torch.Tensor]]:
    query, key, value, bias, out = inputs[:5]
    wanted = [query, key, value]
    wanted += [bias] if bias is not None and bias.dtype != torch.bool else []
    grads = [unwritten(x.dtype, *x.shape) for x in wanted]
    given = (random(out.dtype, *out.shape), *inputs, *grads, *[None] * (4 - len(grads)))

    def allocate(elements: int) -> torch.Tensor:
        return unwritten(torch.float32, elements)

    return binding.backward(*given, allocate, *numbers, row["name"], stream), grads


def main() -> int:
    parser = argparse.ArgumentParser(description="one launch of each compiled variant")
    parser.add_argument(
        "--match", default="", metavar="REGEX", help="only variants whose name matches"
    )
    args = parser.parse_args()
    from memeff_attn import _C

    rows = [row for row in _C.variants() if row["built"] and re.search(args.match, row["name"])]
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
