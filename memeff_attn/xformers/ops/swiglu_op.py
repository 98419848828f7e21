"""The SwiGLU block, silu(x W1^T + b1) * (x W2^T + b2) projected by W3, in PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .unbind import stack_or_none, unbind


class SwiGLUOp:
    """An implementation that `swiglu(op=)` takes."""

    def __init__(self, function: Callable[..., Tensor], packed_weights: bool, name: str) -> None:
        self.function = function
        self.PACKED_WEIGHTS = packed_weights
        self.NAME = name

    def __call__(self, *args: Tensor | None) -> Tensor:
        return self.function(*args)

    def supports(self, op: SwiGLUOpDispatch) -> bool:
        return op.packed_weights or not self.PACKED_WEIGHTS

    def __str__(self) -> str:
        return f"SwiGLUOp:{self.NAME}"


def _eager(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)


SwiGLUEagerOp = SwiGLUOp(_eager, False, "eager")


@dataclass
class SwiGLUOpDispatch:
    """Which implementation serves which arguments: one serves all."""

    device: torch.device | str
    dtype: torch.dtype
    dtype_autocast_gpu: torch.dtype | None
    packed_weights: bool
    bias_enabled: bool

    @property
    def op(self) -> SwiGLUOp:
        return SwiGLUEagerOp

    @staticmethod
    def from_arguments(
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        w3: Tensor,
        b3: Tensor | None,
    ) -> SwiGLUOpDispatch:
        autocast = torch.is_autocast_enabled("cuda")
        return SwiGLUOpDispatch(
            device=x.device,
            dtype=x.dtype,
            dtype_autocast_gpu=torch.get_autocast_dtype("cuda") if autocast else w1.dtype,
            packed_weights=stack_or_none((w1, w2), 0) is not None,
            bias_enabled=b1 is not None and b2 is not None and b3 is not None,
        )


def swiglu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: SwiGLUOp | None = None,
) -> Tensor:
    """(silu(x W1^T + b1) * (x W2^T + b2)) W3^T + b3, differentiable.

    Shapes: x [..., in], w1 and w2 [hidden, in], w3 [out, hidden], biases [rows of their weight];
        the result [..., out].
    Raises: ValueError for shapes that disagree.
    Source: Shazeer, "GLU variants improve transformer"; interface of xFormers.
    """
    if w1.dim() != 2 or w1.shape != w2.shape or w3.dim() != 2 or w3.shape[1] != w1.shape[0]:
        raise ValueError(
            f"expected w1 and w2 [hidden, in] and w3 [out, hidden], got {tuple(w1.shape)}, "
            f"{tuple(w2.shape)} and {tuple(w3.shape)}"
        )
    for name, bias, weight in (("b1", b1, w1), ("b2", b2, w2), ("b3", b3, w3)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"expected {name} of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}"
            )
    return (op or SwiGLUEagerOp)(x, w1, b1, w2, b2, w3, b3)


class SwiGLU(nn.Module):
    """`swiglu` with its weights; parameters are named as in xFormers, so that checkpoints load.

    Args: _pack_weights: W1 and W2 in one linear layer w12, else w1 and w2.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden_features = hidden_features or in_features
        self.out_features = out_features or in_features
        self.op: SwiGLUOp | None = None
        self.w12: nn.Linear | None = None
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * self.hidden_features, bias=bias)
        else:
            self.w1 = nn.Linear(in_features, self.hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, self.hidden_features, bias=bias)
        self.w3 = nn.Linear(self.hidden_features, self.out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x, *self._ordered_params(), op=self.op)

    def _ordered_params(
        self,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None]:
        """w1, b1, w2, b2, w3, b3."""
        b1: Tensor | None = None
        b2: Tensor | None = None
        if self.w12 is None:
            w1, b1, w2, b2 = self.w1.weight, self.w1.bias, self.w2.weight, self.w2.bias
        else:
            both, rows = self.w12, self.hidden_features
            w1, w2 = unbind(both.weight.view(2, rows, self.in_features), 0)
            if both.bias is not None:
                b1, b2 = unbind(both.bias.view(2, rows), 0)
        return w1, b1, w2, b2, self.w3.weight, self.w3.bias
