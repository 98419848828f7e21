"""Fixtures: which device a test runs on, why it is skipped, and one shard of the suite.

pytest --shard 1/3    runs every third test; tests/gpu_record.py merges the records of all shards.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Threads that spin at the end of each small operation stall a busy machine (30 s become 10 min).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

GIB = 1 << 30


@functools.cache
def no_gpu_reason() -> str:
    """Why GPU tests cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "no GPU here (torch.cuda.is_available() is False)"
    try:
        from memeff_attn import _C
    except ImportError as error:
        return f"memeff_attn._C does not import: {error}"
    if not _C.is_cuda_build:
        return "memeff_attn._C is a host-only build"
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", default="1/1", metavar="i/n", help="run the i-th of n parts of the suite"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu: needs a GPU and a CUDA build; skips with the reason otherwise"
    )
    config.addinivalue_line(
        "markers", "whole: looks at what the other tests of its file did; skips in a shard"
    )


def shard_of(config: pytest.Config) -> tuple[int, int]:
    part, _, count = str(config.getoption("--shard")).partition("/")
    i, n = int(part), int(count or 1)
    if not 1 <= i <= n:
        raise pytest.UsageError(f"--shard {i}/{n}: expected 1 <= i <= n")
    return i, n


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    i, n = shard_of(config)
    for item in items:
        device = getattr(item, "callspec", None) and item.callspec.params.get("device")
        needs_gpu = item.get_closest_marker("gpu") is not None or device == "cuda"
        if needs_gpu and no_gpu_reason():
            item.add_marker(pytest.mark.skip(reason=no_gpu_reason()))
        if n > 1 and item.get_closest_marker("whole"):
            item.add_marker(
                pytest.mark.skip(reason=f"shard {i}/{n}: gpu_record.py --merge checks this")
            )
    if n > 1:
        out = [item for index, item in enumerate(items) if index % n != i - 1]
        config.hook.pytest_deselected(items=out)
        items[:] = items[i - 1 :: n]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `device` runs on the CPU and on the GPU; its id starts with the
    device."""
    if "device" in metafunc.fixturenames and "device" not in _parametrized(metafunc):
        metafunc.parametrize("device", ["cpu", "cuda"])


def _parametrized(metafunc: pytest.Metafunc) -> set[str]:
    marks = metafunc.definition.iter_markers("parametrize")
    return {name.strip() for mark in marks for name in str(mark.args[0]).split(",")}


@pytest.fixture
def gpu_memory() -> Iterator[Any]:
    """gpu_memory(gib) skips where that much is not free; everything is given back afterwards."""

    def need(gib: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / GIB
        if free < gib:
            pytest.skip(f"needs {gib:.0f} GiB of GPU memory, {free:.0f} are free")

    yield need
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Each test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_forced_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant forced from outside would hide what the tests choose."""
    monkeypatch.delenv("MEMEFF_FORCE_VARIANT", raising=False)
    monkeypatch.delenv("MEMEFF_FORCE_BACKWARD_VARIANT", raising=False)
