"""The one name of scipy.stats that xFormers' tests import, for machines without scipy: the runner
puts this file into its temporary folder as scipy/stats.py and says so."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class BinomTestResult:
    """Of `binomtest`."""

    k: int
    n: int
    statistic: float
    pvalue: float


def _log_pmf(k: int, n: int, p: float) -> float:
    if p in (0.0, 1.0):
        return 0.0 if k == (n if p == 1.0 else 0) else -math.inf
    choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return choose + k * math.log(p) + (n - k) * math.log1p(-p)


def binomtest(k: int, n: int, p: float = 0.5, alternative: str = "two-sided") -> BinomTestResult:
    """The exact two-sided binomial test: pvalue = sum of P(j) over all j with P(j) <= P(k)."""
    if alternative != "two-sided" or not 0 <= k <= n:
        raise ValueError(f"two-sided with 0 <= k <= n alone, got {alternative}, k {k}, n {n}")
    limit = _log_pmf(k, n, p) + 1e-7
    terms = (_log_pmf(j, n, p) for j in range(n + 1))
    total = math.fsum(math.exp(term) for term in terms if term <= limit)
    return BinomTestResult(k, n, k / n, min(1.0, total))
