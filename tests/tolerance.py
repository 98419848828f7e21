"""The one rule that decides whether a result is right (docs/design.md, "Tests").

Against an fp64 oracle on the same rounded inputs:

    max|mine - oracle| <= 2   * max|eager - oracle| + 2u
    rms(mine - oracle) <= 1.5 * rms(eager - oracle) + u

u is the ulp of the dtype at max|oracle|. NaN and inf positions equal the oracle's. Eager is plain
PyTorch on the same device, in the same dtype and math mode; elements where it is non-finite or off
by more than 64u are replaced by eager in fp32, rounded once. LSE is compared with fp32 eager plus
an absolute 2e-4. Gradients (tests/gradients.py) have 3 and 2 for 2 and 1.5, because they reuse the
rounded output. No looser number is used anywhere.

A gradient that is 0 in exact arithmetic by cancellation (each query sees one key; a bias of one
column) has no size of its own: u is then taken at the size of the terms that cancel.

A Checker only enqueues: figures stay on the device until finish(), which fetches them all at once
and names every case that failed. So a sweep of a thousand shapes costs one synchronisation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

NONE, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2

FORWARD = (2.0, 1.5)  # factors of the max and of the rms
GRADIENT = (3.0, 2.0)
CANCELLED = 2.0**-40  # of its terms: below this, a gradient in fp64 is rounding noise
EAGER_OUTLIER = 64.0  # u: a difference that rounding does not explain
LSE_ATOL = 2e-4
MAX_SCORES = {"cpu": 1 << 23, "cuda": 1 << 28}  # elements of one block of scores
SHOWN = 12  # failures printed in full

INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_bhmk(x: Tensor, heads: int) -> Tensor:
    """[B, M, K], [B, M, H, K] or [B, M, G, H, K] as [B, heads, M, K]; fewer heads are repeated."""
    if x.dim() == 3:
        x = x.unsqueeze(2)
    elif x.dim() == 5:
        x = x.flatten(2, 3)
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    return x.transpose(1, 2)


def head_count(query: Tensor) -> int:
    return math.prod(query.shape[2:-1])


def bias_to_bhmn(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """A bias that broadcasts to [B, H, M, N] ([B, M, N] or [B, G, H, M, N] for the other ranks), as
    4-D."""
    if bias is None:
        return None
    if query.dim() == 3:
        return bias.reshape((1,) * (3 - bias.dim()) + bias.shape).unsqueeze(1)
    if query.dim() == 5:
        bias = bias.reshape((1,) * (5 - bias.dim()) + bias.shape)
        groups, heads = query.shape[2:4]
        return bias.expand(-1, groups, heads, -1, -1).flatten(1, 2)
    return bias.reshape((1,) * (4 - bias.dim()) + bias.shape)


def from_bhmk(out: Tensor, lse: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Back to the rank of the query; LSE is [B, 1, M], [B, H, M] or [B, G, H, M]."""
    out = out.transpose(1, 2)
    if query.dim() == 3:
        return out.squeeze(2), lse
    if query.dim() == 5:
        shape = query.shape[2:4]
        return out.unflatten(2, shape), lse.unflatten(1, shape)
    return out, lse


class Drop(NamedTuple):
    """Dropout as the oracle takes it."""

    keep: Tensor  # bool [B, H, M, N]
    scale: float  # of what is kept


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: int = NONE,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    in_tf32: bool = False,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scale * Q K^T + bias)) V in `dtype`, in the obvious way; (out, lse), dead
    rows give 0 and -inf."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = head_count(query)
    q, k, v = (to_bhmk(x.to(dtype), heads) for x in (query, key, value))
    if in_tf32:
        q, k, v = (round_tf32(x) for x in (q, k, v))
    rank4 = bias_to_bhmn(bias, query)
    if rank4 is not None and dtype == torch.float64 and rank4.dtype != torch.bool:
        rank4 = rank4.double()
    batch, _, rows, _ = q.shape
    keys = k.shape[2]
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, heads, rows, v.shape[-1])
    lse = torch.full((batch, heads, rows), -math.inf, dtype=kind, device=q.device)
    step = max(1, MAX_SCORES[q.device.type] // max(1, batch * heads * keys))
    columns = torch.arange(keys, device=q.device)
    diagonal = keys - rows if causal == BOTTOM_RIGHT else 0
    for first in range(0, rows if keys and batch and heads else 0, step):
        last = min(rows, first + step)
        scores = torch.matmul(q[:, :, first:last], k.transpose(-1, -2)) * scale
        if rank4 is not None:
            part = rank4 if rank4.shape[2] == 1 else rank4[:, :, first:last]
            scores = (
                scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
            )
        if causal != NONE:
            limits = torch.arange(first, last, device=q.device) + diagonal
            scores = scores.masked_fill(columns > limits[:, None], -math.inf)
        dead = (scores == -math.inf).all(-1)
        weights = torch.softmax(scores, dim=-1).to(dtype)
        if drop is not None:
            weights = weights.masked_fill(~drop.keep[:, :, first:last], 0) * drop.scale
        weights = round_tf32(weights) if in_tf32 else weights
        block = torch.matmul(weights, v)
        out[:, :, first:last] = block.masked_fill(dead[..., None], 0)
        lse[:, :, first:last] = torch.logsumexp(scores.to(kind), dim=-1)
    return from_bhmk(out, lse, query)


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Math mode of fp32 products on a GPU, for eager and for us."""
    matmul = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32" if allowed else "ieee")
    if not hasattr(matmul, name):
        name, value = "allow_tf32", allowed  # type: ignore[assignment]
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def tf32_allowed() -> bool:
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return str(matmul.fp32_precision) == "tf32"
    return bool(matmul.allow_tf32)


def round_tf32(x: Tensor) -> Tensor:
    """fp32 numbers as TF32 sees them: 10 bits of mantissa, halves away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def ulp(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of `dtype` at `largest` (fp64, elementwise)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(largest.double())
    spacing = info.eps * torch.exp2((exponent - 1).double())
    return spacing.clamp_min(info.tiny * info.eps)


def measure(
    mine: Tensor,
    exact: Tensor,
    eager: Tensor,
    eager32: Tensor,
    zero: Tensor | None = None,
    terms: Tensor | None = None,
    unit: torch.dtype | None = None,
) -> Tensor:
    """[max, rms, eager's max, eager's rms, u, wrong special values], fp64, on the device.

    zero marks elements that must be exactly 0; terms is the size of what the largest element sums;
    unit is the dtype of u, if not that of mine.
    """
    rounded = exact.to(mine.dtype)
    special = (mine.isnan() != rounded.isnan()) | (
        (mine.isinf() | rounded.isinf()) & (mine != rounded) & ~rounded.isnan()
    )
    if zero is not None:
        special = special | (zero & (mine != 0))
    finite = rounded.isfinite()
    clean = torch.where(finite, exact, 0.0)
    largest = clean.abs().amax()
    if terms is not None:
        largest = torch.where(largest > CANCELLED * terms, largest, terms)
    u = ulp(largest, unit or mine.dtype)
    eager_error = (eager.double() - clean).abs()
    bad = ~eager.isfinite() | (eager_error > EAGER_OUTLIER * u)
    eager_error = torch.where(bad, (eager32.to(mine.dtype).double() - clean).abs(), eager_error)
    eager_error = torch.where(finite, eager_error, 0.0).nan_to_num(0.0, 0.0)
    error = torch.where(finite & mine.isfinite(), (mine.double() - clean).abs(), 0.0)
    rms, eager_rms = error.square().mean().sqrt(), eager_error.square().mean().sqrt()
    return torch.stack(
        [error.amax(), rms, eager_error.amax(), eager_rms, u, special.sum().double()]
    )


class Checker:
    """Collects comparisons; finish() raises one AssertionError that names each case that failed."""

    def __init__(self) -> None:
        # label, absolute tolerance, factors, figures
        self.measured: list[tuple[str, float, tuple[float, float], Tensor]] = []
        self.counted: list[tuple[str, Tensor]] = []  # label, number of wrong elements
        self.failures: list[str] = []
        self.cases = 0

    @contextlib.contextmanager
    def case(self, label: object) -> Iterator[None]:
        """An exception inside is a failure of that case, not of the sweep."""
        self.cases += 1
        try:
            yield
        except Exception as error:
            self.failures.append(f"{label}: {type(error).__name__}: {error}")
            if "CUDA error" in str(error):  # the context is lost: later cases would all fail
                raise AssertionError("\n".join(self.failures)) from error

    def close(
        self,
        label: object,
        mine: Tensor,
        exact: Tensor,
        eager: Tensor,
        eager32: Tensor,
        atol: float = 0.0,
        zero: Tensor | None = None,
        factors: tuple[float, float] = FORWARD,
        terms: Tensor | None = None,
        unit: torch.dtype | None = None,
    ) -> None:
        if mine.shape != exact.shape:
            self.failures.append(
                f"{label}: shape {tuple(mine.shape)}, expected {tuple(exact.shape)}"
            )
        elif mine.numel():
            figures = measure(mine, exact, eager, eager32, zero, terms, unit)
            self.measured.append((str(label), atol, factors, figures))

    def attention(
        self,
        label: object,
        out: Tensor,
        lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        causal: int = NONE,
        scale: float | None = None,
        drop: Drop | None = None,
    ) -> None:
        """Compares out and lse with the oracle on these inputs."""
        inputs = (query, key, value, bias, causal, scale)
        exact, exact_lse = plain_attention(*inputs, drop=drop)
        in_tf32 = query.dtype == torch.float32 and query.is_cuda and tf32_allowed()
        eager32, eager32_lse = plain_attention(
            *inputs, dtype=torch.float32, in_tf32=in_tf32, drop=drop
        )
        eager = (
            eager32
            if query.dtype == torch.float32
            else plain_attention(*inputs, dtype=query.dtype, drop=drop)[0]
        )
        if out.dtype != query.dtype:
            self.failures.append(f"{label}: out is {out.dtype}, expected {query.dtype}")
            return
        dead = (exact_lse == -math.inf)[..., None]
        dead = dead[:, 0] if query.dim() == 3 else dead.movedim(-2, 1)
        self.close(f"{label} out", out, exact, eager, eager32, zero=dead.expand_as(exact))
        if lse is not None:
            self.close(f"{label} lse", lse, exact_lse, eager32_lse, eager32_lse, atol=LSE_ATOL)

    def same_bits(self, label: object, mine: Tensor, other: Tensor) -> None:
        """Bit for bit, NaN payloads included."""
        if mine.shape != other.shape or mine.dtype != other.dtype:
            got, want = (f"{x.dtype}{tuple(x.shape)}" for x in (mine, other))
            self.failures.append(f"{label}: {got}, expected {want}")
            return
        integer = INT_OF_SIZE[mine.element_size()]
        self.counted.append(
            (f"{label}: differing bits", (mine.view(integer) != other.view(integer)).sum())
        )

    def true(self, label: object, condition: Tensor) -> None:
        """Every element of a boolean tensor is true."""
        self.counted.append((str(label), (~condition).sum()))

    def that(self, label: object, condition: bool) -> None:
        if not condition:
            self.failures.append(str(label))

    def finish(self) -> None:
        for label, count in self.counted:
            if int(count):
                self.failures.append(f"{label} ({int(count)} elements)")
        if self.measured:
            device = self.measured[0][3].device
            figures = torch.stack([f.to(device) for _, _, _, f in self.measured]).tolist()
            for (label, atol, factors, _), row in zip(self.measured, figures, strict=True):
                self.failures += judge(label, row, atol, factors)
        self.measured, self.counted = [], []
        failures, self.failures = self.failures, []
        if failures:
            rest = f"\n... and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
            head = f"{len(failures)} failures in {max(self.cases, 1)} cases:\n"
            raise AssertionError(head + "\n".join(failures[:SHOWN]) + rest)


def judge(
    label: str, figures: list[float], atol: float, factors: tuple[float, float] = FORWARD
) -> list[str]:
    """The rule itself, on what measure() found."""
    largest, rms, eager_largest, eager_rms, u, special = figures
    max_limit = factors[0] * eager_largest + 2 * u + atol
    rms_limit = factors[1] * eager_rms + u + atol
    failures = []
    if special:
        failures.append(
            f"{label}: {special:.0f} NaN, inf or empty-row elements differ from the oracle's"
        )
    if not largest <= max_limit:
        facts = f"(eager {eager_largest:.3e}, u {u:.1e})"
        failures.append(f"{label}: max error {largest:.3e} > {max_limit:.3e} {facts}")
    if not rms <= rms_limit:
        failures.append(
            f"{label}: rms error {rms:.3e} > {rms_limit:.3e} (eager {eager_rms:.3e}, u {u:.1e})"
        )
    return failures


def check(
    out: Tensor,
    lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: int = NONE,
    scale: float | None = None,
) -> None:
    """One comparison, at once."""
    checker = Checker()
    checker.attention("attention", out, lse, query, key, value, bias, causal, scale)
    checker.finish()
