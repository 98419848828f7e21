"""What to do about the CUDA errors of a machine's set-up, by the words CUDA has for them."""

from __future__ import annotations

CHECK = "`python -m memeff_attn.info --check` tells more."
# (words of cudaGetErrorString or of torch, what to do)
WAYS_OUT = (
    (
        "driver version is insufficient",  # cudaErrorInsufficientDriver
        "The NVIDIA driver is older than the CUDA that memeff_attn was built with. Update the "
        "driver, or build memeff_attn with a CUDA of the driver's major version (CUDA_HOME=... "
        f"pip install .). {CHECK}",
    ),
    (
        "driver on your system is too old",  # torch
        "The NVIDIA driver is older than the CUDA that torch was built with. Update the driver, or "
        "install a torch built with an older CUDA.",
    ),
    (
        "unsupported toolchain",  # cudaErrorUnsupportedPtxVersion
        "This build has only PTX for this GPU, made by a newer CUDA than the driver knows. Update "
        "the driver, or build memeff_attn with machine code for this GPU (MEMEFF_CUDA_ARCHS=... "
        f"pip install .). {CHECK}",
    ),
    (
        "no kernel image",  # cudaErrorNoKernelImageForDevice
        "The build has no code for this GPU. Build memeff_attn with it: MEMEFF_CUDA_ARCHS=... "
        f"pip install . {CHECK}",
    ),
    (
        "no CUDA-capable device",  # cudaErrorNoDevice
        "No GPU is visible to this process: look at CUDA_VISIBLE_DEVICES and nvidia-smi; a "
        "container needs --gpus all. Without a GPU, move the tensors to the CPU.",
    ),
    (
        "not compiled with CUDA",  # torch
        "This torch has no CUDA. Install one that has (pip install torch on Linux brings it), or "
        "move the tensors to the CPU.",
    ),
    (
        "initialization error",  # cudaErrorInitializationError
        "Often the driver and its libraries are of two versions: restart the machine after an "
        "update. In a forked process, use the start method 'spawn'.",
    ),
)


def way_out(message: str) -> str:
    """What to do about it; empty where that is not known."""
    lower = message.lower()
    return next((text for words, text in WAYS_OUT if words.lower() in lower), "")


def with_way_out(message: str) -> str:
    """The message, followed by what to do where that is known."""
    known = way_out(message)
    return f"{message}\n{known}" if known else message
