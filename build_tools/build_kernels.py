"""Builds the module _C: kernels, table, host part, binding. Standalone, and what setup.py calls.

    python build_tools/build_kernels.py --archs 90 --families all --python python3.12
    python build_tools/build_kernels.py --host-only --out .build/host

Objects that know no Python (kernels, table, host part) lie in --objects, once for every Python;
only binding.cpp is compiled for each. Beside them: kernel_stats.json (registers, spills, shared
memory of each kernel and arch).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import child_session
import cuda
import ptxas_log
from cuda import ROOT, BuildError

CSRC = ROOT / "csrc"
HOST_FILES = sorted(p.name for p in CSRC.glob("*.cpp") if p.name != "binding.cpp")
# Kernels that belong to no row: compiled for every arch of the build, replaced in host-only builds.
REDUCE_FILES = sorted(f"reduce/{p.name}" for p in (CSRC / "reduce").glob("*.cu"))
REDUCE_HOST_ONLY = "reduce/host_only.cpp"
RAM_PER_JOB_GB = 3  # peak of one nvcc on a CUTLASS unit
HOST_FLAGS = "-std=c++17 -O2 -fPIC -fvisibility=hidden -DNDEBUG -Wall -Wextra"
NVCC_FLAGS = (
    "-std=c++17 -O3 --expt-relaxed-constexpr -DNDEBUG --threads 1 -Xptxas -v "
    "-Xcompiler -fPIC,-fvisibility=hidden"
)


def load_kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memeff_kernels", CSRC / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memeff_kernels"] = module
    spec.loader.exec_module(module)
    return module


kernels = load_kernels()


@dataclasses.dataclass
class Options:
    out: Path
    objects: Path
    archs: str = ""
    families: str = "native"
    only: str = ""
    host_only: bool = False
    python: str = sys.executable
    rows_file: Path = kernels.ROWS_FILE
    link: bool = True
    strict: bool = True  # spills and C75xx warnings fail the build
    tell_faults: bool = True  # print them (check_sass.py tells them itself)


def options_for(archs: str) -> Options:
    """What setup.py builds, for this interpreter; archs as MEMEFF_CUDA_ARCHS, none: host-only."""
    code = "_".join(a.code for a in kernels.parse_archs(archs))
    return Options(
        out=ROOT / ".build" / f"py{sys.version_info[0]}{sys.version_info[1]}",
        objects=ROOT / ".build" / (f"sm{code}" if code else "host"),
        archs=archs,
        families=os.environ.get("MEMEFF_FAMILIES", "native"),
        host_only=not code,
        strict=os.environ.get("MEMEFF_STRICT") == "1",  # another compiler may spill: slower, right
    )


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def free_ram_gb() -> float:
    free = float("inf")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) / 2**20
    except OSError:
        pass
    limit = _cgroup_limit()
    return min(free, limit / 2**30) if limit is not None else free


def job_count() -> int:
    limits = [float(len(os.sched_getaffinity(0))), free_ram_gb() / RAM_PER_JOB_GB]
    if os.environ.get("MAX_JOBS", "").isdigit():
        limits.append(float(os.environ["MAX_JOBS"]))
    return max(1, int(min(limits)))


def python_facts(python: str) -> dict[str, str]:
    """Include folders and file name suffix of extension modules of another interpreter."""
    code = (
        "import json, sysconfig, pybind11; print(json.dumps({'pybind11': pybind11.get_include(), "
        "'include': sysconfig.get_path('include'), "
        "'suffix': sysconfig.get_config_var('EXT_SUFFIX')}))"
    )
    if Path(python).resolve() == Path(sys.executable).resolve() and python == sys.executable:
        try:
            import pybind11
        except ImportError as error:  # pip install --no-build-isolation
            raise BuildError(f"{python} has no pybind11: pip install pybind11") from error
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        return {
            "include": sysconfig.get_path("include"),
            "pybind11": pybind11.get_include(),
            "suffix": suffix,
        }
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(
            f"{python} cannot import pybind11 (pip install pybind11): {done.stderr.strip()[-300:]}"
        )
    facts: dict[str, str] = json.loads(done.stdout)
    return facts


def ninja_path() -> str:
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        try:
            import ninja

            found = str(Path(ninja.BIN_DIR) / "ninja")
        except ImportError as error:
            raise BuildError("ninja is missing: pip install ninja") from error
    return found


def supported_archs(archs: list[Any], toolkit: cuda.Toolkit) -> list[Any]:
    """Those that this nvcc can make code for; one line for each other."""
    kept = []
    for arch in archs:
        if arch.number in toolkit.targets:
            kept.append(arch)
        else:
            need = cuda.cuda_for(arch.number)
            print(
                f"nvcc {toolkit.version_text} has no sm_{arch.code} target ({need} has): left out",
                flush=True,
            )
    if archs and not kept:
        names = ", ".join(f"sm_{a.code} ({cuda.cuda_for(a.number)})" for a in archs)
        raise BuildError(
            f"nvcc {toolkit.version_text} can make code for none of the archs asked: {names}"
        )
    return kept


def gencode(sass: Iterable[Any], ptx: Any | None) -> str:
    flags = [f"-gencode arch=compute_{a.code},code=sm_{a.code}" for a in sass]
    if ptx is not None:
        flags.append(f"-gencode arch=compute_{ptx.code},code=compute_{ptx.code}")
    return " ".join(flags)


def object_name(source: str) -> str:
    """reduce/delta.cu -> reduce_delta.o: no unit of rows is called so."""
    return str(Path(source).with_suffix(".o")).replace("/", "_")


def _q(path: object) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def check_host_tools(facts: dict[str, str] | None) -> None:
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx.split()[0]) is None:
        raise BuildError(f"no C++ compiler ({cxx}): install g++ or set CXX")
    if facts is not None and not (Path(facts["include"]) / "Python.h").exists():
        raise BuildError(f"{facts['include']} has no Python.h: install python3-dev")


def nvcc_rule(toolkit: cuda.Toolkit, ccache: str, output: str) -> list[str]:
    ccbin = os.environ.get("NVCC_CCBIN") or os.environ.get("CUDAHOSTCXX") or ""
    nvcc = f"{shlex.quote(str(toolkit.nvcc))} {f'-ccbin {shlex.quote(ccbin)}' if ccbin else ''}"
    return [
        "rule nvcc",
        # The log is kept beside the object, since ptxas tells of registers and spills there.
        f"  command = {ccache} {nvcc} {NVCC_FLAGS} -I{shlex.quote(str(CSRC))} $flags {output}"
        " > $out.log 2>&1 || { grep -v '^ptxas info' $out.log >&2; rm -f $out; exit 1; }",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $name",
    ]


def nvcc_builds(o: Options, archs: list[Any], units: list[Any]) -> tuple[list[Path], list[str]]:
    """Objects of every unit and of the kernels that belong to no row, and the lines for them."""
    objects: list[Path] = []
    lines: list[str] = []

    def add(name: str, source: Path, flags: str, what: str) -> None:
        objects.append(o.objects / name)
        lines.extend(
            [
                f"build {_q(objects[-1])}: nvcc {_q(source)}",
                f"  flags = {flags}",
                f"  name = {what}",
            ]
        )

    # Without the "a" of arch-specific features, which these kernels do not use.
    sass = [kernels.Arch(number) for number in sorted({a.number for a in archs})]
    for source in REDUCE_FILES:
        add(object_name(source), CSRC / source, gencode(sass, sass[-1]), source)
    cutlass = f"-isystem {shlex.quote(str(cuda.find_cutlass()))}" if units else ""
    for unit in units:
        names = ", ".join(b.row.name for b in unit.rows)
        add(
            f"{unit.name}.o",
            o.objects / "generated" / f"{unit.name}.cu",
            f"{cutlass} {gencode(unit.sass, unit.ptx)}",
            f"{unit.name} ({names}) for {' '.join(f'sm_{a.code}' for a in unit.sass)}",
        )
    return objects, lines


def ninja_text(
    o: Options,
    toolkit: cuda.Toolkit | None,
    archs: list[Any],
    units: list[Any],
    facts: dict[str, str] | None,
) -> str:
    ccache = (shutil.which("ccache") or "") if os.environ.get("MEMEFF_CCACHE", "1") != "0" else ""
    cxx = os.environ.get("CXX", "g++")
    generated, objects = o.objects / "generated", o.objects
    host_cuda = ""
    if toolkit is not None:
        host_cuda = " ".join(
            ["-DMEMEFF_CUDA", *(f"-isystem {shlex.quote(p)}" for p in toolkit.include_dirs)]
        )
    output = "-MD -MF $out.d -c $in -o $out"
    lines = ["ninja_required_version = 1.5", f"builddir = {_q(objects)}"]
    lines += [
        "rule cxx",
        f"  command = {ccache} {cxx} {HOST_FLAGS} -I{shlex.quote(str(CSRC))} $flags {output}",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $name",
    ]
    common: list[Path] = []
    for name in [*HOST_FILES, *([REDUCE_HOST_ONLY] if toolkit is None else [])]:
        common.append(objects / object_name(name))
        lines += [
            f"build {_q(common[-1])}: cxx {_q(CSRC / name)}",
            f"  flags = {host_cuda}",
            f"  name = {name}",
        ]
    common.append(objects / "kernel_table.o")
    lines += [
        f"build {_q(common[-1])}: cxx {_q(generated / 'kernel_table.cpp')}",
        "  flags =",
        "  name = kernel_table.cpp",
    ]
    if toolkit is not None:
        lines += nvcc_rule(toolkit, ccache, output)
        nvcc_objects, nvcc_lines = nvcc_builds(o, archs, units)
        common += nvcc_objects
        lines += nvcc_lines
    if facts is None:
        return "\n".join(
            [*lines, "build all: phony " + " ".join(_q(p) for p in common), "default all", ""]
        )
    binding = o.out / "binding.o"
    module = o.out / f"_C{facts['suffix']}"
    python_includes = (
        f"-isystem {shlex.quote(facts['include'])} -isystem {shlex.quote(facts['pybind11'])}"
    )
    libraries = ""
    if toolkit is not None:
        libraries = (
            " ".join(f"-L{shlex.quote(p)}" for p in toolkit.library_dirs)
            + " -lcudart_static -lpthread -ldl -lrt"
        )
    lines += [
        f"build {_q(binding)}: cxx {_q(CSRC / 'binding.cpp')}",
        f"  flags = {python_includes}",
        "  name = binding.cpp",
        "rule link",
        # Hidden symbols and no symbol of the static runtime: nothing can clash with torch's own.
        f"  command = {cxx} -shared -s -Wl,--exclude-libs,ALL -o $out @$out.rsp {libraries}",
        "  rspfile = $out.rsp",
        "  rspfile_content = $in",
        f"  description = {module.name}",
        f"build {_q(module)}: link {_q(binding)} {' '.join(_q(p) for p in common)}",
        f"default {_q(module)}",
        "",
    ]
    return "\n".join(lines)


def slowest(log: Path, skip_lines: int, count: int = 5) -> list[tuple[float, str]]:
    """Seconds and object of the slowest units, from ninja's own log (start, end, mtime, output)."""
    times: dict[str, float] = {}
    if log.exists():
        for line in log.read_text().splitlines()[skip_lines:]:
            parts = line.split("\t")
            if len(parts) == 5:
                times[Path(parts[3]).name] = (int(parts[1]) - int(parts[0])) / 1000
    return sorted(((seconds, name) for name, seconds in times.items()), reverse=True)[:count]


def check_stats(objects: Path, units: list[Any]) -> list[str]:
    """Writes kernel_stats.json; returns what should fail the build."""
    everything: list[dict[str, Any]] = []
    faults: list[str] = []
    for unit in units:
        rows = {b.row.name: b.row for b in unit.rows}
        stats, warnings = ptxas_log.parse((objects / f"{unit.name}.o.log").read_text(), list(rows))
        allowed = all(row.allow_spill for row in rows.values())
        faults += [] if allowed else [f"{unit.name}: {line}" for line in dict.fromkeys(warnings)]
        for one in stats:
            entry = dataclasses.asdict(one)
            row = rows.get(one.row)
            if row is not None:
                number = int("".join(c for c in one.arch if c.isdigit()))
                native = row.min_sm <= number <= row.max_sm
                entry |= {
                    "dynamic_smem_bytes": row.smem_bytes,
                    "threads": row.threads,
                    "native": native,
                }
                if one.spills and not ptxas_log.may_spill(row.name, row.allow_spill, number):
                    text = f"{one.row} for {one.arch} spills {one.spill_store_bytes} bytes"
                    if native:
                        faults.append(text)
                    else:  # an arch it is not meant for: its speed means nothing
                        print(f"note: {text} (not an arch it is chosen on)", flush=True)
            everything.append(entry)
    for source in REDUCE_FILES:
        log = objects / f"{object_name(source)}.log"
        stats, _ = ptxas_log.parse(log.read_text() if log.exists() else "", [])
        faults += [f"{source} for {one.arch} spills: {one.symbol}" for one in stats if one.spills]
    (objects / "kernel_stats.json").write_text(json.dumps(everything, indent=1) + "\n")
    return faults


def build(o: Options) -> Path | None:
    """Returns the module's path (None without --link)."""
    toolkit = None if o.host_only else cuda.find_toolkit()
    archs = kernels.parse_archs(o.archs)
    if toolkit is None and not o.host_only:
        raise BuildError(
            "no nvcc (CUDA_HOME, PATH, /usr/local/cuda, PyPI packages): set CUDA_HOME "
            "or pass --host-only"
        )
    if toolkit is not None:
        archs = supported_archs(archs, toolkit)
        if not archs:
            raise BuildError(
                "no GPU arch to build for: pass --archs (such as 80,90) or --host-only"
            )
    o.out.mkdir(parents=True, exist_ok=True)
    o.objects.mkdir(parents=True, exist_ok=True)
    version = toolkit.version_text if toolkit else "none"
    built, units = kernels.generate(
        o.objects / "generated", archs if toolkit else [], o.families, o.only, version, o.rows_file
    )
    missing = [b.row.name for b in built if not b.sass]
    what = (
        f"CUDA {version} for {', '.join('sm_' + a.code for a in archs)}"
        if toolkit
        else "host-only (no GPU code)"
    )
    jobs = job_count()
    print(
        f"memeff_attn _C: {what}; {len(built)} variants, {len(units)} units, {jobs} jobs",
        flush=True,
    )
    if toolkit and missing:
        shown = ", ".join(missing[:6]) + (
            f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        )
        print(f"not built ({len(missing)}; other archs, --families or --only): {shown}", flush=True)
    facts = python_facts(o.python) if o.link else None
    check_host_tools(facts)
    ninja_file = o.out / "build.ninja"
    kernels.write_if_changed(ninja_file, ninja_text(o, toolkit, archs, units, facts))
    log = o.objects / ".ninja_log"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    environment = dict(os.environ, NINJA_STATUS="[%f/%t %es] ")
    command = [ninja_path(), "-f", str(ninja_file), "-j", str(jobs)]
    if child_session.run(command, environment) != 0:
        raise BuildError("the build failed; the compiler's words are above")
    times = slowest(log, before)
    if times:
        print(
            "slowest: " + ", ".join(f"{name} {seconds:.0f} s" for seconds, name in times),
            flush=True,
        )
    faults = check_stats(o.objects, units)
    if faults:
        for fault in faults if o.tell_faults else []:
            print(f"fault: {fault}", flush=True)
        if o.strict:
            raise BuildError(
                f"{len(faults)} faults in the kernels' code (a row with allow_spill may have them)"
            )
    return o.out / f"_C{facts['suffix']}" if facts else None


def main() -> int:
    parser = argparse.ArgumentParser(description="builds memeff_attn's compiled module")
    parser.add_argument(
        "--archs",
        default="",
        help="such as 80,90a (default: MEMEFF_CUDA_ARCHS, TORCH_CUDA_ARCH_LIST)",
    )
    parser.add_argument(
        "--families",
        default=os.environ.get("MEMEFF_FAMILIES", "native"),
        help="native, all, or names",
    )
    parser.add_argument(
        "--only", default="", help="build only rows whose name matches this regular expression"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter the module is for (it needs pybind11)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".build" / "module", help="where the module goes"
    )
    parser.add_argument(
        "--objects", type=Path, help="objects shared by all Pythons (default: .build/<archs>)"
    )
    parser.add_argument(
        "--host-only", action="store_true", help="no CUDA: the table, explain and variants alone"
    )
    parser.add_argument(
        "--no-link", action="store_true", help="kernels and host part only, no module"
    )
    parser.add_argument(
        "--allow-faults", action="store_true", help="report spills and C75xx warnings, do not fail"
    )
    parser.add_argument(
        "--rows", type=Path, default=kernels.ROWS_FILE, help="another variant list (tests)"
    )
    a = parser.parse_args()
    archs = (
        a.archs
        or os.environ.get("MEMEFF_CUDA_ARCHS")
        or os.environ.get("TORCH_CUDA_ARCH_LIST")
        or ""
    )
    options = options_for("" if a.host_only else archs)
    options = dataclasses.replace(
        options,
        out=a.out.resolve(),
        objects=a.objects.resolve() if a.objects else options.objects,
        families=a.families,
        only=a.only,
        host_only=a.host_only,
        python=a.python,
        rows_file=a.rows.resolve(),
        link=not a.no_link,
        strict=not a.allow_faults,
    )
    try:
        module = build(options)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if module:
        print(module)
    return 0


if __name__ == "__main__":
    sys.exit(main())
