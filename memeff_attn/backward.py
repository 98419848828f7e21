"""The operator memeff_attn::backward as torch sees it: schema, CUDA and CPU implementations, fake.

Gradients are new contiguous tensors of their input's shape and dtype, whatever the strides of the
input; of shape [0] where not needed. Helpers and the library are those of ops.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cpu, dispatch, ops
from .inputs import check_gradient, check_inputs, lse_shape

# grad_out: of out, any strides; out, lse: what forward gave, or part 0 of that lse; needs: of
# query, key, value and attn_bias; the rest as in forward.
_SCHEMA = (
    "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "Tensor out, Tensor lse, float scale, int causal, bool tf32, bool[] needs, str variant, "
    "float p=0.0, Tensor? seed=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
ops.library.define(_SCHEMA, tags=[torch.Tag.pt2_compliant_tag])

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
_TENSORS = 12  # of backward_workspace; backward takes the workspace after them
_FORCED = os.fsencode("MEMEFF_FORCE_BACKWARD_VARIANT")


def forced_variant() -> str:
    """The kernel every GPU call's backward must run, from the environment; empty: none."""
    return os.environ.get("MEMEFF_FORCE_BACKWARD_VARIANT", "")


def _launch_first(*args: Any) -> ops.Failure | None:
    """Replaces itself, on the first launch, by what this installation launches with."""
    global _launch
    _launch = launcher()
    return _launch(*args)


_launch: Callable[..., ops.Failure | None] = _launch_first


def launcher() -> Callable[..., ops.Failure | None]:
    """(tensors, settings, stream) -> failure: allocates the workspace and launches."""
    module, reason = dispatch.native()
    if module is None or not module.is_cuda_build:
        missing = ops.UNSUPPORTED, reason or dispatch.cuda_missing()
        return lambda *args: missing
    workspace_size, backward = module.backward_workspace, module.backward
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        workspace_size = ops.by_scalars(module.backward_workspace_scalars, _TENSORS)
        backward = ops.by_scalars(module.backward_scalars, _TENSORS + 1)

    def launch(
        tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...], stream: int
    ) -> ops.Failure | None:
        size = workspace_size(*tensors, *settings)
        if type(size) is not int:
            failure: ops.Failure = size
            return failure
        query = tensors[1]
        assert query is not None
        workspace = query.new_empty((size,), dtype=torch.float32) if size else None
        result: ops.Failure | None = backward(*tensors, workspace, *settings, stream)
        return result

    return launch


def _allocate(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, needs: list[bool]
) -> list[Tensor]:
    """Contiguous, of the input's shape, or [0]; a bool bias has no gradient."""
    bias = query if attn_bias is None else attn_bias
    needed = *needs[:3], needs[3] and attn_bias is not None and attn_bias.dtype != torch.bool
    return [
        x.new_empty(x.shape if need else (0,))
        for x, need in zip((query, key, value, bias), needed, strict=True)
    ]


def aligned(x: Tensor) -> Tensor:
    """x; or, where its address or strides are not multiples of 16 bytes and a copy's would be, the
    copy: it is cheap beside the kernels for unaligned rows, which x would force on all tensors."""
    size = x.element_size()
    if x.shape[-1] * size % 16:
        return x
    if x.data_ptr() % 16 == 0 and all(
        stride * size % 16 == 0
        for stride, length in zip(x.stride()[:-1], x.shape, strict=False)
        if length > 1
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps the address


def backward_cuda(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: int,
    tf32: bool,
    needs: list[bool],
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Gradients:
    """The operator's work on plain CUDA tensors."""
    grads = _allocate(query, key, value, attn_bias, needs)
    if 0 in out.shape or key.shape[1] == 0:  # no score, or no column of the output
        check_inputs(query, key, value, attn_bias)
        check_gradient(grad_out, out, lse, query, value)
        for grad in grads:
            grad.zero_()
        return grads[0], grads[1], grads[2], grads[3]
    if not variant and _FORCED in ops._environ:
        variant = forced_variant()
    given = [ops.launchable(x) for x in (grad_out, query, key, value)]
    given[0] = aligned(given[0])
    wanted = [grad if grad.numel() else None for grad in grads]  # K may be 0
    tensors = (*given, attn_bias, ops.launchable(out), lse.contiguous(), seed, *wanted)
    settings = scale, p, causal, tf32, variant
    failure = _launch(tensors, settings, ops.stream_of(query.get_device()))
    if failure is not None:
        raise _error(failure, grad_out, query, key, value, attn_bias, out, lse, settings)
    return grads[0], grads[1], grads[2], grads[3]


def _error(
    failure: ops.Failure,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    settings: tuple[float, float, int, bool, str],
) -> Exception:
    if failure[0] != ops.CUDA_ERROR:
        check_inputs(query, key, value, attn_bias)
        check_gradient(grad_out, out, lse, query, value)
        if query.dtype not in dispatch.DTYPES:
            failure = ops.UNSUPPORTED, ""
    scale, p, causal, _, variant = settings
    return ops.error_of(
        failure, query, key, value, attn_bias, scale, causal, variant, p, backward=True
    )


def _backward_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: int,
    tf32: bool,
    needs: list[bool],
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Gradients:
    check_inputs(query, key, value, attn_bias)
    check_gradient(grad_out, out, lse, query, value)
    if query.dtype not in dispatch.DTYPES:
        settings = scale, p, causal, tf32, variant
        failure = ops.UNSUPPORTED, ""
        raise _error(failure, grad_out, query, key, value, attn_bias, out, lse, settings)
    high = lse[0] if lse.dim() > len(lse_shape(query)) else lse
    with torch.autocast("cpu", enabled=False):  # what is in the call's dtype stays in it
        grads = cpu.backward(
            grad_out, query, key, value, attn_bias, out, high, scale, causal, needs, p, seed
        )
    bias = query if attn_bias is None else attn_bias
    a, b, c, d = (
        x.new_empty((0,)) if grad is None else grad
        for x, grad in zip((query, key, value, bias), grads, strict=True)
    )
    return a, b, c, d


def _backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: int,
    tf32: bool,
    needs: list[bool],
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Gradients:
    check_inputs(query, key, value, attn_bias)
    check_gradient(grad_out, out, lse, query, value)
    a, b, c, d = _allocate(query, key, value, attn_bias, needs)
    return a, b, c, d


ops.library.impl("backward", backward_cuda, "CUDA")
ops.library.impl("backward", _backward_cpu, "CPU")
torch.library.register_fake("memeff_attn::backward", _backward_fake, lib=ops.library)
backward = torch.ops.memeff_attn.backward.default
