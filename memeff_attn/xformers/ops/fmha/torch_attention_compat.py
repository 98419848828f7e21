"""Whether PyTorch's own attention kernels could serve xFormers' operators: they do not here."""

from __future__ import annotations


def is_pt_cutlass_compatible(force: bool = False) -> bool:
    """False: `cutlass` runs memeff_attn's kernels, whatever PyTorch has. ImportError with force."""
    if force:
        raise ImportError("memeff_attn runs its own kernels and none of PyTorch's")
    return False


def ensure_pt_flash_ok() -> None:
    """ImportError: PyTorch's flash kernel is not used."""
    raise ImportError("memeff_attn runs its own kernels and none of PyTorch's")
