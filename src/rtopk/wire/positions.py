"""The positions of a payload: the shortest of three index forms, each named by a number in the header.

GAPS codes the gaps between the positions, ABSENT those between the positions left out (density above a
half), BITMAP has one bit per position; NONE is for no positions at all. Elias-Fano is not among them: with
the same parameter its unary part is never shorter than that of Golomb codes of the gaps.

A payload of fixed size has room for positions that is known from h and d alone, on every rank: `position_bytes`. It
uses only additions, multiplications, divisions and square roots of float64, which IEEE 754 defines to the bit, so
that ranks on different machines agree.
"""

from functools import cache

import numpy as np

from rtopk.kernels.jit import Array, Num, entry, int64, uint8, uint64
from rtopk.wire import PayloadError
from rtopk.wire.bits import address, all_zero, last_word, load_word, trailing_zeros
from rtopk.wire.gaps import DIRECTORY, FOUR_STREAMS_FROM, Beside, Bytes, Positions, read_gaps, write_gaps
from rtopk.wire.golomb import CODES, PARAMETERS

NONE, GAPS, BITMAP, ABSENT = range(4)
FORMS = ("none", "gaps", "bitmap", "absent")
NOT_ASCENDING = "indices must be ascending and unique"


@entry
def ascends(positions: Array, start: Num, end: Num) -> Num:
    """Say whether positions are exactly start, ..., end - 1."""
    wrong = int64(0)
    for i in range(end - start):
        wrong |= positions[i] ^ (start + i)
    return wrong == 0


@entry
def complement(positions: Array, limit: Num, out: Array) -> Num:
    """Fill out with the positions below the limit that are not among the given; False if not ascending."""
    j, expected = 0, int64(0)
    for i in range(len(positions) + 1):
        position = positions[i] if i < len(positions) else int64(limit)
        if position < expected or j + position - expected > len(out):
            return False
        while expected < position:
            out[j] = expected
            j += 1
            expected += 1
        expected = position + 1
    return j == len(out)


@entry
def write_bitmap(positions: Array, limit: Num, prefix: Num) -> tuple[Array, Num]:
    """Return an array with one bit per position from byte `prefix` on, and where it ends (-1: bad)."""
    out = np.zeros(prefix + ((limit + 7) >> 3), np.uint8)
    previous = int64(-1)
    for position in positions:
        if position <= previous or position >= limit:
            return out, int64(-1)
        previous = position
        out[prefix + (position >> 3)] |= uint8(1 << (position & 7))
    return out, int64(len(out))


@entry
def read_bitmap(data: Array, begin: Num, end: Num, limit: Num, out: Array) -> Num:
    """Fill out with the positions of the ones; return the bit after the bitmap, or -1."""
    base = address(data)
    j, last = 0, begin + ((limit + 7) >> 3)
    if last > end:
        return int64(-1)
    for at in range(begin, last, 8):
        word = load_word(base + at) if at + 8 <= last else last_word(base + at, base + last)
        while word:
            position = 8 * (at - begin) + trailing_zeros(word)
            if j == len(out) or position >= limit:
                return int64(-1)
            out[j] = position
            j += 1
            word &= word - uint64(1)
    return int64(8 * begin + limit) if j == len(out) else int64(-1)


def write(
    positions: Positions, limit: int, prefix: int, *, absent: bool, beside: Beside = ()
) -> tuple[int, Bytes, int]:
    """Return index form, an array with the bits from byte `prefix` on, and where they end.

    `absent` allows the form of that name. Whatever is `beside` gets the array and writes to its first bytes, at
    the same time if there is enough to do; again, if another form turns out to be shorter.
    """
    n, bitmap = len(positions), prefix + ((limit + 7) >> 3)
    if n and (positions[0] < 0 or positions[-1] >= limit):
        raise ValueError(f"positions must lie in [0, {limit}), got {positions[0]} to {positions[-1]}")
    form, coded = GAPS, positions
    if absent and limit < 2 * n < 2 * limit:
        form, coded = ABSENT, np.empty(limit - n, np.int64)
        if not complement(positions, limit, coded):
            raise ValueError(NOT_ASCENDING)
    if 0 < 2 * len(coded) <= limit:
        out, end = write_gaps(coded, prefix, beside)
        if end < 0:
            raise ValueError(NOT_ASCENDING)
        if end <= bitmap:
            return form, out, end
    out, end = write_bitmap(positions, limit, prefix) if n else (np.empty(prefix, np.uint8), prefix)
    if end < 0:
        raise ValueError(NOT_ASCENDING)
    for other in beside:
        other(out)
    return (BITMAP if n else NONE), out, end


def read(form: int, data: Bytes, begin: int, limit: int, out: Positions, *, padded: bool) -> None:
    """Fill out with the positions coded in data[begin:], which must end there, or in zeros if padded."""
    end = len(data)
    if form == NONE and len(out) == 0:
        bit = 8 * begin
    elif form == GAPS and len(out):
        bit = read_gaps(data, begin, limit, out)
    elif form == BITMAP and len(out):
        bit = read_bitmap(data, begin, end, limit, out)
    elif form == ABSENT and 0 < limit - len(out) <= len(out):
        left_out = np.empty(limit - len(out), np.int64)
        bit = read_gaps(data, begin, limit, left_out)
        if bit >= 0 and not complement(left_out, limit, out):
            bit = -1
    else:
        name = FORMS[form] if form < len(FORMS) else "unknown"
        raise PayloadError(f"index form {form} ({name}) does not fit {len(out)} of {limit} positions")
    if bit < 0:
        raise PayloadError(
            f"index section does not hold {len(out)} ascending positions below {limit} (form {FORMS[form]})"
        )
    byte = (bit + 7) >> 3
    if (bit & 7 and data[bit >> 3] >> (bit & 7)) or not all_zero(data, byte, end):
        raise PayloadError(f"bytes after the index section, at {byte} of {end}, must be zero")
    if byte != end and not padded:
        raise PayloadError(f"payload must end after its index section, at byte {byte}, got {end} bytes")


MARGIN = 5.0  # standard deviations of the length of h codes


def expected_bits(m: int, p: float) -> float:
    """Return the mean length of the code with parameter m for gaps of positions drawn with probability p."""
    stays = _power(1.0 - p, m)  # a gap reaches m
    if m == 1:
        return 1.0 + stays / (1.0 - stays)
    width = (m - 1).bit_length()
    longer = (_power(1.0 - p, (1 << width) - m) - stays) / (1.0 - stays)
    return 1.0 + stays / (1.0 - stays) + width - 1 + longer


@cache
def position_bytes(h: int, d: int) -> int:
    """Return room for h of d positions: uniform ones exceed it once in a million; never more than a bitmap.

    Real positions cluster and need less; those of an adversary may need more.
    """
    if h == 0:
        return 0
    bitmap = (d + 7) // 8
    if 2 * h > d:
        return bitmap
    p = h / d
    per_gap = min(expected_bits(int(PARAMETERS[code]), p) for code in _near(0.6931 / p))
    streams = 4 if h >= FOUR_STREAMS_FROM else 1
    fixed = 16 + (8 * DIRECTORY if streams == 4 else 0) + 8 * streams  # the streams end in whole bytes
    # A code's length has a standard deviation below 0.7 once the sum of all gaps is given; a block in a
    # few hundred names a new parameter.
    bits = h * (per_gap + 1 / 128 + 0.004) + MARGIN * 0.7 * float(h) ** 0.5 + fixed + 9
    return min(bitmap, int(bits) // 8 + 1)


def _near(m: float) -> range:
    """Return the codes around a parameter."""
    code = next((code for code in range(CODES) if PARAMETERS[code] >= m), CODES - 1)
    return range(max(0, code - 3), min(CODES, code + 3))


def _power(x: float, n: int) -> float:
    """Raise to a whole power by squaring: `**` may differ in the last bit between C libraries."""
    result = 1.0
    while n:
        if n & 1:
            result *= x
        x *= x
        n >>= 1
    return result
