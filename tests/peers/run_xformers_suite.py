"""xFormers' own attention tests, unmodified, against memeff_attn.xformers.

    python tests/peers/run_xformers_suite.py CHECKOUT                  everything, one process
    python tests/peers/run_xformers_suite.py CHECKOUT -n 6 --json out.json
    python tests/peers/run_xformers_suite.py CHECKOUT --shard 1/3 -n 4 a third, in four processes
    python tests/peers/run_xformers_suite.py CHECKOUT --collect-only --capability 9.0    counts
    python tests/peers/run_xformers_suite.py CHECKOUT --pack files.tgz  the four files, to carry
    python tests/peers/run_xformers_suite.py CHECKOUT --old-dropout     see below

CHECKOUT is a clone of github.com/facebookresearch/xformers (bare or not; the files are taken from
commit bed3978b, the last one with its own attention), or a folder that holds the four files, as
they lie in the repository or side by side. Nothing is fetched, nothing is written into this
repository: a temporary folder gets the tests, and a package `xformers` that is memeff_attn.xformers
by that name. Only there the mask classes say that they come from xFormers' module, because the
tests draw their cases by the printed name of a class.

Tolerances are xFormers' own numbers, on the operator classes; they are printed, and
tests/test_xformers_surface.py pins them. Tests of other backends (ROCm, Triton and fp8 kernels,
Flash-Attention's) are deselected by name; --with-named-ops keeps those that name such an operator
for inputs that memeff_attn's kernels serve under that name.

--old-dropout: the dropout tests of the suite of 2024 (commit 3d947a67~1, the last one that had some
for the CUTLASS operator); a folder then holds the files of that commit. They rebuild the mask from
torch.ops.xformers._cutlass_rand_uniform, which memeff_attn.xformers.rand_uniform provides.

Skipped tests are counted by kind: combinations that the tests themselves rule out, other backends;
on a GPU any other skip is a refusal and fails the run, as a failed test does. Where the processes
left a test no memory it runs again, alone.

Without a GPU only the tests of masks run; --on-cpu draws the whole grid for CPU tensors, which says
that the interface is right and nothing of the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent
ROOT = PEERS.parents[1]
COMMIT = "bed3978b"
FILES = (
    "tests/test_mem_eff_attention.py",
    "tests/utils.py",
    "tests/test_fmha_merge_attentions.py",
    "xformers/attn_bias_utils.py",
)
MERGE = FILES[2]
OLD_COMMIT = "3d947a67~1"
OLD_TESTS = "test_dropout and not test_dropout_backward_ck"
# Substrings of test names. Never "ck": test_backward and BlockDiagonal hold it.
OTHER_BACKENDS = (
    "dropout_ck",
    "dropout_backward_ck",
    "paged_attention",
    "splitk",
    "fav3",
    "fp8",
    "decoder",
)
NAMED_OPS = ("dispatch_decoding", "wrong_strides", "mqa_decoding")
EVERY = 10.0  # seconds between two lines of progress
# Of a failure that says nothing of the test: other processes had taken the GPU's memory.
NO_MEMORY = ("CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# How the reasons of skipped tests begin, as group() leaves them. Any other reason on a GPU is a
# refusal by memeff_attn, which fails the run.
SKIPS = {
    "combinations that the tests themselves rule out": (
        "packed incompatible with `k",
        "packed doesn't make sense with paged attention",
        "BMK incompatible with this bias",
        "undefined upper left",
        "Can't create this mask inside compile",
        "Not supported bias",  # test_partial_paged looks for a mask in a list of types
    ),
    "other backends": (
        "Flash# not available",
        "Op is not available",
        "cutlassB-blackwell: unsupported",
        "cutlassF-blackwell: unsupported",
    ),
}
UNEXPLAINED = "refused by memeff_attn, or for a reason that is not known here"
SHOWN = 20  # failures printed

SHIM = '''\
"""memeff_attn.xformers as `xformers`, for xFormers' tests."""

import sys

from memeff_attn import attn_bias
from memeff_attn.xformers.aliases import install

install(sys.modules[__name__])
# The tests draw a mask a case from the classes sorted by str(), which holds the module's name.
for _mask in attn_bias.MASKS:
    _mask.__module__ = "xformers.ops.fmha.attn_bias"
'''

# Names of 2024 that the old files import: a class that nothing is, an operator that is not there.
OLD_SHIM = """\

from types import SimpleNamespace as _Names

from memeff_attn.xformers import rand_uniform
from memeff_attn.xformers.ops import fmha as _fmha

rand_uniform.register()
_fmha.attn_bias.AttentionBiasSubTensor = type("AttentionBiasSubTensor", (), {})
_fmha.ck_decoder = _Names(FwOp=type("FwOp", (_fmha.ck_splitk.FwOp,), {"NAME": "ck_decoderF"}))
"""


def fail(text: str) -> None:
    sys.exit(f"run_xformers_suite.py: {text}")


# ---- the temporary folder ----


def is_git(path: Path) -> bool:
    return (path / ".git").exists() or ((path / "objects").is_dir() and (path / "refs").is_dir())


def read_files(checkout: Path, commit: str, names: Sequence[str]) -> dict[str, bytes]:
    """The files by their path in the repository."""
    found = {}
    for name in names:
        places = [checkout / name, checkout / Path(name).name]
        if is_git(checkout):
            done = subprocess.run(
                ["git", "-C", str(checkout), "show", f"{commit}:{name}"], capture_output=True
            )
            if done.returncode:
                fail(
                    f"{checkout} has no {name} at commit {commit}: "
                    f"{done.stderr.decode().strip()}. Fetch that commit, or name another with "
                    "--commit."
                )
            found[name] = done.stdout
        elif path := next((p for p in places if p.is_file()), None):
            found[name] = path.read_bytes()
        else:
            fail(f"{checkout} is no git repository and has neither {name} nor {places[1].name}")
    return found


def pack(files: dict[str, bytes], out: Path) -> None:
    """A tarball of the files side by side, as CHECKOUT takes them."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(out, "w:gz") as archive:
        for name, content in files.items():
            path = Path(folder, Path(name).name)
            path.write_bytes(content)
            archive.add(path, arcname=path.name)
    print(f"{out}: {', '.join(Path(name).name for name in files)}")


def build(folder: Path, files: dict[str, bytes], old: bool) -> None:
    """folder/tests and folder/shim/xformers, and scipy where it is missing."""
    for name, content in files.items():
        path = folder / ("shim" if name.startswith("xformers/") else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "tests" / "__init__.py").touch()
    (folder / "shim" / "xformers" / "__init__.py").write_text(SHIM + OLD_SHIM * old)
    (folder / "pytest.ini").write_text("[pytest]\n")
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        place = folder / "shim" / "scipy"
        place.mkdir()
        (place / "__init__.py").touch()
        shutil.copy(PEERS / "scipy_stats.py", place / "stats.py")
        print("scipy is not installed: tests/peers/scipy_stats.py stands in for its binomial test")


# ---- processes ----


def environment(folder: Path, on_cpu: bool = False) -> dict[str, str]:
    env = dict(os.environ) | ({"MEMEFF_SUITE_ON_CPU": "1"} if on_cpu else {})
    paths = [str(folder / "shim"), str(PEERS), str(ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def command(folder: Path, expression: str, extra: Sequence[str]) -> list[str]:
    pytest = [sys.executable, "-m", "pytest", "-p", "xformers_suite_plugin", "-q", "--tb=short"]
    pytest += ["-p", "no:cacheprovider", "--rootdir", str(folder), "-c", str(folder / "pytest.ini")]
    tests = sorted((folder / "tests").glob("test_*.py"))
    return [*pytest, "-k", expression, *extra, *map(str, tests)]


def count(folder: Path, expression: str, env: dict[str, str]) -> int:
    """Collects; the number of tests."""
    done = subprocess.run(
        command(folder, expression, ["--collect-only"]),
        cwd=folder, env=env, capture_output=True, text=True,
    )  # fmt: skip
    by_file = Counter(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line)
    if done.returncode or not by_file:
        fail(f"collection failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    for name, number in by_file.items():
        print(f"  {name}: {number}")
    return sum(by_file.values())


class Worker:
    """One pytest process and what it has recorded so far."""

    def __init__(
        self,
        folder: Path,
        line: list[str],
        env: dict[str, str],
        shard: str,
        number: int,
        only: Sequence[str] = (),
    ) -> None:
        """only: names of tests; none: all of the shard."""
        self.record = folder / f"record{number}.jsonl"
        self.log = folder / f"log{number}.txt"
        self.record.touch()
        settings = {"MEMEFF_SUITE_SHARD": shard, "MEMEFF_SUITE_RECORD": str(self.record)}
        if only:
            names = folder / f"only{number}.json"
            names.write_text(json.dumps(list(only)))
            settings["MEMEFF_SUITE_ONLY"] = str(names)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                line, cwd=folder, env=env | settings, stdout=log, stderr=log
            )
        self.shard = shard

    def rows(self) -> Iterator[dict[str, Any]]:
        text = self.record.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            yield json.loads(line)

    def problem(self) -> str:
        """Why its record is not to be trusted, empty where it is: pytest ended as it should and
        every test that it took has a result."""
        rows = list(self.rows())
        mine = next((row["mine"] for row in rows if "mine" in row), None)
        done = sum("test" in row and not row["test"].endswith("(teardown)") for row in rows)
        if self.process.returncode in (0, 1) and done == mine:
            return ""
        if self.process.returncode == 5 and mine == 0:
            return ""  # no test for this shard
        tail = self.log.read_text()[-3000:]
        return (
            f"shard {self.shard} ended with {self.process.returncode} after {done} of {mine} tests"
            f"\n{tail}"
        )


def run(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Waits, shows progress; all rows."""
    began = last = time.monotonic()
    while any(worker.process.poll() is None for worker in workers):
        time.sleep(0.5)
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            show_progress(workers, last - began)
    show_progress(workers, time.monotonic() - began)
    return [row for worker in workers for row in worker.rows()]


def show_progress(workers: Sequence[Worker], seconds: float) -> None:
    rows = [row for worker in workers for row in worker.rows()]
    total = sum(row["mine"] for row in rows if "mine" in row)
    outcomes = Counter(row["outcome"] for row in rows if "test" in row)
    done = sum(outcomes.values())
    share = f"{100 * done // total} %" if total else "collecting"
    print(
        f"{done}/{total or '?'} ({share}), {outcomes['failed']} failed, {seconds:.0f} s", flush=True
    )


def without_memory(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Tests that failed for the other processes' sake alone."""
    failed = (row for row in rows if row.get("outcome") == "failed")
    return [row["test"] for row in failed if any(text in row["text"] for text in NO_MEMORY)]


# ---- the report ----


def group(reason: str) -> str:
    """A reason without the numbers of its case."""
    text = reason.removeprefix("Skipped: ").strip().splitlines()
    return re.sub(r"\d+(?:\.\d+)?", "#", text[0]) if text else "(no reason)"


def kinds(reasons: Mapping[str, int]) -> dict[str, int]:
    """How many tests were skipped for each kind of reason: those of SKIPS, and UNEXPLAINED."""
    found = dict.fromkeys((*SKIPS, UNEXPLAINED), 0)
    for reason, number in reasons.items():
        known = (kind for kind, begin in SKIPS.items() if reason.startswith(begin))
        found[next(known, UNEXPLAINED)] += number
    return found


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tests = [row for row in rows if "test" in row]
    outcomes = Counter(row["outcome"] for row in tests)
    reasons = Counter(group(row["text"]) for row in tests if row["outcome"] == "skipped")
    failures = {row["test"]: row["text"] for row in tests if row["outcome"] == "failed"}
    print(
        f"\n{outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} skipped"
    )
    for reason, number in reasons.most_common():
        print(f"  {number:6} skipped: {reason}")
    for kind, number in kinds(reasons).items():
        print(f"  {number:6} skipped in all: {kind}")
    for name, text in list(failures.items())[:SHOWN]:
        lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
        print(f"  FAILED {name}\n      {lines[0] if lines else ''}")
    if len(failures) > SHOWN:
        print(f"  and {len(failures) - SHOWN} more")
    return {
        "passed": outcomes["passed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "skip_reasons": dict(reasons.most_common()),
        "skip_kinds": kinds(reasons),
        "failures": failures,
        "slowest": {
            row["test"]: row["seconds"]
            for row in sorted(tests, key=lambda row: -row["seconds"])[:10]
        },
    }


def facts() -> dict[str, Any]:
    """What it ran on, and the tolerances it was held to."""
    import torch

    from memeff_attn import dispatch
    from memeff_attn.xformers.ops import fmha

    module = dispatch.native()[0]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memeff_attn": None if module is None else module.source_hash,
        "tolerances": {
            f"{op.NAME} {kind}": {str(k): v for k, v in getattr(op, kind).items()}
            for op in (fmha.cutlass.FwOp, fmha.cutlass.BwOp)
            for kind in ("ERROR_ATOL", "ERROR_RTOL")
        },
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--commit", help=f"of a git checkout (default {COMMIT})")
    parser.add_argument("--old-dropout", action="store_true", help="see above")
    parser.add_argument("--tests", default="", metavar="EXPR", help="and only these, as pytest -k")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--shard", default="1/1", metavar="i/n", help="the i-th of n parts")
    parser.add_argument("--with-named-ops", action="store_true", help="see above")
    parser.add_argument("--on-cpu", action="store_true", help="see above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--pack", type=Path, metavar="FILE.tgz", help="write the files and stop")
    parser.add_argument("--collect-only", action="store_true", help="count and stop")
    parser.add_argument("--capability", default="9.0", help="of the GPU to count for (9.0)")
    return parser.parse_args()


def expression_of(args: argparse.Namespace) -> str:
    if args.old_dropout:
        return f"({args.tests}) and {OLD_TESTS}" if args.tests else OLD_TESTS
    left = OTHER_BACKENDS if args.with_named_ops else (*OTHER_BACKENDS, *NAMED_OPS)
    if args.on_cpu:
        left = (*left, "unsupported_cpu")  # that CPU tensors are refused
    expression = " and ".join(f"not {name}" for name in left)
    return f"({args.tests}) and {expression}" if args.tests else expression


def shards(shard: str, processes: int) -> list[str]:
    """The parts of the i-th of n parts: process j of k takes every (n k)-th test."""
    try:
        i, n = (int(x) for x in shard.split("/"))
    except ValueError:
        i, n = 0, 0
    if not 1 <= i <= n or processes < 1:
        fail(f"--shard {shard} -n {processes}: expected i/n with 1 <= i <= n, and N >= 1")
    return [f"{i + j * n}/{n * processes}" for j in range(processes)]


def main() -> int:
    args = arguments()
    for path in (str(ROOT), str(PEERS)):
        sys.path.insert(0, path)
    commit = args.commit or (OLD_COMMIT if args.old_dropout else COMMIT)
    names = [name for name in FILES if not (args.old_dropout and name == MERGE)]
    files = read_files(args.checkout, commit, names)
    if args.pack:
        pack(files, args.pack)
        return 0
    expression = expression_of(args)
    parts = shards(args.shard, args.n)
    with tempfile.TemporaryDirectory(prefix="xformers_suite_") as name:
        folder = Path(name)
        build(folder, files, args.old_dropout)
        env = environment(folder, args.on_cpu)
        if args.collect_only:
            pretended = {} if args.on_cpu else {"MEMEFF_SUITE_CAPABILITY": args.capability}
            where = "on the CPU" if args.on_cpu else f"at compute capability {args.capability}"
            print(f"{count(folder, expression, env | pretended)} tests {where}")
            return 0
        known = facts()
        print(json.dumps(known, indent=1))
        line = command(folder, expression, [])
        began = time.monotonic()
        workers = [Worker(folder, line, env, part, number) for number, part in enumerate(parts)]
        try:
            rows = run(workers)
            if again := without_memory(rows):
                print(f"{len(again)} tests found no memory beside the others and run again, alone")
                workers.append(Worker(folder, line, env, "1/1", len(workers), again))
                rows = [row for row in rows if row.get("test") not in again] + run(workers[-1:])
        finally:
            for worker in workers:
                if worker.process.poll() is None:
                    worker.process.kill()
        result = report(rows)
        problems = [problem for worker in workers if (problem := worker.problem())]
        if known["gpu"] and not args.old_dropout and result["skip_kinds"][UNEXPLAINED]:
            problems.append(f"{result['skip_kinds'][UNEXPLAINED]} tests {UNEXPLAINED}")
        seconds = round(time.monotonic() - began)
    print("\n".join(problems) or f"every test that was collected has a result; {seconds} s")
    if args.json:
        result |= known | {"expression": expression, "shard": args.shard, "commit": commit}
        result |= {"seconds": seconds, "problems": problems}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failed"] or problems else 0


if __name__ == "__main__":
    sys.exit(main())
