"""The record that says: this source passed its whole suite on this GPU.

    python tests/gpu_record.py                   run everything, write tests/gpu_record.json
    python tests/gpu_record.py --shard 1/3 --out A.json    one part (each within its own time limit)
    python tests/gpu_record.py --merge A.json B.json C.json  the parts as one record
    python tests/gpu_record.py --check           exit 1 where the record is stale, partial or failed

Anything after `--` goes to pytest. No git is needed: the record names the hash of csrc and setup.py
(as `csrc/kernels.py --hash` prints it) and of the Python that decides what runs. A build whose
compiled-in hash differs from the source is refused, so that no old binary sits under a fresh
record."""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RECORD = TESTS / "gpu_record.json"
PYTHON_FILES = (
    "ops.py",
    "dispatch.py",
    "attention.py",
    "inputs.py",
    "attn_bias.py",
    "autograd.py",
    "backward.py",
    "dropout.py",
    "mask_arguments.py",
    "mask_rule.py",
    "masks_base.py",
    "masks_blocks.py",
    "masks_dense.py",
    "masks_padded.py",
    "masks_paged.py",
    "merge.py",
    "seqlen.py",
    "tensor_bias.py",
)
SLOWEST = 10  # tests named with their seconds

Record = dict[str, Any]


def source_hash(root: Path = ROOT) -> str:
    """That of csrc/kernels.py, which the build compiles in."""
    spec = importlib.util.spec_from_file_location("memeff_kernels", ROOT / "csrc" / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return str(module.source_hash(root))


def canonical(node: Any) -> Iterator[str]:
    """An AST as text that does not depend on the Python that parsed it: no docstrings, no empty or
    newer fields."""
    if isinstance(node, list):
        for item in node:
            yield from canonical(item)
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name in node._fields:
            value = getattr(node, name, None)
            if name in ("kind", "type_comment", "type_ignores") or value is None or value == []:
                continue
            yield f" {name}="
            yield from canonical(value)
        yield ")"
    else:
        yield repr(node)


def without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            text = first.value if isinstance(first, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                node.body = node.body[1:]
    return tree


def python_hash(root: Path = ROOT) -> str:
    """sha256 over the docstring-free AST of the files that decide what runs: comments and layout do
    not count."""
    digest = hashlib.sha256()
    for name in PYTHON_FILES:
        path = root / "memeff_attn" / name
        tree = without_docstrings(ast.parse(path.read_text(encoding="utf-8"), name))
        digest.update(name.encode() + b"\0" + "".join(canonical(tree)).encode())
    return digest.hexdigest()


class Recorder:
    """A pytest plugin that counts outcomes and keeps what failed."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: dict[str, str] = {}
        self.skipped: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and report.nodeid not in self.failures:
            self.counts["failed"] += 1
            self.failures[report.nodeid] = str(report.longrepr)[-2000:]
        elif report.skipped:
            self.counts["skipped"] += 1
            reason = str(
                report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            )
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
        elif report.when == "call" and report.passed:
            self.counts["passed"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.counts["failed"] += 1
            self.failures[report.nodeid or "collection"] = str(report.longrepr)[-2000:]

    def slowest(self) -> dict[str, float]:
        order = sorted(self.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
        return {name: round(seconds, 1) for name, seconds in order}


def refuse(text: str) -> int:
    print(f"gpu_record: {text}", file=sys.stderr)
    return 2


def run(shard: str, out: Path, arguments: list[str]) -> int:
    try:
        import pytest
    except ImportError:
        return refuse(
            "pytest is not installed here; `pip install pytest`, or carry it along on PYTHONPATH"
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as tests/conftest.py, before torch loads
    import torch

    if not torch.cuda.is_available():
        return refuse("no GPU here (torch.cuda.is_available() is False)")
    sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []
    try:
        from memeff_attn import _C
    except ImportError as error:
        return refuse(f"memeff_attn._C does not import ({error}); build first")
    if not _C.is_cuda_build:
        return refuse("memeff_attn._C is a host-only build; build with nvcc and MEMEFF_CUDA_ARCHS")
    if _C.source_hash != source_hash():
        return refuse(
            f"the binary was built from other source (it says {_C.source_hash[:12]}, "
            f"csrc and setup.py are {source_hash()[:12]}); rebuild"
        )
    recorder = Recorder()
    started = time.monotonic()
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--shard", shard, *arguments]
    code = int(pytest.main([str(TESTS), *options], plugins=[recorder]))
    import cases

    info = _C.device_info(torch.cuda.current_device())
    record: Record = {
        "source_hash": _C.source_hash,
        "python_hash": python_hash(),
        "device": info["name"],
        "sm": info["sm"],
        "torch": torch.__version__,
        "cuda": {
            "torch": torch.version.cuda,
            "build": _C.cuda_version(),
            "archs": _C.built_archs(),
        },
        "python": sys.version.split()[0],
        "shards": [shard],
        "arguments": arguments,
        "seconds": round(time.monotonic() - started, 1),
        "exit": code,
        "counts": recorder.counts,
        "failures": recorder.failures,
        "skipped": recorder.skipped,
        "slowest": recorder.slowest(),
        "variants": runnable_variants(info),
        "variants_hit": sorted(cases.variants_hit),
    }
    write(record, out)
    print(f"gpu_record: {summary(record)} -> {out}")
    return 1 if code or problems_of_run(record) else 0


def runnable_variants(info: dict[str, Any]) -> list[str]:
    """Built variants that this GPU has the shared memory for and has code for."""
    from test_variants import fits_here, rows

    del info
    return sorted(row["name"] for row in rows() if not fits_here(row))


def write(record: Record, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def summary(record: Record) -> str:
    counts = ", ".join(f"{n} {name}" for name, n in record["counts"].items())
    hit = f"{len(record['variants_hit'])} of {len(record['variants'])} variants hit"
    return (
        f"{counts}; {hit}; {record['seconds']:.0f} s on {record['device']}, torch {record['torch']}"
    )


def shards_missing(shards: list[str]) -> list[str]:
    """Which parts of the suite no record holds."""
    totals = {int(s.split("/")[1]) for s in shards}
    if len(totals) != 1:
        return [f"shards of different splits: {', '.join(shards)}"]
    total = totals.pop()
    present = {int(s.split("/")[0]) for s in shards}
    return [f"shard {i}/{total} is missing" for i in range(1, total + 1) if i not in present]


def problems_of_run(record: Record) -> list[str]:
    """What is wrong with what one record (of any shards) holds."""
    problems = [f"failed: {name}" for name in record["failures"]]
    if not record["counts"]["passed"]:
        problems.append("no test passed")
    return problems


def problems(record: Record) -> list[str]:
    """What is wrong with a complete record."""
    found = problems_of_run(record) + shards_missing(record["shards"])
    missing = sorted(set(record["variants"]) - set(record["variants_hit"]))
    found += [f"variant never ran: {name}" for name in missing]
    if not record["variants"]:
        found.append("the build had no variant that the GPU runs")
    if record["arguments"]:
        found.append(f"pytest was given {record['arguments']}: not the whole suite")
    return found


def merge(paths: list[Path], out: Path) -> int:
    records: list[Record] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    merged = dict(records[0])
    for name in ("source_hash", "python_hash", "device", "torch", "variants", "arguments"):
        if any(record[name] != merged[name] for record in records):
            return refuse(f"the records differ in {name}: they are not parts of one run")
    shards = [shard for record in records for shard in record["shards"]]
    if len(shards) != len(set(shards)):
        return refuse(f"a shard is there twice: {', '.join(shards)}")
    merged["shards"] = shards
    merged["seconds"] = round(math.fsum(record["seconds"] for record in records), 1)
    merged["exit"] = max(record["exit"] for record in records)
    merged["counts"] = {k: sum(record["counts"][k] for record in records) for k in merged["counts"]}
    merged["failures"] = {k: v for record in records for k, v in record["failures"].items()}
    merged["skipped"] = {}
    for record in records:
        for reason, count in record["skipped"].items():
            merged["skipped"][reason] = merged["skipped"].get(reason, 0) + count
    slow = sorted(
        ((s, n) for record in records for n, s in record["slowest"].items()), reverse=True
    )
    merged["slowest"] = {name: seconds for seconds, name in slow[:SLOWEST]}
    merged["variants_hit"] = sorted({name for record in records for name in record["variants_hit"]})
    write(merged, out)
    print(f"gpu_record: {summary(merged)} -> {out}")
    found = problems(merged)
    print("\n".join(found), file=sys.stderr) if found else None
    return 1 if found else 0


def staleness(record: Record, root: Path = ROOT) -> list[str]:
    found = []
    if record["source_hash"] != source_hash(root):
        found.append("csrc or setup.py changed since")
    if record["python_hash"] != python_hash(root):
        found.append(f"memeff_attn/{{{','.join(PYTHON_FILES)}}} changed since")
    return found


def check(path: Path) -> int:
    if not path.exists():
        print(f"{path} does not exist: `make gpu-test` on a GPU writes it", file=sys.stderr)
        return 1
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    found = staleness(record) + problems(record)
    for problem in found:
        print(f"{path.name}: {problem}", file=sys.stderr)
    print(f"{path.name}: {'stale or incomplete' if found else 'current'}; {summary(record)}")
    return 1 if found else 0


def main(argv: list[str]) -> int:
    rest: list[str] = []
    if "--" in argv:
        cut = argv.index("--")
        argv, rest = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(description="run the suite on a GPU and record it")
    parser.add_argument("--shard", default="1/1", metavar="i/n", help="run the i-th of n parts")
    parser.add_argument(
        "--out", type=Path, help="the record to write (default: tests/gpu_record.json)"
    )
    parser.add_argument(
        "--check", action="store_true", help="is the record current? exit 1 where not"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="RECORD", help="records of all shards"
    )
    args = parser.parse_args(argv)
    out = args.out or RECORD
    if args.check:
        return check(out)
    if args.merge:
        return merge(args.merge, out)
    if args.shard != "1/1" and args.out is None:
        out = TESTS / f"gpu_record.{args.shard.replace('/', '-of-')}.json"
    return run(args.shard, out, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
