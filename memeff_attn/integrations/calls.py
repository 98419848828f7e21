"""How often a program's attention was ours: the counts of one integration."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch


class Calls(NamedTuple):
    """What became of the attention calls that reached an integration.

    served: calls that memory_efficient_attention computed.
    refused: calls that went elsewhere, or raised.
    traced: calls that torch.compile met while it traced, each once a trace and not once a run; a
        trace that starts over counts again. They are in neither of the other two.
    last_refusal: why the last refused call was, traced ones included; empty where none was.
    """

    served: int = 0
    refused: int = 0
    traced: int = 0
    last_refusal: str = ""


class Counter:
    """Adds up Calls; any thread may call it (the backward pass recomputes checkpoints in others),
    and so may code that torch.compile traces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served = self._refused = self._traced = 0
        self._last = ""

    def add(self, refusal: str = "") -> None:
        """One call: served, or refused for that reason."""
        if torch.compiler.is_compiling():
            _add_traced(self, refusal)
            return
        with self._lock:
            if refusal:
                self._refused += 1
                self._last = refusal
            else:
                self._served += 1

    def read(self, reset: bool = False) -> Calls:
        with self._lock:
            found = Calls(self._served, self._refused, self._traced, self._last)
            if reset:
                self._served = self._refused = self._traced = 0
                self._last = ""
        return found

    def _add_traced(self, refusal: str) -> None:
        with self._lock:
            self._traced += 1
            self._last = refusal or self._last


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _add_traced(counter: Counter, refusal: str) -> bool:
    """Runs while Dynamo traces and leaves nothing in the graph: a count kept inside one would be a
    number that Dynamo guards on, and compiles again for."""
    counter._add_traced(refusal)
    return True
