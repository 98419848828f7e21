"""Whether the torch beside us is new enough; imported before anything that needs it to be."""

from __future__ import annotations

import re

import torch

OLDEST = (2, 4)


def ensure_new_enough(version: str) -> None:
    """ImportError, with the way out, where torch is older than OLDEST."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:  # "main", "git": taken as new
        return
    oldest = ".".join(map(str, OLDEST))
    raise ImportError(
        f"memeff_attn needs torch {oldest} or newer, this Python has torch {version} "
        f"({torch.__file__}). Update it: pip install 'torch>={oldest}'"
    )


ensure_new_enough(str(torch.__version__))
