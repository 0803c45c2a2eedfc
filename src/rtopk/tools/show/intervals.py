"""95 % intervals of a mean over seeds, and of the difference of two; half widths, infinite for a single score."""

import math
from collections.abc import Sequence
from statistics import variance


def half_width(scores: Sequence[float]) -> float:
    """Return half the interval of the mean (Student's t)."""
    n = len(scores)
    return t_quantile(n - 1) * math.sqrt(variance(scores) / n) if n > 1 else math.inf


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half the interval of the difference of two means (Welch: the spreads need not be equal)."""
    if min(len(one), len(other)) < 2:
        return math.inf
    a, b = variance(one) / len(one), variance(other) / len(other)
    if a + b == 0.0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1))
    return t_quantile(freedom) * math.sqrt(a + b)


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def plus_minus(half: float, digits: int = 2) -> str:
    """Write half a width after its mean; nothing where it is infinite.

    >>> f"90.1{plus_minus(0.254)}", f"90.1{plus_minus(math.inf)}"
    ('90.1 ± 0.25', '90.1')
    """
    return "" if half == math.inf else f" ± {half:.{digits}f}"
