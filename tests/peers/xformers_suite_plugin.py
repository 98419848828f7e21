"""What run_xformers_suite.py adds to pytest in each of its processes: the shard, a record of every
test, and for counting on a machine without a GPU a GPU that is only said to be there.

MEMEFF_SUITE_SHARD=i/n   MEMEFF_SUITE_RECORD=file   MEMEFF_SUITE_CAPABILITY=7.0
MEMEFF_SUITE_ON_CPU=1    MEMEFF_SUITE_ONLY=names.json
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

SHOWN = 2000  # characters of a failure that the record keeps


def pretend_gpu(capability: tuple[int, int]) -> None:
    """torch says that there is a GPU, memeff_attn that it has kernels for it. To collect only."""
    from memeff_attn import dispatch

    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: capability  # type: ignore[misc]
    torch.version.cuda = torch.version.cuda or "12.8"
    dispatch.cuda_missing = lambda: ""


def run_on_cpu() -> None:
    """The operators that the tests name take CPU tensors, so that the whole grid is drawn for
    them."""
    from memeff_attn.xformers.ops import fmha

    for op in (fmha.cutlass.FwOp, fmha.cutlass.BwOp):
        op.SUPPORTED_DEVICES = frozenset({"cpu", "cuda"})
        op.is_available = classmethod(lambda cls: True)  # type: ignore[method-assign, assignment]


NO_GPU = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs")


class WithoutGpu:
    """A test that asks torch for a GPU without a look whether there is one is skipped, said so."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        try:
            return (yield)
        except (AssertionError, RuntimeError) as error:
            if any(text in str(error) for text in NO_GPU):
                pytest.skip("needs a GPU, there is none here")
            raise


class Record:
    """One JSON line a test, as it ends, so that the parent can show progress."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write(self, **fields: Any) -> None:
        with self.path.open("a") as file:
            print(json.dumps(fields), file=file)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            text = ""
            if report.outcome == "skipped":
                text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
            elif report.outcome == "failed":
                text = str(report.longrepr)[-SHOWN:]
            name = report.nodeid.partition("::")[2]
            self.write(
                test=name, outcome=report.outcome, text=text, seconds=round(report.duration, 3)
            )
        elif report.when == "teardown" and report.outcome == "failed":
            text = str(report.longrepr)[-SHOWN:]
            self.write(test=report.nodeid + " (teardown)", outcome="failed", text=text, seconds=0)


class Shard:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        i, n = (int(x) for x in os.environ.get("MEMEFF_SUITE_SHARD", "1/1").split("/"))
        config.memeff_total = len(items)
        if names := os.environ.get("MEMEFF_SUITE_ONLY"):
            wanted = set(json.loads(Path(names).read_text()))
            items[:] = [item for item in items if item.nodeid.partition("::")[2] in wanted]
        left = [item for index, item in enumerate(items) if index % n != i - 1]
        config.hook.pytest_deselected(items=left)
        items[:] = items[i - 1 :: n]
        if record := config.pluginmanager.get_plugin("memeff_record"):
            record.write(collected=config.memeff_total, mine=len(items))


def pytest_configure(config: Any) -> None:
    if capability := os.environ.get("MEMEFF_SUITE_CAPABILITY"):
        major, minor = capability.split(".")
        pretend_gpu((int(major), int(minor)))
    if os.environ.get("MEMEFF_SUITE_ON_CPU"):
        run_on_cpu()
    if not torch.cuda.is_available():
        config.pluginmanager.register(WithoutGpu(), "memeff_without_gpu")
    if path := os.environ.get("MEMEFF_SUITE_RECORD"):
        config.pluginmanager.register(Record(path), "memeff_record")
    config.pluginmanager.register(Shard(), "memeff_shard")
