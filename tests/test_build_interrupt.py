"""A build that is interrupted leaves no compiler behind (build_tools/child_session.py); one whose
compiler spills where ours does not goes on for a user and stops for us."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_build import TOOLS, load

child_session = load(TOOLS / "child_session.py")
build_kernels = load(TOOLS / "build_kernels.py")

# A compiler that works in a child of its own and writes the object late, as nvcc does.
COMPILER = """#!/bin/bash
{trap}
for word in "$@"; do [ "$last" = -o ] && object=$word; last=$word; done
echo $$ >> {folder}/started
(sleep 3; echo late > "$object") &
echo $! >> {folder}/started
wait $!
"""


def compiler(folder: Path, trap: str = "") -> Path:
    path = folder / "compiler"
    path.write_text(COMPILER.format(folder=folder, trap=trap))
    path.chmod(0o755)
    return path


def started(folder: Path, count: int) -> list[int]:
    """Process ids of compilers, once there are so many."""
    path, give_up = folder / "started", time.monotonic() + 60
    while time.monotonic() < give_up:
        pids = path.read_text().split() if path.exists() else []
        if len(pids) >= count:
            return [int(pid) for pid in pids]
        time.sleep(0.05)
    raise AssertionError("the compiler did not start")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# Whoever starts this suite in the background may have it ignore SIGINT, and its children with it.
HEEDING = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_leaves_no_compiler(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("ninja", reason="a build needs ninja")
    objects = tmp_path / "o"
    command = [
        sys.executable, "-c", HEEDING, str(TOOLS / "build_kernels.py"), "--host-only", "--no-link",
        "--out", str(tmp_path / "m"), "--objects", str(objects),
    ]  # fmt: skip
    environment = dict(os.environ, CXX=str(compiler(tmp_path)), MEMEFF_CCACHE="0", MAX_JOBS="2")
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as build:
        started(tmp_path, 4 if len(os.sched_getaffinity(0)) > 1 else 2)
        build.send_signal(number)
        status = build.wait(timeout=30)
    assert status in ((-number, 130) if number == signal.SIGINT else (128 + number,))
    alive = [pid for pid in started(tmp_path, 1) if is_alive(pid)]
    assert alive == []
    time.sleep(3.5)  # as long as an orphan would take to write
    assert list(objects.glob("*.o")) == []


CALL = """
import sys
sys.path.insert(0, {tools!r})
import child_session
child_session.run({command!r}, patience_s=0.3)
"""


def test_a_compiler_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    """In a group of its own too, as ninja starts its children."""
    own_group = (
        f"set -m; {compiler(tmp_path, 'trap : INT TERM HUP')} -o {tmp_path / 'late.o'} & wait"
    )
    code = CALL.format(tools=str(TOOLS), command=["bash", "-c", own_group])
    with subprocess.Popen([sys.executable, "-c", code]) as build:
        pids = started(tmp_path, 2)
        assert os.getpgid(pids[0]) != os.getpgid(build.pid)
        build.terminate()
        assert build.wait(timeout=20) == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))
    assert not (tmp_path / "late.o").exists()


def test_a_killed_ninja_takes_its_compilers_along(tmp_path: Path) -> None:
    """Out of memory: the kernel ends ninja alone."""
    script = f"{compiler(tmp_path)} -o {tmp_path / 'late.o'} & wait $(sleep 0.5; kill -9 $$)"
    assert child_session.run(["bash", "-c", script], patience_s=0.3) == -signal.SIGKILL
    assert not any(map(is_alive, started(tmp_path, 2)))
    assert not (tmp_path / "late.o").exists()


def test_make_and_pip_in_between(tmp_path: Path) -> None:
    """pip_install.py is told alone, as by make: the pip and the build that it runs end too. Its
    interpreter is a script that builds, so that no pip can run here."""
    command = [str(compiler(tmp_path)), "-o", str(tmp_path / "late.o")]
    build = shlex.join([sys.executable, "-c", CALL.format(tools=str(TOOLS), command=command)])
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/bash\n{build}\nexit 0\n")  # a process in between, as pip is
    pip.chmod(0o755)
    main = f"""
import sys
sys.path.insert(0, {str(TOOLS)!r})
import pip_install
sys.executable, sys.argv = {str(pip)!r}, ["pip_install.py"]
sys.exit(pip_install.main())
"""
    with subprocess.Popen([sys.executable, "-c", main]) as process:
        pids = started(tmp_path, 2)
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))
    assert not (tmp_path / "late.o").exists()


def test_the_exit_status_is_the_commands(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert child_session.run(["true"]) == 0
    assert child_session.run(["bash", "-c", "exit 7"]) == 7
    assert child_session.run(["bash", "-c", "exit $NUMBER"], {**os.environ, "NUMBER": "3"}) == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_spills_stop_our_builds_not_those_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEMEFF_STRICT", raising=False)
    assert not build_kernels.options_for("80").strict
    monkeypatch.setenv("MEMEFF_STRICT", "1")
    assert build_kernels.options_for("80").strict
    monkeypatch.setattr(build_kernels, "check_stats", lambda *_: ["row_a for sm_80 spills 4 bytes"])
    monkeypatch.setattr(build_kernels.child_session, "run", lambda *_: 0)
    for strict in (False, True):
        options = build_kernels.Options(
            out=tmp_path / "out", objects=tmp_path / "objects", host_only=True, strict=strict
        )
        if strict:
            with pytest.raises(build_kernels.BuildError, match="1 faults"):
                build_kernels.build(options)
        else:
            assert build_kernels.build(options) is not None
        assert "fault: row_a for sm_80 spills 4 bytes" in capsys.readouterr().out
