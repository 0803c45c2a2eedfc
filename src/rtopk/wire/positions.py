"""The positions of a payload: the shortest of three index forms, each named by a number in the header.

GAPS codes the gaps between the positions, ABSENT those between the positions left out (density above a
half), BITMAP has one bit per position; NONE is for no positions at all. Elias-Fano is not among them: with
the same parameter its unary part is never shorter than that of Golomb codes of the gaps.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rtopk.threads import together
from rtopk.wire import PayloadError
from rtopk.wire.bits import address, all_zero, last_word, load_word, trailing_zeros
from rtopk.wire.compiling import Array, Num, entry, int64, loop, uint8, uint64
from rtopk.wire.golomb import best_code, plan, remainders
from rtopk.wire.pack import pack
from rtopk.wire.streams import unpack, unpack_four

NONE, GAPS, BITMAP, ABSENT = range(4)
FORMS = ("none", "gaps", "bitmap", "absent")
SHIFTS = (5, 7)  # blocks of 32 or 128 gaps, whichever is shorter
FOUR_STREAMS_FROM = 1 << 15
DIRECTORY = 48  # bytes: where streams 1 to 3 begin, in positions and in bytes, as uint64
SLACK = 8  # the writer stores whole words
NOT_ASCENDING = "indices must be ascending and unique"

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
Beside = Sequence[Callable[[Bytes], None]]


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


@loop
def stream_ends(n: Num, shift: Num, streams: Num, stream: Num) -> Num:
    """Return where one of the streams of n positions begins and ends."""
    if streams == 1:
        return int64(0), n
    share = stream_share(n, shift)
    return min(n, stream * share), min(n, (stream + 1) * share)


@entry
def plan_streams(
    positions: Array,
    shifts: tuple[int, int],
    streams: Num,
    some: tuple[int, int],
    expected: Array,
    bounds: Array,
) -> Num:
    """Write for each shift the bits expected of some of the streams, and bounds in bytes; return the first code."""
    n = len(positions)
    code = best_code(max(int64(0), positions[-1] + 1 - n), n)  # the mean of all: blocks that differ say so
    for i in range(len(shifts)):
        for stream in range(some[0], some[1]):
            begin, end = stream_ends(n, shifts[i], streams, stream)
            expected[i, stream], bits = plan(positions, begin, end, shifts[i], code)
            bounds[i, stream] = (bits + 7) >> 3
    return code


@entry
def write_stream(
    positions: Array, streams: Num, stream: Num, shift: Num, code: Num, out: Array, at: Num
) -> Num:
    """Write one of the streams at out[at:]; return the byte after it, or -1."""
    begin, end = stream_ends(len(positions), shift, streams, stream)
    start = positions[begin - 1] + 1 if begin else int64(0)
    return pack(positions[begin:end], start, shift, code, out, at)


def write_gaps(positions: Positions, prefix: int, beside: Beside = ()) -> tuple[Bytes, int]:
    """Return an array with the bits of the positions from byte `prefix` on, and where they end (-1: bad).

    Whatever is `beside` gets the array and writes to its first bytes, at the same time.
    """
    n = len(positions)
    streams = 4 if n >= FOUR_STREAMS_FROM else 1
    expected, bounds = np.empty((2, streams)), np.empty((2, streams), np.int64)
    halves = ((0, 2), (2, 4)) if streams == 4 else ((0, 1),)
    plans = [partial(plan_streams, positions, SHIFTS, streams, half, expected, bounds) for half in halves]
    code = together(plans, n)[0]
    best = int(expected[1].sum() < expected[0].sum())
    shift, rooms = (
        SHIFTS[best],
        bounds[best].tolist(),
    )  # each stream has its own room, and closes up afterwards
    at = [prefix + 2 + (DIRECTORY if streams == 4 else 0)]
    for room in rooms:
        at.append(at[-1] + room + SLACK)
    out: Bytes = np.empty(at[-1], np.uint8)
    out[prefix], out[prefix + 1] = shift | (16 if streams == 4 else 0), code
    tasks: list[Callable[[], Any]] = [partial(other, out) for other in beside]
    tasks += [partial(write_stream, positions, streams, i, shift, code, out, at[i]) for i in range(streams)]
    ends = together(tasks, n)[len(beside) :]
    end = int(ends[0])
    if min(ends) < 0:
        return out, -1
    share = int(stream_share(n, shift))
    for i in range(1, streams):
        directory = int(positions[i * share - 1]) + 1, end - prefix
        struct.pack_into("<QQ", out.data, prefix + 2 + 16 * (i - 1), *directory)
        length = ends[i] - at[i]
        out[end : end + length] = out[at[i] : ends[i]]
        end += length
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
