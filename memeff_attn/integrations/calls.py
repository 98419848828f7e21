"""How often a program's attention was ours: the counts of one integration."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

# What tracing makes of tensors. Dynamo puts a whole function of torch's that calls attention
# (multi_head_attention_forward) into its graph; the passes that follow run that function on these,
# and is_compiling() is False then, at least in torch 2.11.
TRACED = (FakeTensor, FunctionalTensor)


class Calls(NamedTuple):
    """What became of the attention calls that reached an integration.

    served: calls that memory_efficient_attention computed.
    refused: calls that went elsewhere, or raised.
    traced: calls that torch.compile met while it traced, once a trace and not once a run; a trace
        that starts over, or that a later pass repeats, counts again. They are in neither of the
        other two.
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

    def add(self, query: Tensor, refusal: str = "") -> None:
        """One call, with this query: served, or refused for that reason."""
        if torch.compiler.is_compiling() or type(query) in TRACED:
            self._add_traced(refusal)
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

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _add_traced(self, refusal: str) -> bool:
        """Runs while Dynamo traces and leaves nothing in the graph: a count kept inside one would
        be a number that Dynamo guards on, and compiles again for. A method, because Dynamo takes
        nothing but constants as the arguments of such a function."""
        with self._lock:
            self._traced += 1
            self._last = refusal or self._last
        return True
