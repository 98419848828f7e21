"""Finds nvcc, CUTLASS and the GPUs to build for. Needs nothing but Python."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class BuildError(Exception):
    """A build that cannot be: the message says what is missing and what to do."""


@dataclasses.dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    root: Path  # of the toolkit: bin/, include/ and so on lie here
    version: tuple[int, int]
    include_dirs: tuple[str, ...]  # for host files that include cuda_runtime_api.h
    library_dirs: tuple[str, ...]  # where libcudart_static.a is
    targets: frozenset[int]  # compute capabilities that this nvcc can make code for

    @property
    def version_text(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def _site_packages() -> list[Path]:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
    return [Path(p) for p in sorted(p for p in paths if p and Path(p).is_dir())]


def _pypi_nvcc() -> list[Path]:
    """nvcc of the PyPI packages, one tree nvidia/cu13 (those of CUDA 12 hold no nvcc)."""
    found: list[Path] = []
    for site in _site_packages():
        found += sorted((site / "nvidia").glob("cu*/bin/nvcc"), reverse=True)
    return found


def _nvcc_candidates() -> list[Path]:
    found: list[Path] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            nvcc = Path(os.environ[variable]) / "bin" / "nvcc"
            if not nvcc.exists():
                raise BuildError(
                    f"{variable}={os.environ[variable]} has no bin/nvcc: correct it or unset it"
                )
            found.append(nvcc)
    on_path = shutil.which("nvcc")
    found += [Path(on_path)] if on_path else []
    found += [p for p in [Path("/usr/local/cuda/bin/nvcc")] if p.exists()]
    return found + _pypi_nvcc()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(
            f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[:400]}"
        )
    return done.stdout + done.stderr


def find_toolkit() -> Toolkit | None:
    """First nvcc of CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, PyPI packages; else None."""
    if os.environ.get("MEMEFF_HOST_ONLY", "0") not in ("", "0"):
        return None
    candidates = _nvcc_candidates()
    return read_toolkit(candidates[0]) if candidates else None


def read_toolkit(nvcc: Path) -> Toolkit:
    if not os.access(nvcc, os.X_OK):
        nvcc.chmod(0o755)  # wheels made without the executable bit
    version = re.search(r"release (\d+)\.(\d+)", _run([str(nvcc), "--version"]))
    if version is None:
        raise BuildError(f"{nvcc} --version names no release")
    # What nvcc itself passes on is right for every layout of a toolkit, wrappers included.
    dry = _run([str(nvcc), "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull])
    lines = "\n".join(
        line for line in dry.splitlines() if re.match(r"#\$ (INCLUDES|LIBRARIES)=", line)
    )
    home = re.search(r"^#\$ _HERE_=(.*)$", dry, flags=re.MULTILINE)
    root = Path(home.group(1)).parent if home else nvcc.resolve().parent.parent
    libraries = [*re.findall(r'"-L([^"]+)"', lines), str(root / "lib64"), str(root / "lib")]
    codes = re.findall(r"sm_(\d+)", _run([str(nvcc), "--list-gpu-code"]))
    return Toolkit(
        nvcc=nvcc,
        root=root,
        version=(int(version.group(1)), int(version.group(2))),
        include_dirs=tuple(os.path.normpath(p) for p in re.findall(r'"-I([^"]+)"', lines)),
        library_dirs=tuple(
            dict.fromkeys(os.path.normpath(p) for p in libraries if Path(p).is_dir())
        ),
        targets=frozenset(int(c) for c in codes),
    )


def cuda_for(arch: int) -> str:
    """Which CUDA can make code for a compute capability."""
    if arch < 75:
        return "CUDA 12.9 or older"
    if arch >= 120 or arch == 103:
        return "CUDA 12.9 or newer"
    if arch >= 100:
        return "CUDA 12.8 or newer"
    return "CUDA 11.8 or newer"


def find_cutlass() -> Path:
    """The include folder: CUTLASS_HOME, third_party/cutlass, else the nvidia-cutlass package."""
    roots: list[Path] = []
    if os.environ.get("CUTLASS_HOME"):
        roots.append(Path(os.environ["CUTLASS_HOME"]))
    else:
        roots.append(ROOT / "third_party" / "cutlass")
        roots += [site / "cutlass_library" / "source" for site in _site_packages()]
    for root in roots:
        for include in (root / "include", root):
            if (include / "cutlass" / "cutlass.h").exists():
                return include
    tried = os.environ.get("CUTLASS_HOME") or "CUTLASS_HOME, third_party/cutlass, site-packages"
    raise BuildError(
        f"no CUTLASS headers (looked in {tried}): set CUTLASS_HOME, clone CUTLASS 4.2.0 into "
        "third_party/cutlass, or pip install nvidia-cutlass==4.2.0.0"
    )


def _from_libcuda() -> list[int]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    archs = []
    for index in range(count.value):
        device, value, parts = ctypes.c_int(), ctypes.c_int(), []
        if cuda.cuDeviceGet(ctypes.byref(device), index) != 0:
            continue
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            parts.append(value.value)
        archs.append(10 * parts[0] + parts[1])
    return sorted(set(archs))


def _from_nvidia_smi() -> list[int]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return []
    return sorted(
        {int(a + b) for a, b in re.findall(r"^\s*(\d+)\.(\d)\s*$", done.stdout, flags=re.MULTILINE)}
    )


def visible_gpus() -> list[int]:
    """Compute capabilities of the GPUs this process may use."""
    return _from_libcuda() or _from_nvidia_smi()


def main() -> int:
    """`cuda.py nvcc` and `cuda.py cutlass` print where the build finds them, or an empty line."""
    try:
        if sys.argv[1:] == ["nvcc"]:
            toolkit = find_toolkit()
            print(toolkit.nvcc if toolkit else "")
        elif sys.argv[1:] == ["cutlass"]:
            print(find_cutlass())
        else:
            print("usage: cuda.py nvcc | cutlass", file=sys.stderr)
            return 2
    except BuildError as error:
        print(error, file=sys.stderr)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
