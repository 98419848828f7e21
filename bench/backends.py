"""What is timed: our kernels and PyTorch's, each as a call on BMHK tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import newer_peers, peers
from bench.shapes import BYTES, Cell

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "tf32": torch.float32,  # where torch allows TF32: oracle.math_of
}
PEERS = ("efficient", "flash", "cudnn")
# Our kernel on the fixed-length problem of the same flop (Cell.fixed), beside packed sequences.
FIXED = "memeff-fixed"
DEFAULT = ("memeff", *PEERS, FIXED)
# Timed when asked for, where they are installed.
OPTIONAL = newer_peers.NAMES
WIDEST_PEER_K = 256  # flash and cuDNN take no wider head

Gradients = tuple[Tensor, ...]  # of query, key, value, and of the bias where there is one


@dataclasses.dataclass
class Tensors:
    """What a cell's calls work on. grad_out is the output's gradient, [B, M, H, Kv]."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    grad_out: Tensor

    def leaves(self) -> Tensors:
        """The same storage, as tensors that want gradients."""
        wanted = [
            x if x is None else x.detach().requires_grad_()
            for x in (self.query, self.key, self.value, self.bias)
        ]
        return Tensors(*wanted, self.grad_out)  # type: ignore[arg-type]

    def wanted(self) -> list[Tensor]:
        listed = (self.query, self.key, self.value, self.bias)
        return [x for x in listed if x is not None]


def is_ours(backend: str) -> bool:
    return backend == "memeff" or backend.startswith(("memeff-", "memeff:"))


def families(which: str = "fwd") -> dict[str, Any]:
    """{kernel family: its operator class} of one pass, as memeff_attn.dispatch lists them."""
    from memeff_attn import dispatch

    listed: Any = dispatch.ALL_FW_OPS if which == "fwd" else dispatch.ALL_BW_OPS
    return {op.NAME.removesuffix("_bwd"): op for op in listed if "cuda" in op.SUPPORTED_DEVICES}


def family_of(backend: str) -> str:
    """The family that a name forces; empty where dispatch chooses, or one kernel is named."""
    forced = backend.startswith("memeff-") and backend != FIXED
    return backend.split("-", 1)[1] if forced else ""


def not_served(backend: str, cell: Cell, sm: int, which: str = "fwd") -> str:
    """Why this backend has no kernel for the cell on such a GPU; empty when it has one."""
    if not is_ours(backend) and backend not in (*PEERS, *OPTIONAL):
        return "unknown backend"
    if backend == FIXED and cell.lens is None:
        return "stands beside packed sequences alone"
    if cell.decoding and which == "bwd":
        return "decoding has no backward pass"
    if is_ours(backend):
        family = family_of(backend)
        if family and family not in families(which):
            return f"no {which} kernels"
        return (
            "" if not family or _has_row(family, cell, sm, which) else "no kernel for these sizes"
        )
    if backend in OPTIONAL:
        return newer_peers.not_served(backend, cell, sm)
    if backend == "efficient":
        return "no grouped heads (copies of the keys would be timed)" if cell.Hkv != cell.H else ""
    if sm < 80:
        return "sm_80 or newer"
    if BYTES[cell.dtype] != 2:
        return "16-bit inputs only"
    if max(cell.K, cell.Kv) > WIDEST_PEER_K:
        return f"K and Kv <= {WIDEST_PEER_K}"
    return _not_in_torch(backend, cell, which)


def _has_row(family: str, cell: Cell, sm: int, which: str) -> bool:
    """Whether a kernel family takes the cell's contiguous tensors, in a build with every row."""
    from memeff_attn import dispatch

    module, _ = dispatch.native()
    if module is None:
        return True
    bits = 16 | cell.K | cell.Kv
    dtype = dispatch._DTYPE_NAMES[DTYPES[cell.dtype]]
    math = "tf32" if cell.dtype == "tf32" else "ieee"
    request = {
        "sm": sm, "dtype": dtype, "math": math, "B": cell.B, "M": cell.M, "N": cell.N,
        "H": cell.H, "K": cell.K, "Kv": cell.Kv, "alignment": bits & -bits, "pass": which,
        "has_bias": cell.bias is not None, "dropout": bool(cell.p), "any_build": True,
        "bias_grad": cell.bias is not None, "variant": f"family:{family}",
    }  # fmt: skip
    return bool(module.select(request))


def _not_in_torch(backend: str, cell: Cell, which: str) -> str:
    """The same of flash and cuDNN, of what PyTorch offers of them."""
    if cell.bias is not None and backend == "flash":
        return "no additive bias"
    if cell.bias is not None and which == "bwd":
        return "no gradient of a bias"
    if cell.lens is not None and backend == "cudnn":
        return "no packed sequences"
    if cell.window is not None and backend == "cudnn":
        return "no window"
    return ""


def check_names(backends: list[str]) -> None:
    """ValueError where a name is not known, or is that of a peer that is not installed."""
    for name in backends:
        ours = [f"memeff-{family}" for family in families()]
        if not is_ours(name) and name not in (*PEERS, *OPTIONAL):
            known = ", ".join((*DEFAULT, *OPTIONAL, *ours, "memeff:<variant>"))
            raise ValueError(f"no backend '{name}'; there are {known}")
        if family_of(name) and name not in ours:
            raise ValueError(f"no kernel family '{family_of(name)}'; there are {', '.join(ours)}")
        if name in OPTIONAL and (why := newer_peers.not_available(name)):
            raise ValueError(f"the backend '{name}' is not available here: {why}")


def make_call(
    backend: str, cell: Cell, tensors: Tensors, which: str
) -> Callable[[], Tensor | Gradients]:
    """A call without arguments: the output [B, M, H, Kv], or (bwd) the gradients alone.

    For the backward pass the forward runs here, once; its graph is kept for all calls.
    """
    make = _ours if is_ours(backend) else _peer
    if which == "fwd":
        return make(backend, cell, tensors)
    if own := peers.own_backward(backend, cell, tensors):
        return own
    leaves = tensors.leaves()
    out, wanted, grad_out = make(backend, cell, leaves)(), leaves.wanted(), leaves.grad_out
    return lambda: torch.autograd.grad(out, wanted, grad_out, retain_graph=True)


def _ours(backend: str, cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    import memeff_attn
    from memeff_attn import dispatch

    bias = mask_of(cell, tensors)
    op: Any = None
    if ":" in backend:
        row = backend.split(":", 1)[1]
        op = dispatch.variant(row)
        op = (None, op) if issubclass(op, dispatch.AttentionBwOpBase) else op
    elif family := family_of(backend):
        op = (families("fwd")[family], families("bwd").get(family))
    q, k, v, p = tensors.query, tensors.key, tensors.value, cell.p or 0.0
    call: Callable[..., Tensor] = memeff_attn.memory_efficient_attention
    if cell.decoding:
        call = memeff_attn.memory_efficient_attention_forward
    if op is None:
        return lambda: call(q, k, v, bias, p)
    return lambda: call(q, k, v, bias, p, op=op)


def mask_of(cell: Cell, tensors: Tensors) -> Any:
    """What our kernels take as attn_bias."""
    from memeff_attn import attn_bias

    if cell.lens is not None:
        device = tensors.query.device
        mask = attn_bias.BlockDiagonalMask.from_seqlens(list(cell.lens), device=device)
        return mask.make_causal() if cell.causal else mask
    if cell.window is not None:
        return attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(cell.window)
    return attn_bias.LowerTriangularMask() if cell.causal else tensors.bias


def _peer(backend: str, cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    module = newer_peers if backend in OPTIONAL else peers
    return module.forward(backend, cell, tensors)
