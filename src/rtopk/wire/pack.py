"""Write ascending positions as streams of Golomb codes.

A block is written in three steps: the gaps, their codes and lengths, and the joining of codes, two at a time.
The first two are loops without branches over 32-bit numbers, which the compiler turns into vector instructions.
Blocks with a large gap or a long code are written with care, one code at a time.
"""

import numpy as np

from rtopk.wire.bits import address, store_word
from rtopk.wire.compiling import Array, Num, int32, int64, loop, uint32, uint64
from rtopk.wire.golomb import BAD_STREAM, PARAMETERS, best_code, keeps, remainder

SMALL = 1 << 21  # gaps and parameters below this are divided as float32
JOINED = 28  # bits: two codes of this length fit a word of which 7 bits are used


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

    The quotient is exact: the half keeps the product further from whole numbers than float32 rounds it.
    """
    inverse, longest = np.float32(1.0) / np.float32(m), int32(0)
    small, first_long, width_short = int32(m), int32(escape), int32(short)
    for i in range(n):
        q = int32((np.float32(gaps[i]) + np.float32(0.5)) * inverse)
        r = int32(gaps[i] - q * small)
        more = int32(r >= first_long)
        # a long remainder is r + escape in short + 1 bits, its lowest bit last
        longer = int32(r + first_long)
        longer = int32((longer >> 1) | ((longer & 1) << width_short))
        tail = int32(r ^ ((r ^ longer) & -more))  # chosen by a mask: the branch would be a coin flip
        length = int32(q + 1 + width_short + more)
        codes[i] = uint32(1 | (tail << 1)) << uint32(q & 31)
        lengths[i] = length
        longest = max(longest, length)
    return int64(longest)


@loop
def _join(codes: Array, lengths: Array, n: Num) -> None:
    """Join the two codes, and add the two lengths, in each of n words."""
    for i in range(n):
        first = lengths[i] & uint64(0xFFFFFFFF)
        codes[i] = (codes[i] & uint64(0xFFFFFFFF)) | ((codes[i] >> uint64(32)) << (first & uint64(63)))
        lengths[i] = first + (lengths[i] >> uint64(32))


@loop
def pack(positions: Array, start: Num, shift: Num, code: Num, out: Array, at: Num) -> Num:
    """Write positions >= start as bits into out[at:]; return the byte after them, or -1 if not ascending.

    The writer stores whole words: out must hold 8 bytes more than the bound of `plan` says.
    """
    n, size, previous = len(positions), 1 << shift, int64(start) - 1
    base = address(out)
    at += base
    codes, lengths = np.empty(size + 2, np.uint32), np.empty(size + 2, np.int32)
    pairs, sums, gaps = codes.view(np.uint64), lengths.view(np.uint64), np.empty(size, np.int32)
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
                word |= pairs[i] << uint64(used)
                store_word(at, word)
                used += int64(sums[i])
                at += used >> 3
                word >>= uint64(used & 56)
                used &= 7
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
            more = int64(r >= escape)
            longer = r + escape
            longer = (longer >> 1) | ((longer & 1) << int64(short))
            tail = uint64(r ^ ((r ^ longer) & -more))
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
