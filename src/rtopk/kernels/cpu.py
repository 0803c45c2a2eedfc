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

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels import draws, jit, loops, plain, rank
from rtopk.kernels.search import CHECKS, LARGE, Candidates, Picked, Search, quantiles, stride
from rtopk.kernels.threads import INLINE, Cuts, ranges, together
from rtopk.kernels.union import union as by_bitmap

noting = plain.noting

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
    memory has huge pages, which are read faster.
    """
    return torch.from_numpy(np.zeros(size, np.float32))


def late(vector: Tensor) -> bool:
    """Return False: nothing waits here."""
    return False


def reaches(vector: Tensor, limit: float) -> bool:
    """Return whether any magnitude is at least `limit`, or NaN."""
    array, bound = _array(vector), _key(limit)
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
    arrays = [_array(vector) for vector in (residual, gradient, velocity) if vector is not None]
    if velocity is None:
        if decay != 1.0:
            residual.mul_(decay)
        loop: Callable[..., Any] = partial(loops.add, *arrays)
    else:
        numbers = np.float32(momentum), np.float32(scale)
        loop = partial(loops.move, arrays[0], arrays[1], arrays[2], *numbers)
    if search is None:
        _without_search(loop, ranges(residual.numel(), 64))
        return None
    return _collect(loop, residual.numel(), search, partial(_sums, arrays, momentum, scale))


def add_to(out: Tensor, residual: Tensor, gradient: Tensor) -> None:
    """Write residual + gradient to `out`. From numpy: torch's threads would wait for one that was put aside."""
    arrays = [_array(vector) for vector in (residual, gradient, out)]
    together([partial(_add, *(array[a:b] for array in arrays)) for a, b in ranges(out.numel(), 64)])


def _add(residual: Any, gradient: Any, out: Any) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # whoever adds looks for Inf and NaN
        np.add(residual, gradient, out=out)


def scan(vector: Tensor, search: Search) -> Candidates:
    """Return the entries at or above a floor; NaN and Inf are the largest of all."""
    array = _array(vector)
    size = vector.numel() if search.size is None else search.size
    return _collect(partial(loops.scan, array), size, search, array.__getitem__)


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that include the r largest entries, without a previous guess."""
    d = vector.numel()
    found = scan(vector, _unchecked(quantiles(_array(vector)[:: stride(d)], r, d)[0], r))
    return found if len(found) >= r else scan(vector, _unchecked(0.0, r))


def _unchecked(floor: float, r: int) -> Search:
    """Return a search whose floor is not checked against a sample, because it comes from one."""
    search = Search(floor, r)
    search.checks = 0
    return search


def pick(candidates: Candidates, r: int, words: Any | Callable[[], Any], k: int) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, is a set bit of `words`."""
    parts = [(_places(positions), values.numpy()) for positions, values in candidates.parts]
    search = partial(rank.rth, [values for _, values in parts], r, int(_key(candidates.floor)))
    drawing: list[Callable[[], Any]] = [search, words if callable(words) else lambda: words]
    end, bits = together(drawing, len(candidates))
    out = np.empty(k, np.int64), np.empty(k, np.float32)
    tasks, ranked, ties = [], 0, end.ties
    for (at, value), (above, tied) in zip(parts, end.counts, strict=True):
        count = draws.ones_before(bits, ranked)
        tasks.append(partial(loops.pick, at, value, end.key, ties, bits, ranked, *out, count))
        ranked, ties = ranked + above + min(tied, ties), ties - min(tied, ties)
    if (ranked, ties, draws.ones_before(bits, r)) != (r, 0, k):  # else `out` would not be filled
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
    places, given = indices.numpy(), _array(values)
    if not loops.within(places, vector.numel()):
        low, high = int(places.min()), int(places.max())
        raise IndexError(f"indices must lie in [0, {vector.numel()}), got {low} to {high}")
    # numpy, because waking torch's threads for so few entries costs more than all the rest on a busy machine.
    arrays = _array(vector), places, given if factor == 1.0 else given * np.float32(factor)
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


def _array(vector: Tensor) -> Any:
    return vector.detach().numpy()


@functools.lru_cache(1024)  # mostly the same few limits
def _key(magnitude: float) -> np.int32:
    with np.errstate(over="ignore"):  # a guess beyond the largest float is Inf, which no entry reaches
        return np.float32(magnitude).view(np.int32)


def _sums(arrays: list[Any], momentum: float, scale: float, at: slice) -> Any:
    """Return some of the sums that the pass will write."""
    residual, gradient, *velocity = (array[at] for array in arrays)
    if not velocity:
        return residual + gradient
    return residual + (velocity[0] * np.float32(momentum) + gradient * np.float32(scale))


def _floor(search: Search, size: int, sums: Callable[[slice], Any]) -> float:
    """Return the floor of a search, or one from a sample if r is large and the sample contradicts it."""
    if search.wanted is None or search.wanted < LARGE or not search.checks:
        return search.floor
    low, middle = quantiles(sums(slice(0, size, stride(size))), search.wanted, size)
    if low <= search.floor <= middle:
        search.checks -= 1
        return search.floor
    search.checks = CHECKS
    return low


def _collect(loop: Callable[..., Any], d: int, search: Search, sums: Callable[[slice], Any]) -> Candidates:
    """Run the pass over all ranges; entries from `search.size` on are accumulated, not searched."""
    size = d if search.size is None else search.size
    floor, cuts = _floor(search, size, sums), ranges(size, 64)
    parts = together([partial(_part, loop, i, cuts, d, floor, search) for i in range(len(cuts))])
    _without_search(loop, ((size, d),))
    found = Candidates(tuple(parts), floor)
    search.shares = [positions.numel() / max(1, len(found)) for positions, _ in parts]
    if search.wanted is not None and not search.wanted <= len(found) <= search.wanted + search.wanted // 3:
        search.checks = CHECKS
    return found


def _without_search(loop: Callable[..., Any], cuts: Cuts) -> None:
    """Run the pass with a bound that no finite entry reaches."""

    def nothing() -> tuple[Any, ...]:  # the loops write before they compare
        return np.int32(0x7FFFFFFF), np.empty(loops.SPARE, np.int32), np.empty(loops.SPARE, np.float32), 0

    together([partial(loop, begin, end, *nothing()) for begin, end in cuts])


def _part(
    loop: Callable[..., Any], part: int, cuts: Cuts, d: int, floor: float, search: Search
) -> tuple[Tensor, Tensor]:
    """Run the pass over one range; if arrays fill up, enlarge them first, then raise the bound."""
    at, end = cuts[part]
    bound, count = _key(floor), 0
    wanted = end - at if search.wanted is None else min(search.wanted, end - at)
    most = min(end - at, wanted + max(wanted // 3, (end - at) // 1024)) + 128
    share = search.shares[part] if len(search.shares) == len(cuts) else 1 / len(cuts)
    room = min(most, 256 + round(1.4 * wanted * share))
    positions, values = search.take(part, room, np.int32 if d < 2**31 else np.int64)
    while True:
        at, count = loop(at, end, bound, positions, values, count)
        if at == end:
            search.put(part, positions, values)
            return torch.from_numpy(positions[:count]), torch.from_numpy(values[:count])
        if positions.size < most:
            room = min(most, 128 + 11 * positions.size // 10)
            positions = _grown(positions, count, room)  # one after the other: three arrays, not four
            values = _grown(values, count, room)
        else:
            search.checks = CHECKS
            last = rank.rth([values[:count]], wanted, int(bound))
            count = loops.keep(positions[:count], values[:count], last.key, last.ties)
            if count != wanted:
                raise AssertionError(f"{count} entries are kept where {wanted} are wanted: {last}")
            bound = np.int32(last.key + 1)  # ties go to the earlier entry


def _grown(array: Any, count: int, room: int) -> Any:
    larger = np.empty(room, array.dtype)
    larger[:count] = array[:count]
    return larger
