"""python -m bench run | compare | host | readme"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import backends, report, shapes

README = Path(__file__).resolve().parents[1] / "README.md"


def names(text: str) -> list[str]:
    return [n for n in text.replace("|", ",").split(",") if n]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m bench", description="Benchmarks on the GPU of this machine."
    )
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="time sets of shapes against PyTorch's kernels, checked in the same run"
    )
    run.add_argument(
        "--set",
        type=names,
        default=list(shapes.SETS),
        help=f"of {','.join(shapes.SETS)} (default: all)",
    )
    run.add_argument(
        "--pass",
        dest="passes",
        type=names,
        default=list(shapes.PASSES),
        help=f"of {','.join(shapes.PASSES)} (default: both); the rows of one that is left out stay",
    )
    run.add_argument(
        "--backends",
        type=names,
        default=list(backends.DEFAULT),
        help="of memeff, memeff-<family>, memeff:<variant>, efficient, flash, cudnn, memeff-fixed "
        "(memeff on fixed lengths of the flop of packed ones; varlen alone); default: the first "
        "and the last four",
    )
    run.add_argument("--out", type=Path, help="folder (default: bench/results/<gpu>)")
    run.add_argument(
        "--budget", type=float, default=0, help="seconds after which no new cell starts (0: none)"
    )
    run.add_argument(
        "--ms",
        type=float,
        default=10,
        help="milliseconds of GPU time for each cell, pass and backend (default: 10)",
    )
    compare = commands.add_parser(
        "compare", help="rows of two files or folders that differ by more than 3 %%"
    )
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    commands.add_parser("host", help="host cost of one small call, and of its pieces")
    readme = commands.add_parser(
        "readme", help="write the tables of README.md from the committed results"
    )
    readme.add_argument("--check", action="store_true", help="only say whether it is up to date")
    return top


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.command == "run":
            from bench.run import run

            return run(
                options.set,
                options.passes,
                options.backends,
                options.out,
                options.budget,
                options.ms,
            )
        if options.command == "compare":
            text, slower = report.compare(options.first, options.second)
            print(text)
            return int(slower > 0)
        if options.command == "host":
            from bench.host import host

            return host()
        old = README.read_text()
        new = report.readme_text(old)
        if options.check:
            print(
                "README.md is up to date"
                if new == old
                else "README.md is stale: run `python -m bench readme`"
            )
            return int(new != old)
        README.write_text(new)
        return 0
    except (ValueError, OSError, ImportError) as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
