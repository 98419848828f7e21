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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import child_session

SHOWN = re.compile(
    r"^\s*(memeff_attn:|memeff_attn _C:|\[\d+/\d+ |slowest:|not built|note:|fault:|nvcc )"
)
PATIENCE_S = 4 * child_session.PATIENCE_S  # for the build to end its compilers first


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    command = [sys.executable, "-m", "pip", "install", "-v", "--disable-pip-version-check"]
    last: collections.deque[str] = collections.deque(maxlen=200)
    with subprocess.Popen(
        command + sys.argv[1:],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
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
    if process.returncode != 0:
        print("".join(last), file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
