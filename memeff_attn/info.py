"""`python -m memeff_attn.info`: versions, the compiled part, the GPUs here, every kernel."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import torch

from . import __version__, dispatch, ops


def lines() -> Iterator[str]:
    """The report, line by line."""
    python = platform.python_version()
    yield f"memeff_attn {__version__}, torch {torch.__version__}, Python {python}"
    module, reason = dispatch.native()
    if module is None:
        yield f"compiled part: none. {reason}"
        yield "The CPU path needs none: it runs on PyTorch's own attention."
        return
    yield f"compiled part: {module.__file__}"
    yield f"  source hash: {module.source_hash}"
    yield f"  CUDA: {module.cuda_version()}"
    yield f"  built for: {' '.join(module.built_archs()) or 'no GPU (host-only build)'}"
    exchange = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    how = (
        "DLPack C exchange"
        if exchange
        else "addresses and strides (this torch has no DLPack exchange)"
    )
    yield f"  tensors handed over by: {how}"
    yield from _gpus(module)
    yield from _variants(module.variants())


def _gpus(module: Any) -> Iterator[str]:
    count = torch.cuda.device_count() if module.is_cuda_build else 0
    if count == 0:
        seen = torch.cuda.device_count()
        yield f"GPUs: {seen} seen by torch, none used" if seen else "GPUs: none seen by torch"
    for index in range(count):
        try:
            facts = module.device_info(index)
        except RuntimeError as error:
            yield f"GPU {index}: {error}"
            continue
        yield (
            f"GPU {index}: {facts['name']}, sm_{facts['sm']}, {facts['sm_count']} SMs, "
            f"{facts['smem_optin'] // 1024} KB of shared memory a block"
        )
        for dtype in ("f16", "bf16", "f32"):
            request = {k: v for k, v in facts.items() if k != "name"}
            request |= {"dtype": dtype, "B": 1, "M": 1024, "N": 1024, "H": 16, "alignment": 16}
            request |= {"K": 64, "Kv": 64}
            names = [module.select(request | {"pass": which}) for which in ("fwd", "bwd")]
            forward, gradients = (name or "no kernel" for name in names)
            yield f"  {dtype}, K 64, M 1024: {forward}, backward {gradients}"


def _variants(rows: list[dict[str, Any]]) -> Iterator[str]:
    built = sum(bool(row["built"]) for row in rows)
    yield f"kernels: {len(rows)} listed, {built} built, in order of preference"
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        limits = [f"K <= {row['max_k'] or 'any'}", f"Kv <= {row['max_kv'] or 'any'}"]
        limits.append(f"alignment {row['alignment']}")
        tile = f"{row['tile_m']} x {row['tile_n']}"
        archs = " ".join(row["built_archs"]) or "not built"
        yield f"  {row['name']:{width}}  {', '.join(limits)}, tile {tile}; {archs}"
    for setting, what in ((ops.FORCE_FORWARD, "GPU call"), (ops.FORCE_BACKWARD, "backward pass")):
        if forced := ops.forced_variant(setting):
            yield f"{setting} is set: every {what} runs {forced} or fails"


def main() -> None:
    """Prints the report."""
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
