"""Subsets <-> whole numbers: the codebook in step (ii) of the proof of Theorem 1.

The subsets of {0, ..., d-1} with at most k' elements are numbered: smaller ones first, and among those of
one size by the combinatorial number system, in which {c_1 < ... < c_m} has the number sum of C(c_i, i).
With `marks` = 2 every element also carries one of two marks (its sign). Integers are exact, of any length.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def codebook_size(d: int, ones: int, marks: int = 1) -> int:
    """Count the subsets with at most `ones` elements, each element with one of `marks` marks.

    >>> codebook_size(4, 2), codebook_size(4, 4), codebook_size(4, 1, marks=2)
    (11, 16, 9)
    """
    total = term = 1
    for j in range(1, ones + 1):
        term = term * (d - j + 1) * marks // j
        total += term
    return total


@lru_cache(maxsize=4096)
def capacity(d: int, bits: int, marks: int = 1) -> int:
    """Return k': the most ones for which every subset still has a codeword of this many bits.

    >>> [capacity(4, bits) for bits in (0, 2, 3, 4)]
    [0, 0, 1, 4]
    """
    if d < 1 or bits < 0:
        raise ValueError(f"need d >= 1 and bits >= 0, got d={d}, bits={bits}; give the node more bits")
    if bits >= d and (1 + marks) ** d <= 1 << bits:
        return d
    # j ones need at least j bits unless all d fit, so no more than this many can.
    j = np.arange(1, min(d, bits) + 1, dtype=np.float64)
    sizes = np.logaddexp2.accumulate(np.concatenate([[0.0], np.cumsum(np.log2((d - j + 1) * marks / j))]))
    doubt = 1e-3  # bits; far above the rounding of the sums, so only exact arithmetic decides within it
    kept: int = max(int(np.searchsorted(sizes, bits - doubt, side="right")) - 1, 0)
    last = int(np.searchsorted(sizes, bits + doubt, side="right")) - 1
    if last <= kept:
        return kept
    size, term = codebook_size(d, kept, marks), math.comb(d, kept) * marks**kept
    while kept < last:
        term = term * (d - kept) * marks // (kept + 1)
        size += term
        if size > 1 << bits:
            break
        kept += 1
    return kept


def rank(support: Sequence[int], d: int, marks: int = 1, marking: int = 0) -> int:
    """Return the number of a subset (ascending), whose marks are the digits of `marking` in base `marks`."""
    m = len(support)
    before = codebook_size(d, m - 1, marks) if m else 0
    among = sum(math.comb(c, i) for i, c in enumerate(support, start=1))
    return before + among * int(marks**m) + marking


def unrank(number: int, d: int, marks: int = 1) -> tuple[list[int], int]:
    """Return the subset (ascending) and the marking of a number; the inverse of `rank`."""
    m, term = 0, 1
    while number >= term:
        number -= term
        m += 1
        if m > d:
            raise ValueError(
                f"there are only {codebook_size(d, d, marks)} subsets of {d}; the number is larger"
            )
        term = term * (d - m + 1) * marks // m
    among, marking = divmod(number, marks**m)
    support: list[int] = []
    c = d - 1
    binomial = math.comb(c, m)  # C(c, i) all the way down, one small step at a time
    for i in range(m, 0, -1):
        while binomial > among:
            binomial = binomial * (c - i) // c
            c -= 1
        support.append(c)
        among -= binomial
        binomial = binomial * i // c if c else 0  # C(c - 1, i - 1)
        c -= 1
    return support[::-1], marking
