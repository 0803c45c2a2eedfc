"""The statistical half of the paper: its bounds as functions that refuse settings outside their assumptions.

Theorem 1 (upper), Theorem 2 (lower), Proposition 1 (compression operator), Theorem 3 and its corollary
(convergence). Theorems 1 and 2 leave a constant open, which is 1 here unless given; logarithms are to base 2,
because k counts bits.
"""

import math
from collections.abc import Callable

from torch import Tensor

# Measured risk of the paper's scheme lies between LOWER x theorem_2 and UPPER x theorem_1 on every setting of
# `risk.grid`; PROVED holds on all settings by the argument in docs/lab.md.
LOWER, UPPER, PROVED = 0.4, 4.0, 13.0


class AssumptionError(ValueError):
    """A bound was asked for outside of its assumptions; the message names value, limit and fix."""


def check_theorem_1(d: int, s: float, n: int, k: float) -> None:
    """Raise AssumptionError unless 2 log d <= k <= s log d."""
    _check_sizes(d, s, n)
    low, high = 2 * math.log2(d), s * math.log2(d)
    if not low <= k <= high:
        fix = "raise k" if k < low else "lower k or raise s"
        raise AssumptionError(
            f"Theorem 1 needs 2 log d <= k <= s log d, that is {low:.4g} to {high:.4g}, got k={k}; {fix}"
        )


def theorem_1(d: int, s: float, n: int, k: float, constant: float = 1.0) -> float:
    """Return the upper bound C s^2 log d / (n k).

    >>> round(theorem_1(d=1024, s=32, n=100, k=160), 3)
    0.64
    """
    check_theorem_1(d, s, n, k)
    return constant * s * s * math.log2(d) / (n * k)


def check_theorem_2(d: int, s: float, n: int, k: float) -> None:
    """Raise AssumptionError unless n k >= d log(d/s) and s <= d / 2."""
    _check_sizes(d, s, n)
    if s > d / 2:
        raise AssumptionError(f"Theorem 2 needs s <= d / 2 = {d / 2:g}, got s={s}; lower s or raise d")
    need = d * math.log2(d / s)
    if n * k < need:
        raise AssumptionError(
            f"Theorem 2 needs n k >= d log(d/s) = {need:.4g}, got n k = {n * k:.4g}; "
            f"raise n to {math.ceil(need / k)} or k to {math.ceil(need / n)}"
        )


def theorem_2(d: int, s: float, n: int, k: float, constant: float = 1.0) -> float:
    """Return the lower bound c max(s^2 log(d/s) / (n k), s / n), for the worst theta and any scheme."""
    check_theorem_2(d, s, n, k)
    return constant * max(s * s * math.log2(d / s) / (n * k), s / n)


def _check_sizes(d: int, s: float, n: int) -> None:
    if d < 2 or not 0 < s <= d or n < 1:
        raise AssumptionError(f"need d >= 2, 0 < s <= d and n >= 1, got d={d}, s={s}, n={n}")


def proposition_1(k: int, d: int) -> float:
    """Return gamma = k / d, with which rTop-k is a compression operator whatever r is."""
    if not 1 <= k <= d:
        raise AssumptionError(f"Proposition 1 needs 1 <= k <= d = {d}, got k={k}")
    return k / d


def lost_by_rtop_k(vector: Tensor, k: int, r: int) -> float:
    """Return E || w - rTop_k(w) ||^2 exactly: the second line in the proof of Proposition 1."""
    if not 1 <= k <= r <= vector.numel():
        raise AssumptionError(f"need 1 <= k <= r <= d, got k={k}, r={r}, d={vector.numel()}")
    squares = vector.double().square().sort(descending=True).values
    return float((1 - k / r) * squares[:r].sum() + squares[r:].sum())


def theorem_3(
    gap: float, L: float, G: float, B: int, n: int, T: int, k: int, d: int, C_hat: float,  # noqa: N803
) -> tuple[float, float]:  # fmt: skip
    """Return the two terms of the bound on E || grad f(z_T) ||^2, of order 1 / sqrt(T) and 1 / T.

    `gap` is E f(w^0) - f*, and the learning rate is C_hat / sqrt(T).
    """
    if gap < 0 or min(L, G, C_hat) <= 0 or min(B, n, T) < 1:
        raise AssumptionError(
            "need gap >= 0, L, G, C_hat > 0 and B, n, T >= 1, "
            f"got gap={gap}, L={L}, G={G}, C_hat={C_hat}, B={B}, n={n}, T={T}"
        )
    if C_hat / math.sqrt(T) > 1 / (2 * L):
        raise AssumptionError(
            f"Theorem 3 needs C_hat / sqrt(T) <= 1 / 2L = {1 / (2 * L):.4g}, got {C_hat / math.sqrt(T):.4g}; "
            f"raise T to {math.ceil((2 * L * C_hat) ** 2)} or lower C_hat"
        )
    gamma = proposition_1(k, d)
    first = (gap / C_hat + C_hat * L * G**2 / (B * n)) * 4 / math.sqrt(T)
    second = 8 * (4 * (1 - gamma**2) / gamma**2 + 1) * C_hat**2 * L**2 * G**2 / T
    return first, second


def corollary_rate(gap: float, L: float, G: float, B: int, n: int) -> float:  # noqa: N803
    """Return the C_hat of the corollary, sqrt(B n gap / (G^2 L)), which balances the first term."""
    return math.sqrt(B * n * gap / (G**2 * L))


def corollary(gap: float, L: float, G: float, B: int, n: int, T: int, k: int, d: int) -> tuple[float, float]:  # noqa: N803
    """Return Theorem 3 at the corollary's C_hat; the first term is then 8 sqrt(gap L G^2 / (B n T))."""
    return theorem_3(gap, L, G, B, n, T, k, d, corollary_rate(gap, L, G, B, n))


def holds(check: Callable[[int, float, int, float], None], d: int, s: float, n: int, k: float) -> bool:
    """Say whether a setting meets the assumptions of a bound."""
    try:
        check(d, s, n, k)
    except AssumptionError:
        return False
    return True
