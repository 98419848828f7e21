"""`pip install -v ARGS`, showing only what the build of _C says, and all of it after a failure.

pip hides a build's output, and with -v drowns it in its own.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys

SHOWN = re.compile(
    r"^\s*(memeff_attn:|memeff_attn _C:|\[\d+/\d+ |slowest:|not built|note:|fault:|nvcc )"
)


def main() -> int:
    command = [sys.executable, "-m", "pip", "install", "-v", "--disable-pip-version-check"]
    last: collections.deque[str] = collections.deque(maxlen=200)
    with subprocess.Popen(
        command + sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            if SHOWN.match(line):
                print(line.strip(), flush=True)
    if process.returncode != 0:
        print("".join(last), file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
