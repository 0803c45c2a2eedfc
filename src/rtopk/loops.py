"""The compiled loops behind `kernels`: fp32 vectors in the memory of the CPU.

Each loop takes a range of the vector, so that threads can share one; none allocates more than a group. Keys
and groups are explained in `simd`. Callers see to it that indices are in range: there is no check in here.
"""

from typing import Any

import numpy as np

from rtopk.simd import (
    GROUP,
    SIGNLESS,
    add_group,
    compiled,
    deposit,
    high,
    inlined,
    lowest,
    momentum_group,
    ones,
    peak_group,
    prefetch,
    scan_group,
)

SPARE = GROUP + 6  # free places that a group may need: entries are written some at a time
PAGE = 1024  # entries of a page of memory
BINS = 2048
STREAMS = 1 << 20  # entries that the check reads as two streams

Array = Any  # numba compiles for the dtypes that it meets
_SIGNLESS = np.int32(SIGNLESS)
_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


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
    """Write down the first entry of a group, or anything if there is none; return the others."""
    at = np.uint64(start) + (np.uint64(lowest(found)) & np.uint64(63))
    positions[np.uint64(count)] = at
    values[np.uint64(count)] = vector[at]
    return found & (found - _ONE)


@inlined
def _write(found: Any, start: int, vector: Array, positions: Array, values: Array, count: int) -> int:
    """Write down the entries of one group: six at once, then fours. A wasted write costs less than a branch."""
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
    """Write down what reaches the bound in less than a group."""
    keys = vector.view(np.int32)
    for i in range(begin, end):
        if keys[i] & _SIGNLESS >= bound:
            positions[count] = i
            values[count] = vector[i]
            count += 1
    return end, count


# Three loops that differ in one line: with a choice inside, LLVM no longer keeps a group in registers. Each
# starts at `begin` and stops at the end, or before a group that the room left in `positions` might not hold;
# it returns where it stopped and the number of entries written down. Gradients mostly lie in pages of 4 KiB,
# and the processor does not fetch ahead across the end of one: the next page is asked for in time.


@compiled
def scan(
    vector: Array, begin: int, end: int, bound: np.int32, positions: Array, values: Array, count: int
) -> tuple[int, int]:
    """Write down the entries that reach the bound."""
    room = positions.size - SPARE
    while begin + GROUP <= end and count <= room:
        found = scan_group(vector, begin, bound)
        count = _write(found, begin, vector, positions, values, count)
        begin += GROUP
    if begin + GROUP <= end or count > room:
        return begin, count
    return _rest(begin, end, bound, vector, positions, values, count)


@compiled
def add(
    residual: Array,
    gradient: Array,
    begin: int,
    end: int,
    bound: np.int32,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int]:
    """Add the gradient to the residual; write down the entries that reach the bound."""
    room = positions.size - SPARE
    while begin + GROUP <= end and count <= room:
        if not begin % PAGE:
            prefetch(gradient, begin + PAGE)
        found = add_group(residual, gradient, begin, bound)
        count = _write(found, begin, residual, positions, values, count)
        begin += GROUP
    if begin + GROUP <= end or count > room:
        return begin, count
    for i in range(begin, end):
        residual[i] += gradient[i]
    return _rest(begin, end, bound, residual, positions, values, count)


@compiled
def move(
    residual: Array,
    gradient: Array,
    velocity: Array,
    momentum: np.float32,
    scale: np.float32,
    begin: int,
    end: int,
    bound: np.int32,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int]:
    """Move the velocity, add it to the residual; write down the entries that reach the bound."""
    room = positions.size - SPARE
    while begin + GROUP <= end and count <= room:
        if not begin % PAGE:
            prefetch(gradient, begin + PAGE)
        found = momentum_group(residual, velocity, gradient, momentum, scale, begin, bound)
        count = _write(found, begin, residual, positions, values, count)
        begin += GROUP
    if begin + GROUP <= end or count > room:
        return begin, count
    for i in range(begin, end):
        velocity[i] = velocity[i] * momentum + gradient[i] * scale
        residual[i] += velocity[i]
    return _rest(begin, end, bound, residual, positions, values, count)


@compiled
def histogram(values: Array, low: int, shift: int, counts: Array) -> None:
    """Count keys from `low` on in bins of 2 ** shift."""
    keys = values.view(np.int32)
    for i in range(keys.size):
        place = (np.int64(keys[i] & _SIGNLESS) - low) >> shift
        if 0 <= place < counts.size:
            counts[place] += 1


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
    for i in range(keys.size):  # without branches: which entries stay cannot be predicted
        key = keys[i] & _SIGNLESS
        tied = int(key == threshold) & int(ties > 0)
        ties -= tied
        positions[count] = positions[i]
        values[count] = values[i]
        count += int(key > threshold) | tied
    return count


@compiled
def window(values: Array, low: np.int32, high_end: np.int32, out: Array) -> tuple[int, int]:
    """Count the keys from `high_end` on and write down those in [low, high_end), up to the room in `out`."""
    keys = values.view(np.int32)
    above = count = i = 0
    while i + GROUP <= keys.size and count <= out.size - SPARE:
        over = scan_group(values, i, high_end)
        above += ones(over)
        found = scan_group(values, i, low) & ~over
        after = count + ones(found)
        while count < after:
            for _ in range(4):
                out[count] = keys[i + (lowest(found) & 63)] & _SIGNLESS
                found &= found - _ONE
                count += 1
        count = after
        i += GROUP
    if i + GROUP <= keys.size or count > out.size - SPARE:
        return above, out.size  # no room
    for j in range(i, keys.size):
        key = keys[j] & _SIGNLESS
        if key >= high_end:
            above += 1
        elif key >= low:
            out[count] = key
            count += 1
    return above, count


@compiled
def tally(values: Array, threshold: int) -> tuple[int, int]:
    """Count the keys above the threshold and those at it."""
    keys = values.view(np.int32)
    above = tied = 0
    for i in range(keys.size):
        above += (keys[i] & _SIGNLESS) > threshold
        tied += (keys[i] & _SIGNLESS) == threshold
    return above, tied


@compiled
def ones_before(words: Array, end: int) -> int:
    """Count the set bits among the first `end`."""
    count: int = 0
    for i in range(end >> 6):
        count += ones(words[i])
    count += ones(words[end >> 6] & ((_ONE << np.uint64(end & 63)) - _ONE))
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
    vector: Array,
) -> None:
    """Rank the entries above the threshold and the first `ties` at it; write down those whose bit is set.

    Go by groups of 64: take as many bits from `words` as the group has ranks, and move them apart where an
    entry has no rank. Ranks begin at `rank`, places in `out` at `count`. What is picked will soon be taken
    out of the vector: fetch it.
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
            position = positions[chosen]
            prefetch(vector, position)
            out_positions[np.uint64(count)] = position
            out_values[np.uint64(count)] = values[chosen]
            drawn &= drawn - _ONE
            count += 1


@compiled
def take_out(residual: Array, indices: Array, values: Array, begin: int, end: int) -> None:
    """Subtract the values at the indices."""
    for i in range(begin, end):
        residual[np.uint64(indices[i])] -= values[i]


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
        k -= (word & bit) == np.uint64(0)
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
