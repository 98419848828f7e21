"""Wheels, source distributions, and what their tools say where something is missing."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build_tools"
sys.path.insert(0, str(TOOLS))

import build_kernels  # noqa: E402
import config  # noqa: E402
import cuda  # noqa: E402
import pip_install  # noqa: E402
import ptxas_log  # noqa: E402
import sass_report  # noqa: E402
import wheels  # noqa: E402

LICENSES = ("LICENSE", "THIRD_PARTY.md", "third_party/licenses/cutlass.txt",
            "third_party/licenses/pybind11.txt")  # fmt: skip


# ---- the built module ----


def built_modules() -> list[Path]:
    return sorted((ROOT / "memeff_attn").glob("_C*.so"))


def test_the_module_links_neither_torch_nor_cuda() -> None:
    """ldd of whatever was built here: one binary for every torch and every CUDA."""
    if not built_modules():
        pytest.skip("no compiled module in memeff_attn/")
    for module in built_modules():
        linked = wheels.linked_libraries(module)
        assert any(name.startswith("libc.so") for name in linked), linked  # ldd said something
        assert wheels.foreign_libraries(module) == []


def test_a_module_that_links_torch_is_noticed() -> None:
    """torch's own extension, as the counterexample."""
    import torch

    assert any(name.startswith("libtorch") for name in wheels.foreign_libraries(
        Path(torch._C.__file__)))  # fmt: skip


def test_the_module_defines_nothing_but_its_entry() -> None:
    """Hidden symbols: nothing of it can clash with torch's own copies of CUTLASS and cudart."""
    for module in built_modules():
        command = ["nm", "-D", "--defined-only", str(module)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except FileNotFoundError:
            pytest.skip("no nm here (binutils)")
        strong = [w[2] for w in map(str.split, done.stdout.splitlines()) if w[1] in "TDB"]
        assert strong == ["PyInit__C"]


# ---- versions ----


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMEFF_LOCAL_VERSION", raising=False)
    base = config.version()
    assert f'__version__ = "{base}"' in (ROOT / "memeff_attn" / "__init__.py").read_text()
    monkeypatch.setenv("MEMEFF_LOCAL_VERSION", wheels.local_version(wheels.ARCHS, (12, 4)))
    assert config.version() == f"{base}+cu124.sm70.75.80.90"
    assert wheels.local_version("90a,9.0;80", (13, 0)) == "cu130.sm80.90"
    assert wheels.local_version("", None) == "host"


def test_the_archs_of_a_wheel_serve_every_gpu() -> None:
    """Each row preferred on a GPU has machine code that runs there; newer GPUs have PTX."""
    kernels = build_kernels.kernels
    rows = kernels.load_rows()
    built, _ = kernels.plan(rows, kernels.parse_archs(wheels.ARCHS))
    for sm in (70, 75, 80, 86, 89, 90, 100, 120):
        for one in built:
            row = one.row
            if not row.min_sm <= sm <= row.max_sm:
                continue
            codes = {a.number for a in one.sass if a.number // 10 == sm // 10 and a.number <= sm}
            ptx = one.ptx is not None and one.ptx.number <= sm
            specific = row.arch in kernels.ARCH_SPECIFIC
            assert codes or (ptx and not specific), f"{row.name} has no code for sm_{sm}"
            assert codes or sm >= 100, f"{row.name} has only PTX for sm_{sm}"


# ---- the wheel itself ----


def fake_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


def test_check_names_what_is_wrong_with_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    wrong = fake_wheel(tmp_path, "memeff_attn-0-cp311-cp311-linux_x86_64.whl", {
        "memeff_attn.libs/libcudart-1234.so.12": b"",
        "memeff_attn-0.dist-info/licenses/LICENSE": b"",
        "memeff_attn/_C.cpython-311-x86_64-linux-gnu.so": Path(torch._C.__file__).read_bytes(),
    })  # fmt: skip
    monkeypatch.setattr(wheels, "MAX_BYTES", 10)
    text = "\n".join(wheels.check(wrong, True))
    for words in ("no manylinux tag", "at most 10", "licence cutlass.txt", "cuda_runtime.txt",
                  "libcudart-1234", "links libtorch"):  # fmt: skip
        assert words in text, text

    empty = fake_wheel(tmp_path, "memeff_attn-0-py3-none-any.whl", {})
    assert any("expected one memeff_attn/_C" in fault for fault in wheels.check(empty, False))


def test_a_good_wheel_passes(tmp_path: Path) -> None:
    if not built_modules():
        pytest.skip("no compiled module in memeff_attn/")
    module = built_modules()[0]
    files = {f"memeff_attn/{module.name}": module.read_bytes()}
    files |= {f"memeff_attn-0.dist-info/licenses/{name}": b"" for name in LICENSES}
    good = fake_wheel(tmp_path, "memeff_attn-0-cp311-cp311-manylinux_2_34_x86_64.whl", files)
    assert wheels.check(good, False) == []
    assert wheels.check(good, True) == ["the licence cuda_runtime.txt is not inside"]


def no_isolation() -> None:
    """Skips where this Python lacks what a build without isolation needs."""
    # Looked for, not imported: setuptools changes how it works in a process that imported pip.
    lacking = [n for n in ("pip", "pybind11", "setuptools", "wheel") if not find_spec(n)]
    if lacking:
        pytest.skip(f"a build without isolation needs {', '.join(lacking)}")
    found = version("setuptools")
    if int(found.split(".")[0]) < 77:
        pytest.skip(f"needs setuptools 77 or newer, here is {found}")


def test_source_distribution_installs(tmp_path: Path) -> None:
    """It holds what is in git, builds a wheel host-only, and that wheel works in a folder of its
    own. Without network: nothing is isolated here (`make sdist` and pip isolate)."""
    no_isolation()
    environment = {**os.environ, "MEMEFF_HOST_ONLY": "1", "PYTHONPATH": ""}
    # ccache, where it is, knows the files again in the next run's folder.
    environment |= {"CCACHE_BASEDIR": str(tmp_path), "CCACHE_NOHASHDIR": "1"}
    code = "import backend, sys; backend.build_sdist(sys.argv[1])"
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, env={**environment, "PYTHONPATH": str(TOOLS)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    (archive,) = tmp_path.glob("memeff_attn-*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        file.extractall(tmp_path / "source", filter="data")
    for name in ("csrc/kernels_rows.py", "build_tools/cuda124.sh", "tests/cases.py", "Makefile",
                 "bench/cells.json", "docs/design.md", "docker/Dockerfile", *LICENSES):  # fmt: skip
        assert name in names, name
    assert not [n for n in names if n.endswith((".so", ".pyc", "cuda_runtime.txt"))]
    (source,) = (tmp_path / "source").iterdir()
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q"]
    done = subprocess.run(
        [*command, "-w", str(tmp_path), str(source)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (made_wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made_wheel) as file:
        file.extractall(tmp_path / "installed")
    code = "import memeff_attn; print(memeff_attn.__file__, memeff_attn._C.is_cuda_build)"
    ran = subprocess.run(
        [sys.executable, "-c", "import memeff_attn._C;" + code],
        cwd=tmp_path, env={**environment, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(tmp_path / "installed/memeff_attn/__init__.py"), "False"]


def test_everything_in_git_is_in_the_source_distribution() -> None:
    """Folders that MANIFEST.in forgets."""
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    grafted = {w for line in (ROOT / "MANIFEST.in").read_text().splitlines()
               if line.startswith("graft ") for w in line.split()[1:]}  # fmt: skip
    folders = {name.partition("/")[0] for name in done.stdout.split() if "/" in name}
    taken = {name.partition("/")[0] for name in grafted} | {"memeff_attn"}
    assert folders - taken <= {".ci", "compat"}, "MANIFEST.in lacks a folder"


# ---- what is missing, said ----


def test_toolkit_without_an_arch_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc13 = cuda.Toolkit(Path("nvcc"), Path(), (13, 0), (), (), frozenset({75, 80, 90}))
    monkeypatch.setenv("CUDA_HOME", "/somewhere")
    monkeypatch.setattr(cuda, "find_toolkit", lambda: nvcc13)
    with pytest.raises(cuda.BuildError) as caught:
        wheels.find_cuda(wheels.ARCHS)
    text = str(caught.value)
    assert "nvcc 13.0" in text and "sm_70" in text and "unset CUDA_HOME" in text


def test_toolkit_without_its_licence(tmp_path: Path) -> None:
    toolkit = cuda.Toolkit(tmp_path / "bin/nvcc", tmp_path, (12, 4), (), (), frozenset({70}))
    with pytest.raises(cuda.BuildError, match=r"no EULA\.txt.*put the toolkit's licence there"):
        wheels.take_cuda_license(toolkit)


def test_no_pybind11(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install --no-build-isolation` meets it."""
    real = builtins.__import__

    def without(name: str, *args: Any, **named: Any) -> Any:
        if name == "pybind11":
            raise ImportError("No module named 'pybind11'")
        return real(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(cuda.BuildError, match="has no pybind11: pip install pybind11"):
        build_kernels.python_facts(sys.executable)


def test_no_pybind11_in_another_python(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho \"No module named 'pybind11'\" >&2\nexit 1\n")
    other.chmod(0o755)
    with pytest.raises(cuda.BuildError, match=r"cannot import pybind11 \(pip install pybind11\)"):
        build_kernels.python_facts(str(other))


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(cuda.BuildError, match=r"no C\+\+ compiler.*install g\+\+ or set CXX"):
        build_kernels.check_host_tools(None)


def test_no_cutlass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTLASS_HOME", str(tmp_path))
    with pytest.raises(cuda.BuildError) as caught:
        cuda.find_cutlass()
    for words in (str(tmp_path), "set CUTLASS_HOME", "pip install nvidia-cutlass==4.2.0.0"):
        assert words in str(caught.value)


@pytest.mark.parametrize("source", ["MEMEFF_CUDA_ARCHS", "the visible GPUs"])
def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(config, "wanted_archs", lambda: config.Wanted("70", source))
    monkeypatch.setattr(cuda, "find_toolkit", lambda: None)
    try:
        archs, text = config.decide()
        assert source == "the visible GPUs" and archs == ""
    except cuda.BuildError as error:
        assert source == "MEMEFF_CUDA_ARCHS"
        text = str(error)
    assert "no nvcc" in text and "CUDA_HOME" in text and "cuda124.sh" in text


@pytest.mark.parametrize(
    "printed",
    [
        "WARNING: Retrying ... NewConnectionError('...: Failed to establish a new connection')",
        "ERROR: No matching distribution found for setuptools>=77",
        "ERROR: No matching distribution found for nvidia-cutlass==4.2.0.0",
    ],
)
def test_offline_pip_says_the_way_out(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setattr(sys, "argv", ["pip_install.py", "."])
    monkeypatch.setattr(pip_install, "end_on_signals", lambda: None)  # the test's own stay
    assert pip_install.main() == 1
    told = capfd.readouterr().err
    assert printed in told and "--no-build-isolation" in told and "CUTLASS_HOME" in told
    assert pip_install.failure_text("error: g++ failed") == "error: g++ failed"


# ---- docs/sass.md ----


def report_hash() -> str:
    text = (ROOT / "docs" / "sass.md").read_text()
    return text.split("hash\n`")[1].split("`")[0]


def test_the_report_of_machine_code_is_of_these_rows() -> None:
    kernels = build_kernels.kernels
    if not kernels.source_hash().startswith(report_hash()):
        pytest.skip("docs/sass.md is of other sources: its head says how to write it again")
    text = (ROOT / "docs" / "sass.md").read_text()
    archs = [int(number) for number in re.findall(r"^## sm_(\d+) ", text, re.M)]
    assert 70 in archs  # nobody here has one to look at
    for arch in archs:
        part = text.split(f"## sm_{arch} ")[1].split("\n## ")[0]
        cells = [[c.strip() for c in line.split("|")[1:-1]]
                 for line in part.splitlines() if line.startswith("| ")][1:]  # fmt: skip
        rows = {r.name: r for r in kernels.load_rows() if r.min_sm <= arch <= r.max_sm}
        assert {c[0] for c in cells} == set(rows)
        for name, _, registers, spilled, smem, *_ in cells:
            assert 0 < int(registers) <= 255
            assert not spilled or ptxas_log.may_spill(name, rows[name].allow_spill, arch)
            assert float(smem) >= rows[name].smem_bytes // 1024


def test_the_report_from_a_log(tmp_path: Path) -> None:
    """Blocks and warps by hand: V100, 128 threads."""
    row = next(r for r in build_kernels.kernels.load_rows() if r.arch == "sm70")
    stats = {"row": row.name, "arch": "sm_70", "registers": 168, "native": True, "symbol": "x",
             "spill_store_bytes": 0, "static_smem_bytes": 0}  # fmt: skip
    lines = list(sass_report.table([stats], 70, {row.name: row}))
    assert len(lines) == 3
    blocks = min(65536 // (168 * 128), 96 * 1024 // (-(-row.smem_bytes // 128) * 128))
    share = f"{blocks} | {4 * blocks} ({100 * 4 * blocks // 64} %) |"
    assert lines[-1].endswith(share) and "| forward | 168 |" in lines[-1]
    assert sass_report.kernel_of("_ZN6memeff7chainedLNS0_8GradientE1EEE") == "dK, dV"
    chip = sass_report.chip_of(86)
    assert sass_report.occupancy(chip, 128, 128, 120 * 1024) == ("-", "-")


def test_gradients_are_those_of_the_header() -> None:
    header = (ROOT / "csrc" / "chained" / "backward_traits.h").read_text()
    names = header.split("enum class Gradient { ")[1].split(" }")[0].split(", ")
    kinds = {"kQuery": "dQ", "kKeyValue": "dK, dV", "kKey": "dK", "kValue": "dV",
             "kBias": "dBias", "kAll": "all, short"}  # fmt: skip
    assert [kinds[name] for name in names] == list(sass_report.GRADIENTS.values())


def test_tools_say_what_they_take() -> None:
    for name in ("wheels", "sass_report"):
        done = subprocess.run([sys.executable, str(TOOLS / f"{name}.py"), "--help"],
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0 and "--archs" in done.stdout
