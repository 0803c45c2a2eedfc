"""Values in 4 or 2 bits: a sign and one of 8 or 2 magnitudes, which are stored with each block of 512 values.

The magnitudes are fitted to the block, so they adapt to any selector: the tail above a threshold of top-k, the
whole range of random-k, the biases of many layers. They are written as bfloat16, so a reader needs no arithmetic.

block: 2**(bits - 1) magnitudes, uint16 each, ascending; then `bits` bits per value, the sign on top,
lowest bits first.
"""

import numpy as np

from rtopk.kernels.jit import Array, Num, entry, int64, loop, uint8, uint32, uint64
from rtopk.wire.bits import address, load_byte, load_word, store_word
from rtopk.wire.fit import BINS, BLOCK, fit

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
            c += int(draws[i] * (above - below) < sizes[i] - below)
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
