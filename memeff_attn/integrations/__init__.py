"""Our attention under programs that call somebody else's: torch's SDPA and transformers. Nothing
here acts before it is called."""

from .calls import Calls
from .sdpa import activate_sdpa, restore_sdpa, sdpa_calls
from .transformers import register_transformers, transformers_calls

__all__ = [
    "Calls",
    "activate_sdpa",
    "register_transformers",
    "restore_sdpa",
    "sdpa_calls",
    "transformers_calls",
]
