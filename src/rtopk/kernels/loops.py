"""The compiled loops of the `cpu` backend: fp32 vectors in host memory.

Each loop takes a range of the vector, so that threads can share a vector; none allocates more than a group. Keys
and groups are explained in `simd`. Callers ensure that indices are in range: nothing is checked here.
"""

from typing import Any

import numpy as np

from rtopk.kernels.jit import Array, entry, inlined, loop
from rtopk.kernels.simd import (
    GROUP,
    SIGNLESS,
    add_group,
    deposit,
    floats_at,
    lowest,
    move_group,
    ones,
    peak_group,
    prefetch,
    scan_group,
)

SPARE = GROUP + 6  # free places that a group may need: entries are written some at a time
PAGE = 1024  # entries of a page of memory
STREAMS = 1 << 20  # entries that the check reads as two streams

_SIGNLESS = np.int32(SIGNLESS)
_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@entry
def reaches(vector: Array, begin: int, end: int, bound: np.int32) -> bool:
    """Return whether an entry reaches the bound; with the key of Inf: whether one is not finite.

    It reads from the end to the beginning, so that what the next pass reads first may still be in the cache;
    in two streams, because one does not saturate the memory.
    """
    high_end = end
    while high_end - begin >= 2 * GROUP:
        low = max(begin, high_end - STREAMS)
        half = (high_end - low) // (2 * GROUP) * GROUP
        low = high_end - 2 * half
        found = np.uint64(0)
        for i in range(low, low + half, GROUP):
            found |= peak_group(vector, i, bound) | peak_group(vector, i + half, bound)
        if found:
            return True
        high_end = low
    keys = vector.view(np.int32)
    reached = False
    for i in range(begin, high_end):
        reached |= keys[i] & _SIGNLESS >= bound
    return reached


@inlined
def _put(found: Any, start: int, vector: Array, positions: Array, values: Array, count: int) -> Any:
    """Store the first entry of a group, or anything if there is none; return the others."""
    at = np.uint64(start) + (np.uint64(lowest(found)) & np.uint64(63))
    positions[np.uint64(count)] = at
    values[np.uint64(count)] = vector[at]
    return found & (found - _ONE)


@inlined
def _write(found: Any, start: int, vector: Array, positions: Array, values: Array, count: int) -> int:
    """Store the entries of one group: six at once, then fours. A wasted write costs less than a branch."""
    after: int = count + ones(found)
    for i in range(6):
        found = _put(found, start, vector, positions, values, count + i)
    count += 6
    while count < after:
        for i in range(4):
            found = _put(found, start, vector, positions, values, count + i)
        count += 4
    return after


@inlined
def _rest(
    begin: int, end: int, bound: np.int32, vector: Array, positions: Array, values: Array, count: int
) -> tuple[int, int]:
    """Store what reaches the bound in an incomplete group."""
    keys = vector.view(np.int32)
    for i in range(begin, end):
        if keys[i] & _SIGNLESS >= bound:
            positions[count] = i
            values[count] = vector[i]
            count += 1
    return end, count


# Loops that differ in a few lines: with a branch inside, LLVM no longer keeps a group in registers. Each starts at
# `begin` and stops at the end, or before a group that might not fit into `positions`; it returns where it stopped
# and the number of entries stored. Gradients mostly lie in pages of 4 KiB, and the processor does not prefetch
# across the end of a page, so the loops prefetch the next one.
#
# A gradient comes in parts, which lie anywhere: (m, 3) int64, where each begins and ends in the vector, ascending,
# and its address.


@entry
def scan(
    vector: Array, begin: int, end: int, bound: np.int32, positions: Array, values: Array, count: int
) -> tuple[int, int]:
    """Store the entries that reach the bound."""
    room = positions.size - SPARE
    while begin + GROUP <= end and count <= room:
        found = scan_group(vector, begin, bound)
        count = _write(found, begin, vector, positions, values, count)
        begin += GROUP
    if begin + GROUP <= end or count > room:
        return begin, count
    return _rest(begin, end, bound, vector, positions, values, count)


@entry
def add(
    sums: Array,
    residual: Array,
    parts: Array,
    begin: int,
    end: int,
    bound: np.int32,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int]:
    """Write residual + gradient to the sums, which may be the residual; store the entries that reach the bound."""
    for i in range(parts.shape[0]):
        start, low, high = _overlap(parts, i, begin, end)
        if low < high:
            here = sums[start:high], residual[start:high], floats_at(parts[i, 2], high - start)
            stop, after = _add(*here, low - start, high - start, bound, positions, values, count)
            count = _shift(positions, count, after, start)
            if start + stop < high:
                return start + stop, count
    return end, count


@loop
def _add(
    sums: Array,
    residual: Array,
    gradient: Array,
    begin: int,
    end: int,
    bound: np.int32,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int]:
    room = positions.size - SPARE
    while begin + GROUP <= end and count <= room:
        if not begin % PAGE:
            prefetch(gradient, begin + PAGE)
        found = add_group(sums, residual, gradient, begin, bound)
        count = _write(found, begin, sums, positions, values, count)
        begin += GROUP
    if begin + GROUP <= end or count > room:
        return begin, count
    for i in range(begin, end):
        sums[i] = residual[i] + gradient[i]
    return _rest(begin, end, bound, sums, positions, values, count)


@entry
def move(
    sums: Array,
    moved: Array,
    residual: Array,
    velocity: Array,
    parts: Array,
    momentum: np.float32,
    scale: np.float32,
    begin: int,
    end: int,
    bound: np.int32,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int]:
    """Do the same with the next velocity, momentum * velocity + scale * gradient, which goes to `moved`.

    `moved` may be the velocity.
    """
    for i in range(parts.shape[0]):
        start, low, high = _overlap(parts, i, begin, end)
        if low < high:
            old = residual[start:high], velocity[start:high], floats_at(parts[i, 2], high - start)
            new, span = (sums[start:high], moved[start:high]), (low - start, high - start)
            stop, after = _move(*new, *old, momentum, scale, *span, bound, positions, values, count)
            count = _shift(positions, count, after, start)
            if start + stop < high:
                return start + stop, count
    return end, count


@loop
def _move(
    sums: Array,
    moved: Array,
    residual: Array,
    velocity: Array,
    gradient: Array,
    momentum: np.float32,
    scale: np.float32,
    begin: int,
    end: int,
    bound: np.int32,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int]:
    room = positions.size - SPARE
    while begin + GROUP <= end and count <= room:
        if not begin % PAGE:
            prefetch(gradient, begin + PAGE)
        found = move_group(sums, moved, residual, velocity, gradient, momentum, scale, begin, bound)
        count = _write(found, begin, sums, positions, values, count)
        begin += GROUP
    if begin + GROUP <= end or count > room:
        return begin, count
    for i in range(begin, end):
        moved[i] = velocity[i] * momentum + gradient[i] * scale
        sums[i] = residual[i] + moved[i]
    return _rest(begin, end, bound, sums, positions, values, count)


@loop
def _overlap(parts: Array, i: int, begin: int, end: int) -> tuple[int, int, int]:
    """Return where a part begins, and which entries of it lie in [begin, end)."""
    start = parts[i, 0]
    return start, max(begin, start), min(end, parts[i, 1])


@loop
def _shift(positions: Array, count: int, after: int, start: int) -> int:
    """Turn positions in a part into positions in the vector; return how many are stored."""
    for j in range(count, after):
        positions[j] += start
    return after


@entry
def keep(positions: Array, values: Array, threshold: int, ties: int) -> int:
    """Move the entries above the threshold, and the first `ties` at it, to the front; return their number."""
    keys = values.view(np.int32)
    count = 0
    for i in range(keys.size):  # without branches: which entries stay cannot be predicted
        key = keys[i] & _SIGNLESS
        tied = int(key == threshold) & int(ties > 0)
        ties -= tied
        positions[count] = positions[i]
        values[count] = values[i]
        count += int(key > threshold) | tied
    return count


@entry
def pick(
    positions: Array,
    values: Array,
    threshold: int,
    ties: int,
    words: Array,
    rank: int,
    out_positions: Array,
    out_values: Array,
    count: int,
) -> None:
    """Rank the entries above the threshold and the first `ties` at it; store those whose bit is set.

    For each group of 64, take as many bits from `words` as the group has ranks, and spread them to the entries that
    have one. Ranks begin at `rank`, places in `out` at `count`.
    """
    keys = values.view(np.int32)
    for start in range(0, keys.size, GROUP):
        if start + GROUP <= keys.size:
            inside = scan_group(values, start, np.int32(threshold + 1))
            tied = scan_group(values, start, np.int32(threshold)) & ~inside
        else:
            inside = tied = np.uint64(0)
            for j in range(keys.size - start):
                key = keys[start + j] & _SIGNLESS
                inside |= np.uint64(key > threshold) << np.uint64(j)
                tied |= np.uint64(key == threshold) << np.uint64(j)
        while tied and ties > 0:
            inside |= tied & (~tied + _ONE)
            tied &= tied - _ONE
            ties -= 1
        ranks = ones(inside)
        if ranks == 0:
            continue
        at, shift = rank >> 6, np.uint64(rank & 63)
        drawn = words[at] >> shift
        if shift:
            drawn |= words[at + 1] << (np.uint64(64) - shift)
        drawn &= _ALL >> np.uint64(64 - ranks)
        rank += ranks
        drawn = deposit(drawn, inside)
        while drawn:
            chosen = np.uint64(start + lowest(drawn))
            out_positions[np.uint64(count)] = positions[chosen]
            out_values[np.uint64(count)] = values[chosen]
            drawn &= drawn - _ONE
            count += 1


@entry
def take_out(residual: Array, indices: Array, values: Array, begin: int, end: int) -> None:
    """Subtract the values at the indices."""
    for i in range(begin, end):
        residual[np.uint64(indices[i])] -= values[i]


@entry
def within(indices: Array, size: int) -> bool:
    """Return whether all indices lie in [0, size)."""
    outside = 0
    for i in range(indices.size):
        outside |= int(np.uint64(indices[i]) >= np.uint64(size))
    return outside == 0
