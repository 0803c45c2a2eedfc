"""The hot loops: accumulate a gradient, and find the r largest entries on the way. Everything is exact.

"Larger" means larger magnitude; among equal magnitudes the lower index is the larger, so the r largest
entries are one definite set, and the same one here, in the twin, and for any number of threads.

The pass, for fp32 on a CPU (`twin` does the same for the rest, in torch):
1. A check reads the gradient: if an entry is not finite, nothing is written at all.
2. One pass adds the gradient to the residual, 64 entries at a time, and compares the sums with a bound while
   they are in registers: one word of 64 bits says which reach it. Mostly it is zero, and that was all.
3. Positions and values of those that reach it are written down: the candidates.
4. The bound comes from the floor, a guess at the r-th magnitude: the last step's, lowered a little.
5. Too low a guess: when a third more than r are held, the r largest are kept and the bound rises above
   them, so a pass never holds much more than r, whatever the data.
6. Too high a guess: fewer than r candidates. Only then a second scan, with a floor taken from a sample; and
   if even that was too high, a third with floor zero, which always finds r.
7. The r-th magnitude of the candidates is found exactly, from a sample and a look at those near it; one more
   pass over them ranks them and picks those whose rank was drawn. Select and subtract cost O(r), not O(d).
Each thread does this for its own range; ranges follow one another, so candidates are in order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rtopk import twin
from rtopk.threads import ranges, together

SAMPLE = 8192
_NOWHERE = np.empty(0, np.int32)
SCATTER = 1 << 14  # entries that are worth a thread where each is a miss of the cache


class Search(NamedTuple):
    """What to look for on the way: the entries at or above a floor."""

    floor: float
    wanted: int | None = None  # this many of the largest are enough; None: all
    size: int | None = None  # only the first `size` entries compete; None: all


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Entries at or above a floor, in parts that follow one another, positions ascending."""

    parts: tuple[tuple[Tensor, Tensor], ...]  # positions (int32 or int64), values
    floor: float

    def __len__(self) -> int:
        return sum(positions.numel() for positions, _ in self.parts)

    @property
    def positions(self) -> Tensor:
        """The positions, int64."""
        return torch.cat([positions.to(torch.int64) for positions, _ in self.parts])


class Scratch:
    """The arrays that candidates are written to, kept from step to step: fresh memory is slow to touch.

    Whoever passes the same one again overwrites the candidates of the last time.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Any, Any]] = {}

    def take(self, part: int, room: int, place: Any) -> tuple[Any, Any]:
        """Return arrays with at least that much room, and at most a quarter more."""
        positions, values = self._arrays.pop(part, (_NOWHERE, _NOWHERE))
        if positions.dtype == place and room <= positions.size <= room + room // 4 + 256:
            return positions, values
        del positions, values  # before the new ones are made
        return np.empty(room, place), np.empty(room, np.float32)

    def put(self, part: int, positions: Any, values: Any) -> None:
        """Keep the arrays."""
        self._arrays[part] = positions, values


class Picked(NamedTuple):
    """Entries picked from the r largest, and the r-th magnitude."""

    positions: Tensor  # int64, ascending
    values: Tensor
    magnitude: float


def compilable(*vectors: Tensor) -> bool:
    """Say whether the compiled loops serve these vectors; the twin serves all others."""
    return all(
        v.dtype == torch.float32 and v.device.type == "cpu" and v.is_contiguous() and v.dim() == 1
        for v in vectors
    )


def zeros(like: Tensor) -> Tensor:
    """Make the memory of a gradient: zeros; half precision is accumulated in fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if like.device.type == "cpu" and dtype == torch.float32:
        # From numpy: torch's own threads, which would fill it, hang in a forked child. And where the system lets
        # programs ask for them, numpy's memory has huge pages, which are read faster.
        return torch.from_numpy(np.zeros(like.numel(), np.float32))
    return torch.zeros(like.numel(), dtype=dtype, device=like.device)


def require_finite(vector: Tensor, name: str) -> None:
    """Raise ValueError if an entry is NaN or Inf, naming the first one."""
    if vector.numel() and reaches(vector, math.inf):
        bad = int((~vector.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"{name} must be finite, got {float(vector[bad])} at index {bad} of {vector.numel()}; "
            "skip this step or lower the learning rate (nothing was changed)"
        )


def reaches(vector: Tensor, limit: float) -> bool:
    """Say whether a magnitude is at least `limit`, or NaN."""
    if not vector.numel():
        return False
    if not compilable(vector):
        return twin.reaches(vector, limit)
    from rtopk import loops

    array, bound = _array(vector), _key(limit)
    return any(together([partial(loops.reaches, array, a, b, bound) for a, b in ranges(array.size, 64)]))


def accumulate_(
    residual: Tensor,
    gradient: Tensor,
    search: Search | None = None,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    scale: float = 1.0,
    scratch: Scratch | None = None,
) -> Candidates | None:
    """Add the gradient to the residual, or to the velocity and that to the residual; return the candidates.

    With a velocity: velocity <- momentum * velocity + scale * gradient, each operation rounded. Candidates
    written to a scratch are valid until it is used again.
    """
    moved = (residual, gradient) if velocity is None else (residual, gradient, velocity)
    if not compilable(*moved):
        twin.accumulate_(residual, gradient, velocity, momentum, scale)
        return None if search is None else scan(residual, search)
    from rtopk import loops

    arrays = [_array(vector) for vector in moved]
    if velocity is None:
        loop: Callable[..., Any] = partial(loops.add, *arrays)
    else:
        numbers = np.float32(momentum), np.float32(scale)
        loop = partial(loops.move, arrays[0], arrays[1], arrays[2], *numbers)
    if search is None:
        _without_search(loop, ranges(residual.numel(), 64))
        return None
    return _collect(loop, residual.numel(), search, Scratch() if scratch is None else scratch)


def scan(vector: Tensor, search: Search, scratch: Scratch | None = None) -> Candidates:
    """Return the entries at or above a floor; the compiled loops count NaN and Inf as the largest of all."""
    size = vector.numel() if search.size is None else search.size
    if not compilable(vector):
        return Candidates((twin.collect(vector[:size], search.floor, search.wanted),), search.floor)
    from rtopk import loops

    return _collect(
        partial(loops.scan, _array(vector)), size, search, Scratch() if scratch is None else scratch
    )


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that hold the r largest entries, without a guess."""
    found = scan(vector, Search(sampled_floor(vector, r), r))
    return found if len(found) >= r else scan(vector, Search(0.0, r))


def largest(vector: Tensor, r: int) -> Tensor:
    """Return the positions of the r entries of largest magnitude, ascending."""
    if r == vector.numel():
        return torch.arange(r, device=vector.device)
    return pick(search_largest(vector, r), r, every_bit(r), r).positions


def sampled_floor(vector: Tensor, r: int) -> float:
    """Guess a magnitude that a little more than r entries reach."""
    d, sample = vector.numel(), vector
    rank = r
    if d > SAMPLE:
        # Multiples of the golden section spread evenly and follow no period of the data.
        spread = np.arange(SAMPLE) * ((math.sqrt(5.0) - 1.0) / 2.0)
        places = ((spread - np.floor(spread)) * d).astype(np.int64)
        expected = r * SAMPLE / d
        rank = math.ceil(expected + 3.0 * math.sqrt(expected) + 4.0)
        if rank >= SAMPLE:
            return 0.0
        if compilable(vector):
            sample = torch.from_numpy(_array(vector)[places])
        else:
            sample = vector[torch.from_numpy(places).to(vector.device)]
    if compilable(sample):  # torch's own threads hang in a forked child
        return float(np.partition(np.abs(_array(sample)), -rank)[-rank])
    return float(sample.abs().kthvalue(sample.numel() - rank + 1).values)


def pick(
    candidates: Candidates, r: int, words: Any | Callable[[], Any], k: int, vector: Tensor | None = None
) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, is a set bit of `words`.

    A function that returns the words is called beside the search for the r-th magnitude. If the vector is
    given, the picked entries are fetched, because they will soon be taken out of it.
    """
    if len(candidates) < r:
        raise ValueError(f"need at least r={r} candidates, got {len(candidates)}")
    if not all(compilable(values) for _, values in candidates.parts):
        positions, values = (torch.cat(column) for column in zip(*candidates.parts, strict=True))
        best = twin.largest_of(values, r)
        ranks = set_bits(words() if callable(words) else words, k).to(values.device)
        return Picked(positions[best[ranks]], values[best[ranks]], float(values[best].abs().min()))
    from rtopk import loops

    parts = [(positions.numpy(), values.numpy()) for positions, values in candidates.parts]
    search = partial(_rth, [values for _, values in parts], r, int(_key(candidates.floor)))
    drawing: list[Callable[[], Any]] = [search, words if callable(words) else lambda: words]
    cut, bits = together(drawing, len(candidates))
    out = np.empty(k, np.int64), np.empty(k, np.float32)
    near = _array(vector) if vector is not None and compilable(vector) else out[1]
    tasks, rank, ties = [], 0, cut.ties
    for (at, value), (above, tied) in zip(parts, cut.counts, strict=True):
        count = loops.ones_before(bits, rank)
        tasks.append(partial(loops.pick, at, value, cut.key, ties, bits, rank, *out, count, near))
        rank, ties = rank + above + min(tied, ties), ties - min(tied, ties)
    together(tasks, len(candidates))
    magnitude = float(np.int32(cut.key).view(np.float32))
    return Picked(torch.from_numpy(out[0]), torch.from_numpy(out[1]), magnitude)


def take_out_(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Subtract values at unique indices."""
    if not (compilable(residual, values) and indices.is_contiguous() and indices.device.type == "cpu"):
        residual[indices] -= values.to(residual.dtype)
        return
    if not indices.numel():
        return
    places = indices.numpy()
    low, high = int(places.min()), int(places.max())
    if low < 0 or high >= residual.numel():
        raise IndexError(f"indices must lie in [0, {residual.numel()}), got {low} to {high}")
    from rtopk import loops

    arrays = _array(residual), places, _array(values)
    together([partial(loops.take_out, *arrays, a, b) for a, b in ranges(indices.numel(), 1, SCATTER)])


def draw_words(r: int, k: int, seed: int) -> Any:
    """Return r bits, in words of 64, k of them set: a uniform k-subset of the ranks."""
    from rtopk import loops

    if k == r:
        return every_bit(r)
    words = np.zeros(r // 64 + 2, np.uint64)  # `pick` reads the word after the last
    if 2 * k <= r:
        loops.draw_words(words, r, k, seed)
        return words
    loops.draw_words(words, r, r - k, seed)  # draw what stays out
    return every_bit(r) & ~words


def draw_few(r: int, k: int, seed: int) -> Tensor:
    """Return the subset that `draw_words` draws, ascending, in O(k) memory."""
    from rtopk import loops

    table = np.full(1 << (2 * k).bit_length(), -1, np.int64)
    drawn = np.empty(k, np.int64)
    loops.draw_few(table, drawn, r, seed)
    drawn.sort()
    return torch.from_numpy(drawn)


def every_bit(r: int) -> Any:
    """Return words of 64 bits, the first r bits set."""
    words = np.full(r // 64 + 2, 0xFFFFFFFFFFFFFFFF, np.uint64)
    words[-2:] = (1 << r % 64) - 1, 0
    return words


def set_bits(words: Any, k: int) -> Tensor:
    """Return the positions of the k set bits, ascending."""
    from rtopk import loops

    out = torch.empty(k, dtype=torch.int64)
    loops.set_bits(words, out.numpy())
    return out


def _array(vector: Tensor) -> Any:
    return vector.detach().numpy()


def _key(magnitude: float) -> np.int32:
    return np.float32(magnitude).view(np.int32)


def _collect(loop: Callable[..., Any], d: int, search: Search, scratch: Scratch) -> Candidates:
    """Run the pass over all ranges; entries from `search.size` on are accumulated, not searched."""
    size = d if search.size is None else search.size
    cuts = ranges(size, 64)
    parts = together([partial(_part, loop, i, cuts, d, search, scratch) for i in range(len(cuts))])
    _without_search(loop, [(size, d)])
    return Candidates(tuple(parts), search.floor)


def _without_search(loop: Callable[..., Any], cuts: list[tuple[int, int]]) -> None:
    """Run the pass with a bound that no finite entry reaches."""
    from rtopk import loops

    def nothing() -> tuple[Any, ...]:  # the loops write before they look
        return np.int32(0x7FFFFFFF), np.empty(loops.SPARE, np.int32), np.empty(loops.SPARE, np.float32), 0

    together([partial(loop, begin, end, *nothing()) for begin, end in cuts])


def _part(
    loop: Callable[..., Any], part: int, cuts: list[tuple[int, int]], d: int, search: Search, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Run the pass over one range, making room as it goes: first larger arrays, then a higher bound."""
    from rtopk import loops

    at, end = cuts[part]
    bound, count = _key(search.floor), 0
    wanted = end - at if search.wanted is None else min(search.wanted, end - at)
    most = min(end - at, wanted + max(wanted // 3, (end - at) // 1024)) + 128
    room = min(most, 256 + 4 * wanted // (3 * len(cuts)))
    positions, values = scratch.take(part, room, np.int32 if d < 2**31 else np.int64)
    while True:
        at, count = loop(at, end, bound, positions, values, count)
        if at == end:
            scratch.put(part, positions, values)
            return torch.from_numpy(positions[:count]), torch.from_numpy(values[:count])
        if positions.size < most:
            room = min(most, 128 + 11 * positions.size // 10)
            positions = _grown(positions, count, room)  # one after the other: three arrays, not four
            values = _grown(values, count, room)
        else:
            cut = _rth([values[:count]], wanted, int(bound))
            count = loops.keep(positions[:count], values[:count], cut.key, cut.ties)
            bound = np.int32(cut.key + 1)  # a later tie loses against an earlier one


def _grown(array: Any, count: int, room: int) -> Any:
    larger = np.empty(room, array.dtype)
    larger[:count] = array[:count]
    return larger


class _Cut(NamedTuple):
    """Where the r largest end."""

    key: int  # of the r-th
    ties: int  # how many of the entries with that key belong to the r
    counts: list[tuple[int, int]]  # of each part: keys above that one, and keys equal to it


def _rth(parts: list[Any], r: int, low: int) -> _Cut:
    """Find the r-th largest key; none is below `low`."""
    from rtopk import loops

    total = sum(part.size for part in parts)
    # A sample of n leaves about 4 total / sqrt(n) keys to look at: the sum of both is least near this n.
    step = max(1, min(total // 2048, round(0.6 * total ** (1 / 3))))
    sample = np.concatenate([part[::step].view(np.int32) for part in parts]) & 0x7FFFFFFF
    # The r-th of all is most likely near the same place of the sample: look only at keys between two others.
    expected, spread = (total - r) / step, math.ceil(2.0 * math.sqrt(sample.size) + 2.0)
    places = max(0, math.floor(expected) - spread), min(sample.size - 1, math.ceil(expected) + spread)
    sample.partition(places)
    least = int(sample[places[0]]) if step > 1 and places[0] > 0 else low
    most = int(sample[places[1]]) + 1 if step > 1 and places[1] < sample.size - 1 else 0x7FFFFFFF
    inside, over = [], []
    for part in parts:
        room = np.empty(part.size // (8 if step > 1 else 1) + loops.SPARE + 1, np.int32)
        above, count = loops.window(part, np.int32(least), np.int32(most), room)
        if count == room.size:
            break
        over.append(above)
        inside.append(room[:count])
    beyond, held = sum(over), sum(keys.size for keys in inside)
    hit = len(inside) == len(parts) and beyond < r <= beyond + held
    near, beyond = (np.concatenate(inside), beyond) if hit else _rth_bin(parts, r)
    place = near.size - (r - beyond)
    near.partition(place)
    key = int(near[place])
    if hit:
        counts = [
            (above + int((keys > key).sum()), int((keys == key).sum()))
            for above, keys in zip(over, inside, strict=True)
        ]
    else:
        counts = [loops.tally(part, key) for part in parts]
    return _Cut(key, r - sum(above for above, _ in counts), counts)


def _rth_bin(parts: list[Any], r: int) -> tuple[Any, int]:
    """Return the keys of the bin that holds the r-th largest, and how many keys lie above that bin."""
    from rtopk import loops

    low, shift, over = 0, 20, 0  # 2048 bins of 2 ** 20 hold every key
    while True:
        counts = np.zeros(loops.BINS, np.int64)
        for part in parts:
            loops.histogram(part, low, shift, counts)
        above = over + counts[::-1].cumsum()  # above[i]: keys in the last i + 1 bins, and over them
        place = int(np.searchsorted(above, r))
        over = int(above[place - 1]) if place else over
        held = int(above[place]) - over
        low += (loops.BINS - 1 - place) << shift
        if shift == 0 or held < 65536:
            break
        shift = max(0, shift - 11)
    near = np.empty(held, np.int32)
    count = 0
    for part in parts:
        count += loops.keys_between(part, low, low + (1 << shift), near[count:])
    return near, over
