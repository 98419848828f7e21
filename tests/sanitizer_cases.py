"""Each compiled variant once, on one small ragged shape: what compute-sanitizer watches.

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

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def shape_of(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """M, N, K, Kv: a partial last tile in every dim, more than one tile of each."""
    step = row["alignment"]
    k = row["max_k"] or 72
    kv = row["max_kv"] or row["value_tile"] + step
    k, kv = (max(step, x // step * step) for x in (k - (step if k > step else 0), kv))
    return row["tile_m"] + 3, 2 * row["tile_n"] + 5, k, kv


def run(row: dict[str, Any], binding: Any) -> str:
    """Launches one variant, top-left causal, with LSE and a bias of each dtype if it takes one.

    Returns what went wrong.
    """
    m, n, k, kv = shape_of(row)
    dtype = DTYPES[row["dtype"]]

    def random(*shape: int) -> torch.Tensor:
        return (
            torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).cuda()
        )

    query, key, value = random(1, m, 2, k), random(1, n, 2, k), random(1, n, 2, kv)
    biases: list[torch.Tensor | None] = [None]
    if row["bias"]:
        bias = random(1, 2, m, n)
        biases = [bias, bias.float(), bias > -1]
    for bias_now in biases:
        out = torch.full((1, m, 2, kv), float("nan"), dtype=dtype, device="cuda")
        lse = torch.full((1, 2, m), float("nan"), device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        tf32 = row["math"] == "tf32"
        arguments = (query, key, value, bias_now, out, lse, k**-0.5, 1, tf32, row["name"], stream)
        failed = binding.forward(*arguments)
        torch.cuda.synchronize()
        if failed is not None:
            return str(failed)
        if bool(out.isnan().any()) or bool(lse.isnan().any()):
            return "a result is NaN, or was not written"
    return ""


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
