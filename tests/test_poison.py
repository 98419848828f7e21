"""Nothing beyond the logical ends is read into a result or written.

Inputs are views into larger buffers whose rest is NaN (or, second run, 0): no bit of the result may
change. Outputs are views into buffers of canaries: every element inside is written, none outside.
On a GPU this goes to _C.forward directly, because only there the caller owns the output."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import backward_cases
import cases
import gradients
import pytest
import torch
from cases import Case
from companions import forward_name, within
from test_variants import each_row, fits_here, math_mode
from tolerance import INT_OF_SIZE, Checker
from torch import Tensor

pytest.importorskip("memeff_attn")

CANARY = 0x5A


def surrounded(x: Tensor, poison: float, extra: int) -> Tensor:
    """A copy of x inside a buffer of `poison`: rows before and after it, columns after each row."""
    rows = x.shape[1]
    buffer = x.new_full((x.shape[0], rows + 4, *x.shape[2:-1], x.shape[-1] + extra), poison)
    inner = buffer[:, 1 : 1 + rows, ..., : x.shape[-1]]
    inner.copy_(x)
    return inner


def poisoned(
    inputs: cases.Inputs, poison: float, extra: int, aligned: bool = False
) -> cases.Inputs:
    """aligned: the bias' rows start at multiples of 16 bytes."""
    query, key, value = (
        surrounded(x, poison, extra) for x in (inputs.query, inputs.key, inputs.value)
    )
    bias = inputs.bias
    if bias is not None:
        columns = (bias.shape[-1] + 15) // 8 * 8 if aligned else bias.shape[-1] + 5
        wide = bias.new_full((*bias.shape[:-2], bias.shape[-2] + 2, columns), poison)
        wide[..., 1:-1, : bias.shape[-1]] = bias
        bias = wide[..., 1:-1, : bias.shape[-1]]
    return cases.Inputs(query, key, value, bias, inputs.causal, inputs.scale)


def ragged(
    dtype: str, bias: str, k: int = 40, kv: int = 72, tile_m: int = 64, tile_n: int = 64
) -> list[Case]:
    """Shapes with a partial last tile in M, in N, in both."""
    sizes = (
        (tile_m + 1, tile_n),
        (tile_m, tile_n + 1),
        (tile_m - 1, 2 * tile_n + 1),
        (1, 1),
        (3, tile_n - 1),
    )
    return [
        Case(dtype, M=m, N=n, H=3, K=k, Kv=kv, mask=mask, bias=bias)
        for m, n in sizes
        for mask in ("none", "bottom_right")
    ]


@pytest.mark.parametrize("bias", ["", "bhmn", "b1m1", "bhmn:f32"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_nan_beyond_the_ends(device: str, dtype: str, bias: str) -> None:
    checker = Checker()
    for case in [*ragged(dtype, bias), *ragged(dtype, bias, k=33, kv=5)]:
        with checker.case(case):
            inputs = cases.make(case, device)
            extra = 8 if case.K % 8 == 0 else 1
            clean, clean_lse = cases.attention(poisoned(inputs, 0.0, extra))
            out, lse = cases.attention(poisoned(inputs, math.nan, extra))
            checker.same_bits(f"{case} out", out, clean)
            checker.same_bits(f"{case} lse", lse, clean_lse)
            checker.attention(case, out, lse, *inputs.tuple())
    checker.finish()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_visible_nan_shows(device: str, dtype: str) -> None:
    """A NaN in a visible input reaches exactly the rows that see it."""
    checker = Checker()
    for case in [
        Case(dtype, M=70, N=133, K=64),
        Case(dtype, M=70, N=133, K=33, mask="bottom_right"),
    ]:
        for operand in ("query", "key", "value"):
            with checker.case(f"{case} NaN in {operand}"):
                inputs = cases.make(case, device)
                row = 132 if operand != "query" else 5
                getattr(inputs, operand)[1, row, 0, 3] = math.nan
                out, _ = cases.attention(inputs)
                lost = out.isnan()
                expected = torch.zeros_like(lost)
                if operand == "query":
                    expected[1, 5, 0] = True
                elif operand == "key":
                    expected[1, 69 if case.causal else slice(None), 0] = True
                else:
                    expected[1, 69 if case.causal else slice(None), 0, 3] = True
                if (
                    case.causal and operand == "value"
                ):  # 0 * NaN of a hidden key may show, as in eager
                    expected[1, :, 0, 3] |= lost[1, :, 0, 3]
                if case.causal and operand == "key":
                    checker.true(f"{case} {operand}", lost[1, 69, 0])
                    checker.true(f"{case} {operand} elsewhere", ~lost[0])
                    continue
                checker.true(f"{case} NaN in {operand}", lost == expected)
    checker.finish()


class Canaries:
    """A tensor of `shape` inside a larger buffer of one byte value."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str, extra: int, row_dim: int = 1
    ) -> None:
        outer = list(shape)
        outer[-1] += extra
        outer[row_dim] += 2 if row_dim != len(shape) - 1 else 0
        size = torch.tensor([], dtype=dtype).element_size()
        count = math.prod(outer)
        self.bytes = torch.full((count * size,), CANARY, dtype=torch.uint8, device=device)
        self.whole = self.bytes.view(dtype).view(outer)
        index: list[slice] = [slice(None)] * len(shape)
        index[-1] = slice(0, shape[-1])
        if row_dim != len(shape) - 1:
            index[row_dim] = slice(1, -1)
        self.inner = self.whole[tuple(index)]
        self.outside = torch.ones(outer, dtype=torch.bool, device=device)
        self.outside[tuple(index)] = False

    def check(self, checker: Checker, label: str) -> None:
        size = self.whole.element_size()
        pattern = int.from_bytes(bytes([CANARY]) * size, "little", signed=True)
        untouched = self.whole.view(INT_OF_SIZE[size]) == pattern
        checker.true(f"{label}: written outside", untouched | ~self.outside)
        checker.true(f"{label}: never written", ~(untouched & ~self.outside))


def launch(
    inputs: cases.Inputs,
    out: Tensor,
    lse: Tensor | None,
    variant: str,
    tf32: bool,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Any:
    from memeff_attn import _C

    query, key, value, bias, causal, scale = inputs.tuple()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    stream = torch.cuda.current_stream().cuda_stream
    tensors = (query, key, value, bias, out, lse, seed)
    return _C.forward(*tensors, scale, p, causal, tf32, variant, None, stream)


@pytest.mark.gpu
@each_row("fwd")
def test_variant_between_canaries(row: dict[str, Any]) -> None:
    """Each variant, straight through the binding: poisoned inputs, outputs and LSE between
    canaries."""
    if reason := fits_here(row):
        pytest.skip(reason)
    step = row["alignment"]
    k = min(row["max_k"] or 256, 256) - (step if step > 1 else 0)
    kv = min(row["max_kv"] or 2 * row["value_tile"] + 8, 2 * row["value_tile"] + 8)
    kv = max(step, kv - step)
    k = max(step, k // step * step)
    tiles = {"tile_m": row["tile_m"], "tile_n": row["tile_n"]}
    p = 0.3 if row["dropout"] else 0.0
    seed = backward_cases.new_seed(2, "cuda") if p else None
    checker = Checker()
    with math_mode(row):
        for bias in biases_of(row):
            for case in ragged(row["dtype"], bias, k, kv // step * step, **tiles):
                case = within(row, case)
                with checker.case(case):
                    inputs = cases.make(case, "cuda")
                    extra = 8
                    results = []
                    for poison in (0.0, math.nan):
                        view = poisoned(inputs, poison, extra, bool(row["bias_alignment"]))
                        shape = (case.B, case.M, case.H, case.value_dim)
                        out = Canaries(shape, inputs.query.dtype, "cuda", extra)
                        lse = Canaries(
                            (case.B, case.H, case.M), torch.float32, "cuda", 5, row_dim=2
                        )
                        tf32 = row["math"] == "tf32"
                        results_in = (view, out.inner, lse.inner, row["name"], tf32)
                        failed = launch(*results_in, p, seed)
                        checker.that(f"{case}: {failed}", failed is None)
                        out.check(checker, f"{case} out")
                        lse.check(checker, f"{case} lse")
                        results.append((out.inner, lse.inner))
                    checker.same_bits(f"{case} out", results[1][0], results[0][0])
                    checker.same_bits(f"{case} lse", results[1][1], results[0][1])
                    drop = backward_cases.drop_of(inputs, p, seed)
                    checker.attention(case, *results[1], *inputs.tuple(), drop)
                    both = Flat((2, case.B, case.H, case.M), torch.float32)
                    again = torch.empty_like(results[1][0])
                    failed = launch(view, again, both.inner, row["name"], tf32, p, seed)
                    checker.that(f"{case}, LSE in two parts: {failed}", failed is None)
                    both.check(checker, f"{case} LSE in two parts")
                    checker.same_bits(f"{case} part 0", both.inner[0], results[1][1].contiguous())
    checker.finish()


def biases_of(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["bias"]:
        return ("",)
    if row["bias_alignment"]:
        return ("bhmn", "1hmn") + (("",) if row["dropout"] else ())
    return ("bhmn", "1hmn:f32", "bhmn:bool") + (("",) if row["dropout"] else ())


class Flat:
    """A contiguous tensor with canaries before and after it, its elements NaN at first."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.count = math.prod(shape)
        self.whole = torch.full((self.count + 128,), math.nan, dtype=dtype, device="cuda")
        self.edge = self.whole.view(INT_OF_SIZE[self.whole.element_size()])
        for part in (self.edge[:64], self.edge[64 + self.count :]):
            part.fill_(CANARY)
        self.inner = self.whole[64 : 64 + self.count].view(shape)

    def check(self, checker: Checker, label: str, written: bool = True) -> None:
        outside = torch.cat([self.edge[:64], self.edge[64 + self.count :]])
        checker.true(f"{label}: written outside", outside == CANARY)
        if written:
            checker.true(f"{label}: never written", ~self.inner.isnan())


@dataclasses.dataclass
class BackwardLaunch:
    """Everything _C.backward takes of one case, each output and the workspace between canaries."""

    row: dict[str, Any]
    inputs: cases.Inputs  # as given: views with poison around
    grad_out: Tensor
    out: Tensor
    lse: Tensor
    seed: Tensor | None
    p: float

    def run(self, checker: Checker, label: str) -> gradients.Four:
        from memeff_attn import _C

        query, key, value, bias, causal, scale = self.inputs.tuple()
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        wanted = [query, key, value] + ([bias] if gradients.has_gradient(bias) else [])
        flat = [Flat(tuple(x.shape), x.dtype) for x in wanted if x is not None]
        grads = [x.inner for x in flat] + [None] * (4 - len(flat))
        given = (
            self.grad_out,
            query,
            key,
            value,
            bias,
            self.out,
            self.lse,
            self.seed,
            None,
            *grads,
        )
        numbers = (False, scale, self.p, causal, self.row["math"] == "tf32", self.row["name"])
        spaces: list[Flat] = []

        def allocate(elements: int) -> Tensor:
            spaces.append(Flat((elements,), torch.float32))
            return spaces[-1].inner

        stream = torch.cuda.current_stream().cuda_stream
        failed = _C.backward(*given, allocate, *numbers, None, stream)
        checker.that(f"{label}: {failed}", failed is None)
        for name, x in zip(gradients.NAMES, flat, strict=False):
            x.check(checker, f"{label} d{name}")
        for space in spaces:
            space.check(checker, f"{label} workspace", written=False)
        checker.that(f"{label}: {len(spaces)} workspaces", len(spaces) == 1)
        return tuple(grads)  # type: ignore[return-value]


@pytest.mark.gpu
@each_row("bwd")
def test_backward_between_canaries(row: dict[str, Any]) -> None:
    """Each backward variant, straight through the binding: poison beyond the ends of every input,
    gradients and workspace full of NaN between canaries; shapes with few blocks (splits) too."""
    if reason := fits_here(row):
        pytest.skip(reason)
    step = row["alignment"]
    k, kv = (min(row[limit] or 256, 256) // step * step for limit in ("max_k", "max_kv"))
    p = 0.3 if row["dropout"] else 0.0
    seed = backward_cases.new_seed(2, "cuda") if p else None
    checker = Checker()
    with math_mode(row):
        for bias in biases_of(row):
            sizes = ragged(row["dtype"], bias, k, kv, row["tile_m"], row["tile_n"])
            some = [Case(row["dtype"], B=1, M=m, N=n, H=1, K=k, Kv=kv, bias=bias)
                    for m, n in ((1500, 70), (70, 1500))]  # fmt: skip
            for case in [*sizes, *some]:
                with checker.case(case):
                    backward_between_canaries(checker, row, within(row, case), p, seed)
    checker.finish()


def backward_between_canaries(
    checker: Checker, row: dict[str, Any], case: Case, p: float, seed: Tensor | None
) -> None:
    inputs = cases.make(case, "cuda")
    shape = (case.B, case.M, case.H, case.value_dim)
    grad_out = torch.randn(shape, device="cuda").to(inputs.query.dtype)
    query, key, value, bias, causal, scale = inputs.tuple()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tf32 = row["math"] == "tf32"
    operator = torch.ops.memeff_attn.forward
    forward = forward_name(row["name"], bias is not None, p, case.K, case.value_dim)
    out, lse = operator(query, key, value, bias, scale, causal, tf32, True, forward, p, seed)
    results = []
    for poison in (0.0, math.nan):
        views = [surrounded(x, poison, 8) for x in (grad_out, out)]
        given = poisoned(inputs, poison, 8, bool(row["bias_alignment"]))
        launch = BackwardLaunch(row, given, *views, lse, seed, p)
        results.append(launch.run(checker, f"{case} poison {poison}"))
    for name, a, b in zip(gradients.NAMES, *results, strict=True):
        if a is not None and b is not None and not (row["adds_query"] and name == "query"):
            checker.same_bits(f"{case} d{name}", b, a)
    drop = backward_cases.drop_of(inputs, p, seed)
    gradients.check(checker, case, results[1], grad_out, *inputs.tuple(), drop)


@pytest.mark.parametrize("bias", ["", "bhmn", "b1m1:f32"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_gradients_with_nan_beyond_the_ends(device: str, dtype: str, bias: str) -> None:
    """The public way: NaN around every input and around the gradient of out changes no bit."""
    checker = Checker()
    for case in ragged(dtype, bias)[:: 3 if device == "cpu" else 1]:
        with checker.case(case):
            inputs = cases.make(case, device)
            grad_out = torch.randn(*inputs.query.shape[:-1], case.value_dim, device=device)
            grad_out = grad_out.to(inputs.query.dtype)
            wants = "qkvb" if bias else "qkv"
            found = []
            for poison in (0.0, math.nan):
                given, around = poisoned(inputs, poison, 8), surrounded(grad_out, poison, 8)
                with backward_cases.deterministic(warn_only=True):
                    found.append(backward_cases.call(given, around, 0.0, 0, wants)[2])
            for name, a, b in zip(gradients.NAMES, *found, strict=True):
                if a is not None and b is not None:
                    checker.same_bits(f"{case} d{name}", b, a)
            gradients.check(checker, case, found[1], grad_out, *inputs.tuple())
    checker.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["heads_first", "padded", "five_dims"])
def test_output_strides(layout: str) -> None:
    """_C.forward writes any output strides with last stride 1."""
    checker = Checker()
    for dtype in cases.DTYPES:
        for k, kv in ((64, 64), (40, 72), (33, 5), (512, 520)):
            rank = "bmghk" if layout == "five_dims" else "bmhk"
            case = Case(dtype, M=70, N=77, H=3, K=k, Kv=kv, rank=rank, mask="top_left")
            with checker.case(case):
                inputs = cases.make(case, "cuda")
                shape = (*inputs.query.shape[:-1], kv)
                lse_shape = (case.B, 3, case.M) if rank == "bmhk" else (case.B, 2, 3, case.M)
                lse = torch.full(lse_shape, math.nan, device="cuda")
                out = torch.full(shape, math.nan, dtype=inputs.query.dtype, device="cuda")
                if layout == "heads_first":
                    out = out.transpose(1, 2).contiguous().transpose(1, 2)
                if layout == "padded":
                    out = Canaries(shape, out.dtype, "cuda", 3).inner
                if layout == "five_dims":
                    out = out.permute(2, 3, 0, 1, 4).contiguous().permute(2, 3, 0, 1, 4)
                failed = launch(inputs, out, lse, "", False)
                checker.that(f"{case}: {failed}", failed is None)
                checker.attention(case, out, lse, *inputs.tuple())
    checker.finish()
