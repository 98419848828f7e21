"""python -m bench run | sweep | compare | host | end2end | plot | readme"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import backends, report, shapes


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
        help="of memeff, memeff-<family> (such as memeff-chained), memeff:<variant>, efficient, "
        "flash, cudnn, memeff-fixed (memeff on fixed lengths of the flop of packed ones; varlen "
        "alone), fa4 (FlashAttention-4), flex (torch's flex_attention, compiled anew for each "
        f"cell: slow to start); default: {','.join(backends.DEFAULT)}",
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
    sweep = commands.add_parser(
        "sweep",
        help="time every kernel that takes a shape, and compare the one that is chosen; goes on "
        "where it was stopped",
    )
    sweep.add_argument("--set", type=names, default=list(shapes.SETS), help="default: all")
    sweep.add_argument("--pass", dest="passes", type=names, default=list(shapes.PASSES))
    sweep.add_argument("--out", type=Path, help="folder (default: bench/results/<gpu>)")
    sweep.add_argument("--budget", type=float, default=0, help="seconds (0: until it is done)")
    sweep.add_argument(
        "--ms", type=float, default=2, help="milliseconds of GPU time for each kernel (default: 2)"
    )
    sweep.add_argument(
        "--check",
        action="store_true",
        help="no timing: judge what is chosen today by the times that are there (of --out, or the "
        "committed ones)",
    )
    compare = commands.add_parser(
        "compare", help="rows of two files or folders that differ by more than 3 %%"
    )
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    commands.add_parser("host", help="host cost of one small call, and of its pieces")
    whole = commands.add_parser(
        "end2end", help="tokens/s and images/s of two whole models, with and without our kernels"
    )
    whole.add_argument("--models", type=names, default=["llama", "vit"], help="default: llama,vit")
    whole.add_argument(
        "--attention",
        type=names,
        default=["memeff", "efficient", "sdpa"],
        help="of memeff, efficient (SDPA held to its memory-efficient kernel), sdpa (its choice)",
    )
    whole.add_argument("--size", choices=("full", "tiny"), default="full")
    whole.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    whole.add_argument("--dtype", default="bf16", help="fp16, bf16 (default) or fp32")
    whole.add_argument("--steps", type=int, default=10, help="timed steps of each (default: 10)")
    whole.add_argument(
        "--out", type=Path, help="file (default: bench/results/<gpu>/end2end.json; CPU: none)"
    )
    plot = commands.add_parser("plot", help="draw docs/figures from the committed results")
    plot.add_argument("--check", action="store_true", help="only say whether they are up to date")
    plot.add_argument("--out", type=Path, help="folder (default: docs/figures)")
    plot.add_argument("--png", action="store_true", help="PNG files beside the SVG files")
    readme = commands.add_parser(
        "readme", help="write the tables of README.md and docs/benchmarks.md from the results"
    )
    readme.add_argument("--check", action="store_true", help="only say whether they are up to date")
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
        if options.command == "sweep":
            from bench import sweep

            if options.check:
                return sweep.check(options.out and sweep.path_of(options.out))
            shapes.check_passes(options.passes)
            return sweep.sweep(options.set, options.passes, options.out, options.budget, options.ms)
        if options.command == "compare":
            text, slower = report.compare(options.first, options.second)
            print(text)
            return int(slower > 0)
        if options.command == "host":
            from bench.host import host

            return host()
        if options.command == "end2end":
            from bench.end2end import end2end

            return end2end(
                options.models,
                options.attention,
                options.size,
                options.device,
                options.dtype,
                options.steps,
                options.out,
            )
        if options.command == "plot":
            from bench.plot import plot

            return plot(options.out, options.png, options.check)
        from bench.pages import write_pages

        return write_pages(options.check)
    except (ValueError, OSError, ImportError) as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
