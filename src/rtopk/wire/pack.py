"""Write ascending positions as streams of Golomb codes.

A block is written in steps: the gaps, their codes and lengths, codes joined to pairs, and pairs appended to the
stream. All but the last are loops without branches, which the compiler turns into vector instructions. Blocks
with a large gap or a long code are written with care, one code at a time.
"""

import numpy as np

from rtopk.kernels.jit import Array, Num, fused, int32, int64, loop, uint32, uint64
from rtopk.wire.bits import address, store_word
from rtopk.wire.golomb import BAD_STREAM, PARAMETERS, best_code, keeps, remainder

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
            at, word, used = _append(at, word, used, uint64(0), 1)
        else:
            code = best
            at, word, used = _append(at, word, used, uint64(1 | (code << 1)), 9)
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
                at, word, used = _append(at, word, used, uint64(0), 16)
                q -= 16
            length = q + 1 + short + int64(r >= escape)
            at, word, used = _append(at, word, used, uint64(tail) << uint64(q), length)
    return at - base + (1 if used else 0)
