"""Decides what `pip install .` builds: for which GPUs, with which nvcc, or host-only."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cuda
from cuda import ROOT, BuildError

CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
# nvcc from PyPI: the parts fit together only where all are of one X.Y. 13.0 has sm_75 and newer.
PYPI_CUDA = (13, 0)
GET_NVCC = (
    "install a CUDA toolkit and name it by CUDA_HOME (build_tools/cuda124.sh FOLDER puts one "
    "together on Debian, without root)"
)
PYPI_PARTS = ("cuda-nvcc", "cuda-crt", "cuda-runtime", "cuda-cccl", "nvvm")


@dataclasses.dataclass(frozen=True)
class Wanted:
    archs: str  # as MEMEFF_CUDA_ARCHS; empty: host-only
    source: str  # who asked for them


def version() -> str:
    """memeff_attn.__version__, and where MEMEFF_LOCAL_VERSION is set (wheels.py), "+" and that."""
    text = (ROOT / "memeff_attn" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"', text, flags=re.MULTILINE)
    assert match is not None
    local = os.environ.get("MEMEFF_LOCAL_VERSION", "")
    return f"{match[1]}+{local}" if local else match[1]


def wanted_archs() -> Wanted:
    """MEMEFF_CUDA_ARCHS, TORCH_CUDA_ARCH_LIST, the visible GPUs, in this order."""
    if os.environ.get("MEMEFF_HOST_ONLY", "0") not in ("", "0"):
        return Wanted("", "MEMEFF_HOST_ONLY")
    for variable in ("MEMEFF_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if os.environ.get(variable, "").strip():
            return Wanted(os.environ[variable], variable)
    gpus = cuda.visible_gpus()
    return Wanted(",".join(str(g) for g in gpus), "the visible GPUs" if gpus else "no GPU")


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver runs."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def pypi_nvcc_requirements() -> list[str]:
    major, minor = PYPI_CUDA
    return [f"nvidia-{part}=={major}.{minor}.*" for part in PYPI_PARTS]


def pypi_nvcc_serves(wanted: Wanted) -> bool:
    """Whether code of the PyPI nvcc would run here (unknown counts as yes)."""
    driver = driver_cuda()
    old = [g for g in cuda.visible_gpus() if g < 75]
    return (
        not old
        and (driver is None or driver >= PYPI_CUDA)
        and wanted.source != "TORCH_CUDA_ARCH_LIST"
    )


def build_requirements() -> list[str]:
    """What pip must bring for this build beyond pyproject.toml's list."""
    wanted = wanted_archs()
    if not wanted.archs:
        return []
    needs: list[str] = []
    if cuda.find_toolkit() is None:
        if not pypi_nvcc_serves(wanted):
            return []
        needs += pypi_nvcc_requirements()
    try:
        cuda.find_cutlass()
    except BuildError:
        needs.append(CUTLASS_REQUIREMENT)
    return needs


def decide() -> tuple[str, str]:
    """(archs, one line that says what is built and why); no archs: host-only."""
    wanted = wanted_archs()
    if not wanted.archs:
        why = {
            "MEMEFF_HOST_ONLY": "MEMEFF_HOST_ONLY is set",
            "no GPU": "no GPU is visible and MEMEFF_CUDA_ARCHS is not set",
        }
        return "", f"host-only build, no GPU code: {why[wanted.source]}"
    toolkit = cuda.find_toolkit()
    if toolkit is None:
        missing = "no nvcc (CUDA_HOME, PATH, /usr/local/cuda, PyPI packages)"
        if wanted.source == "MEMEFF_CUDA_ARCHS":
            raise BuildError(
                f"MEMEFF_CUDA_ARCHS={wanted.archs} but {missing}: {GET_NVCC}, or unset "
                "MEMEFF_CUDA_ARCHS for a host-only build"
            )
        return (
            "",
            f"host-only build, no GPU code: {missing}, asked by {wanted.source} for "
            f"{wanted.archs}. For GPU code {GET_NVCC}",
        )
    if wanted.source == "the visible GPUs":
        cannot = f"the visible GPU is sm_{{}}, which nvcc {toolkit.version_text} cannot target"
        for gpu in cuda.visible_gpus():
            # PTX of the newest known arch serves a GPU that is newer than this nvcc.
            if gpu < min(toolkit.targets):
                raise BuildError(f"{cannot.format(gpu)}: use {cuda.cuda_for(gpu)} (CUDA_HOME)")
            if gpu not in toolkit.targets and gpu > max(toolkit.targets):
                raise BuildError(
                    f"{cannot.format(gpu)}: use {cuda.cuda_for(gpu)} (CUDA_HOME), "
                    f"or MEMEFF_CUDA_ARCHS={max(toolkit.targets)} to run its PTX"
                )
    return wanted.archs, f"CUDA {toolkit.version_text} build for {wanted.archs} ({wanted.source})"


if __name__ == "__main__":  # config.py --pypi-nvcc: the requirements that make an nvcc
    print(" ".join(pypi_nvcc_requirements()))
