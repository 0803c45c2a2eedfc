"""Golomb codes of gaps: ascending positions <-> a stream of bits.

A gap g is the number of positions left out before the next one. With parameter M it is written as g // M in
unary (that many zero bits, then a one) and g % M in truncated binary. The parameter follows the data: a
stream is cut in blocks of 2**shift gaps, and each block keeps the parameter or names a new one. M near
ln 2 times the mean gap is the best for geometric gaps, 0.034 bits over their entropy at worst; there are
eight parameters per factor of two.
"""

import numpy as np

from rtopk.wire.bits import address, bit_length, store_word
from rtopk.wire.compiling import Array, Num, int32, int64, loop, uint64

CODES = 256
BAD_STREAM = -1


# M of each code: 1 to 8 in steps of one, then eight steps for every factor of two.
PARAMETERS = np.array([c + 1 if c < 7 else (8 + (c - 7) % 8) << ((c - 7) // 8) for c in range(CODES)])
LOG2 = np.log2(PARAMETERS)


@loop
def width(m: Num) -> Num:
    """Return the bits that hold 0 to m - 1."""
    return bit_length(int64(m) - 1)


@loop
def best_code(total: Num, n: Num) -> Num:
    """Return the code of the parameter nearest to ln 2 x mean of n gaps that add up to total."""
    target = 0.6931471805599453 * (total / n + 0.5)
    if target < 7.5:
        return max(0, int(target + 0.5) - 1)
    scaled = int64(target * 16)
    exponent = bit_length(scaled) - 5
    mantissa = ((scaled >> exponent) + 1) >> 1  # rounded to 8, ..., 16
    return min(CODES - 1, 7 + 8 * (exponent - 3) + mantissa - 8)


@loop
def keeps(code: Num, best: Num, n: Num) -> Num:
    """Say whether n gaps keep a parameter: one that is c codes off costs about 0.007 c² bits per gap."""
    return n * (code - best) * (code - best) < 1152  # a new one costs 8 bits


@loop
def plan(positions: Array, shift: Num, share: Num) -> Num:
    """Return the first code, the bits expected, and bounds on the bits of two streams and of all.

    Blocks are of 2**shift gaps, streams of `share`. Reads the ends of the blocks only, and decides as `pack`.
    """
    n, size, previous = len(positions), 1 << shift, int64(-1)
    first = best_code(max(int64(0), positions[-1] + 1 - n), n)  # the mean of all: blocks that differ say so
    code, expected, bound, half = first, 0.0, int64(0), int64(0)
    for begin in range(0, n, size):
        if begin % share == 0:  # a stream
            code = first
            if begin == 2 * share:
                half = bound
            bound += 8  # it ends in a part of a byte
        end = min(begin + size, n)
        count, last = end - begin, positions[end - 1]
        total = max(int64(0), last - previous - count)
        best = best_code(total, count)
        expected += 1.0
        if not keeps(code, best, count):
            code = best
            expected += 8.0
        off = code - best
        expected += count * (LOG2[best] + 2.0 + 0.007 * off * off)
        bound += 9 + count * (1 + width(PARAMETERS[code])) + total // PARAMETERS[code]
        previous = last
    return first, expected, half, bound


@loop
def _codes(
    positions: Array,
    previous: Num,
    m: Num,
    short: Num,
    escape: Num,
    gaps: Array,
    codes: Array,
    lengths: Array,
) -> Num:
    """Write the codes of a block and their lengths; return the longest, 64 to do it with care, -1 if bad.

    Loops without branches, which the compiler turns into vector instructions. Gaps and M must fit 30 bits.
    """
    n = len(positions)
    wrong = positions[0] - previous - 1
    gaps[0] = wrong
    left, right = positions[:-1], positions[1:]
    for i in range(n - 1):
        gap = right[i] - left[i] - 1
        gaps[i + 1] = gap
        wrong |= gap
    if wrong < 0:
        return int64(BAD_STREAM)
    if positions[n - 1] - previous >= 1 << 30 or m >= 1 << 30:
        return int64(64)
    inverse, longest = 1.0 / m, int32(0)
    small, first_long, width_short = int32(m), int32(escape), int32(short)
    for i in range(n):
        gap = gaps[i]
        q = int32(gap * inverse)
        r = int32(gap - q * small)
        low, high = int32(r < 0), int32(r >= small)  # the product was rounded across a whole number
        q = int32(q + high - low)
        r = int32(r + small * (low - high))
        more = int32(r >= first_long)
        # a long remainder is r + escape in short + 1 bits, its lowest bit last
        longer = int32(r + first_long)
        longer = int32((longer >> 1) | ((longer & 1) << width_short))
        tail = int32(r ^ ((r ^ longer) & -more))  # chosen by a mask: the branch would be a coin flip
        length = int32(q + 1 + width_short + more)
        codes[i] = (1 | (tail << 1)) << (q & 31)
        lengths[i] = length
        longest = max(longest, length)
    return int64(longest)


@loop
def pack(positions: Array, start: Num, shift: Num, code: Num, out: Array, at: Num) -> Num:
    """Write positions >= start as bits into out[at:]; return the byte after them, or -1 if not ascending.

    The writer stores whole words: out must hold 8 bytes more than the bound of `plan` says.
    """
    n, size, previous = len(positions), 1 << shift, int64(start) - 1
    base = address(out)
    at += base
    codes, lengths = np.empty(size + 1, np.uint32), np.empty(size + 1, np.int32)
    gaps = np.empty(size, np.int32)
    word, used = uint64(0), int64(0)  # bits not yet passed on, fewer than 8 at every turn
    for begin in range(0, n, size):
        end = min(begin + size, n)
        count = end - begin
        best = best_code(max(int64(0), positions[end - 1] - previous - count), count)
        if keeps(code, best, count):
            bits, length = uint64(0), 1
        else:
            code = best
            bits, length = uint64(1 | (code << 1)), 9
        word |= bits << uint64(used)
        store_word(at, word)
        used += length
        at += used >> 3
        word >>= uint64(used & ~7)
        used &= 7
        m = PARAMETERS[code]
        inverse = 1.0 / m
        short = width(m) - 1 if m > 1 else 0  # bits of a short remainder
        escape = (int64(1) << int64(short + 1)) - m if m > 1 else 1  # remainders from here on: a bit more
        longest = _codes(positions[begin:end], previous, m, short, escape, gaps, codes, lengths)
        if longest < 0:  # before a bit of it is written: the bound holds for gaps that are none below zero
            return int64(BAD_STREAM)
        if longest <= 28:
            previous = positions[end - 1]
            codes[count] = lengths[count] = 0
            for i in range(0, count, 2):  # two at once
                both = uint64(codes[i]) | (uint64(codes[i + 1]) << uint64(lengths[i]))
                word |= both << uint64(used)
                store_word(at, word)
                used += lengths[i] + lengths[i + 1]
                at += used >> 3
                word >>= uint64(used & ~7)
                used &= 7
            continue
        for i in range(begin, end):
            gap = positions[i] - previous - 1
            previous = positions[i]
            q = int64(gap * inverse)
            r = gap - q * m
            if r < 0 or r >= m:  # the product was rounded across a whole number
                q = gap // m
                r = gap - q * m
            more = int64(r >= escape)
            # a long remainder is r + escape in short + 1 bits, its lowest bit last
            longer = r + escape
            longer = (longer >> 1) | ((longer & 1) << int64(short))
            tail = uint64(r ^ ((r ^ longer) & -more))  # chosen by a mask: the branch would be a coin flip
            while q > 16 and q + short + 2 > 56:
                store_word(at, word)
                at += 2
                word >>= uint64(16)
                q -= 16
            word |= (uint64(1) | (tail << uint64(1))) << uint64(used + q)
            store_word(at, word)
            used += q + 1 + short + more
            at += used >> 3
            word >>= uint64(used & ~7)
            used &= 7
    return at - base + (1 if used else 0)
