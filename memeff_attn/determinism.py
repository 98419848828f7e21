"""When gradients must have the same bits in every run."""

from __future__ import annotations

import torch


def fixed_order(variant: str) -> bool:
    """Whether gradients must be added up in a fixed order: in torch's deterministic mode, but not
    for a kernel asked for by name where that mode only warns."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    by_name = bool(variant) and not variant.startswith("family:")
    return not (by_name and torch.is_deterministic_algorithms_warn_only_enabled())
