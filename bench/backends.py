"""What is timed: our kernels and PyTorch's, each as a call on BMHK tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.shapes import Cell

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PEERS = ("efficient", "flash", "cudnn")
DEFAULT = ("memeff", *PEERS)
LATER = {"fa4": "[clients]", "flex": "[clients]"}
WIDEST_PEER_K = 256  # flash and cuDNN take no wider head


def is_ours(backend: str) -> bool:
    return backend == "memeff" or backend.startswith(("memeff-", "memeff:"))


def not_served(backend: str, cell: Cell, sm: int) -> str:
    """Why this backend has no kernel for the cell on such a GPU; empty when it has one."""
    if is_ours(backend) or backend == "efficient":
        return ""
    if backend not in PEERS:
        return (
            f"not timed yet: comes with {LATER[backend]}" if backend in LATER else "unknown backend"
        )
    if cell.dtype == "fp32":
        return "16-bit inputs only"
    if max(cell.K, cell.Kv) > WIDEST_PEER_K:
        return f"K and Kv <= {WIDEST_PEER_K}"
    if sm < 80:
        return "sm_80 or newer"
    return ""


def check_names(backends: list[str]) -> None:
    for name in backends:
        if name in LATER:
            raise ValueError(f"the backend '{name}' is not timed yet: it comes with {LATER[name]}")
        if not is_ours(name) and name not in PEERS:
            known = ", ".join((*DEFAULT, "memeff-<family>", "memeff:<variant>"))
            raise ValueError(f"no backend '{name}'; there are {known}")


def make_call(backend: str, cell: Cell, q: Any, k: Any, v: Any) -> Callable[[], torch.Tensor]:
    """A call without arguments that returns the output as [B, M, H, Kv]."""
    return _ours(backend, cell, q, k, v) if is_ours(backend) else _peer(backend, cell, q, k, v)


def _ours(backend: str, cell: Cell, q: Any, k: Any, v: Any) -> Callable[[], torch.Tensor]:
    import memeff_attn
    from memeff_attn import dispatch

    bias = memeff_attn.LowerTriangularMask() if cell.causal else None
    op: Any = None
    if ":" in backend:
        op = dispatch.variant(backend.split(":", 1)[1])
    elif "-" in backend:
        op = getattr(dispatch, backend.split("-", 1)[1].capitalize() + "FwOp")
    call = memeff_attn.memory_efficient_attention
    if op is None:
        return lambda: call(q, k, v, bias)
    return lambda: call(q, k, v, bias, op=op)


def _peer(backend: str, cell: Cell, q: Any, k: Any, v: Any) -> Callable[[], torch.Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kernel = {
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[backend]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = cell.causal
    if cell.Hkv != cell.H:
        raise ValueError("grouped heads are timed with [decode]")

    def call() -> torch.Tensor:
        # Entering the context costs the host about 10 us; the flush before a timed call hides it.
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call
