"""Values in 4 or 2 bits: a sign and one of 8 or 2 magnitudes, which each block of 512 values brings along.

The magnitudes are fitted to the block (Lloyd's algorithm: each is the mean of the values nearest to it), so
they follow whatever band the selector left: the tail above a threshold of top-k, everything of random-k,
the biases of many layers. They are written as bfloat16, so a reader needs no arithmetic at all.

block: 2**(bits - 1) magnitudes, uint16 each, ascending; then `bits` bits per value, the sign on top,
lowest bits first.
"""

import numpy as np

from rtopk.wire.compiling import Array, Num, entry, int64, loop, uint32

BLOCK = 512
_BINS = 256  # of the fit: 16 for every factor of two, 16 factors of two below the largest
_LARGEST = 0x7F7F  # the largest finite bfloat16

_COUNT_ROOT = np.arange(BLOCK + 1) ** (1 / 3)
_WIDTH_ROOT = 2.0 ** (np.arange(_BINS) / 16 * 2 / 3)


def section_size(n: int, bits: int) -> int:
    """Return the bytes of n values."""
    magnitudes = 2 << (bits - 1)  # bytes
    whole, rest = divmod(n, BLOCK)
    return whole * (magnitudes + BLOCK * bits // 8) + (magnitudes + (rest * bits + 7) // 8 if rest else 0)


@loop
def _fit(
    patterns: Array,
    sizes: Array,
    smallest: float,
    low: Num,
    top: Num,
    counts: Array,
    sums: Array,
    levels: Array,
    edges: Array,
) -> None:
    """Write ascending levels with small squared error to the sizes, whose bits are `patterns`.

    Works on bins (the bits from the 19th up: sixteen bins for every factor of two), so a cell of a level is
    a range of bins and its mean a difference of two running sums. Starts from cells of equal sums of
    (count x width²)**(1/3), Panter and Dite's density of levels; then five steps of Lloyd.
    """
    wanted, floor = len(levels), int64(top >> uint32(19)) - (_BINS - 1)
    lowest = max(int64(0), int64(low >> uint32(19)) - floor)  # bins below are empty
    counts[0] = sums[0] = 0.0
    counts[lowest:] = 0.0
    sums[lowest:] = 0.0
    for i in range(len(sizes)):
        b = max(int64(0), int64(patterns[i] >> uint32(19)) - floor)
        counts[b + 1] += 1.0
        sums[b + 1] += sizes[i]
    total = 0.0
    for b in range(lowest, _BINS):
        total += _COUNT_ROOT[int(counts[b + 1])] * _WIDTH_ROOT[b]
    reached, cell, goal = 0.0, 0, total / wanted
    cuts = np.empty(wanted + 1, np.int64)
    cuts[0], cuts[wanted] = 0, _BINS
    for b in range(lowest, _BINS):
        reached += _COUNT_ROOT[int(counts[b + 1])] * _WIDTH_ROOT[b]
        while reached >= goal and cell + 1 < wanted:
            cell += 1
            cuts[cell] = b + 1
            goal = total * (cell + 1) / wanted
        counts[b + 1] += counts[b]
        sums[b + 1] += sums[b]
    previous = smallest  # the level of empty cells at the low end
    for turn in range(6):
        for c in range(wanted):
            n = counts[cuts[c + 1]] - counts[cuts[c]]
            if n > 0.0:
                previous = (sums[cuts[c + 1]] - sums[cuts[c]]) / n
            levels[c] = max(previous, levels[c - 1]) if c else previous
        if turn < 5:
            for c in range(wanted - 1):
                edges[c] = 0.5 * (levels[c] + levels[c + 1])
            for c in range(wanted - 1):
                pattern = edges.view(np.uint32)[c] + uint32(1 << 18)
                cuts[c + 1] = max(int64(0), min(int64(_BINS), int64(pattern >> uint32(19)) - floor))


@loop
def _round_levels(levels: Array, spread: bool, low: Num, top: Num, magnitudes: Array) -> Array:
    """Write the levels as bits of bfloat16; if spread, the outer ones reach the smallest and the largest."""
    for c in range(len(levels)):
        magnitudes[c] = np.float32(levels[c])
    patterns = magnitudes.view(np.uint32)
    for c in range(len(levels)):
        patterns[c] = min(uint32(_LARGEST), (patterns[c] + uint32(0x8000)) >> uint32(16))
    if spread:
        patterns[0] = low >> uint32(16)
        patterns[-1] = min(uint32(_LARGEST), (top + uint32(0xFFFF)) >> uint32(16))
    return patterns


@loop
def _nearest(patterns: Array, edges: Array, codes: Array) -> None:
    """Count the edges that each value passes."""
    if len(edges) == 1:
        for i in range(len(patterns)):
            codes[i] = uint32(patterns[i] > edges[0])
    else:
        e0, e1, e2, e3, e4, e5, e6 = edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], edges[6]
        for i in range(len(patterns)):
            p = patterns[i]
            low = uint32(p > e0) + uint32(p > e1) + uint32(p > e2) + uint32(p > e3)
            codes[i] = low + uint32(p > e4) + uint32(p > e5) + uint32(p > e6)


@loop
def _drawn(sizes: Array, draws: Array, magnitudes: Array, codes: Array) -> None:
    """Take the level above or below, so that the mean of many draws is the value."""
    last = len(magnitudes) - 1
    for i in range(len(sizes)):
        c = 0
        while c < last and magnitudes[c + 1] <= sizes[i]:
            c += 1
        if c < last:
            below, above = float(magnitudes[c]), float(magnitudes[c + 1])
            c += int(draws[i] * (above - below) < sizes[i] - below)
        codes[i] = c


@entry
def write_levels(values: Array, bits: Num, draws: Array, out: Array, at: Num, decoded: Array) -> None:
    """Write a section at out[at:] and what a reader gets to decoded; draws in [0, 1) round stochastically.

    Without draws a value goes to the nearest level. With them the outer levels are the smallest and the
    largest magnitude and a value goes up or down so that its mean is kept.
    """
    wanted, per_byte = 1 << (bits - 1), 8 // bits
    given, result = values.view(np.uint32), decoded.view(np.uint32)
    counts, sums, levels = np.empty(_BINS + 1), np.empty(_BINS + 1), np.empty(wanted)
    magnitudes, edges = np.empty(wanted, np.float32), np.empty(wanted - 1, np.float32)
    table = np.empty(2 * wanted, np.uint32)
    patterns, codes = np.empty(BLOCK + 1, np.uint32), np.empty(BLOCK + per_byte, np.uint32)
    sizes = patterns.view(np.float32)
    for begin in range(0, len(values), BLOCK):
        n = min(BLOCK, len(values) - begin)
        low, top = uint32(0x7FFFFFFF), uint32(0)
        for i in range(n):
            patterns[i] = given[begin + i] & uint32(0x7FFFFFFF)
            low, top = min(low, patterns[i]), max(top, patterns[i])
        patterns[n] = low
        smallest = float(sizes[n])
        _fit(patterns[:n], sizes[:n], smallest, low, top, counts, sums, levels, edges)
        rounded = _round_levels(levels, len(draws) > 0, low, top, magnitudes)
        for c in range(wanted):
            out[at] = rounded[c] & uint32(255)
            out[at + 1] = rounded[c] >> uint32(8)
            at += 2
            rounded[c] <<= uint32(16)  # from here on the magnitudes are what a reader sees
            table[c], table[wanted + c] = rounded[c], rounded[c] | uint32(0x80000000)
        if len(draws):
            _drawn(sizes[:n], draws[begin : begin + n], magnitudes, codes)
        else:
            for c in range(wanted - 1):
                edges[c] = 0.5 * (float(magnitudes[c]) + float(magnitudes[c + 1]))
            _nearest(patterns[:n], edges.view(np.uint32), codes)
        for i in range(n):
            codes[i] |= (given[begin + i] >> uint32(31)) << uint32(bits - 1)
            result[begin + i] = table[codes[i]]
        codes[n : n + per_byte] = 0
        if bits == 4:
            for i in range(0, n, 2):
                out[at + (i >> 1)] = codes[i] | (codes[i + 1] << uint32(4))
        else:
            for i in range(0, n, 4):
                low = codes[i] | (codes[i + 1] << uint32(2))
                out[at + (i >> 2)] = low | (codes[i + 2] << uint32(4)) | (codes[i + 3] << uint32(6))
        at += (n + per_byte - 1) // per_byte


@entry
def read_levels(data: Array, at: Num, bits: Num, out: Array) -> Num:
    """Fill out from a section at data[at:]; return 0, or -1 if magnitudes do not ascend or are not finite."""
    wanted = 1 << (bits - 1)
    patterns = out.view(np.uint32)
    table = np.empty(2 * wanted, np.uint32)
    mask = (1 << bits) - 1
    per_byte = 8 // bits
    for begin in range(0, len(out), BLOCK):
        end = min(begin + BLOCK, len(out))
        previous = uint32(0)
        for c in range(wanted):
            level = uint32(data[at]) | (uint32(data[at + 1]) << uint32(8))
            if level < previous or level > uint32(_LARGEST):
                return -1
            previous = level
            table[c] = level << uint32(16)
            table[wanted + c] = table[c] | uint32(0x80000000)
            at += 2
        whole = (end - begin) // per_byte
        i = begin
        for _ in range(whole):
            byte = int64(data[at])
            at += 1
            for j in range(per_byte):
                patterns[i + j] = table[(byte >> (bits * j)) & mask]
            i += per_byte
        if i < end:
            byte = int64(data[at])
            at += 1
            for j in range(end - i):
                patterns[i + j] = table[(byte >> (bits * j)) & mask]
            if byte >> (bits * (end - i)):
                return -1
    return 0
