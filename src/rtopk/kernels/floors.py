"""Guess the r-th magnitude of a vector from a small sample of it."""

import math
from typing import Any

import numpy as np

SAMPLE = 4096


def stride(d: int) -> int:
    """Return a step that takes a sample and follows no period of the data: shapes are products of 2, 3 and 5."""
    step = max(1, d // SAMPLE)
    while math.gcd(step, 30) > 1:
        step += 1
    return step


def quantiles(sample: Any, r: int, d: int) -> tuple[float, float]:
    """Return a magnitude that r of the d entries and a few more reach, almost surely, and one that about r do."""
    n = sample.size
    expected = r * n / d
    lower = math.ceil(expected + 3.0 * math.sqrt(expected) + 4.0) if n < d else r
    if lower >= n:
        return 0.0, math.inf
    upper = max(1, round(expected))
    magnitudes = np.abs(sample)
    magnitudes.partition(n - lower)
    low = float(magnitudes[n - lower])
    rest = magnitudes[n - lower :]
    rest.partition(lower - upper)
    return low, float(rest[lower - upper])
