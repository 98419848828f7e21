"""`explain`: which operator and kernel a call would run, and why not the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cpu, dispatch
from .attn_bias import AttentionBias, is_plain, mask_rule
from .inputs import Inputs


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    device: Any = None,
    backward: bool = False,
    return_lse: bool = False,
) -> str:
    """Which operator and kernel `memory_efficient_attention` would run on these inputs, and why not
    the others.

    Shapes, Dtypes: as `memory_efficient_attention`.
    Args: the same, and device: a GPU that need not be here ("sm_70", (9, 0)), or "cpu"; default:
        the tensors' device. backward: the kernel of the backward pass instead (with the gradient of
        a bias that requires one). return_lse: of a call that returns the log-sum-exp too, such as
        `memory_efficient_attention_forward_requires_grad`.
    Memory: none; nothing is launched.
    Raises: ValueError where the inputs disagree with each other.
    Source: csrc/dispatch.cpp and cpu.py.
    """
    inputs = Inputs(query, key, value, attn_bias, p, scale, wants_lse=return_lse)
    inputs.validate_inputs()
    chosen: type[dispatch.AttentionOpBase] | None = (
        dispatch.resolve_bw_op(op) if backward else dispatch.resolve_op(op)
    )
    if device is None:
        device = query.device
    if str(device).startswith("cpu"):
        return _explain_cpu(inputs, chosen, backward)
    gpu_op: type[dispatch._Kernels] = dispatch.KernelBwOp if backward else dispatch.KernelFwOp
    here = str(device).startswith("cuda")
    missing = dispatch.native()[1]
    reasons = [r for r in gpu_op._inherent_reasons(inputs) if not r.startswith("device is")]
    if chosen is not None and not issubclass(chosen, gpu_op):
        reasons.append(f"op={chosen.NAME} does not run on a GPU")
    if missing or reasons:
        return "chosen: none\n" + dispatch._listing(
            gpu_op, [*reasons, missing] if missing else reasons
        )
    if dispatch._is_empty(inputs):
        return "chosen: none; an input is empty, the result needs no kernel"
    gpu = dispatch._gpu_of(torch.device(device)) if here else dispatch.gpu_named(device)
    name = chosen.VARIANT if chosen else ""
    text: str = dispatch._C().explain(dispatch.request_of(inputs, gpu, name, gpu_op.PASS))
    return text


def _explain_cpu(d: Inputs, chosen: type[dispatch.AttentionOpBase] | None, backward: bool) -> str:
    cpu_op: type[dispatch.AttentionOpBase] = dispatch.CpuBwOp if backward else dispatch.CpuFwOp
    reasons = [r for r in cpu_op.not_supported_reasons(d) if not r.startswith("device is")]
    if chosen is not None and not issubclass(chosen, cpu_op):
        reasons.append(f"op={chosen.NAME} does not run on the CPU")
    if reasons:
        return "chosen: none\n" + dispatch._listing(cpu_op, reasons)
    path, why = _cpu_route(d, backward)
    name = "PyTorch's flash kernel for the CPU" if path == "flash" else "blockwise PyTorch"
    other = dispatch.KernelBwOp if backward else dispatch.KernelFwOp
    others = f"the others:\n  - takes tensors on a GPU: {other.NAME}"
    return f"chosen: {cpu_op.NAME}, {name} ({why})\n{others}"


def _cpu_route(d: Inputs, backward: bool) -> tuple[str, str]:
    """("flash" or "blockwise", why)."""
    rule = mask_rule(d.attn_bias, d.query, d.key)
    bias, causal = rule.bias, rule.causal
    if causal is None or not is_plain(d.attn_bias):
        return "blockwise", "PyTorch's flash kernel knows no such mask"
    settings = d.query, d.key, d.value, bias, d.scale_float, causal, d.p
    if backward:
        return cpu.backward_route(*settings, bias is not None and bias.requires_grad)
    return cpu.route(*settings)
