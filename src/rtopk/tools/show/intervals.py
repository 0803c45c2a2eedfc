"""95 % intervals of a mean over seeds, and of the difference of two."""

import math
from collections.abc import Sequence
from statistics import variance


def half_width(scores: Sequence[float]) -> float:
    """Return half the interval of the mean (Student's t); infinite for one score."""
    n = len(scores)
    return _t(n - 1) * math.sqrt(variance(scores) / n) if n > 1 else math.inf


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half the interval of the difference of two means (Welch); infinite where one has a single score."""
    if min(len(one), len(other)) < 2:
        return math.inf
    a, b = variance(one) / len(one), variance(other) / len(other)
    if a + b == 0.0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1))
    return _t(freedom) * math.sqrt(a + b)


def _t(freedom: float) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))
