"""`python -m memeff_attn.xformers.info` (and `python -m xformers.info`): which operators of
xFormers' names run here, on what, and why the others do not."""

from __future__ import annotations

import torch

from .. import info as memeff_info
from ..dispatch import cuda_missing
from . import __version__
from .ops import common
from .ops import fmha as fmha  # registers the attention operators


def get_features_status() -> dict[str, str]:
    """{"category.NAME": "available" or why not}, as xFormers' function of this name."""
    status = {}
    for op in common.OPERATORS_REGISTRY:
        text = "available" if op.is_available() else op.unavailable_reason()
        status[f"{op.OPERATOR_CATEGORY}.{op.NAME}"] = text
    return status


def print_info() -> None:
    """The report."""
    print(f"xFormers {__version__}: memeff_attn's kernels behind xFormers' names")
    rows = get_features_status()
    rows["pytorch.version"] = torch.__version__
    rows["pytorch.cuda"] = "available" if torch.cuda.is_available() else "not available"
    rows["memeff_attn.cuda"] = cuda_missing() or "available"
    for name, text in rows.items():
        print(f"{name + ':':<50} {text}")
    print()
    memeff_info.main([])  # not what the calling program was given


if __name__ == "__main__":
    print_info()
