"""docker/Dockerfile, read: no container engine runs in CI."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_tools"))

import build_kernels  # noqa: E402

DOCKERFILE = ROOT / "docker" / "Dockerfile"
# Comments go before lines are joined, as docker does it.
LINES = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
INSTRUCTIONS = [
    (m[1], m[2])
    for m in re.finditer(r"^([A-Z]+) (.*)$", "\n".join(LINES).replace("\\\n", " "), re.M)
]


def of(kind: str) -> list[str]:
    return [text for name, text in INSTRUCTIONS if name == kind]


def arguments() -> dict[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in of("ARG"))}


def test_every_line_is_an_instruction() -> None:
    known = {"ARG", "FROM", "SHELL", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert {name for name, _ in INSTRUCTIONS} == known
    joined = "\n".join(LINES).replace("\\\n", " ")
    assert len([line for line in joined.splitlines() if line.strip()]) == len(INSTRUCTIONS)


def test_cuda_of_the_images_knows_every_arch_of_the_default() -> None:
    """CUDA 12.4, and one release for building and running."""
    given = arguments()
    releases = [re.match(r"nvidia/cuda:(\d+\.\d+\.\d+)-\w+-(\S+)$", given[name])
                for name in ("CUDA_IMAGE", "RUN_IMAGE")]  # fmt: skip
    assert all(releases) and len({m.groups() for m in releases if m}) == 1
    assert given["CUDA_IMAGE"].startswith("nvidia/cuda:12.4.") and "devel" in given["CUDA_IMAGE"]
    numbers = [a.number for a in build_kernels.kernels.parse_archs(given["ARCHS"])]
    assert numbers == [70, 80]
    for archs in re.findall(r"--build-arg ARCHS=(\S+)", DOCKERFILE.read_text()):
        assert {a.number for a in build_kernels.kernels.parse_archs(archs)} <= {70, 75, 80, 90}


@pytest.mark.parametrize("script", of("RUN"))
def test_scripts_are_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_variables_are_declared() -> None:
    declared = {*arguments(), "PATH"}
    for text in [*of("RUN"), *of("FROM"), *of("ENV")]:
        assert set(re.findall(r"\$\{?(\w+)", text)) <= declared, text


def test_the_build_settings_are_ones_that_the_build_reads() -> None:
    build = next(text for text in of("RUN") if "pip wheel" in text)
    settings = re.findall(r"\b([A-Z_]{4,})=", build)
    assert set(settings) == {"CUDA_HOME", "MEMEFF_CUDA_ARCHS", "MAX_JOBS"}
    read = "".join((ROOT / "build_tools" / f"{n}.py").read_text()
                   for n in ("config", "cuda", "build_kernels"))  # fmt: skip
    assert all(f'"{name}"' in read for name in settings)


def test_the_command_is_one_that_info_has() -> None:
    command = json.loads(of("CMD")[0])
    assert command[:3] == ["python", "-m", "memeff_attn.info"]
    pytest.importorskip("memeff_attn")
    from memeff_attn import info

    with pytest.raises(SystemExit) as caught:
        info.main([*command[3:], "--help"])  # every option before --help is read first
    assert caught.value.code == 0


def test_what_the_build_needs_is_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in ("setup.py", "pyproject.toml", "csrc", "build_tools", "memeff_attn",
                 "third_party/licenses", "LICENSE", "THIRD_PARTY.md", "README.md"):  # fmt: skip
        assert (ROOT / name).exists() and name not in ignored
