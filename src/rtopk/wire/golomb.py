"""Golomb codes of gaps: ascending positions <-> a stream of bits.

A gap g is the number of positions left out before the next one. With parameter M it is written as g // M in
unary (that many zero bits, then a one) and g % M in truncated binary. The parameter follows the data: a
stream is cut in blocks of 2**shift gaps, and each block keeps the parameter or names a new one. M near
ln 2 times the mean gap is the best for geometric gaps, 0.034 bits over their entropy at worst; there are
eight parameters per factor of two.

A block is written in steps: the gaps, their codes and lengths, codes joined to pairs, and pairs appended to the
stream. All but the last are loops without branches, which the compiler turns into vector instructions. Blocks
with a large gap or a long code are written with care, one code at a time.
"""

from functools import cache

import numpy as np

from rtopk.kernels.jit import Array, Num, fused, int32, int64, loop, uint32, uint64
from rtopk.wire.bits import address, bit_length, float_bits, store_word

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
        short = max(0, (m - 1).bit_length() - 1)
        escape = (2 << short) - m
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


SMALL = 1 << 21  # gaps and parameters below this are divided as float32
JOINED = 28  # bits: twice as many can be appended at once


@loop
def _gaps(positions: Array, previous: Num, gaps: Array) -> Num:
    """Write the gaps of a block; return all of them joined by or: negative if one is, large if one is."""
    joined = positions[0] - previous - 1
    gaps[0] = joined
    left, right = positions[:-1], positions[1:]
    for i in range(len(left)):
        gap = right[i] - left[i] - 1
        gaps[i + 1] = gap
        joined |= gap
    return joined


@loop
def _codes(gaps: Array, n: Num, m: Num, short: Num, escape: Num, codes: Array, lengths: Array) -> Num:
    """Write the codes of n small gaps and their lengths; return the longest length.

    The quotient is exact: the half keeps the product further from whole numbers than float32 rounds it. A long
    remainder is r + escape, its lowest bit last. A short one is even as r + r: one expression serves both.
    """
    inverse, longest = np.float32(1.0) / np.float32(m), int32(0)
    small, first_long, width_long = int32(m), int32(escape), int32(short + 1)
    for i in range(n):
        q = int32((np.float32(gaps[i]) + np.float32(0.5)) * inverse)
        r = int32(gaps[i] - q * small)
        tail = uint32(r + min(r, first_long))
        tail = tail | uint32(1) | ((tail & uint32(1)) << uint32(width_long & 31))
        length = int32(q + width_long + int32(r >= first_long))
        codes[i] = tail << uint32(q & 31)
        lengths[i] = length
        longest = max(longest, length)
    return int64(longest)


@loop
def _join(codes: Array, lengths: Array, n: Num) -> None:
    """Join the two codes, and add the two lengths, in each of n words."""
    for i in range(n):
        code, first = codes[i], lengths[i] & uint64(0xFFFFFFFF)
        lengths[i] = first + (lengths[i] >> uint64(32))
        codes[i] = (code & uint64(0xFFFFFFFF)) | ((code >> uint64(32)) << (first & uint64(63)))


@fused
def _append(at: Num, word: Num, used: Num, bits: Num, length: Num) -> Num:
    """Write up to 56 bits; return where the next byte goes, the bits not yet passed on, and how many: below 8."""
    word |= bits << uint64(used)
    store_word(at, word)
    used += length
    return at + (used >> 3), word >> uint64(used & 56), used & 7


@loop
def pack(positions: Array, start: Num, shift: Num, code: Num, out: Array, at: Num) -> Num:
    """Write positions >= start as bits into out[at:]; return the byte after them, or -1 if not ascending.

    The writer stores whole words: out must hold 8 bytes more than the bound of `plan` says.
    """
    n, size, previous = len(positions), 1 << shift, int64(start) - 1
    base = address(out)
    at += base
    pairs, sums = np.empty((size >> 1) + 2, np.uint64), np.empty((size >> 1) + 2, np.uint64)
    codes, lengths, gaps = pairs.view(np.uint32), sums.view(np.int32), np.empty(size, np.int32)
    word, used = uint64(0), int64(0)
    for begin in range(0, n, size):
        end = min(begin + size, n)
        count = end - begin
        best = best_code(max(int64(0), positions[end - 1] - previous - count), count)
        if keeps(code, best, count):
            at, word, used = _append(at, word, used, uint64(0), int64(1))
        else:
            code = best
            at, word, used = _append(at, word, used, uint64(1 | (code << 1)), int64(9))
        m = PARAMETERS[code]
        short, escape = remainder(m)
        joined = _gaps(positions[begin:end], previous, gaps)
        if joined < 0:  # before a bit of it is written: the bound holds for gaps that are none below zero
            return int64(BAD_STREAM)
        if max(joined, m) < SMALL and _codes(gaps, count, m, short, escape, codes, lengths) <= JOINED:
            previous = positions[end - 1]
            codes[count] = lengths[count] = 0
            half = (count + 1) >> 1
            _join(pairs, sums, half)
            for i in range(half):
                at, word, used = _append(at, word, used, pairs[i], int64(sums[i]))
            continue
        inverse = 1.0 / m
        for i in range(begin, end):
            gap = positions[i] - previous - 1
            previous = positions[i]
            q = int64(gap * inverse)
            r = gap - q * m
            if r < 0 or r >= m:  # the product was rounded across a whole number
                q = gap // m
                r = gap - q * m
            tail = r + min(r, escape)
            tail = tail | 1 | ((tail & 1) << int64(short + 1))
            while q > 16 and q + short + 2 > 56:
                at, word, used = _append(at, word, used, uint64(0), int64(16))
                q -= 16
            length = q + 1 + short + int64(r >= escape)
            at, word, used = _append(at, word, used, uint64(tail) << uint64(q), length)
    return at - base + (1 if used else 0)
