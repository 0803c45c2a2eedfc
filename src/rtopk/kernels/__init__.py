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
   them, so a pass never holds much more than r, whatever the data. Where r is large, a sample of the sums
   corrects the guess before the pass begins.
6. Too high a guess: fewer than r candidates. Only then a second scan, with a floor taken from a sample; and
   if even that was too high, a third with floor zero, which always finds r.
7. The r-th magnitude of the candidates is found exactly, from a sample and a look at those near it; one more
   pass over them ranks them and picks those whose rank was drawn. Select and subtract cost O(r), not O(d).
Each thread does this for its own range; ranges follow one another, so candidates are in order.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels import floors
from rtopk.kernels import torch as twin
from rtopk.kernels.search import DOUBT, Candidates, Picked, Scratch, Search
from rtopk.kernels.threads import Cuts, ranges, together

SOUND = 8 * floors.SAMPLE  # from this r on, a sample costs less than the candidates of a bad guess
SCATTER = 1 << 14  # entries that are worth a thread where each is a miss of the cache


def compilable(*vectors: Tensor) -> bool:
    """Say whether the compiled loops serve these vectors; the twin serves all others."""
    return all(v.dtype == torch.float32 and v.is_cpu and v.is_contiguous() and v.dim() == 1 for v in vectors)


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
    from rtopk.kernels import loops

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
    from rtopk.kernels import loops

    arrays = [_array(vector) for vector in moved]
    if velocity is None:
        loop: Callable[..., Any] = partial(loops.add, *arrays)
    else:
        numbers = np.float32(momentum), np.float32(scale)
        loop = partial(loops.move, arrays[0], arrays[1], arrays[2], *numbers)
    if search is None:
        _without_search(loop, ranges(residual.numel(), 64))
        return None
    scratch = scratch or Scratch()
    search = _corrected(search, residual.numel(), partial(_sums, arrays, momentum, scale), scratch)
    return _collect(loop, residual.numel(), search, scratch)


def scan(vector: Tensor, search: Search, scratch: Scratch | None = None) -> Candidates:
    """Return the entries at or above a floor; the compiled loops count NaN and Inf as the largest of all."""
    scratch = scratch or Scratch()
    if compilable(vector):
        search = _corrected(search, vector.numel(), _array(vector).__getitem__, scratch)
    return _scan(vector, search, scratch)


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that hold the r largest entries, without a guess."""
    found = _scan(vector, Search(sampled_floor(vector, r), r), Scratch())
    return found if len(found) >= r else _scan(vector, Search(0.0, r), Scratch())


def largest(vector: Tensor, r: int) -> Tensor:
    """Return the positions of the r entries of largest magnitude, ascending."""
    if r == vector.numel():
        return torch.arange(r, device=vector.device)
    from rtopk.kernels import draws

    return pick(search_largest(vector, r), r, draws.every_bit(r), r).positions


def sampled_floor(vector: Tensor, r: int) -> float:
    """Guess a magnitude that a little more than r entries reach."""
    every = slice(None, None, floors.stride(vector.numel()))
    if compilable(vector):
        return floors.quantiles(_array(vector)[every], r, vector.numel())[0]
    sample = vector.detach()[every].to("cpu", torch.float64)
    return floors.quantiles(sample.numpy(), r, vector.numel())[0]


def pick(candidates: Candidates, r: int, words: Any | Callable[[], Any], k: int) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, is a set bit of `words`.

    A function that returns the words is called beside the search for the r-th magnitude.
    """
    from rtopk.kernels import draws, loops
    from rtopk.kernels import rank as cut

    if len(candidates) < r:
        raise ValueError(f"need at least r={r} candidates, got {len(candidates)}")
    if not all(compilable(values) for _, values in candidates.parts):
        positions, values = (torch.cat(column) for column in zip(*candidates.parts, strict=True))
        best = twin.largest_of(values, r)
        ranks = draws.set_bits(words() if callable(words) else words, k).to(values.device)
        return Picked(positions[best[ranks]], values[best[ranks]], float(values[best].abs().min()))
    parts = [(positions.numpy(), values.numpy()) for positions, values in candidates.parts]
    search = partial(cut.rth, [values for _, values in parts], r, int(_key(candidates.floor)))
    drawing: list[Callable[[], Any]] = [search, words if callable(words) else lambda: words]
    end, bits = together(drawing, len(candidates))
    out = np.empty(k, np.int64), np.empty(k, np.float32)
    tasks, rank, ties = [], 0, end.ties
    for (at, value), (above, tied) in zip(parts, end.counts, strict=True):
        count = draws.ones_before(bits, rank)
        tasks.append(partial(loops.pick, at, value, end.key, ties, bits, rank, *out, count))
        rank, ties = rank + above + min(tied, ties), ties - min(tied, ties)
    if (rank, ties, draws.ones_before(bits, r)) != (r, 0, k):  # else `out` would not be filled
        raise AssertionError(f"{rank} entries and {ties} ties are ranked where r={r}, k={k}: {end}")
    together(tasks, len(candidates))
    magnitude = float(np.int32(end.key).view(np.float32))
    return Picked(torch.from_numpy(out[0]), torch.from_numpy(out[1]), magnitude)


def take_out_(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Subtract values at unique indices."""
    if not (compilable(residual, values) and indices.is_contiguous() and indices.is_cpu):
        residual[indices] -= values.to(residual.dtype)
        return
    if not indices.numel():
        return
    from rtopk.kernels import loops

    places = indices.numpy()
    if not loops.within(places, residual.numel()):
        low, high = int(places.min()), int(places.max())
        raise IndexError(f"indices must lie in [0, {residual.numel()}), got {low} to {high}")
    arrays = _array(residual), places, _array(values)
    together([partial(loops.take_out, *arrays, a, b) for a, b in ranges(indices.numel(), 1, SCATTER)])


def _array(vector: Tensor) -> Any:
    return vector.detach().numpy()


@functools.lru_cache(1024)  # mostly the same few limits, and what a step finds kept it finds sooner
def _key(magnitude: float) -> np.int32:
    with np.errstate(over="ignore"):  # a guess beyond the largest float is Inf, which no entry reaches
        return np.float32(magnitude).view(np.int32)


def _sums(arrays: list[Any], momentum: float, scale: float, at: slice) -> Any:
    """Return some of the sums that the pass will write."""
    residual, gradient, *velocity = (array[at] for array in arrays)
    if not velocity:
        return residual + gradient
    return residual + (velocity[0] * np.float32(momentum) + gradient * np.float32(scale))


def _corrected(search: Search, d: int, sums: Callable[[slice], Any], scratch: Scratch) -> Search:
    """Return the search with a floor from a sample, if r is large and the sample contradicts the floor."""
    if search.wanted is None or search.wanted < SOUND or not scratch.doubt:
        return search
    size = d if search.size is None else search.size
    low, middle = floors.quantiles(sums(slice(0, size, floors.stride(size))), search.wanted, size)
    if search.floor < low or search.floor > middle:
        scratch.doubt = DOUBT
        return search._replace(floor=low)
    scratch.doubt -= 1
    return search


def _scan(vector: Tensor, search: Search, scratch: Scratch) -> Candidates:
    size = vector.numel() if search.size is None else search.size
    if not compilable(vector):
        return Candidates((twin.collect(vector[:size], search.floor, search.wanted),), search.floor)
    from rtopk.kernels import loops

    return _collect(partial(loops.scan, _array(vector)), size, search, scratch)


def _collect(loop: Callable[..., Any], d: int, search: Search, scratch: Scratch) -> Candidates:
    """Run the pass over all ranges; entries from `search.size` on are accumulated, not searched."""
    size = d if search.size is None else search.size
    cuts = ranges(size, 64)
    parts = together([partial(_part, loop, i, cuts, d, search, scratch) for i in range(len(cuts))])
    _without_search(loop, ((size, d),))
    found = Candidates(tuple(parts), search.floor)
    scratch.shares = [positions.numel() / max(1, len(found)) for positions, _ in parts]
    if search.wanted is not None and not search.wanted <= len(found) <= search.wanted + search.wanted // 3:
        scratch.doubt = DOUBT
    return found


def _without_search(loop: Callable[..., Any], cuts: Cuts) -> None:
    """Run the pass with a bound that no finite entry reaches."""
    from rtopk.kernels import loops

    def nothing() -> tuple[Any, ...]:  # the loops write before they look
        return np.int32(0x7FFFFFFF), np.empty(loops.SPARE, np.int32), np.empty(loops.SPARE, np.float32), 0

    together([partial(loop, begin, end, *nothing()) for begin, end in cuts])


def _part(
    loop: Callable[..., Any], part: int, cuts: Cuts, d: int, search: Search, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Run the pass over one range, making room as it goes: first larger arrays, then a higher bound."""
    from rtopk.kernels import loops
    from rtopk.kernels import rank as cut

    at, end = cuts[part]
    bound, count = _key(search.floor), 0
    wanted = end - at if search.wanted is None else min(search.wanted, end - at)
    most = min(end - at, wanted + max(wanted // 3, (end - at) // 1024)) + 128
    share = scratch.shares[part] if len(scratch.shares) == len(cuts) else 1 / len(cuts)
    room = min(most, 256 + round(1.4 * wanted * share))
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
            scratch.doubt = DOUBT
            last = cut.rth([values[:count]], wanted, int(bound))
            count = loops.keep(positions[:count], values[:count], last.key, last.ties)
            if count != wanted:
                raise AssertionError(f"{count} entries are kept where {wanted} are wanted: {last}")
            bound = np.int32(last.key + 1)  # a later tie loses against an earlier one


def _grown(array: Any, count: int, room: int) -> Any:
    larger = np.empty(room, array.dtype)
    larger[:count] = array[:count]
    return larger
