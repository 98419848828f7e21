"""torch.ops.xformers._cutlass_rand_uniform: the numbers behind dropout's mask, as xFormers' tests
of 2024 asked its CUTLASS operator for them. Nothing registers it by itself: xFormers has one too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import dropout

_SCHEMA = "_cutlass_rand_uniform(float p, Tensor out) -> Tensor"


def rand_uniform(p: float, out: Tensor) -> Tensor:
    """u in (0, 1) of every weight of the next call: it is kept where u > p.

    Shapes: out [B, H, M, N], whose shape, dtype and device count and not its contents.
    Numerics: u = (number + 1/2) / 65536 with dropout's 16-bit number, so that u > p exactly where
        the number is not below the threshold, p in 65536ths rounded. {seed, offset} are drawn from
        torch's generator, as the call would.
    """
    batch, heads, queries, keys = out.shape
    seed = dropout.new_seed(out.device)
    every = torch.arange(batch * heads, device=out.device).view(batch, heads)
    numbers = dropout.dropout_numbers(seed, every, 0, queries, keys)
    return ((numbers + 0.5) / dropout.CELLS).to(out.dtype)


@functools.cache
def register() -> Any:
    """Puts it into torch.ops.xformers, for as long as the process runs."""
    make: Any = torch.library.Library
    library = make("xformers", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("_cutlass_rand_uniform", rand_uniform, "CompositeExplicitAutograd")
    return library
