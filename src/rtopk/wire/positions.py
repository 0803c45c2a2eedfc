"""The positions of a payload: the shortest of three index forms, each named by a number in the header.

GAPS codes the gaps between the positions, ABSENT those between the positions left out (density above a
half), BITMAP has one bit per position; NONE is for no positions at all. Elias-Fano is not among them: with
the same parameter its unary part is never shorter than that of Golomb codes of the gaps.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rtopk.threads import together
from rtopk.wire import PayloadError
from rtopk.wire.bits import address, all_zero, last_word, load_word, trailing_zeros
from rtopk.wire.compiling import Array, Num, entry, int64, loop, uint8, uint64
from rtopk.wire.golomb import plan, remainders
from rtopk.wire.pack import pack
from rtopk.wire.streams import unpack, unpack_four

NONE, GAPS, BITMAP, ABSENT = range(4)
FORMS = ("none", "gaps", "bitmap", "absent")
SHIFTS = (5, 7)  # blocks of 32 or 128 gaps, whichever is shorter
FOUR_STREAMS_FROM = 1 << 15
DIRECTORY = 48  # bytes: where streams 1 to 3 begin, in positions and in bytes, as uint64
SLACK = 8  # the writer stores whole words

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


@entry
def ascends(positions: Array, start: Num, end: Num) -> Num:
    """Say whether positions are exactly start, ..., end - 1."""
    wrong = int64(0)
    for i in range(end - start):
        wrong |= positions[i] ^ (start + i)
    return wrong == 0


@loop
def stream_share(n: Num, shift: Num) -> Num:
    """Return how many of n positions each of four streams but the last holds: whole blocks."""
    quarter = (n + 3) >> 2
    return (quarter + (1 << shift) - 1) >> shift << shift


@entry
def plan_gaps(positions: Array, shifts: tuple[int, ...], four: Num) -> Num:
    """Return the block shift that gives the fewest bits, its first code, bounds in bytes of half and of all."""
    n = len(positions)
    shift = shifts[0]
    code, expected, half, bound = plan(positions, shift, stream_share(n, shift) if four else n)
    for other in shifts[1:]:
        proposal = plan(positions, other, stream_share(n, other) if four else n)
        if proposal[1] < expected:
            shift, (code, expected, half, bound) = other, proposal
    return shift, code, (half + 7) >> 3, (bound + 7) >> 3


@entry
def write_stream(positions: Array, shift: Num, code: Num, out: Array, at: Num) -> Num:
    """Write one stream at out[at:]; return the byte after it, or -1."""
    return pack(positions, 0, shift, code, out, at)


@entry
def write_pair(positions: Array, pair: Num, shift: Num, code: Num, out: Array, at: Num) -> Num:
    """Write two of four streams at out[at:]; return the byte after each, or -1."""
    n = len(positions)
    share = stream_share(n, shift)
    cut, last = (2 * pair + 1) * share, min(n, (2 * pair + 2) * share)
    start = positions[2 * share - 1] + 1 if pair else int64(0)
    first = pack(positions[2 * pair * share : cut], start, shift, code, out, at)
    if first < 0:
        return first, first
    return first, pack(positions[cut:last], positions[cut - 1] + 1, shift, code, out, first)


def write_gaps(positions: Positions, prefix: int) -> tuple[Bytes, int]:
    """Return an array with the bits of the positions from byte `prefix` on, and where they end (-1: bad)."""
    n = len(positions)
    four = n >= FOUR_STREAMS_FROM
    shift, code, half, bound = plan_gaps(positions, SHIFTS, four)
    at = prefix + 2 + (DIRECTORY if four else 0)
    out: Bytes = np.empty(at + bound + 2 * SLACK, np.uint8)
    out[prefix], out[prefix + 1] = shift | (16 if four else 0), code
    if not four:
        return out, write_stream(positions, shift, code, out, at)
    gap = at + half + SLACK  # the second pair has its own room, and closes up afterwards
    ends = side_by_side(
        n,
        partial(write_pair, positions, 0, shift, code, out, at),
        partial(write_pair, positions, 1, shift, code, out, gap),
    )
    if min(ends[0][1], ends[1][1]) < 0:
        return out, -1
    second = ends[0][1]
    end = second + ends[1][1] - gap
    out[second:end] = out[gap : ends[1][1]]
    share = stream_share(n, shift)
    offsets = ends[0][0], second, second + ends[1][0] - gap
    for stream, offset in enumerate(offsets, start=1):
        start = int(positions[stream * share - 1]) + 1
        struct.pack_into("<QQ", out.data, prefix + 2 + 16 * (stream - 1), start, offset - prefix)
    return out, end


@entry
def read_stream(data: Array, begin: Num, end: Num, limit: Num, out: Array) -> Num:
    """Fill out from the one stream in data[begin:end]; return the bit after it, or -1."""
    shift, code = int64(data[begin] & 15), int64(data[begin + 1])
    return unpack(data, 8 * (begin + 2), end, shift, code, 0, limit, out)[0]


@entry
def read_four(
    data: Array, begin: Num, end: Num, limit: Num, out: Array, tables: Array, offsets: Array
) -> Num:
    """Fill out from the four streams in data[begin:end]; return the bit after them, or -1."""
    n, base = len(out), address(data)
    shift, code = int64(data[begin] & 15), int64(data[begin + 1])
    share = stream_share(n, shift)
    if end - begin < 2 + DIRECTORY or n <= 3 * share:
        return int64(-1)
    starts, firsts = np.zeros(4, np.int64), np.empty(4, np.int64)
    firsts[0] = begin + 2 + DIRECTORY
    for stream in range(1, 4):
        at = base + begin + 2 + 16 * (stream - 1)
        start, offset = load_word(at), load_word(at + 8)
        if start > uint64(limit) or offset > uint64(end - begin):
            return int64(-1)
        starts[stream], firsts[stream] = int64(start), begin + int64(offset)
    bits = 8 * firsts
    if unpack_four(data, bits, end, shift, code, starts, limit, out, share, tables, offsets) < 0:
        return int64(-1)
    for stream in range(1, 4):  # each begins where the one before it ended, in positions and in bytes
        last = bits[stream - 1]
        if starts[stream] != out[stream * share - 1] + 1 or (last + 7) >> 3 != firsts[stream]:
            return int64(-1)
        if last & 7 and data[last >> 3] >> uint8(last & 7):
            return int64(-1)
    return bits[3]


def read_gaps(data: Bytes, begin: int, limit: int, out: Positions) -> int:
    """Fill out with the positions coded in data[begin:]; return the bit after them, or -1."""
    end = len(data)
    if end - begin < 2 or data[begin] >> 4 > 1:
        return -1
    if data[begin] >> 4 == 0:
        return int(read_stream(data, begin, end, limit, out))
    return int(read_four(data, begin, end, limit, out, *remainders()))


def side_by_side(n: int, one: Callable[[], Any], two: Callable[[], Any]) -> list[Any]:
    """Do two parts of the work on n positions, in two threads if there is enough of it."""
    return together([one, two], n)


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


def write(positions: Positions, limit: int, prefix: int, *, absent: bool) -> tuple[int, Bytes, int]:
    """Return index form, an array with the bits from byte `prefix` on, and where they end.

    `absent` allows the form of that name.
    """
    n = len(positions)
    if n == 0:
        return NONE, np.empty(prefix, np.uint8), prefix
    if positions[0] < 0 or positions[-1] >= limit:
        raise ValueError(f"positions must lie in [0, {limit}), got {positions[0]} to {positions[-1]}")
    form, out, end = BITMAP, None, -1
    if 2 * n <= limit:
        form, (out, end) = GAPS, write_gaps(positions, prefix)
    elif absent and n < limit:
        left_out = np.empty(limit - n, np.int64)
        if complement(positions, limit, left_out):
            form, (out, end) = ABSENT, write_gaps(left_out, prefix)
    if out is None or (end >= 0 and end - prefix > (limit + 7) >> 3):
        form, (out, end) = BITMAP, write_bitmap(positions, limit, prefix)
    if end < 0:
        raise ValueError("indices must be ascending and unique")
    return form, out, end


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
