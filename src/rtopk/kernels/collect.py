"""The passes of the `cpu` backend: over a whole vector, or over its parts as they come, and the candidates of both.

Whoever writes sums, in place or elsewhere, has them in registers and compares them with the floor of a search. So
candidates are found in the same pass. A pass is shared by threads in pieces. Of each piece the arrays are kept
from step to step; how many candidates it had then says how large they must be.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels import loops, rank
from rtopk.kernels.search import CHECKS, LARGE, Candidates, Search, quantiles, stride
from rtopk.kernels.threads import MOST, ranges, together

INFINITE = np.int32(0x7F800000)
Part = tuple[Tensor, Tensor]  # positions and values of candidates
NOTHING: Part = torch.empty(0, dtype=torch.int32), torch.empty(0)
Sums = Callable[[slice], Any]  # some entries of a vector that is about to be written
Spans = Sequence[tuple[int, int]]  # stretches of a vector: where they begin and end


def array_of(vector: Tensor) -> Any:
    """Return a vector as numpy sees it."""
    return vector.detach().numpy()


@functools.lru_cache(1024)  # mostly the same few limits
def key_of(magnitude: float) -> np.int32:
    """Return the key of a magnitude; of one beyond the largest float that of Inf, which no entry reaches."""
    try:
        return np.int32(struct.unpack("<i", struct.pack("<f", magnitude))[0])
    except OverflowError:
        return INFINITE


def collect(loop: Callable[..., Any], d: int, search: Search, sums: Sums) -> Candidates:
    """Run a pass over a whole vector; entries from `search.size` on are accumulated, not searched."""
    notes = Notes(d, search, "whole")
    notes.run(loop, ((0, d),), sums)
    return notes.candidates()


def without_search(loop: Callable[..., Any], spans: Spans) -> None:
    """Run a pass over stretches of a vector with a bound that no finite entry reaches."""

    def nothing() -> tuple[Any, ...]:  # the loops write before they compare
        return np.int32(0x7FFFFFFF), np.empty(loops.SPARE, np.int32), np.empty(loops.SPARE, np.float32), 0

    cuts = _cut(spans)
    together([partial(loop, begin, end, *nothing()) for begin, end in cuts], _length(cuts))


def _cut(spans: Spans) -> list[tuple[int, int]]:
    """Cut stretches into pieces for threads."""
    return [(begin + a, begin + b) for begin, end in spans if begin < end for a, b in ranges(end - begin, 64)]


def _length(spans: Spans) -> int:
    return sum([end - begin for begin, end in spans])


class Notes:
    """Candidates of a vector that is written at once, or part by part in any order."""

    def __init__(self, d: int, search: Search, ranges_of: str = "parts") -> None:
        self.search, self.d = search, d
        self.size = d if search.size is None else search.size
        self.floor = self._guess = search.floor
        self.left = d  # entries that have not been written
        self._found: dict[int, Part] = {}  # by where they begin
        self._room = self.size if search.wanted is None else 2 * search.wanted
        search.use(ranges_of)

    def look(self, sums: Tensor, begin: int, end: int) -> None:
        """Note a part that was added elsewhere."""
        self.run(partial(loops.scan, array_of(sums)), ((begin, end),))

    def run(self, loop: Callable[..., Any], spans: Spans, sums: Sums | None = None) -> None:
        """Run a pass over stretches of the vector; `sums` returns some of what it will write, if that is all."""
        whole = _length(spans) == self.left == self.d
        if whole and sums is not None:
            self.floor = _floor(self.search, self.size, sums)
        size = self.size if self._room >= 0 else 0
        cuts = _cut([(begin, min(end, size)) for begin, end in spans])
        tasks = [partial(_piece, loop, *cut, self.d, self.floor, self.search) for cut in cuts]
        for (begin, _), part in zip(cuts, together(tasks, _length(cuts)), strict=True):
            self._found[begin] = part
            self._room -= 0 if whole else part[0].numel()  # few pieces do not hold too many
        without_search(loop, [(max(begin, size), end) for begin, end in spans])
        self.left -= _length(spans)

    def found(self, vector: Tensor, search: Search) -> Candidates | None:
        """Return the candidates; None if they are another search's, parts are missing, or they are far too many."""
        asked = (search.floor, vector.numel() if search.size is None else search.size)
        if self.left or self._room < 0 or (self._guess, self.size) != asked:
            return None
        return self.candidates()

    def candidates(self) -> Candidates:
        """Return the candidates of what was written."""
        parts = [part for _, part in sorted(self._found.items())] or [NOTHING]
        if len(parts) > MOST:
            joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
            parts = [(joined[0][a:b], joined[1][a:b]) for a, b in ranges(joined[0].numel(), 64)]
        found, wanted = Candidates(tuple(parts), self.floor), self.search.wanted
        if wanted is not None and not wanted <= len(found) <= wanted + wanted // 3:
            self.search.checks = CHECKS
        return found


def _floor(search: Search, size: int, sums: Sums) -> float:
    """Return the floor of a search, or one from a sample if r is large and the sample contradicts it."""
    if search.wanted is None or search.wanted < LARGE or not search.checks:
        return search.floor
    low, middle = quantiles(sums(slice(0, size, stride(size))), search.wanted, size)
    if low <= search.floor <= middle:
        search.checks -= 1
        return search.floor
    search.checks = CHECKS
    return low


def _piece(loop: Callable[..., Any], begin: int, end: int, d: int, floor: float, search: Search) -> Part:
    """Run the pass over one range; if arrays fill up, enlarge them first, then raise the bound."""
    at, bound, count, key = begin, key_of(floor), 0, (begin, end)
    size = end - begin
    wanted = size if search.wanted is None else min(search.wanted, size)
    most = min(size, wanted + max(wanted // 3, size // 1024)) + 128
    room = min(most, 256 + round(1.2 * search.last(key, wanted * size // d)))
    positions, values = search.take(key, room, np.int32 if d < 2**31 else np.int64)
    while True:
        at, count = loop(at, end, bound, positions, values, count)
        if at == end:
            search.put(key, positions, values, count)
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
