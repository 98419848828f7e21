"""What xFormers' tests take of scipy.stats, for machines without scipy: the exact binomial test and
distribution. The runner puts this file into its temporary folder as scipy/stats.py and says so."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np


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


@functools.cache
def _table(n: int, p: float) -> Any:
    return np.array([math.exp(_log_pmf(k, n, p)) for k in range(n + 1)])


class _Binomial:
    """scipy.stats.binom, its three functions of whole numbers k."""

    @staticmethod
    def pmf(k: Any, n: int, p: float) -> Any:
        """P(k), 0 outside 0..n."""
        index = np.asarray(k).astype(int)
        return np.where((index < 0) | (index > n), 0.0, _table(n, p)[index.clip(0, n)])

    @staticmethod
    def cdf(k: Any, n: int, p: float) -> Any:
        """Sum of P(j) over j <= k."""
        sums = np.concatenate([[0.0], np.cumsum(_table(n, p))])
        return sums[(np.floor(np.asarray(k)).astype(int) + 1).clip(0, n + 1)]

    @staticmethod
    def sf(k: Any, n: int, p: float) -> Any:
        """Sum of P(j) over j > k, summed from its own end: small tails stay exact."""
        sums = np.concatenate([np.cumsum(_table(n, p)[::-1])[::-1], [0.0]])
        return sums[(np.floor(np.asarray(k)).astype(int) + 1).clip(0, n + 1)]


distributions = SimpleNamespace(binom=_Binomial)
