"""Biases of the backward cases of test_variants.py: broadcasts, layouts, sums over many batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from backward_cases import BackwardCase
from cases import MASKS


def biased_shapes(
    case: Callable[..., BackwardCase], edge: tuple[int, int], k: int, kv: int, drop: float
) -> list[BackwardCase]:
    """Every broadcast of a bias with its gradient, its layouts, and sums over many batches."""
    broadcasts = ["".join(p) for p in itertools.product("b1", "h1", "m1", "n1")]
    found = [
        case(M=edge[0], N=edge[1], K=k, Kv=kv, bias=b + d, p=p)
        for b, (d, p) in itertools.product(broadcasts, (("", 0.0), (":f32", drop)))
    ]
    found += [
        case(M=70, N=77, K=k, Kv=kv, bias="bhmn" + d + s, wants=w)
        for d, s, w in itertools.product(
            ("", ":f32"), (":padded", ":transposed", ":offset", ":expanded"), ("b", "qkvb")
        )
    ]
    many = ("1hmn", "11mn", "111n", "b1mn")
    return found + [case(B=40, M=33, N=70, H=3, K=k, Kv=kv, bias=b, mask="none") for b in many]


def aligned_shapes(
    case: Callable[..., BackwardCase], edge: tuple[int, int], k: int, kv: int, drop: float
) -> list[BackwardCase]:
    """The same for rows that take aligned biases alone: every broadcast but along the keys, whose
    stride is 1; gradients whose rows are and are not aligned."""
    broadcasts = ["".join(x) + "n:rows8" for x in itertools.product("b1", "h1", "m1")]
    found = [
        case(M=edge[0], N=n, K=k, Kv=kv, bias=b, p=p, wants=w)
        for b in broadcasts
        for n, p, w in ((edge[1], 0.0, "qkvb"), (edge[1] // 8 * 8 + 8, drop, "b"))
    ]
    found += [
        case(M=200, N=n, H=4, Hkv=h, K=k, Kv=kv, bias="bhmn:rows8", mask=m)
        for n, h, m in itertools.product((77, 304), (4, 2), MASKS)
    ]
    many = ("1hmn", "11mn", "b1mn")
    return found + [
        case(B=40, M=33, N=70, H=3, K=k, Kv=kv, bias=f"{b}:rows8", mask="none") for b in many
    ]
