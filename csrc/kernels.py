"""The generator: from the variant list (kernels_rows.py) to kernel units and the dispatch table.

    python csrc/kernels.py --list                 names, in order of preference
    python csrc/kernels.py --list --json          every field
    python csrc/kernels.py --hash                 what _C.source_hash is compared with
    python csrc/kernels.py --generate DIR --archs 80,90a [--families native|all|NAMES] [--only RE]

Needs nothing but Python. build_tools/build_kernels.py imports it; nothing generated is committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CSRC = Path(__file__).resolve().parent
ROWS_FILE = CSRC / "kernels_rows.py"

# Oldest compute capability that the instructions of a sub-family exist on.
ARCH_MINIMUM = {"sm70": 70, "sm75": 75, "sm80": 80, "sm90": 90, "simt": 70}
# Sub-families of arch-specific features (wgmma): they need the "a" target, run on that arch alone.
ARCH_SPECIFIC = {"sm90"}
# A unit parses CUTLASS once (10 s) and holds few enough kernels to keep every core busy. A backward
# row is several kernels, whose symbols do not name it: alone in its unit, they are its own.
ROWS_PER_UNIT = {"fwd": 2, "bwd": 1}
KINDS = {"fwd": "kForward", "bwd": "kBackward"}
DTYPES = {"f16": "kF16", "bf16": "kBF16", "f32": "kF32"}
MATHS = {"ieee": "kIeee", "tf32": "kTf32"}
# Names that torch's TORCH_CUDA_ARCH_LIST knows.
ARCH_NAMES = {"volta": "70", "turing": "75", "ampere": "80;86", "ada": "89", "hopper": "90"}
HASHED_SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".py"}


@dataclasses.dataclass(frozen=True)
class Arch:
    """One target: "90" is (90, False), "90a" is (90, True)."""

    number: int
    specific: bool = False

    @property
    def code(self) -> str:
        return f"{self.number}{'a' if self.specific else ''}"


@dataclasses.dataclass(frozen=True)
class BuiltRow:
    """A row and the code that this build gives it."""

    row: Any
    sass: tuple[Arch, ...]
    ptx: Arch | None


@dataclasses.dataclass(frozen=True)
class Unit:
    name: str
    rows: tuple[BuiltRow, ...]

    @property
    def sass(self) -> tuple[Arch, ...]:
        return self.rows[0].sass

    @property
    def ptx(self) -> Arch | None:
        return self.rows[0].ptx


def load_rows(path: Path = ROWS_FILE) -> list[Any]:
    """The variant list; empty while the file does not exist."""
    if not path.exists():
        return []
    spec = importlib.util.spec_from_file_location("kernels_rows", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    keep, before = sys.dont_write_bytecode, sys.modules.get(spec.name)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = keep
        if before is None:
            del sys.modules[spec.name]
        else:
            sys.modules[spec.name] = before
    rows = list(module.VARIANTS)
    check_rows(rows)
    return rows


def check_rows(rows: list[Any]) -> None:
    seen: set[str] = set()
    for row in rows:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", row.name):
            raise ValueError(f"row {row.name!r}: a name is lower case letters, digits and _")
        if row.name in seen:
            raise ValueError(f"row {row.name}: the name is used twice")
        seen.add(row.name)
        for field, allowed in (
            ("arch", ARCH_MINIMUM),
            ("dtype", DTYPES),
            ("math", MATHS),
            ("kind", KINDS),
        ):
            if getattr(row, field) not in allowed:
                got = getattr(row, field)
                raise ValueError(f"row {row.name}: {field} is {got!r}, not one of {list(allowed)}")
        if not row.min_sm <= row.max_sm:
            raise ValueError(f"row {row.name}: min_sm {row.min_sm} > max_sm {row.max_sm}")


def parse_archs(text: str) -> list[Arch]:
    """Reads "80;9.0a 90+PTX", separators and dots as in TORCH_CUDA_ARCH_LIST; +PTX is implied."""
    archs: list[Arch] = []
    for name, numbers in ARCH_NAMES.items():
        text = re.sub(rf"\b{name}\b", numbers, text, flags=re.IGNORECASE)
    for word in re.split(r"[;,\s]+", text.strip()):
        if not word:
            continue
        match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)([af]?)(?:\+PTX)?", word, flags=re.IGNORECASE)
        if match is None:
            raise ValueError(
                f"cannot read the GPU arch {word!r}: expected such as 80, 8.0, sm_80 or 90a"
            )
        arch = Arch(int(match.group(1) + match.group(2)), match.group(3).lower() == "a")
        if arch not in archs:
            archs.append(arch)
    return sorted(archs, key=lambda a: (a.number, a.specific))


def _plan_row(row: Any, archs: list[Arch], families: str) -> BuiltRow:
    minimum = ARCH_MINIMUM[row.arch]
    base = sorted({a.number for a in archs})
    named = set(families.split(","))
    if row.arch in ARCH_SPECIFIC:
        wanted = families in ("native", "all") or row.family in named or row.arch in named
        sass = (Arch(minimum, True),) if wanted and minimum in base else ()
        return BuiltRow(row, sass, None)
    if families == "native":
        numbers = [n for n in base if row.min_sm <= n <= row.max_sm]
    elif families == "all" or row.family in named or row.arch in named:
        numbers = [n for n in base if n >= minimum]
    else:
        numbers = []
    ptx = Arch(numbers[-1]) if numbers and numbers[-1] == base[-1] else None
    return BuiltRow(row, tuple(Arch(n) for n in numbers), ptx)


def plan(
    rows: list[Any], archs: list[Arch], families: str = "native", only: str = ""
) -> tuple[list[BuiltRow], list[Unit]]:
    """Which code each row gets, and the units that hold it.

    families: "native" (each row for the archs it is preferred on), "all" (for every asked arch that
    has its instructions: how older families are tested on a newer GPU), or comma-separated names of
    families or sub-families.
    """
    built = []
    for row in rows:
        one = _plan_row(row, archs, families)
        if only and not re.search(only, row.name):
            one = BuiltRow(row, (), None)
        built.append(one)
    groups: dict[Any, list[BuiltRow]] = {}
    for one in built:
        if one.sass:
            r = one.row
            key = (r.family, r.kind, r.arch, r.dtype, r.header, one.sass, one.ptx)
            groups.setdefault(key, []).append(one)
    units: list[Unit] = []
    counts: dict[str, int] = {}
    for (family, kind, arch, dtype, *_), members in groups.items():
        stem = "_".join([family, *(["bwd"] if kind == "bwd" else []), arch, dtype])
        size = ROWS_PER_UNIT[kind]
        for start in range(0, len(members), size):
            number = counts[stem] = counts.get(stem, 0) + 1
            units.append(Unit(f"{stem}_{number:02d}", tuple(members[start : start + size])))
    return built, units


def _signature(row: Any, params: str, stream: str) -> str:
    kind = "BackwardParams" if row.kind == "bwd" else "ForwardParams"
    return f"Status launch_{row.name}(const {kind}&{params}, {stream})"


def unit_source(unit: Unit) -> str:
    """One translation unit. Each row's traits get a short name, which forward symbols hold."""
    lines = ["// Generated by csrc/kernels.py."]
    lines += [f'#include "{unit.rows[0].row.header}"', "", "namespace memeff {"]
    for built in unit.rows:
        row = built.row
        name, traits = row.name, f"rows::{row.name}"
        space = row.traits.partition("::")[0]  # launchers lie beside the traits
        lines += ["namespace rows {", f"struct {name} : {row.traits} {{}};", "}  // namespace rows"]
        facts = {
            "kSmemBytes": row.smem_bytes,
            "kTileM": row.tile_m,
            "kTileN": row.tile_n,
            "kValueTile": row.value_tile,
            "kThreads": row.threads,
        }
        for member, value in facts.items():
            said = f"{name}: {member} is not the row's {value}"
            lines.append(f'static_assert({traits}::{member} == {value}, "{said}");')
        launcher = "launch_backward" if row.kind == "bwd" else "launch_forward"
        lines.append(f"{_signature(row, ' params', 'cudaStream_t stream')} {{")
        lines.append(f'  return {space}::{launcher}<{traits}>(params, stream, "{name}");')
        lines.append("}")
    lines += ["}  // namespace memeff", ""]
    return "\n".join(lines)


def _bool(value: Any) -> str:
    return "true" if value else "false"


def table_source(built: list[BuiltRow], cuda_version: str, source_hash: str) -> str:
    """kernel_table.cpp: the list as dispatch.h's KernelRow; no launch: not built."""
    lines = ["// Generated by csrc/kernels.py.", '#include "dispatch.h"', "", "namespace memeff {"]
    for one in built:
        if one.sass:
            lines.append(f"{_signature(one.row, '', 'CUstream_st*')};")
    lines += ["", "const KernelRow kKernelTable[] = {"]
    for one in built:
        r = one.row
        sass = ", ".join(str(a.number) for a in one.sass) or "0"
        launch = f"&launch_{r.name}" if one.sass else "nullptr"
        pair = ("nullptr", launch) if r.kind == "bwd" else (launch, "nullptr")
        fields = [
            f'"{r.name}", "{r.family}", "{r.arch}"',
            f"Pass::{KINDS[r.kind]}, DType::{DTYPES[r.dtype]}, Math::{MATHS[r.math]}",
            f"{r.max_k}, {r.max_kv}, {r.alignment}",
            f"{_bool(r.bias)}, {_bool(r.dropout)}",
            f"{r.tile_m}, {r.tile_n}, {r.value_tile}, {r.threads}, {r.smem_bytes}",
            f"{r.max_n}, {_bool(r.sequences)}",
            f"{r.max_m}, {float(r.max_blocks_per_sm)}, {r.min_m}, {float(r.min_blocks_per_sm)}",
            f"{_bool(r.partial)}, {_bool(r.pages)}, {r.bias_alignment}, {r.min_sm}, {r.max_sm}",
            f"{_bool(r.allow_spill)}, {r.blocks_per_sm}, {_bool(r.in_memory)}",
            f"{_bool(r.adds_query)}, {r.min_length}, {r.causal_length}, {r.min_k}",
            _bool(r.arch in ARCH_SPECIFIC),
            f"{{{sass}}}, {one.ptx.number if one.ptx else 0}",
            *pair,
        ]
        lines.append("    {" + ", ".join(fields) + "},")
    if not built:
        lines.append("    {},  // an array is not empty in C++; kKernelCount is 0")
    archs = sorted(
        {a.code for one in built for a in one.sass}, key=lambda c: (int(c.rstrip("a")), c)
    )
    names = [f"sm_{code}" for code in archs]
    names += [f"compute_{n}" for n in sorted({one.ptx.number for one in built if one.ptx})]
    lines += [
        "};",
        f"const int kKernelCount = {len(built)};",
        f'const BuildInfo kBuildInfo = {{"{source_hash}", "{cuda_version}", "{" ".join(names)}"}};',
        "",
        "}  // namespace memeff",
        "",
    ]
    return "\n".join(lines)


def write_if_changed(path: Path, text: str) -> bool:
    """Leaves the time stamp alone where the text is the same, so that ninja rebuilds nothing."""
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


def generate(
    out: Path,
    archs: list[Arch],
    families: str = "native",
    only: str = "",
    cuda_version: str = "none",
    rows_file: Path = ROWS_FILE,
) -> tuple[list[BuiltRow], list[Unit]]:
    """Writes out/<unit>.cu and out/kernel_table.cpp. No archs: a host-only table."""
    built, units = plan(load_rows(rows_file), archs, families, only)
    names = {f"{unit.name}.cu" for unit in units}
    for old in out.glob("*.cu"):
        if old.name not in names:
            old.unlink()
    for unit in units:
        write_if_changed(out / f"{unit.name}.cu", unit_source(unit))
    write_if_changed(out / "kernel_table.cpp", table_source(built, cuda_version, source_hash()))
    return built, units


def source_hash(root: Path = CSRC.parent) -> str:
    """sha256 over csrc/** and setup.py: path and content of each file, in the order of paths."""
    digest = hashlib.sha256()
    files = [p for p in (root / "csrc").rglob("*") if p.suffix in HASHED_SUFFIXES and p.is_file()]
    files += [root / "setup.py"] if (root / "setup.py").exists() else []
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description="variant list, units and dispatch table")
    parser.add_argument(
        "--list", action="store_true", help="print the rows' names, in order of preference"
    )
    parser.add_argument("--json", action="store_true", help="with --list: every field")
    parser.add_argument("--hash", action="store_true", help="print the source hash")
    parser.add_argument("--generate", type=Path, metavar="DIR", help="write units and table")
    parser.add_argument("--archs", default="", help="such as 80,86,90a; empty: a host-only table")
    parser.add_argument("--families", default="native", help="native, all, or names")
    parser.add_argument(
        "--only", default="", help="build only rows whose name matches this regular expression"
    )
    parser.add_argument("--rows", type=Path, default=ROWS_FILE, help="another list (tests)")
    args = parser.parse_args()
    if args.hash:
        print(source_hash())
    if args.list:
        rows = [r for r in load_rows(args.rows) if re.search(args.only, r.name)]
        print(
            json.dumps([dataclasses.asdict(r) for r in rows], indent=1)
            if args.json
            else "\n".join(r.name for r in rows)
        )
    if args.generate:
        _, units = generate(
            args.generate, parse_archs(args.archs), args.families, args.only, rows_file=args.rows
        )
        for unit in units:
            print(unit.name, *(b.row.name for b in unit.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
