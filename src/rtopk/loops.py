"""The compiled loops behind `kernels`: fp32 vectors in the memory of the CPU.

Each loop takes a range of the vector, so that threads can share one; none allocates more than a group. Keys
and groups are explained in `simd`. Callers see to it that indices are in range: there is no check in here.
"""

import numpy as np

from rtopk.simd import (
    GROUP,
    SIGNLESS,
    add_group,
    compiled,
    high,
    inlined,
    lowest,
    momentum_group,
    ones,
    scan_group,
)

SPARE = GROUP + 4  # free places that a group may need: four entries are written at a time
SCAN, ADD, MOMENTUM = 0, 1, 2
BINS = 2048
STREAMS = 1 << 20  # entries that the check reads as two streams

Array = np.ndarray[tuple[int], np.dtype[np.generic]]
_SIGNLESS = np.int32(SIGNLESS)
_ONE = np.uint64(1)


@compiled
def reaches(vector: Array, begin: int, end: int, bound: np.int32) -> bool:
    """Say whether an entry reaches the bound; with the key of Inf: whether one is not finite.

    From the end to the beginning, so that what the next pass reads first was read last and may still be in
    the cache; two streams, because one does not keep the memory busy.
    """
    high_end = end
    while high_end - begin >= 2 * GROUP:
        low = max(begin, high_end - STREAMS)
        half = (high_end - low) // (2 * GROUP) * GROUP
        low = high_end - 2 * half
        found = np.uint64(0)
        for i in range(low, low + half, GROUP):
            found |= scan_group(vector, i, bound) | scan_group(vector, i + half, bound)
        if found:
            return True
        high_end = low
    keys = vector.view(np.int32)
    return any(keys[i] & _SIGNLESS >= bound for i in range(begin, high_end))


@compiled
def collect(
    mode: int,
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
    """Accumulate (or only scan) from `begin`, writing down the entries that reach the bound.

    Stop at the end, or before a group that the room left in `positions` might not hold. Return where it
    stopped and the number of entries written down.
    """
    room = positions.size - SPARE
    i = begin
    while i + GROUP <= end and count <= room:
        if mode == ADD:
            found = add_group(residual, gradient, i, bound)
        elif mode == MOMENTUM:
            found = momentum_group(residual, velocity, gradient, momentum, scale, i, bound)
        else:
            found = scan_group(residual, i, bound)
        if found:
            after = count + ones(found)
            while count < after:  # four at a time: a branch for each entry costs more than a wasted write
                for _ in range(4):
                    at = i + (lowest(found) & 63)
                    positions[count] = at
                    values[count] = residual[at]
                    found &= found - _ONE
                    count += 1
            count = after
        i += GROUP
    if i + GROUP <= end or i == end or count > room:
        return i, count
    for j in range(i, end):  # less than a group
        if mode == MOMENTUM:
            velocity[j] = velocity[j] * momentum + gradient[j] * scale
            residual[j] += velocity[j]
        elif mode == ADD:
            residual[j] += gradient[j]
        if np.float32(residual[j]).view(np.int32) & _SIGNLESS >= bound:
            positions[count] = j
            values[count] = residual[j]
            count += 1
    return end, count


@compiled
def histogram(values: Array, low: int, shift: int, counts: Array) -> None:
    """Count keys from `low` on in bins of 2 ** shift; the last bin takes all that lie above."""
    keys = values.view(np.int32)
    last = counts.size - 1
    for i in range(keys.size):
        key = np.int64(keys[i] & _SIGNLESS) - low
        if key >= 0:
            counts[min(key >> shift, last)] += 1


@compiled
def keys_between(values: Array, low: int, high_end: int, out: Array) -> int:
    """Write down the keys in [low, high_end) and return their number."""
    keys = values.view(np.int32)
    count = 0
    for i in range(keys.size):
        key = keys[i] & _SIGNLESS
        if low <= key < high_end:
            out[count] = key
            count += 1
    return count


@compiled
def keep(positions: Array, values: Array, threshold: int, ties: int) -> int:
    """Move the entries above the threshold, and the first `ties` at it, to the front; return their number."""
    keys = values.view(np.int32)
    count = 0
    for i in range(keys.size):
        key = keys[i] & _SIGNLESS
        if key == threshold:
            if ties == 0:
                continue
            ties -= 1
        elif key < threshold:
            continue
        positions[count] = positions[i]
        values[count] = values[i]
        count += 1
    return count


@compiled
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
) -> tuple[int, int, int]:
    """Rank the entries above the threshold and the first `ties` at it; write down those whose bit is set.

    There are no branches, so `out` needs one place more than is picked. Return rank, ties and count.
    """
    keys = values.view(np.int32)
    for i in range(keys.size):
        key = np.int64(keys[i] & _SIGNLESS)
        tied = np.int64(key == threshold) & np.int64(ties > 0)
        inside = np.int64(key > threshold) | tied
        ties -= tied
        bit = inside & np.int64((words[rank >> 6] >> np.uint64(rank & 63)) & _ONE)
        out_positions[count] = positions[i]
        out_values[count] = values[i]
        count += bit
        rank += inside
    return rank, ties, count


@compiled
def take_out(residual: Array, indices: Array, values: Array, begin: int, end: int) -> None:
    """Subtract the values at the indices."""
    for i in range(begin, end):
        residual[indices[i]] -= values[i]


@inlined
def _below(state: np.uint64, size: np.uint64, reject: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the next state of splitmix64 and a number below `size`, uniform (Lemire's rejection)."""
    while True:
        state += np.uint64(0x9E3779B97F4A7C15)
        z = state
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        if z * size >= reject:
            return state, high(z, size)


@compiled
def draw_words(words: Array, r: int, k: int, seed: int) -> None:
    """Set k of the first r bits: the first k distinct numbers of the stream of a seed."""
    state, size = np.uint64(seed), np.uint64(r)
    reject = (np.uint64(0) - size) % size
    while k > 0:
        state, number = _below(state, size, reject)
        bit = _ONE << (number & np.uint64(63))
        word = words[number >> np.uint64(6)]
        k -= np.int64((word & bit) == np.uint64(0))
        words[number >> np.uint64(6)] = word | bit


@compiled
def draw_few(table: Array, out: Array, r: int, seed: int) -> None:
    """Write down the same numbers where k is far below r; `table` is a hash set of 2 ** n places, all -1."""
    state, size = np.uint64(seed), np.uint64(r)
    reject = (np.uint64(0) - size) % size
    mask = np.uint64(table.size - 1)
    count = 0
    while count < out.size:
        state, number = _below(state, size, reject)
        place = (number * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20) & mask
        while table[place] != -1 and table[place] != np.int64(number):
            place = (place + _ONE) & mask
        if table[place] == -1:
            table[place] = np.int64(number)
            out[count] = np.int64(number)
            count += 1


@compiled
def set_bits(words: Array, out: Array) -> None:
    """Write down the positions of the set bits, ascending."""
    count = 0
    for w in range(words.size):
        word = words[w]
        while word:
            out[count] = w * 64 + lowest(word)
            count += 1
            word &= word - _ONE
