"""`pip install -v ARGS`, showing only what the build of _C says, and all of it after a failure.

pip hides a build's output, and with -v drowns it in its own. Nor does it end the build when it is
ended itself: so it gets a session, all of which hears of it.
"""

from __future__ import annotations

import collections
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import child_session

SHOWN = re.compile(
    r"^\s*(memeff_attn:|memeff_attn _C:|\[\d+/\d+ |slowest:|not built|note:|fault:|nvcc )"
)
PATIENCE_S = 4 * child_session.PATIENCE_S  # for the build to end its compilers first
# What pip says where it reaches no package index.
_OFFLINE = re.compile(
    r"NewConnectionError|Failed to establish a new connection|ConnectTimeoutError|NameResolution|"
    r"No matching distribution found for (setuptools|wheel|pybind11|ninja|torch|pytest|nvidia-\S+)"
)
OFFLINE_HINT = (
    "pip reached no package index. Without one: put setuptools>=77, wheel, pybind11 and ninja (for "
    "GPUs CUDA and CUTLASS too, named by CUDA_HOME and CUTLASS_HOME) where this Python finds them "
    'and use `pip install --no-build-isolation --no-deps .`; CONTRIBUTING.md, "Offline"'
)


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs a pip; its status and the last lines it printed. Prints only those of SHOWN."""
    last: collections.deque[str] = collections.deque(maxlen=200)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=env,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line)
                if SHOWN.match(line):
                    print(line.strip(), flush=True)
        except BaseException:
            child_session.end_session(process, PATIENCE_S)
            raise
    return process.returncode, "".join(last)


def failure_text(printed: str) -> str:
    """What pip printed, followed by the way out where it was alone."""
    return f"{printed}\n{OFFLINE_HINT}" if _OFFLINE.search(printed) else printed


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end this program by an exception, so that `run` ends pip's session."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def main() -> int:
    end_on_signals()
    command = [sys.executable, "-m", "pip", "install", "-v", "--disable-pip-version-check"]
    status, printed = run(command + sys.argv[1:])
    if status != 0:
        print(failure_text(printed), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
