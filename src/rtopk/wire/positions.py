"""The positions of a payload: the shortest of three index forms, each named by a number in the header.

GAPS codes the gaps between the positions, ABSENT those between the positions left out (density above a
half), BITMAP has one bit per position; NONE is for no positions at all. Elias-Fano is not among them: with
the same parameter its unary part is never shorter than that of Golomb codes of the gaps.
"""

import numpy as np
from numpy.typing import NDArray

from rtopk.wire import PayloadError
from rtopk.wire.bits import address, all_zero, last_word, load_word, trailing_zeros
from rtopk.wire.compiling import Array, Num, entry, int64, loop, uint8, uint64
from rtopk.wire.golomb import pack, plan
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


@entry
def write_gaps(positions: Array, prefix: Num, shifts: tuple[int, ...]) -> tuple[Array, Num]:
    """Return an array with the bits of the positions from byte `prefix` on, and where they end (-1: bad)."""
    n = len(positions)
    shift, (code, expected, bound) = shifts[0], plan(positions, shifts[0])
    for other in shifts[1:]:
        proposal = plan(positions, other)
        if proposal[1] < expected:
            shift, (code, expected, bound) = other, proposal
    streams = 4 if n >= FOUR_STREAMS_FROM else 1
    # each stream may start a new parameter and ends in a part of a byte
    out = np.empty(prefix + 2 + DIRECTORY + (bound >> 3) + 4 * 128 + SLACK, np.uint8)
    out[prefix] = shift | (streams >> 2 << 4)
    out[prefix + 1] = code
    at = prefix + 2
    if streams == 1:
        return out, pack(positions, 0, shift, code, out, at)
    at += DIRECTORY
    share = stream_share(n, shift)
    for stream in range(4):
        start = int64(0)
        if stream:
            start = positions[stream * share - 1] + 1
            entry = prefix + 2 + 16 * (stream - 1)
            for i in range(8):
                out[entry + i] = (start >> (8 * i)) & 255
                out[entry + 8 + i] = ((at - prefix) >> (8 * i)) & 255
        at = pack(positions[stream * share : min(n, (stream + 1) * share)], start, shift, code, out, at)
        if at < 0:
            break
    return out, at


@loop
def stream_share(n: Num, shift: Num) -> Num:
    """Return how many of n positions each of four streams but the last holds: whole blocks."""
    quarter = (n + 3) >> 2
    return (quarter + (1 << shift) - 1) >> shift << shift


@entry
def read_gaps(data: Array, begin: Num, end: Num, limit: Num, out: Array) -> Num:
    """Fill out with the positions coded in data[begin:end]; return the bit after them, or -1."""
    n = len(out)
    if end - begin < 2:
        return int64(-1)
    shift, code = int64(data[begin] & 15), int64(data[begin + 1])
    if data[begin] >> 4 == 0:
        return unpack(data, 8 * (begin + 2), end, shift, code, 0, limit, out)
    share = stream_share(n, shift)
    if data[begin] >> 4 != 1 or end - begin < 2 + DIRECTORY or n <= 3 * share:
        return int64(-1)
    starts, bits = np.zeros(4, np.int64), np.zeros(4, np.int64)
    firsts, base = np.zeros(4, np.int64), address(data)
    firsts[0] = begin + 2 + DIRECTORY
    for stream in range(1, 4):
        entry = begin + 2 + 16 * (stream - 1)
        start, offset = load_word(base + entry), load_word(base + entry + 8)
        if start > uint64(limit) or offset > uint64(end - begin):
            return int64(-1)
        starts[stream], firsts[stream] = int64(start), begin + int64(offset)
    bits[:] = 8 * firsts
    if unpack_four(data, bits, end, shift, code, starts, limit, out, share) < 0:
        return int64(-1)
    for stream in range(3):  # each ends where the next begins, in positions and in bytes
        if starts[stream + 1] != out[(stream + 1) * share - 1] + 1:
            return int64(-1)
        last = bits[stream]
        if (last + 7) >> 3 != firsts[stream + 1] or (last & 7 and data[last >> 3] >> uint8(last & 7)):
            return int64(-1)
    return bits[3]


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
        form, (out, end) = GAPS, write_gaps(positions, prefix, SHIFTS)
    elif absent and n < limit:
        left_out = np.empty(limit - n, np.int64)
        if complement(positions, limit, left_out):
            form, (out, end) = ABSENT, write_gaps(left_out, prefix, SHIFTS)
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
        bit = read_gaps(data, begin, end, limit, out)
    elif form == BITMAP and len(out):
        bit = read_bitmap(data, begin, end, limit, out)
    elif form == ABSENT and 0 < limit - len(out) <= len(out):
        left_out = np.empty(limit - len(out), np.int64)
        bit = read_gaps(data, begin, end, limit, left_out)
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
