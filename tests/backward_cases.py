"""The matrix of the backward pass: cases, the calls, and how a case is checked.

A BackwardCase is a Case (cases.py) with dropout, the inputs whose gradients are wanted and the
strides of the gradient of the output. `run` checks out, LSE and every wanted gradient by the rule;
memory that a call gets from torch is filled with NaN first, so that what it leaves unwritten
shows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import cases
import gradients
import torch
from cases import DTYPES, HEAD_DIMS, MASKS, STRIDES, UNEQUAL_HEAD_DIMS, Case, Inputs
from companions import forward_name
from gradients import Four
from tolerance import Checker, Drop, bias_to_bhmn, head_count, tf32_allowed
from torch import Tensor

FORCE_BACKWARD = "MEMEFF_FORCE_BACKWARD_VARIANT"
ALL = "qkvb"
SUBSETS = [
    "".join(letters) for n in range(1, 5) for letters in itertools.combinations(ALL, n)
]  # 15 of them
# 0.999 only where it is exact (zeros, masks): it keeps so few weights that the ratio of single
# rounding errors, ours and eager's, would decide.
DROPOUTS = (1e-6, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class BackwardCase(Case):
    p: float = 0.0
    wants: str = ALL  # of query, key, value, bias: those that require a gradient
    grad: str = "dense"  # strides of the gradient of out: a key of GRAD_STRIDES

    def __str__(self) -> str:
        text = super().__str__()
        text += f" p={self.p}" if self.p else ""
        text += f" wants={self.wants}" if self.wants != ALL else ""
        return text + (f" dO={self.grad}" if self.grad != "dense" else "")


def _one_number(shape: tuple[int, ...], fill: cases.Fill) -> Tensor:
    """What out.sum().backward() passes: every stride 0."""
    return fill(1).expand(shape)


GRAD_STRIDES: dict[str, Callable[[tuple[int, ...], cases.Fill], Tensor]] = {
    **{name: STRIDES[name] for name in ("dense", "heads_first", "padded8", "padded1", "offset1")},
    **{name: STRIDES[name] for name in ("batch0", "rows0", "heads0", "last_dim")},
    "sum": _one_number,
}


def make_grad(case: BackwardCase, device: torch.device | str, query: Tensor) -> Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"grad of {case}".encode()))

    def fill(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return x.to(query.dtype)

    return GRAD_STRIDES[case.grad]((*query.shape[:-1], case.value_dim), fill)


# --- calls ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def forced_backward(name: str) -> Iterator[None]:
    """Inside, every backward call runs this variant ("": automatic)."""
    before = os.environ.pop(FORCE_BACKWARD, None)
    if name:
        os.environ[FORCE_BACKWARD] = name
    try:
        yield
    finally:
        os.environ.pop(FORCE_BACKWARD, None)
        if before is not None:
            os.environ[FORCE_BACKWARD] = before


@contextlib.contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """Deterministic mode; it also fills every tensor that torch.empty makes with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    before_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=before_warn)


def new_seed(number: int, device: torch.device | str) -> Tensor:
    """The state that the next call with dropout draws after torch.manual_seed(number); the
    generator is left as that manual_seed leaves it."""
    from memeff_attn import dropout

    torch.manual_seed(number)
    state = dropout.new_seed(torch.device(device))
    torch.manual_seed(number)
    return state


def drop_of(inputs: Inputs, p: float, seed: Tensor | None) -> Drop | None:
    """The mask that this seed means."""
    from memeff_attn import dropout

    if seed is None:
        return None
    query, key = inputs.query, inputs.key
    sizes = (query.shape[0], head_count(query), query.shape[1], key.shape[1])
    return Drop(dropout.dropout_mask(seed, p, *sizes), float(dropout.keep_scale(p)))


def by_operators(
    inputs: Inputs, grad_out: Tensor, p: float, seed: Tensor | None, wants: str
) -> tuple[Tensor, Tensor, Four]:
    """Both operators, as autograd calls them; lse without its low part."""
    query, key, value, bias, causal, scale = inputs.tuple()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    operators = torch.ops.memeff_attn
    tf32 = query.dtype == torch.float32 and tf32_allowed()
    forced, forced_too = os.environ.get(cases.FORCE, ""), os.environ.get(FORCE_BACKWARD, "")
    out, lse = operators.forward(
        query, key, value, bias, scale, causal, tf32, True, forced, p, seed
    )
    if not wants:
        return out, lse[0], (None, None, None, None)
    needs = [letter in wants for letter in ALL]
    needs[3] = needs[3] and gradients.has_gradient(bias)
    found = operators.backward(
        grad_out, query, key, value, bias, out, lse, scale, causal, tf32, needs, forced_too, p, seed
    )
    four = tuple(x if need else None for x, need in zip(found, needs, strict=True))
    assert all(need or x.shape == (0,) for x, need in zip(found, needs, strict=True))
    return out, lse[0], four  # type: ignore[return-value]


def mask_object(causal: int) -> Any:
    import memeff_attn

    masks = (
        lambda: None,
        memeff_attn.LowerTriangularMask,
        memeff_attn.LowerTriangularFromBottomRightMask,
    )
    return masks[causal]()


def by_autograd(
    inputs: Inputs, grad_out: Tensor, p: float, wants: str
) -> tuple[Tensor, Tensor, Four]:
    """The public call and torch.autograd.grad; draws its own seed. A diagonal excludes a bias."""
    import memeff_attn

    leaves = [
        x if x is None else x.detach().requires_grad_(letter in wants and x.is_floating_point())
        for x, letter in zip(inputs.tuple()[:4], ALL, strict=True)
    ]
    query, key, value, bias = leaves
    assert query is not None and key is not None and value is not None
    assert not (inputs.causal and bias is not None)
    attn_bias = bias if bias is not None else mask_object(inputs.causal)
    call = memeff_attn.memory_efficient_attention
    out = call(query, key, value, attn_bias, p, inputs.scale)
    asked = [x for x in leaves if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(out, asked, grad_out))
    four = tuple(None if x is None or not x.requires_grad else next(found) for x in leaves)
    return out.detach(), torch.empty(0), four  # type: ignore[return-value]


def call(
    inputs: Inputs, grad_out: Tensor, p: float = 0.0, number: int = 0, wants: str = ALL
) -> tuple[Tensor, Tensor | None, Four, Drop | None]:
    """(out, lse, gradients, the mask of the dropout); by the public call where that can say it."""
    seed = new_seed(number, inputs.query.device) if p else None
    if inputs.causal and inputs.bias is not None:
        out, lse, four = by_operators(inputs, grad_out, p, seed, wants)
        return out, lse, four, drop_of(inputs, p, seed)
    out, _, four = by_autograd(inputs, grad_out, p, wants)
    return out, None, four, drop_of(inputs, p, seed)


def usable(case: BackwardCase, inputs: Inputs) -> str:
    """case.wants without what has no gradient."""
    keeps = gradients.has_gradient(inputs.bias)
    return "".join(x for x in case.wants if x != "b" or keeps)


def check_case(checker: Checker, case: BackwardCase, device: torch.device | str) -> None:
    inputs = cases.make(case, device)
    grad_out = make_grad(case, device, inputs.query)
    wants = usable(case, inputs)
    if not wants:
        return
    number = zlib.crc32(str(case).encode())
    name = os.environ.get(FORCE_BACKWARD, "")
    name = forward_name(name, bool(case.bias), case.p, case.K, case.value_dim)
    with deterministic(warn_only=True), cases.forced(name or os.environ.get(cases.FORCE, "")):
        out, lse, four, drop = call(inputs, grad_out, case.p, number, wants)
    checker.attention(case, out, lse, *inputs.tuple(), drop)
    wanted = [x is not None for x in four]
    checker.that(f"{case}: gradients {wanted}", wanted == [x in wants for x in ALL])
    gradients.check(checker, case, four, grad_out, *inputs.tuple(), drop)


def run(
    all_cases: list[BackwardCase],
    device: torch.device | str,
    checker: Checker | None = None,
    variant: str = "",
) -> None:
    """Every case against the oracle, the backward pass by `variant`; one message for all
    failures."""
    checker = checker or Checker()
    with forced_backward(variant):
        for case in all_cases:
            with checker.case(case):
                check_case(checker, case, device)
    checker.finish()


def run_forward(
    all_cases: list[BackwardCase], device: torch.device | str, variant: str = ""
) -> None:
    """The forward pass of every case, dropout too, by `variant`."""
    checker = Checker()
    with cases.forced(variant):
        for case in all_cases:
            with checker.case(case):
                inputs = cases.make(case, device)
                seed = new_seed(zlib.crc32(str(case).encode()), device) if case.p else None
                out, lse, _ = by_operators(inputs, inputs.query, case.p, seed, "")
                checker.attention(case, out, lse, *inputs.tuple(), drop_of(inputs, case.p, seed))
    checker.finish()


# --- dropout by identity --------------------------------------------------------------------------


def kept_forward(inputs: Inputs, p: float, seed: Tensor, width: int) -> Tensor:
    """bool [B, H, M, N]: which weights reach the output, read off with V = chunks of the
    identity."""
    keys, heads = inputs.key.shape[1], head_count(inputs.query)
    eye = torch.eye(keys + width, dtype=inputs.query.dtype, device=inputs.query.device)
    parts = []
    for first in range(0, keys, width):
        value = eye[:keys, first : first + width, None].movedim(1, 2)
        value = value.expand(inputs.query.shape[0], keys, heads, width).contiguous()
        given = dataclasses.replace(inputs, value=value.view(*inputs.key.shape[:-1], width))
        out, _, _ = by_operators(given, inputs.query, p, seed, "")
        parts.append(out.reshape(value.shape[0], -1, heads, width))
    return (torch.cat(parts, -1)[..., :keys] != 0).transpose(1, 2)


def kept_backward(inputs: Inputs, p: float, seed: Tensor) -> Tensor:
    """bool [B, H, M, N]: which weights reach dV, read off with dO = chunks of the identity."""
    rows, heads = inputs.query.shape[1], head_count(inputs.query)
    width = inputs.value.shape[-1]
    eye = torch.eye(rows + width, dtype=inputs.query.dtype, device=inputs.query.device)
    parts = []
    for first in range(0, rows, width):
        grad_out = eye[:rows, first : first + width, None].movedim(1, 2)
        grad_out = grad_out.expand(inputs.query.shape[0], rows, heads, width).contiguous()
        grad_out = grad_out.view(*inputs.query.shape[:-1], width)
        _, _, four = by_operators(inputs, grad_out, p, seed, "v")
        assert four[2] is not None
        parts.append(four[2].reshape(grad_out.shape[0], -1, heads, width))
    return (torch.cat(parts, -1)[..., :rows] != 0).permute(0, 2, 3, 1)


def check_identity(
    checker: Checker, case: BackwardCase, device: torch.device | str, number: int
) -> None:
    """Forward and backward drop what dropout.dropout_mask says, element by element. No group of
    heads shares a key head, so that dV is one head's."""
    inputs = cases.make(case, device)
    seed = new_seed(number, device)
    drop = drop_of(inputs, case.p, seed)
    assert drop is not None and head_count(inputs.query) == head_count(inputs.key)
    kept = drop.keep & visible(inputs)
    if drop.scale == 0:
        kept = torch.zeros_like(kept)
    forward = kept_forward(inputs, case.p, seed, case.value_dim)
    checker.true(f"{case} seed {number}: forward's mask", forward == kept)
    checker.true(
        f"{case} seed {number}: backward's mask", kept_backward(inputs, case.p, seed) == kept
    )


def visible(inputs: Inputs) -> Tensor:
    """bool [B, H, M, N]."""
    query, key, _, bias, causal, _ = inputs.tuple()
    scores = torch.zeros(
        query.shape[0], head_count(query), query.shape[1], key.shape[1], device=query.device
    )
    rank4 = bias_to_bhmn(bias, query)
    every = slice(None)
    return gradients.masked(scores, rank4, causal, every, query.shape[1]) != -float("inf")


# --- the matrix -----------------------------------------------------------------------------------


def _head_dims(dtype: str, thin: bool) -> list[BackwardCase]:
    """Every head dim, K != Kv among them; then with a bias gradient, then with dropout."""
    dims = [(k, 0) for k in HEAD_DIMS] + list(UNEQUAL_HEAD_DIMS)
    if thin:
        dims = dims[::3]
    masks = ("bottom_right",) if thin else ("none", "top_left")
    made = [BackwardCase(dtype, M=70, N=133, K=k, Kv=kv, mask=m) for (k, kv) in dims for m in masks]
    some = dims[::4] if thin else dims
    made += [BackwardCase(dtype, M=70, N=133, K=k, Kv=kv, bias="bhmn") for k, kv in some]
    return made + [BackwardCase(dtype, M=70, N=133, K=k, Kv=kv, p=0.3) for k, kv in some]


def _edges(dtype: str, thin: bool) -> list[BackwardCase]:
    """M and N around every tile edge: each diagonal, and dropout or a bias gradient in turn."""
    sizes = (1, 31, 33, 65, 129) if thin else cases.EDGES
    pairs = list(itertools.product(sizes, sizes))
    masks = ("none",) if thin else tuple(MASKS)
    made = [BackwardCase(dtype, B=1, M=m, N=n, H=3, mask=x) for m, n in pairs for x in masks]
    extras = itertools.cycle(
        [{"p": 0.2}, {"bias": "bhmn"}, {"bias": "1h1n", "p": 0.5}, {"bias": "bh11:f32"}]
    )
    turn = itertools.cycle(MASKS)
    return made + [
        BackwardCase(dtype, B=1, M=m, N=n, H=3, K=40, mask=next(turn), **next(extras))
        for m, n in pairs
    ]


def _masks(dtype: str, thin: bool) -> list[BackwardCase]:
    """Diagonals far from square: queries that see nothing, keys that nobody sees."""
    sizes = ((2, 5), (5, 2), (1, 300), (300, 1), (100, 64), (128, 64), (300, 70), (70, 300))
    sizes += () if thin else ((513, 512), (512, 513), (1024, 300), (300, 1024))
    turn = itertools.cycle((0.0, 0.25))
    return [
        BackwardCase(dtype, M=m, N=n, K=k, mask=mask, bias=bias, p=next(turn))
        for (m, n), k, mask, bias in itertools.product(
            sizes, (64,) if thin else (64, 33), ("top_left", "bottom_right"), ("", "11mn", "b1m1")
        )
    ]


def _biases(dtype: str, thin: bool) -> list[BackwardCase]:
    """Every broadcast, type and layout of a bias, with its gradient, alone or with the others."""
    shapes = ["".join(p) for p in itertools.product("b1", "h1", "m1", "n1")]
    layouts = ("", ":padded", ":transposed", ":offset", ":expanded")
    everything = list(itertools.product(shapes, ("", ":f32"), layouts))
    everything += [(shape, ":bool", "") for shape in shapes]
    if thin:
        everything = everything[::4]
    turns = [
        itertools.cycle(MASKS),
        itertools.cycle((0.0, 0.0, 0.3, 0.0)),
        itertools.cycle((ALL, "b", ALL, "qb", "vb")),
        itertools.cycle(((65, 77), (33, 128), (1, 130), (130, 2), (64, 64), (129, 43))),
        itertools.cycle((64, 40, 33)),
    ]
    made = []
    for shape, kind, layout in everything:
        mask, p, wants, (m, n), k = (next(turn) for turn in turns)
        wants = ALL if kind == ":bool" else wants
        made.append(
            BackwardCase(
                dtype, M=m, N=n, K=k, bias=shape + kind + layout, mask=mask, p=p, wants=wants
            )
        )
    ranks = itertools.product(
        ("bmk", "bmghk"), ("bhmn", "11mn", "b11n", "bh1n", "1hm1", "1111"), ("", ":f32")
    )
    made += [
        BackwardCase(dtype, H=1 if rank == "bmk" else 2, rank=rank, bias=shape + kind)
        for rank, shape, kind in ranks
    ]
    return made


def _layouts(dtype: str, thin: bool) -> list[BackwardCase]:
    """Ranks, strides of the inputs and of the gradient of out, grouped heads."""
    dims = (40,) if thin else (64, 33, 40, 128, 200)
    grads = itertools.cycle(GRAD_STRIDES)
    biases = itertools.cycle(("", "", "1hmn", ""))
    drops = itertools.cycle((0.0, 0.0, 0.0, 0.2, 0.0))
    ranks = ("bmk", "bmhk", "bmghk")
    made = [
        BackwardCase(
            dtype, B=3, H=1 if rank == "bmk" else 4, K=k, rank=rank, strides=strides,
            grad=next(grads), bias=next(biases), p=next(drops),
        )
        for rank, strides, k in itertools.product(ranks, (*STRIDES, "mixed"), dims)
    ]  # fmt: skip
    made += [
        BackwardCase(dtype, H=1 if rank == "bmk" else 3, K=k, rank=rank, grad=grad, mask=mask)
        for rank, grad, k, mask in itertools.product(
            ranks, GRAD_STRIDES, dims[:2], ("none",) if thin else ("none", "bottom_right")
        )
    ]
    made += [
        BackwardCase(dtype, M=m, N=n, H=h, Hkv=hkv, K=k, Kv=kv, mask=mask, bias=bias,
                     strides=strides, p=next(drops))
        for (m, n), (h, hkv), (k, kv), mask, bias, strides in itertools.product(
            ((65, 77),) if thin else ((1, 65), (65, 77)),
            ((8, 1), (6, 2), (8, 4)),
            ((40, 72),) if thin else ((64, 0), (40, 72), (256, 0)),
            ("bottom_right",) if thin else ("none", "bottom_right"),
            ("", "bhmn"),
            ("dense",) if thin else ("dense", "heads_first", "mixed"),
        )
    ]  # fmt: skip
    return made


def _scales(dtype: str, thin: bool) -> list[BackwardCase]:
    """Scale 0, negative, tiny and large; queries and keys of other sizes."""
    dims = (33,) if thin else (64, 33)
    made = [
        BackwardCase(dtype, K=k, scale=s, mask=mask, bias=bias)
        for k, s, mask, bias in itertools.product(
            dims, (0.0, -0.5, 1e-3, 1.0, 4.0), ("none", "top_left"), ("", "bhmn", "bhmn:f32")
        )
    ]
    gains = itertools.product((0.0, 1e-3, 4.0), MASKS)
    return made + [BackwardCase(dtype, K=64, gain=g, mask=m) for g, m in gains]


def _dropout(dtype: str, thin: bool) -> list[BackwardCase]:
    """Every p (1 drops all, 1e-6 nothing) at sizes below, at and beyond a tile (B33)."""
    sizes = ((3, 248), (65, 77)) if thin else ((3, 3), (3, 248), (248, 3), (248, 256), (65, 77))
    dims = ((40, 0),) if thin else ((16, 0), (64, 0), (33, 65), (128, 0), (256, 0))
    masks = itertools.cycle(MASKS)
    biases = itertools.cycle(("", "bhmn", "", "1h1n:f32", "", "b11n:bool"))
    return [
        BackwardCase(dtype, M=m, N=n, K=k, Kv=kv, p=p, mask=next(masks), bias=next(biases))
        for (m, n), (k, kv), p in itertools.product(sizes, dims, DROPOUTS)
    ]


def _subsets(dtype: str, thin: bool) -> list[BackwardCase]:
    """Each set of inputs that require a gradient; a bias alone among them."""
    drops = (0.0,) if thin else (0.0, 0.4)
    return [
        BackwardCase(dtype, K=40, bias=bias, wants=wants, p=p, rank=rank)
        for wants, bias, p, rank in itertools.product(
            SUBSETS, ("bhmn", "1h1n") if thin else ("bhmn", "1h1n", "11m1", ""), drops, ("bmhk",)
        )
        if bias or "b" not in wants
    ]


def _sizes(dtype: str, thin: bool) -> list[BackwardCase]:
    """Realistic sizes of one workload each: vision, diffusion, language, pair bias, windows."""
    small = [
        BackwardCase(dtype, B=1, M=197, N=197, H=3, K=80),
        BackwardCase(dtype, B=1, M=256, N=77, H=4, K=40),
        BackwardCase(dtype, B=7, M=49, N=49, H=3, K=32, bias="1hmn"),
        BackwardCase(dtype, B=1, M=600, N=600, H=1, K=64, mask="top_left", p=0.1),
    ]
    big = [
        BackwardCase(dtype, B=8, M=197, N=197, H=16, K=80),
        BackwardCase(dtype, B=2, M=4096, N=77, H=8, K=40),
        BackwardCase(dtype, B=1, M=1024, N=1024, H=8, K=160, p=0.1),
        BackwardCase(dtype, B=1, M=2048, N=2048, H=8, K=128, mask="top_left"),
        BackwardCase(dtype, B=1, M=1500, N=2000, H=4, K=256, mask="bottom_right"),
        BackwardCase(dtype, B=2, M=1000, N=1024, H=8, Hkv=2, K=64, p=0.1, mask="bottom_right"),
        BackwardCase(dtype, B=64, M=64, N=64, H=8, K=32, bias="1hmn:f32"),
        BackwardCase(dtype, B=64, M=256, N=256, H=4, K=16, bias="1hmn"),
        BackwardCase(dtype, B=1, M=1024, N=1024, H=1, K=512),
        BackwardCase(dtype, B=1, M=16, N=8192, H=2, K=64),
        BackwardCase(dtype, B=1, M=8192, N=16, H=2, K=64, bias="bhmn"),
    ]
    return small if thin else small + big


GROUPS: dict[str, Callable[[str, bool], list[BackwardCase]]] = {
    "head_dims": _head_dims,
    "edges": _edges,
    "masks": _masks,
    "biases": _biases,
    "layouts": _layouts,
    "scales": _scales,
    "dropout": _dropout,
    "subsets": _subsets,
    "sizes": _sizes,
}


def group(name: str, dtype: str, device: torch.device | str) -> list[BackwardCase]:
    assert dtype in DTYPES
    return GROUPS[name](dtype, torch.device(device).type == "cpu")
