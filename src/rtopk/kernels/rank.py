"""Find the r-th largest magnitude of some candidates, exactly, and how many of its ties belong to the r.

A sample says between which two keys the r-th most likely lies; one pass counts those above and collects those
between. If the sample was misleading, or too many keys are equal, a histogram finds the bin of the r-th instead.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from rtopk.kernels.jit import Array, entry
from rtopk.kernels.simd import GROUP, SIGNLESS, lowest, ones, scan_group

SPARE = GROUP + 4  # free places that a group may need: keys are written four at a time
BINS = 2048
ONE_BY_ONE_BELOW = 65536  # fewer keys than this are examined one by one rather than counted in finer bins
_SIGNLESS = np.int32(SIGNLESS)
_ONE = np.uint64(1)


class Cut(NamedTuple):
    """Where the r largest end."""

    key: int  # of the r-th
    ties: int  # how many of the entries with that key belong to the r
    counts: list[tuple[int, int]]  # of each part: keys above that one, and keys equal to it


def rth(parts: list[Any], r: int, low: int) -> Cut:
    """Find the r-th largest key; none is below `low`."""
    total = sum(part.size for part in parts)
    # A sample of n leaves about 4 total / sqrt(n) keys to look at: the sum of both is least near this n.
    step = max(1, min(total // 2048, round(0.6 * total ** (1 / 3))))
    sample = _joined([part[::step].view(np.int32) for part in parts]) & SIGNLESS
    if step == 1:
        sample.partition(total - r)
        key = int(sample[total - r])
        counts = [tally(part, key) for part in parts]
        return Cut(key, r - sum(above for above, _ in counts), counts)
    # The r-th of all is most likely near the same place of the sample: look only at keys between two others.
    expected, spread = (total - r) / step, math.ceil(2.0 * math.sqrt(sample.size) + 2.0)
    places = max(0, math.floor(expected) - spread), min(sample.size - 1, math.ceil(expected) + spread)
    sample.partition(places[0])  # one after the other: numpy is much slower with two at once
    sample[places[0] :].partition(places[1] - places[0])
    least = int(sample[places[0]]) if places[0] > 0 else low
    most = int(sample[places[1]]) + 1 if places[1] < sample.size - 1 else SIGNLESS
    inside, over = [], []
    for part in parts:
        room = np.empty(part.size // 8 + SPARE + 1, np.int32)
        above, count = _window(part, np.int32(least), np.int32(most), room)
        if count == room.size:
            break
        over.append(above)
        inside.append(room[:count])
    beyond, held = sum(over), sum(keys.size for keys in inside)
    hit = len(inside) == len(parts) and beyond < r <= beyond + held
    near, beyond = (_joined(inside), beyond) if hit else rth_bin(parts, r)
    place = near.size - (r - beyond)
    near.partition(place)
    key = int(near[place])
    looked_at = [keys.view(np.float32) for keys in inside] if hit else parts
    counts = [tally(part, key) for part in looked_at]
    if hit:
        counts = [(more + above, tied) for more, (above, tied) in zip(over, counts, strict=True)]
    return Cut(key, r - sum(above for above, _ in counts), counts)


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def rth_bin(parts: list[Any], r: int) -> tuple[Any, int]:
    """Return the keys of the bin that holds the r-th largest, and how many keys lie above that bin."""
    low, shift, over, bins = 0, 20, 0, BINS  # 2048 bins of 2 ** 20 hold every key
    while True:
        counts = np.zeros(bins, np.int64)
        for part in parts:
            _histogram(part, low, shift, counts)
        above = over + counts[::-1].cumsum()  # above[i]: keys in the last i + 1 bins, and over them
        place = int(np.searchsorted(above, r))
        over = int(above[place - 1]) if place else over
        held = int(above[place]) - over
        low += (bins - 1 - place) << shift
        if shift == 0 or held < ONE_BY_ONE_BELOW:
            break
        # As many bins as the last one is wide: keys above it are in `over` already.
        shift, bins = max(0, shift - 11), 1 << min(11, shift)
    near = np.empty(held, np.int32)
    count = 0
    for part in parts:
        count += _keys_between(part, low, low + (1 << shift), near[count:])
    if count != held:
        raise AssertionError(f"the bin at {low} holds {count} keys where {held} were counted")
    return near, over


@entry
def _histogram(values: Array, low: int, shift: int, counts: Array) -> None:
    """Count keys from `low` on in bins of 2 ** shift."""
    keys = values.view(np.int32)
    for i in range(keys.size):
        place = (np.int64(keys[i] & _SIGNLESS) - low) >> shift
        if 0 <= place < counts.size:
            counts[place] += 1


@entry
def _keys_between(values: Array, low: int, high_end: int, out: Array) -> int:
    """Collect the keys in [low, high_end) and return their number."""
    keys = values.view(np.int32)
    count = 0
    for i in range(keys.size):
        key = keys[i] & _SIGNLESS
        if low <= key < high_end:
            out[count] = key
            count += 1
    return count


@entry
def _window(values: Array, low: np.int32, high_end: np.int32, out: Array) -> tuple[int, int]:
    """Count the keys from `high_end` on and collect those in [low, high_end), up to the room in `out`."""
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


@entry
def tally(values: Array, threshold: int) -> tuple[int, int]:
    """Count the keys above the threshold and those at it."""
    keys = values.view(np.int32)
    above = tied = 0
    for i in range(keys.size):
        above += (keys[i] & _SIGNLESS) > threshold
        tied += (keys[i] & _SIGNLESS) == threshold
    return above, tied
