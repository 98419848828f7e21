"""Writes docs/sass.md: what the compiler made of every kernel, and how much of an SM it fills.

    python build_tools/build_kernels.py --archs 70,75,80,90a --no-link      # or make wheel
    python build_tools/sass_report.py --objects .build/sm70_75_80_90a --out docs/sass.md

Reads kernel_stats.json beside the objects (what ptxas said); compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build_kernels
from check_sass import Chip, blocks_per_sm, chip_of
from cuda import BuildError

CARDS = {70: "V100", 75: "T4", 80: "A100", 86: "RTX 30", 89: "L4, L40", 90: "H100, H200"}
# enum class Gradient of csrc/chained/backward_traits.h, as a mangled name has it.
GRADIENTS = {"0": "dQ", "1": "dK, dV", "2": "dK", "3": "dV", "4": "dBias", "5": "all, short"}
_GRADIENT = re.compile(r"8GradientE(\d)E")
HEAD = "| variant | kernel | registers | spilled bytes | shared memory KB | blocks an SM | warps |"
INTRODUCTION = """\
# What the compiler made of the kernels

Registers, spills and shared memory of every kernel, and how many of its blocks an SM holds by them:
what the ptxas of CUDA {cuda} says of the machine code for {archs}. Written by
`build_tools/sass_report.py` (its docstring has the commands) from the sources with the hash
`{hash}`. `build_tools/check_sass.py` counts tensor-core instructions too and fails on what a
row must not do.

- spilled bytes: stores of one thread. Rows that may spill say so in `csrc/kernels_rows.py`.
- shared memory: what the row states; for a backward row that of its largest kernel, so that its
  others may fit more blocks.
- blocks an SM: the least of what registers, shared memory and threads allow. "-": more shared
  memory than a block of this GPU may have; the row is chosen on GPUs with more.
- warps: resident warps, of the {most} that an SM holds at most.
"""


def kernel_of(symbol: str) -> str:
    """Which of a row's kernels a mangled name is."""
    found = _GRADIENT.search(symbol)
    return GRADIENTS.get(found[1], "?") if found else "forward"


def table(stats: list[dict[str, Any]], number: int, rows: dict[str, Any]) -> Iterator[str]:
    """The lines of one arch, in the order of the list."""
    chip = chip_of(number)
    order = {name: i for i, name in enumerate(rows)}
    yield HEAD
    yield "|---|---|---|---|---|---|---|"
    own = [s for s in stats if s["arch"] == f"sm_{number}" and s["native"]]
    for one in sorted(own, key=lambda s: (order[s["row"]], kernel_of(s["symbol"]), s["registers"])):
        row = rows[one["row"]]
        smem = row.smem_bytes + one["static_smem_bytes"]
        yield (
            f"| {row.name} | {kernel_of(one['symbol'])} | {one['registers']} "
            f"| {one['spill_store_bytes'] or ''} | {smem / 1024:.1f} "
            f"| {' | '.join(occupancy(chip, one['registers'], row.threads, smem))} |"
        )


def occupancy(chip: Chip, registers: int, threads: int, smem: int) -> tuple[str, str]:
    """Blocks an SM, and the share of its warps."""
    if smem > chip.block_smem_kb * 1024:
        return "-", "-"
    blocks = blocks_per_sm(chip, registers, threads, smem)
    warps = blocks * threads // 32
    return str(blocks), f"{warps} ({100 * 32 * warps / chip.threads:.0f} %)"


def read(objects: Path) -> tuple[list[dict[str, Any]], str, str]:
    """Statistics of a build, the hash of its sources, its CUDA."""
    file = objects / "kernel_stats.json"
    if not file.exists():
        raise BuildError(f"{file} is missing: build the kernels first (see --help)")
    table_source = (objects / "generated" / "kernel_table.cpp").read_text()
    found = re.search(r'kBuildInfo = \{"(\w+)", "([^"]+)"', table_source)
    assert found is not None
    return json.loads(file.read_text()), found[1], found[2]


def report(builds: Sequence[Path], archs: list[int]) -> str:
    """The document. Of an arch that several builds have, the first one's rows count."""
    rows = {row.name: row for row in build_kernels.kernels.load_rows()}
    stats: list[dict[str, Any]] = []
    sources, compilers = set(), set()
    for objects in builds:
        own, source_hash, cuda = read(objects)
        sources.add(source_hash)
        compilers.add(cuda)
        taken = {s["arch"] for s in stats}
        stats += [s for s in own if s["arch"] not in taken]
    if len(sources) + len(compilers) > 2:
        raise BuildError("the builds are of different sources or compilers: build again")
    if lost := sorted({s["row"] for s in stats} - set(rows)):
        raise BuildError(f"the build has rows that the list has not ({lost[0]}): build again")
    for arch in archs:
        have = {s["row"] for s in stats if s["arch"] == f"sm_{arch}"}
        want = [r.name for r in rows.values() if r.min_sm <= arch <= r.max_sm]
        if missing := [name for name in want if name not in have]:
            raise BuildError(f"no build has {missing[0]} for sm_{arch}")
    most = ", ".join(f"{chip_of(a).threads // 32} (sm_{a})" for a in archs)
    names = " and ".join(f"sm_{a}" for a in archs)
    text = INTRODUCTION.format(
        cuda=compilers.pop(), archs=names, hash=sources.pop()[:12], most=most
    )
    for arch in archs:
        text += f"\n## sm_{arch} ({CARDS.get(arch, 'GPU')})\n\n"
        text += "\n".join(table(stats, arch, rows)) + "\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--objects", type=Path, nargs="+", required=True, help="folders of builds' objects"
    )
    parser.add_argument("--archs", default="70,80", help="such as 70,80")
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    a = parser.parse_args()
    try:
        numbers = [x.number for x in build_kernels.kernels.parse_archs(a.archs)]
        text = report(a.objects, numbers)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if a.out:
        a.out.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
