"""Runs a command whose processes all end with the call, however the call ends.

An nvcc that outlives an interrupted build goes on writing objects, minutes later, which the next
build then takes for its own. ninja gives each compiler a process group, so that killing one group
reaches none of them; a session holds them all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 5.0  # for ninja to hand SIGTERM on and to remove what is half written
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S
) -> int:
    """The exit status. An interrupt (and SIGTERM or SIGHUP, where the main thread calls) first
    ends the command, then this program as the signal would."""
    received: list[int] = []
    with _recorded(received):
        process = subprocess.Popen(command, env=env, start_new_session=True)
        try:
            while not received:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
                    break
        finally:
            # Negative: killed, so that its children may still run.
            if process.returncode is None or process.returncode < 0:
                end_session(process, patience_s)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        raise SystemExit(128 + received[0])
    return process.returncode


@contextlib.contextmanager
def _recorded(received: list[int]) -> Iterator[None]:
    """Inside, signals are noted and raise nothing: an exception between the start of the process
    and the `try` would leave it behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_session(leader: subprocess.Popen[Any], patience_s: float) -> None:
    """SIGTERM to the leader's group, SIGKILL to what is left of the session after `patience_s`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
    kill_from = time.monotonic() + patience_s
    while members := _members(leader.pid):
        now = time.monotonic()
        if now > kill_from + 10:  # a process that even SIGKILL does not end waits in the kernel
            break
        for pid in members if now > kill_from else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()
        time.sleep(0.05)
    leader.wait()


def _members(session: int) -> list[int]:
    """The live processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        # pid (name) state parent group session; the name may hold spaces and parentheses.
        state, _, _, its_session = text.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state not in "ZX":
            found.append(int(entry.name))
    return found
