"""The matrix of shapes that the forward pass is tested on, and how a case becomes tensors.

One list for every device; `groups(device)` gives a thinner slice of it on a CPU. A Case's text is
the one-line grammar of the failure reports: "B2 M65 N33 H4/2 K40/72 f16 bmhk dense causal
bias=1hmn:f32:padded scale=0.5"."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import zlib
from collections.abc import Callable, Iterator

import torch
from tolerance import BOTTOM_RIGHT, NONE, TOP_LEFT, Checker, tf32_allowed
from torch import Tensor

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
MASKS = {"none": NONE, "top_left": TOP_LEFT, "bottom_right": BOTTOM_RIGHT}
FORCE = "MEMEFF_FORCE_VARIANT"

TILES = (32, 64, 128)
EDGES = tuple(sorted({n for t in TILES for n in (1, t - 1, t, t + 1, 2 * t + 1)}))
HEAD_DIMS = (
    1,
    2,
    3,
    5,
    31,
    33,
    36,
    40,
    64,
    72,
    80,
    88,
    96,
    100,
    128,
    160,
    192,
    256,
    264,
    320,
    384,
    512,
    520,
    1024,
)
UNEQUAL_HEAD_DIMS = (
    (1, 64), (64, 1), (8, 128), (128, 8), (40, 72), (33, 65), (100, 36), (64, 320), (320, 64),
    (512, 128), (96, 512), (16, 1024), (64, 520), (256, 264), (80, 81), (128, 513),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: str = "f16"
    B: int = 2
    M: int = 65
    N: int = 77
    H: int = 2
    K: int = 64
    Kv: int = 0  # 0: K
    Hkv: int = 0  # 0: H
    rank: str = "bmhk"  # bmk (H = 1), bmhk, bmghk (G = 2)
    strides: str = "dense"  # a key of STRIDES
    mask: str = "none"
    bias: str = ""  # as make_bias reads it: "bhmn" with 1 for a broadcast dim, ":f32", ":padded"
    scale: float | None = None
    gain: float = 1.0  # query and key are normal numbers times this

    @property
    def value_dim(self) -> int:
        return self.Kv or self.K

    @property
    def kv_heads(self) -> int:
        return self.Hkv or self.H

    @property
    def causal(self) -> int:
        return MASKS[self.mask]

    def __str__(self) -> str:
        heads = f"H{self.H}" + (f"/{self.Hkv}" if self.Hkv else "")
        dims = f"K{self.K}" + (f"/{self.Kv}" if self.Kv else "")
        text = f"B{self.B} M{self.M} N{self.N} {heads} {dims} {self.dtype}"
        text += f" {self.rank} {self.strides} {self.mask}"
        text += f" bias={self.bias}" if self.bias else ""
        text += f" scale={self.scale}" if self.scale is not None else ""
        return text + (f" gain={self.gain}" if self.gain != 1 else "")


@dataclasses.dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: int
    scale: float | None

    def tuple(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int, float | None]:
        return self.query, self.key, self.value, self.bias, self.causal, self.scale


# --- strides --------------------------------------------------------------------------------------
# Each gives a tensor of `shape` with strides of its own; fill(*shape) gives random numbers.
Fill = Callable[..., Tensor]


def _dense(shape: tuple[int, ...], fill: Fill) -> Tensor:
    return fill(*shape)


def _heads_first(shape: tuple[int, ...], fill: Fill) -> Tensor:
    """[B, H, M, K] in memory."""
    if len(shape) == 3:
        return fill(shape[1], shape[0], shape[2]).transpose(0, 1)
    order = (0, *range(2, len(shape) - 1), 1, len(shape) - 1)
    back = sorted(range(len(shape)), key=lambda i: order[i])
    return fill(*(shape[i] for i in order)).permute(back)


def _sliced(extra: int) -> Callable[[tuple[int, ...], Fill], Tensor]:
    def make(shape: tuple[int, ...], fill: Fill) -> Tensor:
        return fill(shape[0], shape[1] + 1, *shape[2:-1], shape[-1] + extra)[
            :, :-1, ..., : shape[-1]
        ]

    return make


def _offset(shape: tuple[int, ...], fill: Fill) -> Tensor:
    count = torch.Size(shape).numel()
    return fill(count + 1)[1:].view(shape)


def _expanded(dim: int) -> Callable[[tuple[int, ...], Fill], Tensor]:
    def make(shape: tuple[int, ...], fill: Fill) -> Tensor:
        return fill(*shape[:dim], 1, *shape[dim + 1 :]).expand(shape)

    return make


def _last_dim(shape: tuple[int, ...], fill: Fill) -> Tensor:
    return fill(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def _packed(shape: tuple[int, ...], fill: Fill) -> Tensor:
    """One of query, key, value unbound from [B, M, 3, ..., K]."""
    return fill(shape[0], shape[1], 3, *shape[2:])[:, :, 1]


STRIDES: dict[str, Callable[[tuple[int, ...], Fill], Tensor]] = {
    "dense": _dense,
    "heads_first": _heads_first,
    "packed": _packed,
    "padded8": _sliced(8),
    "padded1": _sliced(1),
    "offset1": _offset,
    "batch0": _expanded(0),
    "rows0": _expanded(1),
    "heads0": _expanded(-2),
    "last_dim": _last_dim,
}
variants_hit: set[str] = set()  # filled by test_variants.py, written by gpu_record.py
PER_TENSOR = ("heads_first", "padded1", "dense")  # strides "mixed": query, key, value in turn


def make_bias(spec: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> Tensor:
    """shape: the full one, of the query's rank. A 1 in the spec is a broadcast dim; "bhmn" stands
    for every rank."""
    dims, *rest = spec.split(":")
    letters = {"bmn": "bmn", "bhmn": "bhmn", "bghmn": "bghmn"}[
        {3: "bmn", 4: "bhmn", 5: "bghmn"}[len(shape)]
    ]
    broadcast = {letter for letter, got in zip("bhmn", dims, strict=True) if got == "1"}
    broadcast |= {"g"} & ({"g"} if "h" in broadcast else set())
    size = [1 if letter in broadcast else n for letter, n in zip(letters, shape, strict=True)]
    if "transposed" in rest:
        bias = fill(*size[:-2], size[-1], size[-2]).transpose(-1, -2)
    elif "padded" in rest:
        bias = fill(*size[:-1], size[-1] + 3)[..., : size[-1]]
    elif "rows8" in rest:  # rows start at multiples of 16 bytes
        bias = fill(*size[:-1], (size[-1] + 15) // 8 * 8)[..., : size[-1]]
    elif "offset" in rest:
        bias = _offset(tuple(size), fill)
    elif "expanded" in rest:
        bias = fill(*size).expand(shape)
    else:
        bias = fill(*size)
    if "bool" in rest:
        return (bias > -0.7) if "expanded" not in rest else (fill(*size) > -0.7).expand(shape)
    if "f32" in rest and bias.dtype != torch.float32:
        wide = torch.empty_strided(
            bias.shape, bias.stride(), dtype=torch.float32, device=bias.device
        )
        return wide.copy_(bias) if "expanded" not in rest else bias.float()
    return bias


def make(case: Case, device: torch.device | str) -> Inputs:
    """Random inputs; the same case gives the same numbers on every run of one device."""
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(case).encode()))

    def fill(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def scaled(*shape: int) -> Tensor:
        return fill(*shape) * case.gain

    def shape(rows: int, heads: int, dim: int) -> tuple[int, ...]:
        middle = {"bmk": (), "bmhk": (heads,), "bmghk": (2, heads)}[case.rank]
        return (case.B, rows, *middle, dim)

    names = PER_TENSOR if case.strides == "mixed" else (case.strides,) * 3
    builders = [STRIDES[name] for name in names]
    if case.strides == "heads0":
        builders[0] = STRIDES["dense"]
    query = builders[0](shape(case.M, case.H, case.K), scaled)
    key = builders[1](shape(case.N, case.kv_heads, case.K), scaled)
    value = builders[2](shape(case.N, case.kv_heads, case.value_dim), fill)
    bias = None
    if case.bias:
        full = {"bmk": (case.B,), "bmhk": (case.B, case.H), "bmghk": (case.B, 2, case.H)}[case.rank]
        bias = make_bias(case.bias, (*full, case.M, case.N), dtype, fill)
    return Inputs(query, key, value, bias, case.causal, case.scale)


# --- calls ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Inside, every call runs this variant ("" : automatic)."""
    before = os.environ.pop(FORCE, None)
    if name:
        os.environ[FORCE] = name
    try:
        yield
    finally:
        os.environ.pop(FORCE, None)
        if before is not None:
            os.environ[FORCE] = before


def attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) by the public call; a diagonal together with a tensor bias by the op below it."""
    import memeff_attn

    query, key, value, bias, causal, scale = inputs.tuple()
    if bias is not None and causal:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        name = os.environ.get(FORCE, "")
        operator = torch.ops.memeff_attn.forward
        arguments = (query, key, value, bias, scale, causal, tf32_allowed(), True, name)
        out, (lse, _) = operator(*arguments)
        return out, lse
    masks = {
        NONE: lambda: bias,
        TOP_LEFT: memeff_attn.LowerTriangularMask,
        BOTTOM_RIGHT: memeff_attn.LowerTriangularFromBottomRightMask,
    }
    call = memeff_attn.memory_efficient_attention_forward_requires_grad
    return call(query, key, value, masks[causal](), 0.0, scale)


def automatic(inputs: Inputs) -> str:
    """The variant that these inputs run on a GPU, to be forced on parts of them; "" on a CPU."""
    if not inputs.query.is_cuda:
        return ""
    from memeff_attn import _C, dispatch

    query, key, value, bias, _, scale = inputs.tuple()
    described = dispatch.Inputs(query, key, value, bias, 0.0, scale)
    gpu = _C.device_info(query.get_device())
    del gpu["name"]
    return str(_C.select(dispatch.request_of(described, gpu)))


def run(
    cases: list[Case], device: torch.device | str, checker: Checker | None = None, variant: str = ""
) -> None:
    """Every case against the oracle; one failure message for all of them."""
    checker = checker or Checker()
    with forced(variant):
        for case in cases:
            with checker.case(case):
                inputs = make(case, device)
                out, lse = attention(inputs)
                checker.attention(case, out, lse, *inputs.tuple())
    checker.finish()


# --- the matrix -----------------------------------------------------------------------------------


def _head_dims(dtype: str, thin: bool) -> list[Case]:
    """Every head dim, K != Kv among them, with each diagonal."""
    dims = [(k, 0) for k in HEAD_DIMS] + list(UNEQUAL_HEAD_DIMS)
    masks = ("none", "top_left") if not thin else ("bottom_right",)
    cases = [Case(dtype, M=70, N=133, K=k, Kv=kv, mask=m) for (k, kv) in dims for m in masks]
    biased = [Case(dtype, M=70, N=133, K=k, Kv=kv, bias="bhmn") for (k, kv) in dims[::2]]
    return cases + (biased[::3] if thin else biased)


def _edges(dtype: str, thin: bool) -> list[Case]:
    """M and N around every tile edge."""
    sizes = EDGES if not thin else (1, 31, 32, 65, 129, 257)
    dims = (64, 40) if not thin else (40,)
    pairs = itertools.product(sizes, sizes)
    return [
        Case(dtype, B=1, M=m, N=n, H=3, K=k, mask=mask)
        for (m, n), k, mask in itertools.product(pairs, dims, MASKS)
    ]


def _masks(dtype: str, thin: bool) -> list[Case]:
    """Diagonals far from square: rows that see nothing, keys that nobody sees."""
    sizes = (
        (2, 5),
        (5, 2),
        (1, 300),
        (300, 1),
        (100, 64),
        (128, 64),
        (300, 70),
        (70, 300),
        (513, 512),
        (512, 513),
    )
    sizes += ((2048, 1024), (1024, 2048)) if not thin else ()
    return [
        Case(dtype, M=m, N=n, K=k, mask=mask, bias=bias)
        for (m, n), k, mask, bias in itertools.product(
            sizes, (64, 33), ("top_left", "bottom_right"), ("", "11mn")
        )
    ]


def _biases(dtype: str, thin: bool) -> list[Case]:
    """Every broadcast of a bias, every type and layout of it."""
    shapes = ["".join(p) for p in itertools.product("b1", "h1", "m1", "n1")]
    kinds = ("", ":f32", ":bool")
    layouts = ("", ":padded", ":transposed", ":offset", ":expanded")
    everything = list(itertools.product(shapes, kinds, layouts))
    if thin:
        everything = everything[::3]
    masks = itertools.cycle(MASKS)
    sizes = itertools.cycle(((65, 77), (33, 128), (1, 130), (130, 1), (64, 64), (129, 43)))
    dims = itertools.cycle((64, 40, 33))
    cases = [
        Case(dtype, M=m, N=n, K=next(dims), bias=shape + kind + layout, mask=next(masks))
        for (shape, kind, layout), (m, n) in zip(everything, sizes, strict=False)
    ]
    ranks = [
        Case(dtype, M=65, N=77, H=1 if rank == "bmk" else 2, K=64, rank=rank, bias=shape + kind)
        for rank, shape, kind in itertools.product(
            ("bmk", "bmghk"), ("bhmn", "11mn", "b11n", "bh1n", "1hm1"), kinds
        )
    ]
    return cases + ranks


def _layouts(dtype: str, thin: bool) -> list[Case]:
    """Ranks, grouped heads and strides, at a vectorisable and at an odd head dim."""
    cases = [
        Case(
            dtype,
            B=3,
            M=m,
            N=n,
            H=1 if rank == "bmk" else 4,
            K=k,
            rank=rank,
            strides=strides,
            mask=mask,
        )
        for rank, strides, k, (m, n), mask in itertools.product(
            ("bmk", "bmhk", "bmghk"),
            (*STRIDES, "mixed"),
            (64, 33) if thin else (64, 33, 40, 128, 200, 320),
            ((65, 77),) if thin else ((65, 77), (1, 130)),
            ("none",) if thin else ("none", "bottom_right"),
        )
    ]
    grouped = [
        Case(dtype, M=m, N=n, H=h, Hkv=hkv, K=k, Kv=kv, mask=mask, bias=bias, strides=strides)
        for (m, n), (h, hkv), (k, kv), mask, bias, strides in itertools.product(
            ((1, 65), (65, 77)),
            ((8, 1), (6, 2), (8, 4)),
            ((64, 0),) if thin else ((64, 0), (40, 72), (256, 0)),
            ("none", "bottom_right"),
            ("", "bhmn"),
            ("dense", "heads_first", "mixed"),
        )
    ]
    return cases + grouped


def _scales(dtype: str, thin: bool) -> list[Case]:
    """Scale 0, negative, tiny, large; and logits large enough for one key to take all the
    weight."""
    scales = (0.0, -0.5, 1e-3, 1.0, 4.0, None)
    cases = [
        Case(dtype, K=k, scale=s, mask=mask, bias=bias)
        for k, s, mask, bias in itertools.product(
            (64, 33), scales, ("none", "top_left"), ("", "bhmn", "bhmn:f32")
        )
    ]
    return cases + [
        Case(dtype, K=64, gain=g, mask=m) for g, m in itertools.product((0.0, 1e-3, 8.0), MASKS)
    ]


def _sizes(dtype: str, thin: bool) -> list[Case]:
    """Realistic sizes of one workload each: vision, diffusion, language, decoding, pair bias."""
    small = [
        Case(dtype, B=2, M=197, N=197, H=4, K=80),
        Case(dtype, B=1, M=256, N=77, H=8, K=40),
        Case(dtype, B=133, M=77, N=77, H=2, K=64, bias="b11n"),
        Case(dtype, B=4, M=1, N=1000, H=8, Hkv=2, K=128),
        Case(dtype, B=8, M=48, N=48, H=3, K=16, bias="1hmn"),
        Case(dtype, B=1, M=600, N=600, H=1, K=512),
    ]
    big = [
        Case(dtype, B=32, M=197, N=197, H=16, K=80),
        Case(dtype, B=2, M=4096, N=77, H=8, K=40),
        Case(dtype, B=2, M=1024, N=1024, H=8, K=160),
        Case(dtype, B=1, M=2048, N=2048, H=16, K=128, mask="top_left"),
        Case(dtype, B=1, M=1500, N=3000, H=4, K=256, mask="bottom_right"),
        Case(dtype, B=16, M=1, N=8192, H=32, Hkv=8, K=128),
        Case(dtype, B=100, M=512, N=512, H=3, K=16, bias="1hmn:f32"),
        Case(dtype, B=1, M=4096, N=4096, H=1, K=512),
    ]
    return small if thin else small + big


GROUPS: dict[str, Callable[[str, bool], list[Case]]] = {
    "head_dims": _head_dims,
    "edges": _edges,
    "masks": _masks,
    "biases": _biases,
    "layouts": _layouts,
    "scales": _scales,
    "sizes": _sizes,
}


def group(name: str, dtype: str, device: torch.device | str) -> list[Case]:
    return GROUPS[name](dtype, torch.device(device).type == "cpu")
