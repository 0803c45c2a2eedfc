"""Fit a few levels to the magnitudes of a block by Lloyd's algorithm: each is the mean of the values nearest to it.

Works on bins, sixteen for every factor of two: a cell of a level is a range of bins, and its mean a difference of
two running sums. Counts and sums are whole numbers, both in one word, so a value takes one addition.
"""

import numpy as np

from rtopk.kernels.jit import Array, Num, int32, int64, loop, uint32, uint64

BLOCK = 512  # values
BINS = 256  # sixteen factors of two below the largest value; the lowest bin takes all below
_TURNS = 5
_COUNT = 44  # the bit from which a bin counts its values; below it is their sum, in units

_COUNT_ROOT = np.rint(2.0**20 * np.arange(BLOCK + 1) ** (1 / 3)).astype(np.int64)
_WIDTH_ROOT = np.rint(2.0**20 * 2.0 ** (np.arange(BINS) / 16 * 2 / 3)).astype(np.int64)
# By exponent of the largest size: all are below 2**30 units.
_UNIT = 2.0 ** (np.maximum(1, np.arange(256)) - 156.0)
_PER_UNIT = 1.0 / _UNIT
_SHARE = 1.0 / np.maximum(1, np.arange(BLOCK + 1))


@loop
def _count(patterns: Array, sizes: Array, top: Num, places: Array, units: Array, bins: Array) -> None:
    """Add the sizes, whose bits are `patterns`, to their bins. A bin is the bits from the 19th up."""
    floor, scale = int32(top >> uint32(19)) - int32(BINS), _PER_UNIT[top >> uint32(23)]
    for i in range(len(sizes)):  # in vectors
        places[i] = uint32(max(int32(1), int32(patterns[i] >> uint32(19)) - floor))
        units[i] = int32(sizes[i] * scale)
    for i in range(len(sizes)):
        bins[places[i]] += units[i] + (1 << _COUNT)


@loop
def _cut(bins: Array, lowest: Num, roots: Array, cuts: Array) -> None:
    """Make bins running sums, and cuts cells of equal sums of (count x width²)**(1/3).

    That is Panter and Dite's density of levels, and a good start.
    """
    wanted, reached, below = len(cuts) - 1, int64(0), int64(0)
    held, widths, running = bins[lowest + 1 :], _WIDTH_ROOT[lowest:], roots[lowest:]
    for b in range(len(held)):
        own = held[b]
        reached += _COUNT_ROOT[uint64(own) >> uint64(_COUNT)] * widths[b]
        running[b] = reached
        below += own
        held[b] = below
    b, part, goal = uint64(0), reached // wanted, int64(0)
    cuts[0], cuts[wanted] = 0, BINS
    for cell in range(1, wanted):
        goal += part
        while running[b] < goal:
            b += uint64(1)
        cuts[cell] = lowest + int64(b) + 1


@loop
def fit(
    patterns: Array,
    sizes: Array,
    smallest: float,
    low: Num,
    top: Num,
    places: Array,
    units: Array,
    bins: Array,
    roots: Array,
    levels: Array,
    edges: Array,
) -> None:
    """Write ascending levels with small squared error to the sizes, whose bits are `patterns`, from low to top.

    The arrays between are room to work in: two of BLOCK, two of BINS + 1.
    """
    wanted, floor = len(levels), int64(top >> uint32(19)) - (BINS - 1)
    lowest = max(int64(0), int64(low >> uint32(19)) - floor)  # bins below are empty
    bins[:] = 0
    _count(patterns, sizes, top, places, units, bins)
    cuts = np.empty(wanted + 1, np.int64)
    _cut(bins, lowest, roots, cuts)
    previous, unit = smallest, _UNIT[top >> uint32(23)]  # the level of empty cells at the low end
    for turn in range(_TURNS + 1):
        for c in range(wanted):
            cell = bins[cuts[c + 1]] - bins[cuts[c]]
            n = cell >> _COUNT
            if n > 0:
                previous = (cell - (n << _COUNT)) * unit * _SHARE[n]
            levels[c] = max(previous, levels[c - 1]) if c else previous
        if turn < _TURNS:
            for c in range(wanted - 1):
                edges[c] = 0.5 * (levels[c] + levels[c + 1])
            for c in range(wanted - 1):
                pattern = edges.view(np.uint32)[c] + uint32(1 << 18)
                cuts[c + 1] = max(int64(0), min(int64(BINS), int64(pattern >> uint32(19)) - floor))
