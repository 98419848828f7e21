"""Timing on the GPU: CUDA events, L2 flushed before each call, backends interleaved, medians."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
FLUSH_BYTES = (
    256 << 20
)  # five times the H200's L2; long enough (65 us) for the host to queue the call behind it
HEAD_START_CYCLES = 400_000  # about 0.2 ms of an idle GPU while the host queues a round
FLUSH_US, CYCLES_PER_US = 60, 2000  # what the flush hides of the host's work; clock of the newest
MOST_HIDDEN_US = 2000
ROUNDS = 4  # each backend is timed in this many separate turns
MIN_REPS, MAX_REPS = 4, 100  # calls a backend and cell
ESTIMATE_CALLS = 2


class Progress:
    """One line on stderr: done/total, time, what runs now; plain lines where it is no terminal."""

    def __init__(self, total: int, label: str = "") -> None:
        self.total, self.label, self.done = total, label, 0
        self.start = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.shown = -1

    def step(self, text: str, by: int = 1) -> None:
        self.done += by
        elapsed = time.monotonic() - self.start
        share = self.done / max(1, self.total)
        if self.terminal:
            filled = int(24 * share)
            bar = "#" * filled + "." * (24 - filled)
            left = elapsed * (1 - share) / max(share, 1e-9)
            clock = f"{elapsed:.0f} s, {left:.0f} s left"
            line = f"{self.label} [{bar}] {self.done}/{self.total} {clock}  {text}"
            sys.stderr.write("\r\x1b[2K" + line[:150])
            if self.done >= self.total:
                sys.stderr.write("\n")
            sys.stderr.flush()
        elif int(10 * share) != self.shown:  # a log: one line for each tenth
            self.shown = int(10 * share)
            print(
                f"{self.label} {self.done}/{self.total} {elapsed:.0f} s  {text}",
                file=sys.stderr,
                flush=True,
            )

    def clear(self) -> None:
        """Takes the bar away before something else is printed; the next step draws it again."""
        if self.terminal and self.done < self.total:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


class Timer:
    """Times several callables on the current device, in turns."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds  # of GPU time for each callable of a cell
        self.buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def warm_up(self, seconds: float = 0.3) -> None:
        """Brings the clocks up."""
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(8):
                a @ a
            torch.cuda.synchronize()

    def _calls(
        self, call: Callable[[], object], count: int, hidden_us: float
    ) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """hidden_us: how long the GPU waits before each call, so that the host is ahead of it."""
        torch.cuda._sleep(HEAD_START_CYCLES)
        pairs = []
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.buffer.zero_()
            if hidden_us > 0:
                torch.cuda._sleep(int(hidden_us * CYCLES_PER_US))
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        return pairs

    def medians(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Median milliseconds of each callable. Each has run before: nothing here warms it up."""
        estimates, hidden = [], []
        for call in calls:
            hidden.append(_to_hide_us(call))
            pairs = self._calls(call, ESTIMATE_CALLS, hidden[-1])
            torch.cuda.synchronize()
            estimates.append(min(b.elapsed_time(e) for b, e in pairs))
        reps = [
            min(MAX_REPS, max(MIN_REPS, int(self.milliseconds / max(e, 1e-3)))) for e in estimates
        ]
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        for turn in range(ROUNDS):
            for i, call in enumerate(calls):
                count = reps[i] * (turn + 1) // ROUNDS - reps[i] * turn // ROUNDS
                events[i] += self._calls(call, count, hidden[i])
        torch.cuda.synchronize()
        return [statistics.median(b.elapsed_time(e) for b, e in pairs) for pairs in events]


def _to_hide_us(call: Callable[[], object]) -> float:
    """How much longer than the flush the host takes to queue a call (a backward call passes
    autograd's thread), with a margin. Else short kernels would be timed by the host's pace."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    host_us = (time.perf_counter() - begin) * 1e6
    torch.cuda.synchronize()
    return min(MOST_HIDDEN_US, max(0.0, 1.5 * host_us - FLUSH_US))


def with_peak_mib(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and the MiB that it allocates at its peak on top of what there was: its
    result included, for a backward call not the inputs, output and log-sum-exp that it reads."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20
