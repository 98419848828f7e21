"""Benchmarks: `python -m bench run | compare | host | end2end | plot | readme` (see bench/__main__.py)."""
