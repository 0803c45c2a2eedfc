"""Gaps between ascending positions <-> bytes: one stream of Golomb codes, or four behind a directory.

Many positions are split into four streams, so that a reader can interleave them and a writer can use several
threads.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rtopk.kernels.jit import Array, Num, entry, int64, loop, uint8, uint64
from rtopk.kernels.threads import together
from rtopk.wire.bits import address, load_word
from rtopk.wire.golomb import best_code, pack, plan, remainders
from rtopk.wire.streams import unpack, unpack_four

SHIFTS = (5, 7)  # blocks of 32 or 128 gaps, whichever is shorter
FOUR_STREAMS_FROM = 1 << 15
DIRECTORY = 48  # bytes: where streams 1 to 3 begin, in positions and in bytes, as uint64
SLACK = 8  # the writer stores whole words

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
Beside = Sequence[Callable[[Bytes], None]]


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
    expected: Array,
    bounds: Array,
) -> Num:
    """Write for each shift the bits expected of the streams, and bounds in bytes; return the first code."""
    n, streams = len(positions), bounds.shape[1]
    code = best_code(max(int64(0), positions[-1] + 1 - n), n)  # the mean of all: blocks that differ say so
    for i in range(len(shifts)):
        for stream in range(streams):
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

    The functions in `beside` get the array and write to its first bytes, in parallel.
    """
    n = len(positions)
    streams = 4 if n >= FOUR_STREAMS_FROM else 1
    expected, bounds = np.empty((2, streams)), np.empty((2, streams), np.int64)
    code = plan_streams(positions, SHIFTS, expected, bounds)
    best = int(expected[1].sum() < expected[0].sum())
    shift, at = SHIFTS[best], [prefix + 2 + (DIRECTORY if streams == 4 else 0)]
    for room in bounds[best].tolist():  # each stream has its own room; the gaps are closed afterwards
        at.append(at[-1] + room + SLACK)
    out: Bytes = np.empty(at[-1], np.uint8)
    out[prefix], out[prefix + 1] = shift | (16 if streams == 4 else 0), code
    tasks: list[Callable[[], Any]] = [partial(other, out) for other in beside]
    tasks += [partial(write_stream, positions, streams, i, shift, code, out, at[i]) for i in range(streams)]
    ends = together(tasks, n)[len(beside) :]
    end = int(ends[0])
    if min(ends) < 0:
        return out, -1
    share = stream_share(n, shift)
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
    return unpack(data, 8 * (begin + 2), end, shift, code, int64(0), limit, out)[0]


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
