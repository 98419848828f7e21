"""Whether the torch beside us is new enough; imported before anything that needs it to be."""

from __future__ import annotations

import re

import torch

OLDEST = (2, 4)


def at_least(major: int, minor: int, version: str = str(torch.__version__)) -> bool:
    """Whether torch is of this release or newer; a version without numbers is taken as new."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is None or (int(found[1]), int(found[2])) >= (major, minor)


def ensure_new_enough(version: str) -> None:
    """ImportError, with the way out, where torch is older than OLDEST."""
    if at_least(*OLDEST, version):
        return
    oldest = ".".join(map(str, OLDEST))
    raise ImportError(
        f"memeff_attn needs torch {oldest} or newer, this Python has torch {version} "
        f"({torch.__file__}). Update it: pip install 'torch>={oldest}'"
    )


ensure_new_enough(str(torch.__version__))
