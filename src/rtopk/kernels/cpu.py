"""Compiled loops for fp32 vectors in host memory.

1. A check reads the gradient: if an entry is not finite, nothing is written.
2. One pass adds the gradient to the residual, 64 entries at a time, and compares the sums with a bound while
   they are in registers: a 64-bit word says which reach it. Usually it is zero, and the pass moves on.
3. The positions and values of entries that reach the bound are stored: the candidates.
4. The bound comes from the floor, a guess at the r-th magnitude: the last step's, lowered a little.
5. If the guess is too low: once a third more than r are held, the r largest are kept and the bound rises above
   them, so a pass never holds much more than r, whatever the data. If r is large, a sample of the sums
   corrects the guess before the pass starts.
6. If the guess is too high, there are fewer than r candidates. Only then a second scan runs, with a floor from a
   sample; if even that was too high, a third with floor zero always finds r.
7. The r-th magnitude of the candidates is found exactly, from a sample and the keys near it. One more pass over
   the candidates ranks them and picks those whose rank was drawn. Select and subtract cost O(r), not O(d).

Each thread does this for its own range. Ranges are consecutive, so candidates are in order.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels import draws, jit, loops, plain, rank
from rtopk.kernels.collect import Notes, array_of, collect, key_of, without_search
from rtopk.kernels.search import Candidates, GradientPart, Motion, Picked, Search, quantiles, stride
from rtopk.kernels.threads import INLINE, ranges, together
from rtopk.kernels.union import union as by_bitmap

batch = 1 << 26  # entries of a gradient's parts that are added at once: all, but for memory's sake
LINE = 64  # bytes of a cache line
Row = tuple[int, int, int]  # where a part begins and ends in the vector, and its address
SCATTER = 1 << 14  # entries that are worth a thread if each is a cache miss
SORT_BELOW = 1 / 2048  # positions per entry of d; below it, reading the bitmap costs more than sorting


def serves(*vectors: Tensor) -> bool:
    """Serve contiguous fp32 vectors in host memory."""
    for v in vectors:  # no generator: this is asked at every turn
        if v.dtype != torch.float32 or not v.is_cpu or v.dim() != 1 or not v.is_contiguous():
            return False
    return True


_ready: bool | None = None


def ready() -> bool:
    """Return whether the loops of a step are compiled, or on disk; the first time let them be compiled if not."""
    global _ready
    if _ready is None:
        entries: Any = loops.reaches, loops.add, loops.scan, loops.pick, loops.take_out, rank.tally
        _ready = jit.waits() or all(jit.on_disk(loop) for loop in entries)
        if not _ready:
            jit.behind(_prepare)
    return _ready or jit.waits()


def _prepare() -> None:
    """Have the loops of a step compiled by calling them, with little to do."""
    global _ready
    vector, search = torch.arange(1.0, 4097.0), Search(3000.0, 64)
    reaches(vector, math.inf)
    found = accumulate_(vector.clone(), vector, search, None, 0.0, 1.0, 1.0)
    assert found is not None
    picked = pick(found, 64, partial(draws.draw_words, 64, 8, 0), 8)
    subtract_(vector, picked.positions, picked.values, 1.0)
    scan(vector, search)
    rank.rth_bin([vector.numpy()], 8)
    by_bitmap([picked.positions], vector.numel())
    _ready = True


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a vector of zeros.

    From numpy: torch's threads, which would fill it, hang in a forked child. And if the system allows it, numpy's
    memory has huge pages, which are read faster. It begins with a cache line, so no group shares one.
    """
    memory = np.zeros(size + LINE // 4, np.float32)
    begin = -memory.ctypes.data % LINE // 4
    return torch.from_numpy(memory[begin : begin + size])


def late(vector: Tensor) -> bool:
    """Return False: nothing waits here."""
    return False


def reaches(vector: Tensor, limit: float) -> bool:
    """Return whether any magnitude is at least `limit`, or NaN."""
    array, bound = array_of(vector), key_of(limit)
    if array.size < INLINE:
        return loops.reaches(array, 0, array.size, bound)
    return any(together([partial(loops.reaches, array, a, b, bound) for a, b in ranges(array.size, 64)]))


def accumulate_(
    residual: Tensor,
    gradient: Tensor,
    search: Search | None,
    velocity: Tensor | None,
    momentum: float,
    scale: float,
    decay: float,
) -> Candidates | None:
    """Add the gradient to the residual, or to the velocity and that to the residual; return the candidates."""
    kept, speed = array_of(residual), None if velocity is None else array_of(velocity)
    table = _table([(0, gradient.numel(), gradient.data_ptr())])
    if speed is None:
        if decay != 1.0:
            residual.mul_(decay)
        loop: Callable[..., Any] = partial(loops.add, kept, kept, table)
    else:
        loop = partial(loops.move, kept, speed, kept, speed, table, np.float32(momentum), np.float32(scale))
    if search is None:
        without_search(loop, ((0, residual.numel()),))
        return None
    return collect(
        loop, residual.numel(), search, partial(_sums, kept, [(0, gradient)], speed, momentum, scale)
    )


def add_to(
    out: Tensor, residual: Tensor, parts: Sequence[GradientPart], notes: Notes | None, motion: Motion | None
) -> list[GradientPart]:
    """Write the sums of some parts to `out`, all in one pass; return those that are not served."""
    rows: list[Row] = []
    rest: list[GradientPart] = []
    for begin, part in parts:
        if part.dtype == torch.float32 and part.is_cpu and part.is_contiguous():
            rows.append((begin, begin + part.numel(), part.data_ptr()))
        else:
            rest.append((begin, part))
    if not rows:
        return rest
    rows.sort()
    table, sums, kept, speed, factor = _table(rows), array_of(out), array_of(residual), None, 0.0
    if motion is None:
        loop: Callable[..., Any] = partial(loops.add, sums, kept, table)
    else:
        moved, velocity, factor = motion
        speed = array_of(velocity)
        speeds = array_of(moved), kept, speed
        loop = partial(loops.move, sums, *speeds, table, np.float32(factor), np.float32(1.0))
    if notes is None:
        without_search(loop, _stretches(rows))
    else:
        notes.run(loop, _stretches(rows), partial(_sums, kept, parts, speed, factor, 1.0))
    return rest


def _table(rows: Sequence[Row]) -> Any:
    """Return parts as loops read them."""
    return np.array(rows, np.int64)


def _stretches(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return the stretches that ascending parts cover; neighbours are one."""
    spans, begin, end = [], rows[0][0], rows[0][0]
    for start, stop, _ in rows:
        if start != end:
            spans.append((begin, end))
            begin = start
        end = stop
    return [*spans, (begin, end)]


def noting(vector: Tensor, search: Search) -> Notes:
    """Return the notes for a vector that is added to part by part."""
    return Notes(vector.numel(), search)


def scan(vector: Tensor, search: Search) -> Candidates:
    """Return the entries at or above a floor; NaN and Inf are the largest of all."""
    array = array_of(vector)
    size = vector.numel() if search.size is None else search.size
    return collect(partial(loops.scan, array), size, search, array.__getitem__)


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that include the r largest entries, without a previous guess."""
    d = vector.numel()
    found = scan(vector, _unchecked(quantiles(array_of(vector)[:: stride(d)], r, d)[0], r))
    return found if len(found) >= r else scan(vector, _unchecked(0.0, r))


def _unchecked(floor: float, r: int) -> Search:
    """Return a search whose floor is not checked against a sample, because it comes from one."""
    search = Search(floor, r)
    search.checks = 0
    return search


def pick(candidates: Candidates, r: int, words: Any | Callable[[], Any], k: int) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, is a set bit of `words`."""
    parts = [(_places(positions), values.numpy()) for positions, values in candidates.parts]
    search = partial(rank.rth, [values for _, values in parts], r, int(key_of(candidates.floor)))
    drawing: list[Callable[[], Any]] = [search, words if callable(words) else lambda: words]
    end, bits = together(drawing, len(candidates))
    out = np.empty(k, np.int64), np.empty(k, np.float32)
    tasks, ranked, ties = [], 0, end.ties
    drawn = partial(draws.ones_before, bits) if k < r else int  # of so many ranks; all, if all are
    for (at, value), (above, tied) in zip(parts, end.counts, strict=True):
        count = drawn(ranked)
        tasks.append(partial(loops.pick, at, value, end.key, ties, bits, ranked, *out, count))
        ranked, ties = ranked + above + min(tied, ties), ties - min(tied, ties)
    if (ranked, ties, drawn(r)) != (r, 0, k):  # else `out` would not be filled
        raise AssertionError(f"{ranked} entries and {ties} ties are ranked where r={r}, k={k}: {end}")
    together(tasks, len(candidates))
    magnitude = float(np.int32(end.key).view(np.float32))
    return Picked(torch.from_numpy(out[0]), torch.from_numpy(out[1]), magnitude)


def subtract_(vector: Tensor, indices: Tensor, values: Tensor, factor: float) -> None:
    """Subtract values, times a factor, at unique indices."""
    if not (indices.is_contiguous() and indices.is_cpu):
        plain.subtract_(vector, indices, values, factor)
        return
    if not indices.numel():
        return
    places, given = indices.numpy(), array_of(values)
    if not loops.within(places, vector.numel()):
        low, high = int(places.min()), int(places.max())
        raise IndexError(f"indices must lie in [0, {vector.numel()}), got {low} to {high}")
    # numpy, because waking torch's threads for so few entries costs more than all the rest on a busy machine.
    arrays = array_of(vector), places, given if factor == 1.0 else given * np.float32(factor)
    together([partial(loops.take_out, *arrays, a, b) for a, b in ranges(indices.numel(), 1, SCATTER)])


def union(lists: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Join ascending lists of positions; other devices, and lists much shorter than the bitmap, sort."""
    few = sum(positions.numel() for positions in lists) < SORT_BELOW * size
    if few or not all(positions.is_cpu for positions in lists):
        return plain.union(lists, size)
    return by_bitmap(lists, size)


def _places(positions: Tensor) -> Any:
    """Return positions as our own loops find them: another backend, which stood in for them, has int64 always."""
    fit = positions.numel() == 0 or int(positions[-1]) < 2**31
    return (positions.to(torch.int32) if fit else positions).numpy()


def _sums(
    residual: Any, parts: Sequence[GradientPart], velocity: Any, momentum: float, scale: float, at: slice
) -> Any:
    """Return some of the sums that the pass will write, given all parts."""
    step = at.step
    gradient = np.concatenate(
        [
            array_of(part).reshape(-1)[-begin % step : max(0, at.stop - begin) : step]
            for begin, part in sorted(parts, key=itemgetter(0))
        ]
    )
    if velocity is None:
        return residual[at] + gradient
    return residual[at] + (velocity[at] * np.float32(momentum) + gradient * np.float32(scale))
