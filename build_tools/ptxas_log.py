"""Reads what `ptxas -v` said of each kernel: registers, spills, shared memory, C75xx warnings."""

from __future__ import annotations

import dataclasses
import re

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
# "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized ..."
_C75 = re.compile(r"^.*\(C75\d\d\).*$", flags=re.MULTILINE)

# Rows without allow_spill that spill some bytes before sm_80, under CUDA 12.4 (docs/sass.md).
_OLD_ARCHS_SPILL = re.compile(r"chained_(simt_\w+_v64_bias|sm7\d_f16_any_full)")


def may_spill(name: str, allow_spill: bool, arch: int) -> bool:
    """Whether registers of this row may spill on this arch (70, 90)."""
    return allow_spill or (arch < 80 and _OLD_ARCHS_SPILL.fullmatch(name) is not None)


@dataclasses.dataclass
class KernelStats:
    row: str
    arch: str  # "sm_80"
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_smem_bytes: int = 0
    symbol: str = ""

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


def row_of(symbol: str, names: list[str]) -> str:
    """The row that the mangled symbol names; lengths stand in front there, so none is a prefix.

    names: the rows of its unit. All kernels of a unit of one row are that row's.
    """
    if len(names) == 1:
        return names[0]
    for name in names:
        if f"{len(name)}{name}" in symbol:
            return name
    return ""


def parse(log: str, names: list[str]) -> tuple[list[KernelStats], list[str]]:
    """Statistics of each kernel and arch, and the lines with C75xx warnings."""
    stats: list[KernelStats] = []
    current: KernelStats | None = None
    own = False  # the properties that follow are the entry's, not those of a function it calls
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            current = KernelStats(row_of(entry[1], names), entry[2], symbol=entry[1])
            stats.append(current)
            own = True
        elif current is None:
            continue
        elif properties := _PROPERTIES.search(line):
            own = properties[1] == current.symbol
        elif spills := _SPILLS.search(line):
            current.stack_bytes = max(current.stack_bytes, int(spills[1]))
            current.spill_store_bytes += int(spills[2])
            current.spill_load_bytes += int(spills[3])
        elif (used := _USED.search(line)) and own:
            current.registers = int(used[1])
            if smem := _SMEM.search(line):
                current.static_smem_bytes = int(smem[1])
    return stats, [m.group(0).strip() for m in _C75.finditer(log)]
