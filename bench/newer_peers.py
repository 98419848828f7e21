"""Peers that are timed where they are installed: FlashAttention-4 (flash_attn.cute) and torch's
flex_attention, compiled. Each as a call on BMHK tensors that gives the output [B, M, H, Kv]."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.shapes import BYTES, Cell

if TYPE_CHECKING:
    from bench.backends import Tensors

NAMES = ("fa4", "flex")
FA4_MULTIPLE, FA4_WIDEST = 8, 256  # head dimensions that its sm_90 kernels take
FLEX_NARROWEST = 16  # Triton's tl.dot takes no less
WAY_OUT = {
    "fa4": "it needs the package flash-attn-4 (module flash_attn.cute) and a GPU of sm_90 or newer",
    "flex": "it needs torch 2.6 or newer and, on a GPU, triton",
}


def not_available(backend: str) -> str:
    """Why this backend cannot be timed in this installation; empty where it can."""
    try:
        if backend == "fa4":
            importlib.import_module("flash_attn.cute")
        else:
            importlib.import_module("torch.nn.attention.flex_attention")
            if torch.cuda.is_available():
                importlib.import_module("triton")
    except Exception as problem:  # whatever a package raises while it loads
        found = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return f"{found}; {WAY_OUT[backend]}"
    return ""


def not_served(backend: str, cell: Cell, sm: int) -> str:
    """Why this backend has no kernel for the cell on such a GPU; empty where it has one."""
    if cell.p:
        return "no dropout"
    if backend == "flex":
        narrow = min(cell.K, cell.Kv) < FLEX_NARROWEST
        return f"K and Kv >= {FLEX_NARROWEST}" if narrow else ""
    if sm < 90:
        return "sm_90 or newer"
    if BYTES[cell.dtype] != 2:
        return "16-bit inputs only"
    if cell.bias is not None:
        return "no additive bias"
    if max(cell.K, cell.Kv) > FA4_WIDEST:
        return f"K and Kv <= {FA4_WIDEST}"
    if cell.K % FA4_MULTIPLE or cell.Kv % FA4_MULTIPLE:
        return f"K and Kv in multiples of {FA4_MULTIPLE}"
    return ""


def forward(backend: str, cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    return (_fa4 if backend == "fa4" else _flex)(cell, tensors)


def _fa4(cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    cute: Any = importlib.import_module("flash_attn.cute")
    q, k, v = tensors.query, tensors.key, tensors.value
    settings: dict[str, Any] = {"causal": cell.causal}
    if cell.window is not None:  # it does not count the query's own key
        settings["window_size"] = (cell.window - 1, 0)
    function = cute.flash_attn_func
    if cell.lens is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        starts = torch.tensor([0, *accumulate(cell.lens)], dtype=torch.int32, device=q.device)
        settings |= {f"cu_seqlens_{side}": starts for side in "qk"}
        settings |= {f"max_seqlen_{side}": max(cell.lens) for side in "qk"}
        function = cute.flash_attn_varlen_func

    def call() -> Tensor:
        found = function(q, k, v, **settings)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # newer ones add the LSE
        return out.view(cell.B, cell.M, cell.H, cell.Kv)

    return call


def _flex(cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    """The block mask is made and the kernel compiled before anything is timed."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    # What was compiled for earlier cells counts towards dynamo's limit of recompilations, beyond
    # which it would run the eager form, with all M x N scores.
    torch._dynamo.reset()
    # The backward pass runs many times on one graph, whose buffers must stay.
    import torch._functorch.config as graphs

    graphs.donated_buffer = False
    attention = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
    q, k, v = (x.transpose(1, 2) for x in (tensors.query, tensors.key, tensors.value))
    settings: dict[str, Any] = {"enable_gqa": cell.Hkv != cell.H}
    if tensors.bias is not None:
        settings["score_mod"] = bias_mod(tensors.bias)
    if mod := mask_mod(cell, tensors.query.device):
        sizes = (None, None, cell.M, cell.N)
        settings["block_mask"] = flex.create_block_mask(mod, *sizes, device=q.device)
    return lambda: attention(q, k, v, **settings).transpose(1, 2)


def bias_mod(bias: Tensor) -> Callable[..., Tensor]:
    """score_mod that adds a bias [B or 1, H or 1, M or 1, N or 1], read by its own indices."""
    kept = [d for d, size in enumerate(bias.shape) if size > 1]
    table = bias.squeeze()

    def add(score: Tensor, *place: Tensor) -> Tensor:
        out: Tensor = score + table[tuple(place[d] for d in kept)]
        return out

    return add


def mask_mod(cell: Cell, device: torch.device) -> Callable[..., Tensor] | None:
    """mask_mod(b, h, m, n) of the cell: True where the query sees the key; None: it sees all."""
    below = cell.N - cell.M if cell.window is not None else 0
    window, causal = cell.window, cell.causal or cell.window is not None
    sequence = None
    if cell.lens is not None:
        lens = torch.tensor(cell.lens, device=device)
        sequence = torch.arange(len(lens), device=device).repeat_interleave(lens)
    if not causal and sequence is None:
        return None

    def seen(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        found = n == n
        if causal:
            found = found & (n <= m + below)
        if window is not None:
            found = found & (n > m + below - window)
        if sequence is not None:
            found = found & (sequence[m] == sequence[n])
        return found

    return seen
