"""Golomb codes of gaps: ascending positions <-> a stream of bits.

A gap g is the number of positions left out before the next one. With parameter M it is written as g // M in
unary (that many zero bits, then a one) and g % M in truncated binary. The parameter follows the data: a
stream is cut in blocks of 2**shift gaps, and each block keeps the parameter or names a new one. M near
ln 2 times the mean gap is the best for geometric gaps, 0.034 bits over their entropy at worst; there are
eight parameters per factor of two.
"""

from functools import cache

import numpy as np

from rtopk.kernels.jit import Array, Num, int64, loop
from rtopk.wire.bits import bit_length, float_bits

CODES = 256
BAD_STREAM = -1


# M of each code: 1 to 8 in steps of one, then eight steps for every factor of two.
PARAMETERS = np.array([c + 1 if c < 7 else (8 + (c - 7) % 8) << ((c - 7) // 8) for c in range(CODES)])
LOG2 = np.log2(PARAMETERS)
INVERSE = 1.0 / PARAMETERS
TABLED = 7 + 8 * 8  # codes of M below 2**11, whose remainders are in tables
LENGTH_BITS = 10  # of an entry of a table: four lengths can be added up
WIDTH = np.array([int(m - 1).bit_length() for m in PARAMETERS])  # bits that hold 0 to M - 1


@loop
def remainder(m: Num) -> Num:
    """Return the bits of a short remainder, and the first remainder that takes a bit more."""
    short = max(0, bit_length(int64(m) - 1) - 1)
    return short, (int64(1) << int64(short + 1)) - m


@cache
def remainders() -> tuple[Array, Array]:
    """Return a table of remainders for each of the first TABLED codes, and where each table begins.

    The entry of the bits behind the one that ends the unary part is 2**LENGTH_BITS x remainder + length, that
    one included.
    """
    tables = []
    for m in PARAMETERS[:TABLED].tolist():
        short, escape = remainder(m)
        bits = np.arange(2 << short)
        r = bits & ((1 << short) - 1)
        longer = r >= escape
        values = np.where(longer, 2 * r - escape + (bits >> short), r)
        tables.append((values << LENGTH_BITS) + 1 + short + longer)
    offsets = np.cumsum([0] + [len(table) for table in tables])
    return np.concatenate(tables).astype(np.uint32), offsets


@loop
def best_code(total: Num, n: Num) -> Num:
    """Return the code of the parameter nearest to ln 2 x mean of n gaps that add up to total."""
    target = 0.6931471805599453 * (total / n + 0.5)
    if target < 7.5:
        return max(0, int(target + 0.5) - 1)
    # exponent and mantissa of the target, rounded to three bits: codes count the same way, from 8.0 on
    return min(CODES - 1, ((float_bits(target) + (1 << 48)) >> 49) - (((1023 + 3) << 3) - 7))


@loop
def keeps(code: Num, best: Num, n: Num) -> Num:
    """Return whether n gaps keep a parameter: one that is c codes off costs about 0.007 c² bits per gap."""
    return n * (code - best) * (code - best) < 1152  # a new one costs 8 bits


@loop
def plan(positions: Array, begin: Num, stop: Num, shift: Num, code: Num) -> Num:
    """Return the bits expected of a stream of positions[begin:stop] in blocks of 2**shift, and a bound on them.

    Reads the ends of the blocks only, and decides as `pack`.
    """
    size, previous = 1 << shift, positions[begin - 1] if begin else int64(-1)
    expected, bound = 0.0, int64(8)  # it ends in a part of a byte
    for first in range(begin, stop, size):
        end = min(first + size, stop)
        count, last = end - first, positions[end - 1]
        total = max(int64(0), last - previous - count)
        best = best_code(total, count)
        head = 1.0
        if not keeps(code, best, count):
            code = best
            head = 9.0
        off = code - best
        expected += head + count * (LOG2[best] + 2.0 + 0.007 * (off * off))
        bound += 10 + count * (1 + WIDTH[code]) + int64(total * INVERSE[code])
        previous = last
    return expected, bound
