"""Benchmarks: `python -m bench run | compare | host | readme` (see bench/__main__.py)."""
