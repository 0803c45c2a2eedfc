"""The hot loops: accumulate a gradient, and find the r largest entries on the way. Everything is exact.

"Larger" means larger magnitude; among equal magnitudes the lower index is the larger, so the r largest entries
are one definite set, and the same one here, in the twin, and for any number of threads.

The pass, for fp32 on a CPU (`twin` does the same for the rest, in torch):
1. A check reads the gradient: if an entry is not finite, nothing is written at all.
2. One pass adds the gradient to the residual, 64 entries at a time, and compares the sums with a bound while
   they are in registers: one word of 64 bits says which reach it. Mostly it is zero, and that was all.
3. Positions and values of those that reach it are written down: the candidates.
4. The bound comes from the floor, a guess at the r-th magnitude: the last step's, lowered a little.
5. Too low a guess: when a quarter more than r are held, the r largest are kept and the bound rises above
   them, so a pass never holds much more than r, whatever the data.
6. Too high a guess: fewer than r candidates. Only then a second scan, with a floor taken from a sample; and
   if even that was too high, a third with floor zero, which always finds r.
7. A histogram of the candidates' magnitudes gives the r-th exactly; one more pass over the candidates ranks
   them and picks those whose rank was drawn. So select and subtract cost O(r), not O(d).
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
) -> Candidates | None:
    """Add the gradient to the residual, or to the velocity and that to the residual; return the candidates.

    With a velocity: velocity <- momentum * velocity + scale * gradient, each operation rounded.
    """
    moved = (residual, gradient) if velocity is None else (residual, gradient, velocity)
    if search is None or not compilable(*moved):
        twin.accumulate_(residual, gradient, velocity, momentum, scale)
        return None if search is None else scan(residual, search)
    from rtopk import loops

    mode = loops.ADD if velocity is None else loops.MOMENTUM
    empty = np.empty(0, np.float32)
    return _collect(
        partial(
            loops.collect,
            mode,
            _array(residual),
            empty if velocity is None else _array(velocity),
            _array(gradient),
            np.float32(momentum),
            np.float32(scale),
        ),
        residual.numel(),
        search,
    )


def scan(vector: Tensor, search: Search) -> Candidates:
    """Return the entries at or above a floor."""
    size = vector.numel() if search.size is None else search.size
    if not compilable(vector):
        return Candidates((twin.collect(vector[:size], search.floor, search.wanted),), search.floor)
    from rtopk import loops

    array, empty, nought = _array(vector)[:size], np.empty(0, np.float32), np.float32(0.0)
    return _collect(partial(loops.collect, loops.SCAN, array, empty, empty, nought, nought), size, search)


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
    d = vector.numel()
    if d <= SAMPLE:
        return float(vector.abs().kthvalue(d - r + 1).values)
    # Multiples of the golden section spread evenly and follow no period of the data.
    places = torch.arange(SAMPLE, dtype=torch.float64).mul_((math.sqrt(5.0) - 1.0) / 2.0)
    sample = vector[places.frac_().mul_(d).to(torch.int64).to(vector.device)].abs()
    expected = r * SAMPLE / d
    rank = math.ceil(expected + 3.0 * math.sqrt(expected) + 4.0)
    return float(sample.kthvalue(SAMPLE - rank + 1).values) if rank < SAMPLE else 0.0


def pick(candidates: Candidates, r: int, words: Any, k: int) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, has its bit set in `words`."""
    if len(candidates) < r:
        raise ValueError(f"need at least r={r} candidates, got {len(candidates)}")
    if not all(compilable(values) for _, values in candidates.parts):
        positions, values = (torch.cat(column) for column in zip(*candidates.parts, strict=True))
        best = twin.largest_of(values, r)
        ranks = set_bits(words, k).to(values.device)
        return Picked(positions[best[ranks]], values[best[ranks]], float(values[best].abs().min()))
    from rtopk import loops

    parts = [(positions.numpy(), values.numpy()) for positions, values in candidates.parts]
    threshold, ties = _rth([values for _, values in parts], r, int(_key(candidates.floor)))
    positions, values = torch.empty(k + 1, dtype=torch.int64), torch.empty(k + 1)
    rank = count = 0
    for at, value in parts:
        rank, ties, count = loops.pick(
            at, value, threshold, ties, words, rank, positions.numpy(), values.numpy(), count
        )
    return Picked(positions[:k], values[:k], float(np.int32(threshold).view(np.float32)))


def take_out_(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Subtract values at unique indices."""
    if not (compilable(residual, values) and indices.is_contiguous() and indices.device.type == "cpu"):
        residual[indices] -= values.to(residual.dtype)
        return
    if not indices.numel():
        return
    low, high = (int(end) for end in torch.aminmax(indices))
    if low < 0 or high >= residual.numel():
        raise IndexError(f"indices must lie in [0, {residual.numel()}), got {low} to {high}")
    from rtopk import loops

    arrays = _array(residual), indices.numpy(), _array(values)
    together([partial(loops.take_out, *arrays, a, b) for a, b in ranges(indices.numel(), 1)])


def draw_words(r: int, k: int, seed: int) -> Any:
    """Return r bits, in words of 64, k of them set: a uniform k-subset of the ranks."""
    from rtopk import loops

    if k == r:
        return every_bit(r)
    words = np.zeros(r // 64 + 1, np.uint64)  # one bit more than r: `pick` looks at the rank after the last
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
    words = np.full(r // 64 + 1, 0xFFFFFFFFFFFFFFFF, np.uint64)
    words[-1] = np.uint64((1 << r % 64) - 1)
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


def _collect(loop: Callable[..., tuple[int, int]], d: int, search: Search) -> Candidates:
    """Run the pass over all ranges; entries from `search.size` on are accumulated, not searched."""
    size = d if search.size is None else search.size
    place = np.int32 if d < 2**31 else np.int64
    bound = _key(search.floor)
    cuts = ranges(size, 64)

    def part(begin: int, end: int) -> tuple[Tensor, Tensor]:
        wanted = end - begin if search.wanted is None else min(search.wanted, end - begin)
        spare = max(wanted // 4, (end - begin) // 1024)
        most = min(end - begin, wanted + spare) + 128
        room = min(most, 1024 + 3 * wanted // (2 * len(cuts)))
        return _part(loop, begin, end, bound, wanted, most, room, place)

    def tail() -> None:
        loop(size, d, np.int32(0x7FFFFFFF), np.empty(128, place), np.empty(128, np.float32), 0)

    parts = together([partial(part, a, b) for a, b in cuts])
    if size < d:
        tail()
    return Candidates(tuple(parts), search.floor)


def _part(
    loop: Callable[..., tuple[int, int]],
    at: int,
    end: int,
    bound: np.int32,
    wanted: int,
    most: int,
    room: int,
    place: type[np.signedinteger[Any]],
) -> tuple[Tensor, Tensor]:
    """Run the pass over one range, making room as it goes: first larger arrays, then a higher bound."""
    from rtopk import loops

    positions, values, count = np.empty(room, place), np.empty(room, np.float32), 0
    while True:
        at, count = loop(at, end, bound, positions, values, count)
        if at == end:
            return torch.from_numpy(positions[:count]), torch.from_numpy(values[:count])
        if room < most:
            room = min(most, 2 * room)
            positions, values = _grown(positions, count, room), _grown(values, count, room)
        else:
            threshold, ties = _rth([values[:count]], wanted, int(bound))
            count = loops.keep(positions[:count], values[:count], threshold, ties)
            bound = np.int32(threshold + 1)  # a later tie loses against an earlier one


def _grown(array: Any, count: int, room: int) -> Any:
    larger = np.empty(room, array.dtype)
    larger[:count] = array[:count]
    return larger


def _rth(parts: list[Any], r: int, low: int) -> tuple[int, int]:
    """Return the r-th largest key of all parts, none below `low`, and how many of its ties belong to the r."""
    from rtopk import loops

    # A good floor has the r-th key within a factor of two above it; bins of 2 ** 20 cover all keys.
    for shift, start in ((12, low), (20, 0)):
        counts = np.zeros((len(parts), loops.BINS), np.int64)
        together(
            [
                partial(loops.histogram, part, start, shift, row)
                for part, row in zip(parts, counts, strict=True)
            ]
        )
        above = counts.sum(0)[::-1].cumsum()  # above[i]: keys in the last i + 1 bins
        place = int(np.searchsorted(above, r))
        if place or shift == 20:
            break
    bin_low = start + ((loops.BINS - 1 - place) << shift)
    over = int(above[place - 1]) if place else 0
    inside = np.empty(int(above[place]) - over, np.int32)
    count = 0
    for part in parts:
        count += loops.keys_between(part, bin_low, bin_low + (1 << shift), inside[count:])
    threshold = int(np.partition(inside, inside.size - (r - over))[inside.size - (r - over)])
    return threshold, r - over - int((inside > threshold).sum())
