"""xFormers' interface over memeff_attn: `import memeff_attn.xformers.ops as xops`.

Names, signatures, layouts, operator tuples, the padded log-sum-exp and error classes are those of
xFormers 0.0.35; the masks are memeff_attn.attn_bias. `compat/xformers` makes the same modules
importable as `xformers`. docs/migrating.md says what differs.
"""

from __future__ import annotations

from ..dispatch import cuda_missing
from .version import __version__ as __version__

# What programs read to decide whether xFormers serves their GPU.
_has_cpp_library: bool = not cuda_missing()
_is_opensource: bool = True


def _is_triton_available() -> bool:
    """No kernel here needs Triton."""
    return False
