"""Values in 4 or 2 bits: a sign and one of 8 or 2 magnitudes, which are stored with each block of 512 values.

The magnitudes are fitted to the block, so they adapt to any selector: the tail above a threshold of top-k, the
whole range of random-k, the biases of many layers. They are written as bfloat16, so a reader needs no arithmetic.

block: 2**(bits - 1) magnitudes, uint16 each, ascending; then `bits` bits per value, the sign on top,
lowest bits first.

The fit is Lloyd's algorithm: each magnitude is the mean of the values nearest to it. It works on bins, sixteen for
every factor of two: a cell of a level is a range of bins, and its mean a difference of two running sums. Counts and
sums are whole numbers, both in one word, so a value takes one addition.
"""

import numpy as np

from rtopk.kernels.jit import Array, Num, entry, int32, int64, loop, uint8, uint32, uint64
from rtopk.wire.bits import address, load_byte, load_word, store_word

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
        bins[places[i]] += int64(units[i]) + (1 << _COUNT)


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


_LARGEST = 0x7F7F  # the largest finite bfloat16


def section_size(n: int, bits: int) -> int:
    """Return the bytes of n values."""
    magnitudes = 2 << (bits - 1)  # bytes
    whole, rest = divmod(n, BLOCK)
    return whole * (magnitudes + BLOCK * bits // 8) + (magnitudes + (rest * bits + 7) // 8 if rest else 0)


@loop
def _round_levels(levels: Array, spread: bool, low: Num, top: Num, magnitudes: Array) -> Array:
    """Write the levels as bits of bfloat16; if spread, the outer ones reach the smallest and the largest."""
    for c in range(len(levels)):
        magnitudes[c] = np.float32(levels[c])
    patterns = magnitudes.view(np.uint32)
    for c in range(len(levels)):
        patterns[c] = min(uint32(_LARGEST), (patterns[c] + uint32(0x8000)) >> uint32(16))
    if spread:
        first, last = low >> uint32(16), min(uint32(_LARGEST), (top + uint32(0xFFFF)) >> uint32(16))
        patterns[0], patterns[-1] = first, last
        for c in range(
            1, len(levels) - 1
        ):  # a mean far below the largest value may have been rounded to zero
            patterns[c] = max(patterns[c], first)
    return patterns


@loop
def _nearest(patterns: Array, edges: Array, levels: Array, codes: Array, result: Array) -> None:
    """Count the edges that each value exceeds, and write its level."""
    if len(edges) == 1:
        e0, v0, v1 = edges[0], levels[0], levels[1]
        for i in range(len(patterns)):
            codes[i] = uint32(patterns[i] > e0)
            result[i] = v1 if patterns[i] > e0 else v0
    else:
        e0, e1, e2, e3, e4, e5, e6 = edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], edges[6]
        v0, v1, v2, v3, v4, v5, v6, v7 = (
            levels[0],
            levels[1],
            levels[2],
            levels[3],
            levels[4],
            levels[5],
            levels[6],
            levels[7],
        )
        for i in range(len(patterns)):
            p = patterns[i]
            low = uint32(p > e0) + uint32(p > e1) + uint32(p > e2) + uint32(p > e3)
            codes[i] = low + uint32(p > e4) + uint32(p > e5) + uint32(p > e6)
            v = v1 if p > e0 else v0
            v = v2 if p > e1 else v
            v = v3 if p > e2 else v
            v = v4 if p > e3 else v
            v = v5 if p > e4 else v
            v = v6 if p > e5 else v
            result[i] = v7 if p > e6 else v


@loop
def _drawn(sizes: Array, draws: Array, magnitudes: Array, codes: Array, result: Array) -> None:
    """Round up or down at random, so that the mean of many draws is the value."""
    last, levels = len(magnitudes) - 1, magnitudes.view(np.uint32)
    for i in range(len(sizes)):
        c = 0
        while c < last and magnitudes[c + 1] <= sizes[i]:
            c += 1
        if c < last:
            below, above = float(magnitudes[c]), float(magnitudes[c + 1])
            c += int(float(draws[i]) * (above - below) < float(sizes[i]) - below)
        codes[i] = c
        result[i] = levels[c]


@loop
def _sign(given: Array, bits: Num, codes: Array, result: Array) -> None:
    """Add the signs of the values given to codes and results."""
    for i in range(len(given)):
        sign = given[i] & uint32(0x80000000)
        codes[i] |= sign >> uint32(32 - bits)
        result[i] |= sign


@loop
def _squeeze(pairs: Array, bits: Num, out: Array) -> None:
    """Write codes, which come two in a word, as bytes."""
    if bits == 4:
        for i in range(len(out)):
            out[i] = uint8((pairs[i] | (pairs[i] >> uint64(28))) & uint64(255))
    else:
        for i in range(len(out)):
            low, high = pairs[2 * i], pairs[2 * i + 1]
            low, high = (low | (low >> uint64(30))) & uint64(15), (high | (high >> uint64(30))) & uint64(15)
            out[i] = uint8(low | (high << uint64(4)))


@entry
def write_levels(values: Array, bits: Num, draws: Array, out: Array, at: Num, decoded: Array) -> None:
    """Write a section at out[at:] and what a reader gets to decoded; draws in [0, 1) round stochastically.

    Without draws a value is rounded to the nearest level. With draws the outer levels are the smallest and the
    largest magnitude, and a value is rounded up or down without bias.
    """
    wanted, per_byte = 1 << (bits - 1), 8 // bits
    levels, magnitudes = np.empty(wanted), np.empty(wanted, np.float32)
    edges = np.empty(wanted - 1, np.float32)
    patterns, codes = np.empty(BLOCK + 1, np.uint32), np.empty(BLOCK + 4, np.uint32)
    places, units = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.int32)
    bins, roots = np.empty(BINS + 1, np.int64), np.empty(BINS + 1, np.int64)
    sizes = patterns.view(np.float32)
    for begin in range(0, len(values), BLOCK):
        n = min(BLOCK, len(values) - begin)
        given = values[begin : begin + n].view(np.uint32)
        result = decoded[begin : begin + n].view(np.uint32)
        low, top = uint32(0x7FFFFFFF), uint32(0)
        for i in range(n):
            size = given[i] & uint32(0x7FFFFFFF)
            patterns[i] = size
            low, top = min(low, size), max(top, size)
        patterns[n] = low
        smallest = float(sizes[n])
        fit(patterns[:n], sizes[:n], smallest, low, top, places, units, bins, roots, levels, edges)
        rounded = _round_levels(levels, len(draws) > 0, low, top, magnitudes)
        for c in range(wanted):
            out[at] = rounded[c] & uint32(255)
            out[at + 1] = rounded[c] >> uint32(8)
            at += 2
            rounded[c] <<= uint32(16)  # from here on the magnitudes are what a reader sees
        if len(draws):
            _drawn(sizes[:n], draws[begin : begin + n], magnitudes, codes, result)
        else:
            for c in range(wanted - 1):
                edges[c] = 0.5 * (float(magnitudes[c]) + float(magnitudes[c + 1]))
            _nearest(patterns[:n], edges.view(np.uint32), rounded, codes, result)
        _sign(given, bits, codes, result)
        codes[n : n + 4] = 0
        length = (n + per_byte - 1) // per_byte
        _squeeze(codes.view(np.uint64), bits, out[at : at + length])
        at += length


@loop
def _read_magnitudes(data: Array, at: Num, table: Array, pairs: Array) -> Num:
    """Write the value of each code to table, of two codes to pairs; return whether the magnitudes were valid."""
    wanted, previous = len(table) // 2, uint32(0)
    for c in range(wanted):
        level = uint32(data[at + 2 * c]) | (uint32(data[at + 2 * c + 1]) << uint32(8))
        if level < previous or level > uint32(_LARGEST):
            return False
        previous = level
        table[c] = level << uint32(16)
        table[wanted + c] = table[c] | uint32(0x80000000)
    for second in range(len(table)):
        high = uint64(table[second]) << uint64(32)
        for first in range(len(table)):
            pairs[second, first] = high | uint64(table[first])
    return True


@entry
def read_levels(data: Array, at: Num, bits: Num, out: Array) -> Num:
    """Fill out from a section at data[at:]; return 0, or -1 if magnitudes do not ascend or are not finite."""
    wanted, per_byte, base, to = 1 << (bits - 1), 8 // bits, address(data), address(out)
    table, pairs = np.empty(2 * wanted, np.uint32), np.empty((2 * wanted, 2 * wanted), np.uint64)
    two = address(pairs)
    for begin in range(0, len(out), BLOCK):
        end = min(begin + BLOCK, len(out))
        if not _read_magnitudes(data, at, table, pairs):
            return -1
        at += 2 * wanted
        whole = (end - begin) // per_byte
        if bits == 4:
            for byte in range(base + at, base + at + whole):
                store_word(to, load_word(two + 8 * int64(load_byte(byte))))
                to += 8
        else:
            for byte in range(base + at, base + at + whole):
                codes = int64(load_byte(byte))
                store_word(to, load_word(two + 8 * (codes & 15)))
                store_word(to + 8, load_word(two + 8 * (codes >> 4)))
                to += 16
        at += whole
        i = begin + whole * per_byte
        if i < end:  # the last block
            codes = int64(data[at])
            for j in range(end - i):
                out.view(np.uint32)[i + j] = table[(codes >> (bits * j)) & (2 * wanted - 1)]
            if codes >> (bits * (end - i)):
                return -1
    return 0
