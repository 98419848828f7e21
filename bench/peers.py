"""PyTorch's kernels as calls on BMHK tensors: through scaled_dot_product_attention, and, for packed
sequences and windows, which that function does not take, through the operators under it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.shapes import Cell

if TYPE_CHECKING:
    from bench.backends import Gradients, Tensors

# custom_mask_type of torch's memory-efficient operator
NO_MASK, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT = 0, 1, 2


def forward(backend: str, cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    """A call without arguments that gives the output [B, M, H, Kv]."""
    if cell.lens is None and cell.window is None:
        return _through_sdpa(backend, cell, tensors)
    if backend == "flash":
        return _flash_packed(cell, tensors)
    if backend == "efficient":
        arguments = _efficient_arguments(cell, tensors)
        return lambda: _efficient_forward(cell, arguments)[0]
    raise ValueError(f"{backend} takes neither packed sequences nor windows")


def own_backward(
    backend: str, cell: Cell, tensors: Tensors
) -> Callable[[], tuple[Tensor, ...]] | None:
    """A call that gives the gradients where autograd would give wrong ones, else None: autograd's
    formula of the memory-efficient operator does not pass the window on."""
    if backend != "efficient" or cell.window is None:
        return None
    return _efficient_backward(cell, tensors)


def _through_sdpa(backend: str, cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kernel = {
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[backend]
    q, k, v = (x.transpose(1, 2) for x in (tensors.query, tensors.key, tensors.value))
    bias, p, causal = tensors.bias, cell.p or 0.0, cell.causal
    grouped: dict[str, Any] = {"enable_gqa": True} if cell.Hkv != cell.H else {}

    def call() -> Tensor:
        # Entering the context costs the host about 10 us; the flush before a timed call hides it.
        with sdpa_kernel(kernel):
            out = scaled_dot_product_attention(q, k, v, bias, p, is_causal=causal, **grouped)
        return out.transpose(1, 2)

    return call


def _starts(cell: Cell, device: torch.device) -> tuple[Tensor, int]:
    """Where each sequence begins and the last one ends, and the longest length. Without sequences
    each batch entry is one."""
    lens = cell.lens or (cell.M,) * cell.B
    assert cell.M == cell.N
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device), max(lens)


def _flash_packed(cell: Cell, tensors: Tensors) -> Callable[[], Tensor]:
    starts, longest = _starts(cell, tensors.query.device)
    q, k, v = (x.flatten(0, 1) for x in (tensors.query, tensors.key, tensors.value))
    window = {}
    if cell.window is not None:  # flash does not count the query's own key
        window = {"window_size_left": cell.window - 1, "window_size_right": 0}
    limits = (starts, starts, longest, longest)
    op = torch.ops.aten._flash_attention_forward

    def call() -> Tensor:
        out: Tensor = op(q, k, v, *limits, 0.0, cell.causal, False, **window)[0]
        return out.view(cell.B, cell.M, cell.H, cell.Kv)

    return call


def _efficient_arguments(cell: Cell, tensors: Tensors) -> tuple[Any, ...]:
    """What forward and backward share: query, key, value, bias, and the sequences' limits."""
    limits: tuple[Any, ...] = (None, None, None, None)
    if cell.lens:
        starts, longest = _starts(cell, tensors.query.device)
        limits = (starts, starts, longest, longest)
    return tensors.query, tensors.key, tensors.value, None, *limits


def _mask_type(cell: Cell) -> int:
    if cell.window is not None:
        return CAUSAL_BOTTOM_RIGHT
    return CAUSAL_TOP_LEFT if cell.causal else NO_MASK


def _efficient_forward(
    cell: Cell, arguments: tuple[Any, ...], lse: bool | None = None
) -> tuple[Any, ...]:
    """Output, log-sum-exp, seed, offset, and the longest of the queries and keys."""
    lse = arguments[0].requires_grad if lse is None else lse
    op = torch.ops.aten._efficient_attention_forward
    found: tuple[Any, ...] = op(*arguments, 0.0, _mask_type(cell), lse, window_size=cell.window)
    return found


def _efficient_backward(cell: Cell, tensors: Tensors) -> Callable[[], Gradients]:
    arguments = _efficient_arguments(cell, tensors)
    out, lse, seed, offset, *longest = _efficient_forward(cell, arguments, lse=True)
    q, k, v, bias, *starts = arguments[:6]
    op = torch.ops.aten._efficient_attention_backward
    before = (tensors.grad_out, q, k, v, bias, out, *starts, *longest, lse)
    after = (0.0, seed, offset, _mask_type(cell), False)
    return lambda: tuple(op(*before, *after, window_size=cell.window)[:3])
