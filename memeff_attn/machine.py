"""What stands between this machine and a fast call: torch, driver, GPUs, what the build has code
for. Each finding that is bad says the way out. `python -m memeff_attn.info --check` prints them."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import dispatch
from .cuda_errors import way_out

Version = tuple[int, int]  # of CUDA
# Oldest Linux driver that runs programs of a CUDA major version (machine code, not PTX of a newer
# minor version): CUDA Compatibility guide, "Minor Version Compatibility".
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Finding(NamedTuple):
    ok: bool
    what: str  # one line
    way_out: str = ""  # where not ok


class Gpu(NamedTuple):
    number: int
    name: str
    sm: int  # compute capability as a number: 70, 90


@dataclass(frozen=True)
class Torch:
    version: str
    cuda: str | None  # that it was built with; None: a CPU build
    gpus: int  # that it can use
    archs: tuple[str, ...] = ()  # "sm_80", "compute_90"
    problem: str = ""  # its own words where it has CUDA and uses no GPU


@dataclass(frozen=True)
class Driver:
    cuda: Version | None  # newest CUDA it runs; None: there is no libcuda
    release: str = ""  # "535.104.05", where known
    gpus: tuple[Gpu, ...] = ()  # visible to this process
    problem: str = ""  # why it shows no GPU, where it fails
    hardware: bool = False  # the kernel's module is loaded: an NVIDIA GPU is in the machine


# ---- facts ----


def torch_facts() -> Torch:
    cuda = torch.version.cuda
    if cuda is None:
        return Torch(str(torch.__version__), None, 0)
    count, problem = 0, ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    except (AssertionError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
    archs = tuple(torch.cuda.get_arch_list()) if count else ()
    return Torch(str(torch.__version__), str(cuda), count, archs, problem)


def driver_facts() -> Driver:
    """From libcuda itself, so that an old driver can be asked too."""
    release = _driver_release()
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(None, release, hardware=bool(release))
    number = ctypes.c_int()
    libcuda.cuDriverGetVersion(ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
    if code := libcuda.cuInit(0):
        problem = f"cuInit fails with {_error_name(libcuda, code)}"
        return Driver(cuda, release, problem=problem, hardware=bool(release))
    return Driver(cuda, release, tuple(_gpus(libcuda)), hardware=bool(release))


def _driver_release() -> str:
    """Of the kernel's module, which containers see too."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "of an unknown release"


def _error_name(libcuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    libcuda.cuGetErrorName(code, ctypes.byref(name))
    return f"{(name.value or b'error').decode()} ({code})"


def _gpus(libcuda: Any) -> Iterator[Gpu]:
    count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    libcuda.cuDeviceGetCount(ctypes.byref(count))
    name = ctypes.create_string_buffer(256)
    for index in range(count.value):
        if libcuda.cuDeviceGet(ctypes.byref(device), index):
            continue
        libcuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in (_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR):
            libcuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        yield Gpu(index, name.value.decode(), 10 * capability[0] + capability[1])


def version_of(text: str) -> Version | None:
    """(12, 4) of "12.4"; None of "none"."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


# ---- findings ----


def check_torch(facts: Torch, driver: Driver) -> Finding:
    """Version and CUDA of torch."""
    what = f"torch {facts.version}, Python {platform.python_version()}"
    if not driver.gpus:
        return Finding(True, what)
    if facts.cuda is None:
        return Finding(
            False,
            f"{what}: a build for the CPU, and a GPU is here",
            "install a torch with CUDA (on Linux `pip install torch` brings one)",
        )
    if facts.gpus == 0:
        reason = facts.problem or "torch.cuda.device_count() is 0"
        return Finding(
            False,
            f"{what} with CUDA {facts.cuda} uses no GPU: {reason}",
            f"update the driver, or install a torch built with CUDA {_text(driver.cuda)} or older",
        )
    return Finding(True, f"{what}, CUDA {facts.cuda}, {facts.gpus} GPUs")


def check_compiled(module: ModuleType | None, reason: str, driver: Driver) -> Finding:
    """Whether the compiled part is there and holds GPU code."""
    how = (
        "pip install . with nvcc in reach (CUDA_HOME) and MEMEFF_CUDA_ARCHS naming the GPU, or a "
        'wheel; CONTRIBUTING.md, "Building"'
    )
    if module is None:
        return Finding(not driver.gpus, f"compiled part: none. {reason}", how)
    if not module.is_cuda_build:
        return Finding(not driver.gpus, "compiled part: host-only, no GPU code", how)
    archs = " ".join(module.built_archs())
    return Finding(True, f"compiled part: CUDA {module.cuda_version()} for {archs}")


def check_driver(driver: Driver, build: Version | None) -> Finding:
    """Whether there is a driver that runs what was built (None: nothing was)."""
    release = f" {driver.release}" if driver.release else ""
    if driver.cuda is None:
        if not driver.hardware:
            return Finding(True, "driver: none, no GPU here: calls run on the CPU")
        return Finding(
            False,
            f"driver{release} is loaded, but libcuda.so.1 is not found",
            "in a container: start it with --gpus all (NVIDIA container toolkit); else install "
            "the driver's user libraries (Debian: libcuda1)",
        )
    what = f"driver{release} runs CUDA {_text(driver.cuda)}"
    if driver.problem:
        return Finding(False, f"{what}: {driver.problem}", _init_way_out(driver.problem))
    if build is not None and driver.cuda[0] < build[0]:
        oldest = OLDEST_DRIVER.get(build[0], f"one for CUDA {build[0]}")
        return Finding(
            False,
            f"{what}, this build's CUDA {_text(build)} needs driver {oldest} or newer",
            f"update the driver, or build with a CUDA {driver.cuda[0]}.x: CUDA_HOME=... "
            "pip install .",
        )
    return Finding(True, what if driver.gpus else f"{what}; it shows no GPU: calls run on the CPU")


def check_gpu(gpu: Gpu, module: Any, driver: Driver, facts: Torch) -> Finding:
    """Whether this build and this torch have code for a GPU that the driver runs."""
    what = f"GPU {gpu.number}: {gpu.name}, sm_{gpu.sm}"
    build = version_of(module.cuda_version())
    rebuild = f"MEMEFF_CUDA_ARCHS={gpu.sm} pip install . (CUDA_HOME: a CUDA that knows sm_{gpu.sm})"
    if gpu.sm < 70:
        return Finding(False, f"{what}: older than sm_70", "use another GPU, or CPU tensors")
    kinds = {name: _code_for(module, gpu.sm, name) for name in DTYPES}
    missing = [name for name, kind in kinds.items() if not kind]
    if missing:
        has = " ".join(module.built_archs())
        return Finding(
            False, f"{what}: no code for {', '.join(missing)} in this build ({has})", rebuild
        )
    by_ptx = [name for name, kind in kinds.items() if kind == "PTX"]
    if by_ptx and build and driver.cuda and driver.cuda < build:
        return Finding(
            False,
            f"{what}: this build has PTX of CUDA {_text(build)} for it, the driver runs "
            f"{_text(driver.cuda)}",
            f"update the driver, or {rebuild}",
        )
    if facts.gpus and facts.archs and not runs_on(module, facts.archs, gpu.sm):
        return Finding(
            False,
            f"{what}: torch {facts.version} has no code for it ({' '.join(facts.archs)})",
            "install a torch that has: the last ones with sm_70 are those built with CUDA 12.6",
        )
    code = "PTX, compiled by the driver at the first call" if by_ptx else "machine code"
    return Finding(True, f"{what}: {code}")


def _code_for(module: Any, sm: int, dtype: str) -> str:
    """ "machine code", "PTX", or "" where one pass has neither."""
    rows = {row["name"]: row for row in module.variants()}
    request = {"sm": sm, "dtype": dtype, "B": 1, "M": 1024, "N": 1024, "H": 16, "K": 64, "Kv": 64}
    kinds = []
    for which in ("fwd", "bwd"):
        name = module.select(request | {"alignment": 16, "pass": which})
        if not name:
            return ""
        archs = [a for a in rows[name]["built_archs"] if a.startswith("sm_")]
        kinds.append("machine code" if runs_on(module, archs, sm) else "PTX")
    return max(kinds, key=["machine code", "PTX"].index)


def runs_on(module: Any, archs: list[str] | tuple[str, ...], sm: int) -> bool:
    """Whether code for these ("sm_80", "sm_90a", "compute_90"), ours or torch's, runs on the
    compute capability."""
    parsed = (re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch) for arch in archs)
    return any(
        module.code_runs(int(found[2]), bool(found[3]), found[1] == "compute", sm)
        for found in parsed
        if found is not None
    )


def _text(version: Version | None) -> str:
    return "none" if version is None else f"{version[0]}.{version[1]}"


def _init_way_out(problem: str) -> str:
    if "NO_DEVICE" in problem:
        return "look at CUDA_VISIBLE_DEVICES; a container needs --gpus all"
    if "MISMATCH" in problem:
        return "driver and libcuda are of two versions: restart the machine after the update"
    return "restart the machine; if it stays, look at `nvidia-smi` and at dmesg for NVRM lines"


def findings(
    facts: Torch | None = None,
    driver: Driver | None = None,
    compiled: tuple[ModuleType | None, str] | None = None,
    need_gpu: bool = False,
) -> Iterator[Finding]:
    """All of them for this machine, or for the one described."""
    driver = driver_facts() if driver is None else driver
    facts = torch_facts() if facts is None else facts
    module, reason = dispatch.native() if compiled is None else compiled
    build = version_of(module.cuda_version()) if module is not None else None
    yield check_torch(facts, driver)
    yield check_compiled(module, reason, driver)
    yield check_driver(driver, build)
    if module is not None and build is not None:
        for gpu in driver.gpus:
            yield check_gpu(gpu, module, driver, facts)
    if need_gpu and not driver.gpus:
        problem = "no GPU is visible to this process"
        yield Finding(False, problem, way_out("no CUDA-capable device"))
