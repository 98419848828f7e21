"""Benchmarks: `python -m bench --help` lists the commands (bench/__main__.py)."""
