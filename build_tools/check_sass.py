"""Builds kernels and checks their machine code: registers, spills, shared memory, instructions.

    python build_tools/check_sass.py --archs 70 --only _sm70_ --cuda /path/to/cuda-12.4
    python build_tools/check_sass.py --archs 80,90 --only '^chained_sm80_(f16|bf16)_' --table

Fails where a row spills without allow_spill, exceeds the shared memory of every arch it is chosen
on, lacks its family's tensor-core instruction, or (sm70, K <= 128) leaves room for fewer than 2
blocks an SM. --table links a module as well and compares what it lists with what was built.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build_kernels
import cuda
import ptxas_log
from cuda import ROOT, BuildError


@dataclasses.dataclass(frozen=True)
class Chip:
    """Per SM: CUDA programming guide, technical specifications per compute capability."""

    smem_kb: int  # shared memory in all
    block_smem_kb: int  # most that one block may opt into
    reserved_kb: int  # kept by the system for each block
    threads: int
    blocks: int


CHIPS = {
    70: Chip(96, 96, 0, 2048, 32),
    75: Chip(64, 64, 0, 1024, 16),
    80: Chip(164, 163, 1, 2048, 32),
    86: Chip(100, 99, 1, 1536, 16),
    89: Chip(100, 99, 1, 1536, 24),
    90: Chip(228, 227, 1, 2048, 32),
    100: Chip(228, 227, 1, 2048, 32),
    120: Chip(100, 99, 1, 1536, 24),
}
REGISTERS_PER_SM = 65536
COUNTED = (
    "HMMA.884",
    "HMMA.1688",
    "HMMA.16816",
    "HGMMA",
    "LDGSTS",
    "FFMA",
    "MUFU.EX2",
    "STL",
    "LDL",
)
# "        /*0a10*/              @!P0 HMMA.884.F32.F32.STEP0 R8, ..."
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)")
# Every row of a sub-family must hold one of these.
TENSOR_CORE = {
    "sm70": ("HMMA.884",),
    "sm75": ("HMMA.1688",),
    "sm80": ("HMMA.16816", "HMMA.1688"),
    "sm90": ("HGMMA",),
    "simt": ("FFMA",),
}
# Forward rows of sm70 that serve K <= 128 hide their latency by a second block.
MIN_BLOCKS_SM70, MAX_TWO_BLOCKS_K = 2, 128


def chip_of(number: int) -> Chip:
    return CHIPS[max(n for n in CHIPS if n <= number)]


def blocks_per_sm(chip: Chip, registers: int, threads: int, smem_bytes: int) -> int:
    """Resident blocks: registers go to warps by 256, shared memory to blocks by 128 bytes."""
    warps = -(-threads // 32)
    by_registers = REGISTERS_PER_SM // (-(-registers * 32 // 256) * 256 * warps)
    smem = -(-smem_bytes // 128) * 128 + chip.reserved_kb * 1024
    by_smem = chip.smem_kb * 1024 // smem if smem else chip.blocks
    return min(by_registers, by_smem, chip.threads // (32 * warps), chip.blocks)


def instruction_counts(
    cuobjdump: Path | None, objects: dict[Path, list[str]]
) -> dict[tuple[str, str], collections.Counter[str]]:
    """Counts by (row, "sm_80"); empty without a cuobjdump. objects: each with its rows' names."""
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    if cuobjdump is None:
        return counts
    for path, names in objects.items():
        done = subprocess.run(
            [str(cuobjdump), "-sass", str(path)], capture_output=True, text=True, check=True
        )
        arch = row = ""
        for line in done.stdout.splitlines():
            if match := re.match(r"\s*arch = (sm_\w+)", line):
                arch = match[1]
            elif match := re.search(r"Function : (\S+)", line):
                row = ptxas_log.row_of(match[1], names)
            elif row and (
                match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)", line)
            ):
                counter = counts.setdefault((row, arch), collections.Counter())
                for name in COUNTED:
                    if match[1].startswith(name):
                        counter[name] += 1
                        break
    return counts


def check(stats: list[dict[str, Any]], rows: dict[str, Any], counts: dict[Any, Any]) -> list[str]:
    """Prints one line a kernel and arch; returns what is wrong."""
    faults: list[str] = []
    fitting: dict[str, bool] = {}
    width = max([len(name) for name in rows] + [4])
    print(f"{'row':{width}}  arch   regs  spill  smem KB  blocks/SM  instructions")
    order = {name: i for i, name in enumerate(rows)}
    for one in sorted(stats, key=lambda s: (order.get(s["row"], -1), s["arch"])):
        row = rows.get(one["row"])
        if row is None:
            faults.append(f"a kernel that belongs to no row: {one['symbol']}")
            continue
        number = int(re.sub(r"\D", "", one["arch"]))
        chip = chip_of(number)
        smem = row.smem_bytes + one["static_smem_bytes"]
        blocks = blocks_per_sm(chip, one["registers"], row.threads, smem)
        spill = one["spill_store_bytes"]
        counter = counts.get((row.name, one["arch"]))
        shown = " ".join(f"{k} {v}" for k, v in counter.items()) if counter else ""
        print(
            f"{row.name:{width}}  {one['arch']:6} {one['registers']:4}  {spill:5}"
            f"  {smem / 1024:7.1f}  {blocks:9}  {shown}"
        )
        where = f"{row.name} for {one['arch']}"
        native = row.min_sm <= number <= row.max_sm
        if native:
            fitting[row.name] = fitting.get(row.name, False) or smem <= chip.block_smem_kb * 1024
        needed = TENSOR_CORE[row.arch]
        if counter is not None and native and not any(counter[i] for i in needed):
            faults.append(f"{where} has no {' or '.join(needed)}")
        serves_small_k = row.kind == "fwd" and max(row.max_k, row.value_tile) <= MAX_TWO_BLOCKS_K
        if row.arch == "sm70" and native and serves_small_k and blocks < MIN_BLOCKS_SM70:
            faults.append(
                f"{where}: {blocks} blocks an SM, expected {MIN_BLOCKS_SM70} for K <= 128"
            )
    for name, fits in fitting.items():
        if not fits:
            faults.append(f"{name} exceeds the shared memory of every arch built")
    return faults


def check_table(module: Path, built: list[Any]) -> list[str]:
    """What the linked module lists against the plan."""
    spec = importlib.util.spec_from_file_location("_C", module)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    listed = {v["name"]: v["built"] for v in extension.variants()}
    planned = {b.row.name: bool(b.sass) for b in built}
    faults = []
    if list(listed) != list(planned):
        faults.append(
            "the module's variants are not those of kernels.py --list, or in another order"
        )
    for name, plan in planned.items():
        if listed.get(name) != plan:
            faults.append(f"{name}: built {listed.get(name)}, planned {plan}")
    if extension.source_hash != build_kernels.kernels.source_hash():
        faults.append("the module's source hash is not that of the sources")
    print(
        f"table: {len(listed)} variants, {sum(listed.values())} with code, "
        f"{' '.join(extension.built_archs())}"
    )
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="builds kernels and checks their machine code")
    parser.add_argument("--archs", required=True, help="such as 70 or 80,90")
    parser.add_argument(
        "--only", default="", help="rows whose name matches this regular expression"
    )
    parser.add_argument("--families", default="native")
    parser.add_argument(
        "--cuda", help="root of the CUDA toolkit to use (else as the build finds it)"
    )
    parser.add_argument("--objects", type=Path, help="default: .build/check_<archs>")
    parser.add_argument(
        "--table", action="store_true", help="link a module too and check its table"
    )
    parser.add_argument("--rows", type=Path, default=build_kernels.kernels.ROWS_FILE)
    a = parser.parse_args()
    if a.cuda:
        os.environ["CUDA_HOME"] = a.cuda
    kernels = build_kernels.kernels
    try:
        toolkit = cuda.find_toolkit()
        if toolkit is None:
            raise BuildError("no nvcc: pass --cuda or set CUDA_HOME")
        archs = kernels.parse_archs(a.archs)
        missing = [x.code for x in archs if x.number not in toolkit.targets]
        if missing:
            raise BuildError(
                f"nvcc {toolkit.version_text} has no target sm_{missing[0]}: see --cuda"
            )
        name = "check_" + "_".join(x.code for x in archs)
        objects = (a.objects or ROOT / ".build" / name).resolve()
        options = build_kernels.Options(
            out=objects / "module",
            objects=objects,
            archs=a.archs,
            families=a.families,
            only=a.only,
            rows_file=a.rows.resolve(),
            link=a.table,
            strict=False,
            tell_faults=False,  # but below, all together
        )
        module = build_kernels.build(options)
        built, units = kernels.plan(kernels.load_rows(a.rows), archs, a.families, a.only)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows = {b.row.name: b.row for b in built if b.sass}
    if not rows:
        print("error: no row matches", file=sys.stderr)
        return 1
    stats = json.loads((objects / "kernel_stats.json").read_text())
    tool = toolkit.root / "bin" / "cuobjdump"
    if not tool.exists():
        print("no cuobjdump beside nvcc: instructions are not counted")
    objs = {objects / f"{unit.name}.o": [b.row.name for b in unit.rows] for unit in units}
    faults = check(stats, rows, instruction_counts(tool if tool.exists() else None, objs))
    faults += build_kernels.check_stats(objects, units)
    have = {(s["row"], s["arch"]) for s in stats}
    for one in built:
        for x in one.sass:
            if (one.row.name, f"sm_{x.code}") not in have:
                faults.append(f"{one.row.name}: no kernel for sm_{x.code}")
    if module is not None:
        faults += check_table(module, built)
    for fault in faults:
        print(f"fault: {fault}")
    print(f"{len(stats)} kernels of {len(rows)} rows checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
