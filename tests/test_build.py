"""The generator, the build driver; no GPU, and nvcc for one test only."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build_tools"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_under_test_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(TOOLS))
kernels = load(ROOT / "csrc" / "kernels.py")
build_kernels = load(TOOLS / "build_kernels.py")
check_sass = load(TOOLS / "check_sass.py")
config = load(TOOLS / "config.py")
cuda, ptxas_log = config.cuda, build_kernels.ptxas_log

# A list in the form of csrc/kernels_rows.py; FOLDER is replaced.
ROWS = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str; family: str; arch: str; header: str; min_sm: int; max_sm: int
    dtype: str = "f16"; math: str = "ieee"; traits: str = "{family}::Traits"
    max_k: int = 64; max_kv: int = 64; alignment: int = 8; bias: bool = False
    tile_m: int = 64; tile_n: int = 64; value_tile: int = 64; threads: int = 128
    smem_bytes: int = 1024; kind: str = "fwd"; dropout: bool = False; min_length: int = 0
    max_n: int = 0; sequences: bool = True; min_m: int = 0; min_blocks_per_sm: float = 0
    adds_query: bool = False; causal_length: int = 0; min_k: int = 0
    max_m: int = 0; max_blocks_per_sm: float = 0; allow_spill: bool = False; blocks_per_sm: int = 1
    partial: bool = False; pages: bool = True; bias_alignment: int = 0; in_memory: bool = False

def row(name, arch, min_sm, max_sm, family="chained", **kw):
    return Variant(name=name, family=family, arch=arch, min_sm=min_sm, max_sm=max_sm,
                   header="FOLDER/" + family + ".h",
                   traits=("registers" if family == "register" else family) + "::Traits", **kw)

VARIANTS = [
    row("chained_sm80_f16_k64", "sm80", 80, 999),
    row("chained_sm80_f16_k64_bias", "sm80", 80, 999, bias=True),
    row("chained_sm75_f16_k64", "sm75", 75, 75),
    row("chained_sm70_f16_k64", "sm70", 70, 72),
    row("register_sm80_f16_k64", "sm80", 80, 999, family="register"),
    row("hopper_sm90_f16_k64", "sm90", 90, 90, family="hopper"),
    row("chained_bwd_sm80_f16_k64", "sm80", 80, 999, kind="bwd", bias=True, dropout=True),
]
"""

# What the generated units need of a family.
HEADER = """
#include <cuda_runtime.h>
#include "params.h"
#include "status.h"
namespace memeff { namespace FAMILY {
struct Traits {
  static constexpr int kSmemBytes = 1024, kTileM = 64, kTileN = 64, kValueTile = 64, kThreads = 128;
};
template <class T> __global__ void forward_kernel(ForwardParams p) {
  *static_cast<int*>(p.out.data) = 1;
}
template <class T> Status launch_forward(const ForwardParams& p, cudaStream_t s, const char*) {
  forward_kernel<T><<<1, 1, 0, s>>>(p);
  return {};
}
template <class T> __global__ void backward_kernel(BackwardParams p) {
  *static_cast<int*>(p.grad_key.data) = 1;
}
template <class T> Status launch_backward(const BackwardParams& p, cudaStream_t s, const char*) {
  backward_kernel<T><<<1, 1, 0, s>>>(p);
  return {};
}
}}
"""


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.py"
    path.write_text(ROWS.replace("FOLDER", tmp_path.as_posix()))
    for family, space in (("chained", "chained"), ("register", "registers")):
        (tmp_path / f"{family}.h").write_text(HEADER.replace("FAMILY", space))
    return path


def planned(
    rows_file: Path, archs: str, families: str = "native", only: str = ""
) -> dict[str, str]:
    built, _ = kernels.plan(
        kernels.load_rows(rows_file), kernels.parse_archs(archs), families, only
    )
    return {
        b.row.name: " ".join([a.code for a in b.sass] + ([f"ptx{b.ptx.code}"] if b.ptx else []))
        for b in built
        if b.sass
    }


# ---- the generator ----


def test_archs_are_read_in_every_spelling() -> None:
    def codes(text: str) -> list[str]:
        return [a.code for a in kernels.parse_archs(text)]

    assert codes("80") == ["80"]
    assert codes("9.0a;8.0 7.5,sm_90+PTX") == ["75", "80", "90", "90a"]
    assert codes("12.0 10.0") == ["100", "120"]
    assert codes("Volta;Ampere") == ["70", "80", "86"]
    assert codes("") == []
    with pytest.raises(ValueError, match="fast"):
        codes("80,fast")


def test_native_rows_get_their_own_archs_and_the_newest_ptx(rows_file: Path) -> None:
    assert planned(rows_file, "70,75,80,90a") == {
        "chained_sm80_f16_k64": "80 90 ptx90",
        "chained_sm80_f16_k64_bias": "80 90 ptx90",
        "chained_sm75_f16_k64": "75",
        "chained_sm70_f16_k64": "70",
        "register_sm80_f16_k64": "80 90 ptx90",
        "hopper_sm90_f16_k64": "90a",
        "chained_bwd_sm80_f16_k64": "80 90 ptx90",
    }


def test_all_families_go_to_every_arch_that_has_their_instructions(rows_file: Path) -> None:
    assert planned(rows_file, "90", "all") == {
        "chained_sm80_f16_k64": "90 ptx90",
        "chained_sm80_f16_k64_bias": "90 ptx90",
        "chained_sm75_f16_k64": "90 ptx90",
        "chained_sm70_f16_k64": "90 ptx90",
        "register_sm80_f16_k64": "90 ptx90",
        "hopper_sm90_f16_k64": "90a",
        "chained_bwd_sm80_f16_k64": "90 ptx90",
    }
    assert planned(rows_file, "75", "all") == {
        "chained_sm75_f16_k64": "75 ptx75",
        "chained_sm70_f16_k64": "75 ptx75",
    }


def test_families_and_rows_are_picked_by_name(rows_file: Path) -> None:
    assert list(planned(rows_file, "90", "register,sm70")) == [
        "chained_sm70_f16_k64",
        "register_sm80_f16_k64",
    ]
    assert list(planned(rows_file, "90", only="bias$")) == ["chained_sm80_f16_k64_bias"]


def test_generation_is_stable_and_drops_old_units(rows_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "generated"
    archs = kernels.parse_archs("80,90a")
    _, units = kernels.generate(out, archs, rows_file=rows_file)
    first = {p.name: (p.read_text(), p.stat().st_mtime_ns) for p in out.iterdir()}
    assert {f"{u.name}.cu" for u in units} | {"kernel_table.cpp"} == set(first)
    kernels.generate(out, archs, rows_file=rows_file)
    assert first == {p.name: (p.read_text(), p.stat().st_mtime_ns) for p in out.iterdir()}
    kernels.generate(out, [], rows_file=rows_file)
    assert [p.name for p in out.iterdir()] == ["kernel_table.cpp"]
    table = (out / "kernel_table.cpp").read_text()
    assert table.count("nullptr, nullptr}") == 7 and "launch_" not in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"register_sm80_f16_k64"', '"chained_sm80_f16_k64"'), "twice"),
        (('"sm75", 75, 75', '"sm76", 75, 75'), "sm76"),
        (('dtype: str = "f16"', 'dtype: str = "f8"'), "f8"),
        (('"sm70", 70, 72', '"sm70", 73, 72'), "min_sm"),
        (('"chained_sm70_f16_k64"', '"chained sm70"'), "lower case"),
        (('kind="bwd"', 'kind="both"'), "both"),
    ],
)
def test_bad_rows_are_refused(rows_file: Path, change: tuple[str, str], message: str) -> None:
    rows_file.write_text(rows_file.read_text().replace(*change))
    with pytest.raises(ValueError, match=message):
        kernels.load_rows(rows_file)


def test_backward_rows_get_units_and_launchers_of_their_own(rows_file: Path) -> None:
    built, units = kernels.plan(kernels.load_rows(rows_file), kernels.parse_archs("80"))
    assert [u.name for u in units] == [
        "chained_sm80_f16_01", "register_sm80_f16_01", "chained_bwd_sm80_f16_01",
    ]  # fmt: skip
    source = kernels.unit_source(units[-1])
    name = "launch_chained_bwd_sm80_f16_k64"
    assert f"Status {name}(const BackwardParams& params, cudaStream_t stream) {{" in source
    assert "chained::launch_backward<rows::chained_bwd_sm80_f16_k64>(params, stream, " in source
    table = kernels.table_source(built, "13.0", "hash")
    assert f"Status {name}(const BackwardParams&, CUstream_st*);" in table
    assert f"nullptr, &{name}}}" in table
    assert "&launch_chained_sm80_f16_k64, nullptr}" in table
    assert "Pass::kBackward, DType::kF16, Math::kIeee, 64, 64, 8, true, true, " in table


def test_the_list_leaves_no_module_behind(rows_file: Path) -> None:
    sys.modules.pop("kernels_rows", None)
    kernels.load_rows(rows_file)
    assert "kernels_rows" not in sys.modules


def test_source_hash_sees_names_and_contents_of_sources_only(tmp_path: Path) -> None:
    (tmp_path / "csrc" / "a").mkdir(parents=True)
    header = tmp_path / "csrc" / "a" / "x.h"
    header.write_text("1")
    (tmp_path / "setup.py").write_text("")
    seen = [kernels.source_hash(tmp_path)]
    (tmp_path / "csrc" / "x.o").write_text("object")
    assert kernels.source_hash(tmp_path) == seen[0]
    header.write_text("2")
    seen.append(kernels.source_hash(tmp_path))
    header.rename(header.with_name("y.h"))
    seen.append(kernels.source_hash(tmp_path))
    (tmp_path / "setup.py").write_text("x")
    seen.append(kernels.source_hash(tmp_path))
    assert len(set(seen)) == len(seen)


def test_command_line_of_the_generator() -> None:
    def run(*args: str) -> str:
        return subprocess.run(
            [sys.executable, str(ROOT / "csrc" / "kernels.py"), *args],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert run("--hash").strip() == kernels.source_hash()
    assert run("--list").split() == [r.name for r in kernels.load_rows()]


# ---- what the compiler said ----

LOG = """
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_ZN6memeff3runINS_4rows5row_aEEEv' for 'sm_80'
ptxas info    : Function properties for _ZN6memeff3runINS_4rows5row_aEEEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN6memeff3runINS_4rows10row_a_biasEEEv' for 'sm_90'
ptxas info    : Function properties for _ZN6memeff3runINS_4rows10row_a_biasEEEv
    48 bytes stack frame, 36 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions serialized
"""


def test_ptxas_log_is_read() -> None:
    stats, warnings = ptxas_log.parse(LOG, ["row_a", "row_a_bias"])
    assert [(s.row, s.arch, s.registers, s.static_smem_bytes, s.spills) for s in stats] == [
        ("row_a", "sm_80", 168, 512, False),
        ("row_a_bias", "sm_90", 255, 0, True),
    ]
    assert stats[1].spill_store_bytes == 36 and stats[1].stack_bytes == 48
    assert len(warnings) == 1 and "C7510" in warnings[0]
    stats, _ = ptxas_log.parse(LOG.replace("row_a", "x"), ["chained_bwd"])
    assert {s.row for s in stats} == {"chained_bwd"}  # alone in its unit


def test_old_archs_may_spill_where_their_compiler_does() -> None:
    simt, volta = "chained_simt_f32_v64_bias", "chained_sm70_f16_any_full"
    assert all(ptxas_log.may_spill(name, False, 70) for name in (simt, volta))
    assert not ptxas_log.may_spill(simt, False, 90)
    assert not ptxas_log.may_spill("chained_sm70_f16_v64", False, 70)
    assert ptxas_log.may_spill("chained_sm70_f16_v64", True, 70)


def test_spills_and_c75_warnings_are_faults_unless_allowed(rows_file: Path, tmp_path: Path) -> None:
    log = LOG.replace("10row_a_bias", "25chained_sm80_f16_k64_bias").replace(
        "5row_a", "20chained_sm80_f16_k64"
    )

    def faults() -> list[str]:
        _, units = kernels.plan(kernels.load_rows(rows_file), kernels.parse_archs("80,90"))
        (tmp_path / f"{units[0].name}.o.log").write_text(log)
        found: list[str] = build_kernels.check_stats(tmp_path, units[:1])
        return found

    text = "\n".join(faults())
    assert "chained_sm80_f16_k64_bias for sm_90 spills 36 bytes" in text and "C7510" in text
    rows_file.write_text(
        rows_file.read_text().replace("allow_spill: bool = False", "allow_spill: bool = True")
    )
    assert faults() == []


@pytest.mark.parametrize(
    ("sm", "registers", "threads", "smem_kb", "expected"),
    [
        (70, 212, 128, 40, 2),  # 256 * 27 * 4 registers a block: 2 fit
        (70, 128, 128, 33, 2),  # 96 KB of shared memory
        (75, 64, 256, 16, 4),  # 1024 threads, 64 KB
        (80, 168, 128, 48, 3),  # registers; shared memory with 1 KB for the system too
        (86, 64, 128, 50, 1),  # 51 KB of 100
        (90, 32, 128, 1, 16),  # threads
    ],
)
def test_blocks_per_sm(sm: int, registers: int, threads: int, smem_kb: int, expected: int) -> None:
    chip = check_sass.chip_of(sm)
    assert check_sass.blocks_per_sm(chip, registers, threads, smem_kb * 1024) == expected


def test_sm70_rows_need_tensor_cores_and_two_blocks(
    rows_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {r.name: r for r in kernels.load_rows(rows_file) if r.arch == "sm70"}
    one: dict[str, Any] = {
        "row": "chained_sm70_f16_k64", "arch": "sm_70", "registers": 255, "symbol": "",
        "static_smem_bytes": 60 * 1024, "spill_store_bytes": 0, "spill_load_bytes": 0,
    }  # fmt: skip
    counter = check_sass.collections.Counter({"FFMA": 3})
    faults = check_sass.check([one], rows, {("chained_sm70_f16_k64", "sm_70"): counter})
    text = "\n".join(faults)
    assert "HMMA.884" in text and "1 blocks an SM" in text
    one |= {"static_smem_bytes": 0, "registers": 128}
    counter["HMMA.884"] = 64
    assert check_sass.check([one], rows, {("chained_sm70_f16_k64", "sm_70"): counter}) == []
    assert "HMMA.884 64" in capsys.readouterr().out


# ---- what is built where ----


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a GPU, without nvcc, and without a word in the environment."""
    for name in ("CUDA_HOME", "CUDA_PATH", "MEMEFF_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MEMEFF_HOST_ONLY", raising=False)
    monkeypatch.setattr(cuda, "visible_gpus", lambda: [])
    monkeypatch.setattr(cuda, "find_toolkit", lambda: None)
    monkeypatch.setattr(config, "driver_cuda", lambda: None)
    return monkeypatch


def toolkit(version: tuple[int, int], targets: set[int]) -> Any:
    return cuda.Toolkit(Path("nvcc"), Path(), version, (), (), frozenset(targets))


def test_no_gpu_is_host_only_and_needs_nothing(no_cuda: pytest.MonkeyPatch) -> None:
    archs, line = config.decide()
    assert archs == "" and "host-only" in line and "no GPU is visible" in line
    assert config.build_requirements() == []


def test_gpu_without_nvcc_brings_one_from_pypi(no_cuda: pytest.MonkeyPatch) -> None:
    no_cuda.setattr(cuda, "visible_gpus", lambda: [90])
    no_cuda.setenv("CUTLASS_HOME", "/nowhere")
    needs = config.build_requirements()
    assert "nvidia-cuda-nvcc==13.0.*" in needs and "nvidia-nvvm==13.0.*" in needs
    assert "nvidia-cutlass==4.2.0.0" in needs
    archs, line = config.decide()
    assert archs == "" and "no nvcc" in line
    no_cuda.setattr(config, "driver_cuda", lambda: (12, 4))  # its driver would not run CUDA 13
    assert config.build_requirements() == []


def test_asked_archs_without_nvcc_are_an_error(no_cuda: pytest.MonkeyPatch) -> None:
    no_cuda.setenv("MEMEFF_CUDA_ARCHS", "80")
    with pytest.raises(config.BuildError, match="MEMEFF_CUDA_ARCHS=80 but no nvcc"):
        config.decide()


@pytest.mark.parametrize(
    ("gpu", "version", "targets", "message"),
    [
        (70, (13, 0), {75, 80, 90}, "sm_70.*nvcc 13.0.*CUDA 12.9 or older"),
        (100, (12, 4), {70, 80, 90}, "sm_100.*nvcc 12.4.*CUDA 12.8 or newer.*MEMEFF_CUDA_ARCHS=90"),
    ],
)
def test_gpu_beyond_nvcc_names_the_cuda_needed(
    no_cuda: pytest.MonkeyPatch, gpu: int, version: tuple[int, int], targets: set[int], message: str
) -> None:
    no_cuda.setattr(cuda, "visible_gpus", lambda: [gpu])
    no_cuda.setattr(cuda, "find_toolkit", lambda: toolkit(version, targets))
    with pytest.raises(config.BuildError, match=message):
        config.decide()


def test_archs_that_nvcc_lacks_are_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    nvcc13 = toolkit((13, 0), {75, 80, 90})
    kept = build_kernels.supported_archs(kernels.parse_archs("70,80"), nvcc13)
    assert [a.code for a in kept] == ["80"]
    assert "no sm_70 target" in capsys.readouterr().out
    with pytest.raises(build_kernels.BuildError, match="none of the archs"):
        build_kernels.supported_archs(kernels.parse_archs("70"), nvcc13)


def test_jobs_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_kernels, "free_ram_gb", lambda: 100.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert build_kernels.job_count() == 16
    monkeypatch.setenv("MAX_JOBS", "4")
    assert build_kernels.job_count() == 4
    monkeypatch.setattr(build_kernels, "free_ram_gb", lambda: 7.0)
    assert build_kernels.job_count() == 2
    monkeypatch.setattr(build_kernels, "free_ram_gb", lambda: 1.0)
    assert build_kernels.job_count() == 1


# ---- builds ----


def drive(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "build_kernels.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_host_only_build_without_cuda(rows_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("pybind11")
    done = drive(
        "--host-only", "--rows", rows_file, "--out", tmp_path / "m", "--objects", tmp_path / "o"
    )
    assert done.returncode == 0, done.stderr
    assert "host-only (no GPU code); 7 variants" in done.stdout
    module = next((tmp_path / "m").glob("_C*.so"))
    # In a process of its own, which must load neither torch nor a CUDA library.
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", {str(module)!r})
c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c)
assert [v["name"] for v in c.variants()][2:4] == ["chained_sm75_f16_k64", "chained_sm70_f16_k64"]
assert not any(v["built"] for v in c.variants()) and c.built_archs() == []
assert c.cuda_version() == "none" and c.is_cuda_build is False
asked = dict(sm=75, dtype="f16", M=9, N=9, K=64, Kv=64, alignment=8)
assert c.select(asked) == "chained_sm75_f16_k64"
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "torch" not in maps and "torch" not in sys.modules
print(c.source_hash)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == kernels.source_hash()


def test_one_header_of_one_family_rebuilds_that_family(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        found = cuda.find_toolkit()
    except cuda.BuildError as error:
        pytest.skip(str(error))
    if found is None or 80 not in found.targets:
        pytest.skip("no nvcc for sm_80 here")
    (tmp_path / "include" / "cutlass").mkdir(parents=True)
    (tmp_path / "include" / "cutlass" / "cutlass.h").touch()
    monkeypatch.setenv("CUTLASS_HOME", str(tmp_path))
    monkeypatch.setenv("MEMEFF_CCACHE", "0")
    objects = tmp_path / "o"
    args = (
        "--archs",
        "80",
        "--no-link",
        "--rows",
        rows_file,
        "--objects",
        objects,
        "--out",
        tmp_path / "m",
    )

    def stamps() -> dict[str, int]:
        done = drive(*args)
        assert done.returncode == 0, done.stdout + done.stderr
        return {p.name: p.stat().st_mtime_ns for p in objects.glob("*.o")}

    first = stamps()
    assert {"chained_sm80_f16_01.o", "register_sm80_f16_01.o"} <= set(first)
    assert {"chained_bwd_sm80_f16_01.o", "reduce_delta.o", "reduce_sum_splits.o"} <= set(first)
    assert stamps() == first
    header = tmp_path / "register.h"
    header.write_text(header.read_text() + "\n")
    second = stamps()
    assert {name for name in first if first[name] != second[name]} == {"register_sm80_f16_01.o"}
    log = build_kernels.json.loads((objects / "kernel_stats.json").read_text())
    assert {one["row"] for one in log} == {
        "chained_sm80_f16_k64", "chained_sm80_f16_k64_bias", "register_sm80_f16_k64",
        "chained_bwd_sm80_f16_k64",
    }  # fmt: skip
