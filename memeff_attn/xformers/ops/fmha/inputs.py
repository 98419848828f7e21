"""One call of attention as operators see it, what the backward pass needs of it, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....attn_bias import (
    VARLEN_BIASES,
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    MaskWithTensorBias,
    bias_of_rank,
    bias_shape,
)

Bias = Tensor | AttentionBias | None


def _is_bias_type_supported_in_BMK(attn_bias_type: Any) -> bool:
    """Whether 3-D inputs take it: None, tensors, LowerTriangularMask."""
    return attn_bias_type in (type(None), LowerTriangularMask) or (
        isinstance(attn_bias_type, type) and issubclass(attn_bias_type, Tensor)
    )


def _tensor_of(attn_bias: Bias) -> Tensor | None:
    """The tensor that is, or is in, a bias of the call's shape."""
    if isinstance(attn_bias, LowerTriangularMaskWithTensorBias):
        return attn_bias._bias
    return attn_bias if isinstance(attn_bias, Tensor) else None


def _attn_bias_apply(attn_bias: Bias, op: Callable[[Tensor], Tensor]) -> Bias:
    """The same bias with `op` applied to its tensor, where it has one."""
    if isinstance(attn_bias, Tensor):
        return op(attn_bias)
    if isinstance(attn_bias, LowerTriangularMaskWithTensorBias):
        return LowerTriangularMaskWithTensorBias(op(attn_bias._bias))
    if isinstance(attn_bias, MaskWithTensorBias):
        return MaskWithTensorBias(attn_bias.mask, op(attn_bias._bias), attn_bias.per_sequence)
    return attn_bias


def _grouped(bias: Tensor, query: Tensor) -> Tensor:
    """A bias [B, G * H, M, N] beside a 5-D query as a view [B, G, H, M, N]: diffusers passes such
    with shared heads."""
    if bias.dim() != 4 or query.dim() != 5:
        return bias
    groups, heads = query.shape[2:4]
    if bias.shape[1] == 1:
        return bias.unsqueeze(1)
    return bias.unflatten(1, (groups, heads)) if bias.shape[1] == groups * heads else bias  # type: ignore[no-untyped-call]


@dataclass
class Inputs:
    """The arguments of one call.

    Shapes: [B, M, H, K], [B, M, K] (one head) or [B, M, G, H, K], query, key and value alike; key
        and value [.., Kv] have as many heads as query (expand them).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Bias = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def scale_float(self) -> float:
        """scale, or K ** -0.5 where it is None."""
        return float(self.query.shape[-1]) ** -0.5 if self.scale is None else self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of query, key and value."""
        return sum(x.untyped_storage().nbytes() for x in (self.query, self.key, self.value))

    def get_qkv_in_bmghk(self) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value as [B, M, G, H, K] views."""
        missing = 5 - self.query.dim()
        where = (slice(None), slice(None), *(None,) * missing)
        views = [x[where] for x in self._qkv]
        return views[0], views[1], views[2]

    def normalize_bmhk(self) -> tuple[int, ...]:
        """The shape of the output; turns 3-D inputs into [B, M, 1, K], in place."""
        if self.query.dim() not in (3, 4, 5):
            raise ValueError(
                f"query has shape {tuple(self.query.shape)}, expected [B, M, G, H, K], "
                "[B, M, H, K] or [B, M, K]"
            )
        width = self.query.shape[-1] if self._quantized else self.value.shape[-1]
        shape = (*self.query.shape[:-1], width)
        if self.query.dim() == 3:
            self.query, self.key, self.value = (x.unsqueeze(2) for x in self._qkv)
            self.attn_bias = _attn_bias_apply(self.attn_bias, lambda bias: bias.unsqueeze(-3))
        return shape

    def get_output_dtype(self) -> torch.dtype:
        """That of an operator with SUPPORTS_OUTPUT_DTYPE: parts are float32 by default."""
        if self.output_dtype is not None:
            return self.output_dtype
        wide = self.is_partial and self.query.dtype != torch.float64
        return torch.float32 if wide else self.query.dtype

    def validate_inputs(self) -> None:
        """ValueError where the arguments disagree with each other, whatever operator runs."""
        self._check_layout()
        if not self._quantized and any(x.dtype != self.query.dtype for x in self._qkv):
            device = self.query.device.type
            if not torch.is_autocast_enabled(device):
                raise ValueError(
                    "Query/Key/Value should all have the same dtype, or (in the quantized case) "
                    "Key/Value should have dtype torch.int32, or the call be under "
                    f"torch.autocast({device!r}), which casts them" + self._listing("dtype")
                )
        if self.query.dim() == 3 and not _is_bias_type_supported_in_BMK(type(self.attn_bias)):
            raise ValueError(
                "Please provide inputs in BMHK format rather than BMK when using bias type "
                f"`{type(self.attn_bias).__name__}`"
            )
        self._check_shapes()
        self._check_tensor_bias()
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"Invalid dropout probability: p={self.p}, expected 0 <= p <= 1")

    @property
    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def _quantized(self) -> bool:
        return self.key.dtype == self.value.dtype == torch.int32

    def _listing(self, attribute: str = "shape") -> str:
        pairs = zip(("query", "key  ", "value"), self._qkv, strict=True)
        return "".join(f"\n  {name}.{attribute}: {getattr(x, attribute)}" for name, x in pairs)

    def _check_layout(self) -> None:
        rank = self.query.dim()
        if not 3 <= rank <= 5 or self.key.dim() != rank or self.value.dim() != rank:
            raise ValueError(
                "Query/Key/Value should all have BMGHK, BMHK or BMK shape." + self._listing()
            )
        device = self.query.device
        if self.key.device != device or self.value.device != device:
            raise ValueError(
                "Query/Key/Value should all be on the same device" + self._listing("device")
            )
        bias = self.attn_bias
        if isinstance(bias, VARLEN_BIASES):
            where = bias.q_seqinfo.seqstart.device
            if where != device:
                raise ValueError(
                    "Attention bias and Query/Key/Value should be on the same device: the bias is "
                    f"on {where}, query on {device}. Make it with device={str(device)!r}, or move "
                    f"it with attn_bias.to({str(device)!r})."
                )

    def _check_shapes(self) -> None:
        if isinstance(self.attn_bias, BlockDiagonalMask) and any(
            x.shape[0] != 1 for x in self._qkv
        ):
            raise ValueError(
                "Expected batch_size=1 when using block-diagonal bias: pack the sequences along "
                "the length" + self._listing()
            )
        query, key, value = self._qkv
        batch, heads, width = query.shape[0], query.shape[2:-1], query.shape[-1]
        lead = (batch, key.shape[1], *heads)
        key_width = value.shape[-1] if self._quantized else width
        if key.shape != (*lead, key_width) or value.shape[:-1] != lead:
            raise ValueError(
                "Incompatible shapes for attention inputs:" + self._listing() + "\nHINT: nothing "
                "is broadcast here, `expand` key and value for shared heads (MQA, GQA) before "
                "calling `memory_efficient_attention`"
            )

    def _check_tensor_bias(self) -> None:
        bias = _tensor_of(self.attn_bias)
        if bias is None:
            return
        expected = bias_shape(self.query, self.key)
        try:
            found = bias_of_rank(_grouped(bias, self.query), self.query).shape
        except ValueError:
            found = bias.shape
        if len(found) != len(expected) or any(
            got not in (1, want) for got, want in zip(found, expected, strict=True)
        ):
            raise ValueError(
                f"Invalid shape for attention bias: {tuple(bias.shape)} (expected {expected}, or "
                "1 in any dimension; `expand` costs no memory)" + self._listing()
            )
        if bias.dtype in (self.query.dtype, torch.bool):
            return
        if not torch.is_autocast_enabled(self.query.device.type):
            raise ValueError(
                f"Invalid dtype for attention bias: {bias.dtype}, expected the query's "
                f"{self.query.dtype} (or torch.bool, True = visible). Convert it with .to()."
            )


@dataclass
class Context:
    """What the backward pass takes of the forward pass.

    lse: natural logarithm, float32, in the operator's own form. rng_state: the dropout state where
        p > 0; op_bw is then the one operator that knows it.
    """

    lse: Tensor
    out: Tensor
    op_bw: Any = None
    rng_state: Any = None
    qkv_share_storage: bool = False

    def get_padded_lse(self, pad_to: int, force_pad_inf: bool = False) -> Tensor:
        """lse with its rows padded by +inf to a multiple of `pad_to`.

        force_pad_inf: also what lies beyond the output's rows is +inf.
        """
        lse, rows = self.lse, self.out.shape[1]
        if force_pad_inf:
            lse = lse[..., :rows]
        missing = -lse.shape[-1] % pad_to
        return torch.nn.functional.pad(lse, (0, missing), value=math.inf) if missing else lse


@dataclass
class Gradients:
    """Of query, key and value, and of a tensor bias that requires one."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    db: Tensor | None = None


def bmk2bmhk(tensor: Tensor, num_heads: int) -> Tensor:
    """[B * H, M, K] as a view [B, M, H, K]; 4-D tensors as they are."""
    if tensor.dim() == 4:
        return tensor
    batch, rows, width = tensor.shape
    return tensor.reshape(batch // num_heads, num_heads, rows, width).transpose(1, 2)
