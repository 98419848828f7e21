"""The operator memeff_attn::backward as torch sees it: schema, CUDA and CPU implementations, fake.

Gradients are new contiguous tensors of their input's shape and dtype, whatever the strides of the
input; of shape [0] where not needed. Helpers and the library are those of ops.py. As there, the
CUDA path allocates and launches; `_second_try` mends what the compiled code refuses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import cpu, dispatch, ops
from .determinism import fixed_order
from .inputs import check_gradient, lse_shape
from .mask_arguments import SCHEMA as MASK_SCHEMA
from .mask_arguments import MaskArguments, check_call, mask_of, rule_of

# grad_out: of out, any strides; out, lse: what forward gave, or part 0 of that lse; needs: of
# query, key, value and attn_bias; the rest as in forward. On CUDA there are no pages, and with
# sequences a bias whose gradient is needed is broadcast over no dimension. grad_lse: the gradient
# of part 0 of the log-sum-exp, where it has one.
_SCHEMA = (
    "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "Tensor out, Tensor lse, float scale, int causal, bool tf32, bool[] needs, str variant, "
    f"float p=0.0, Tensor? seed=None, Tensor? grad_lse=None, {MASK_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
ops.library.define(_SCHEMA, tags=[torch.Tag.pt2_compliant_tag])

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
Wanted = list[Tensor | None]  # the same, None where not needed
# grad_out, query, key, value, attn_bias, out, lse, seed, delta
Given = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None
]
_TENSORS = 13  # those and the gradients
_FORCED = os.fsencode(ops.FORCE_BACKWARD)
_launch = ops.on_first_launch(globals())


def launcher() -> ops.Launch:
    """(given, wanted, settings, stream) -> failure: launches, with a workspace it allocates."""
    backward = ops.compiled("backward", _TENSORS)
    describe: Any = None if ops.has_exchange() else ops.numbers

    def launch(
        given: Given, wanted: Wanted, settings: tuple[Any, ...], stream: int
    ) -> ops.Failure | None:
        query, workspace = given[1], None  # which lives until the launches are made

        def allocate(elements: int) -> Any:
            nonlocal workspace
            workspace = query.new_empty((elements,), dtype=torch.float32)
            return workspace if describe is None else describe(workspace)

        order = fixed_order(settings[4])  # of the variant
        return backward(*given, *wanted, allocate, order, *settings, stream)

    return launch


def _allocate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    needs: Sequence[bool],
    mask: MaskArguments | None = None,
) -> Wanted:
    """Contiguous, of the input's shape; a bool bias has no gradient. That of a bias over sequences
    is zeros: kernels write what lies within a sequence."""
    grads: Wanted = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip((query, key, value), needs, strict=False)
    ]
    if needs[3] and attn_bias is not None and attn_bias.dtype != torch.bool:
        varlen = mask is not None and mask.query_starts is not None
        make = torch.zeros_like if varlen else torch.empty_like
        grads.append(make(attn_bias, memory_format=torch.contiguous_format))
    else:
        grads.append(None)
    return grads


def _all_tensors(grads: Sequence[Tensor | None], inputs: ops.Operands) -> Gradients:
    """What the operator returns."""
    a, b, c, d = (
        grad if grad is not None else (inputs[0] if x is None else x).new_empty((0,))
        for grad, x in zip(grads, inputs, strict=True)
    )
    return a, b, c, d


def aligned(x: Tensor) -> Tensor:
    """x; or, where its address or strides are not multiples of 16 bytes and a copy's would be, the
    copy: it is cheap beside the kernels for unaligned rows, which x would force on all tensors."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
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
    needs: Sequence[bool],
    variant: str,
    p: float = 0.0,
    seed: Tensor | None = None,
    grad_lse: Tensor | None = None,
    mask: MaskArguments | None = None,
) -> Wanted:
    """The operator's work on plain CUDA tensors."""
    wanted = _allocate(query, key, value, attn_bias, needs, mask)
    if not variant and _FORCED in ops._environ:
        variant = ops.forced_variant(ops.FORCE_BACKWARD)
    delta = None if grad_lse is None else _delta(grad_out, out, lse, grad_lse)
    given = aligned(grad_out), query, key, value, attn_bias, out, lse, seed, delta
    settings = scale, p, causal, tf32, variant, mask
    stream = ops.stream_of(query.get_device())
    failure = _launch(given, wanted, settings, stream)
    if failure is not None:
        _second_try(failure, given, wanted, ops.Settings(*settings), stream)
    return wanted


def _delta(grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor) -> Tensor:
    """rowsum(grad_out * out) - grad_lse, fp32 of the shape of grad_lse: dS = P * (dP - delta) then
    is the gradient of both outputs. A query that sees no key has a log-sum-exp without one."""
    total = (grad_out.float() * out.float()).sum(-1)
    total = total.unsqueeze(1) if out.dim() == 3 else total.movedim(1, -1)
    high = lse[0] if lse.dim() > grad_lse.dim() else lse
    return (total - grad_lse.masked_fill(high == -math.inf, 0.0)).contiguous()


def _second_try(
    failure: ops.Failure, given: Given, wanted: Wanted, settings: ops.Settings, stream: int
) -> None:
    """Writes the gradients where no kernel or copies are all it takes; raises otherwise."""
    grad_out, query, key, value, attn_bias, out, lse, seed, delta = given
    if failure[0] != ops.CUDA_ERROR:
        check_call(query, key, value, attn_bias, settings.mask)
        check_gradient(grad_out, out, lse, query, value)
        if 0 in out.shape or key.shape[1] == 0:  # no score, or no column of the output
            for grad in wanted:
                if grad is not None:
                    grad.zero_()
            return
        operands = [aligned(ops.launchable(grad_out)), *map(ops.launchable, (query, key, value))]
        mended = (*operands, attn_bias, ops.launchable(out), lse.contiguous(), seed, delta)
        if any(a is not b for a, b in zip(mended, given, strict=True)):
            some = [grad if grad is not None and grad.numel() else None for grad in wanted]
            again = _launch(mended, some, settings, stream)  # K may be 0
            if again is None:
                return
            failure = again
        if query.dtype not in dispatch.DTYPES:
            failure = ops.UNSUPPORTED, ""
    raise ops.error_of(failure, (query, key, value, attn_bias), settings, backward=True)


def _backward_cuda(
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
    grad_lse: Tensor | None = None,
    *mask: Any,
    **named: Any,
) -> Gradients:
    inputs = query, key, value, attn_bias
    grads = backward_cuda(
        grad_out, *inputs, out, lse, scale, causal, tf32, needs, variant, p, seed,
        grad_lse, mask_of(mask, named),
    )  # fmt: skip
    return _all_tensors(grads, inputs)


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
    grad_lse: Tensor | None = None,
    *mask: Any,
    **named: Any,
) -> Gradients:
    inputs, given = (query, key, value, attn_bias), mask_of(mask, named)
    check_call(*inputs, given)
    check_gradient(grad_out, out, lse, query, value)
    if query.dtype not in dispatch.DTYPES:
        settings = ops.Settings(scale, p, causal, tf32, variant, given)
        raise ops.error_of((ops.UNSUPPORTED, ""), inputs, settings, backward=True)
    high = lse[0] if lse.dim() > len(lse_shape(query)) else lse
    rule = None if given is None else rule_of(query, key, attn_bias, causal, given)
    with torch.autocast("cpu", enabled=False):  # what is in the call's dtype stays in it
        grads = cpu.backward(
            grad_out, *inputs, out, high, scale, causal, needs, p, seed, rule, grad_lse
        )
    return _all_tensors(grads, inputs)


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
    grad_lse: Tensor | None = None,
    *mask: Any,
    **named: Any,
) -> Gradients:
    inputs = query, key, value, attn_bias
    check_call(*inputs, mask_of(mask, named))
    check_gradient(grad_out, out, lse, query, value)
    return _all_tensors(_allocate(*inputs, needs), inputs)


ops.library.impl("backward", _backward_cuda, "CUDA")
ops.library.impl("backward", _backward_cpu, "CPU")
torch.library.register_fake("memeff_attn::backward", _backward_fake, lib=ops.library)
backward = torch.ops.memeff_attn.backward.default
