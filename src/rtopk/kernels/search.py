"""Candidates: the entries of a vector at or above a floor, which include the r largest.

A `Search` belongs to one vector and is reused in every step. It guesses how large the r-th entry will be, so that
the pass that accumulates the gradient can also note the candidates. The guess affects only the time of a step,
never what is selected, so it is not part of any checkpoint.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels.host import Asking, ask

SAMPLE = 4096
CHECKS = 8  # passes in which the guess is compared with a sample, after a bad guess
LARGE = 8 * SAMPLE  # from this r on, a sample costs less than the extra candidates of a bad guess

# How the guess at the next r-th magnitude follows the last ones, in logarithms; see docs/performance.md.
FIRST_MARGIN = 0.04  # how far below the predicted magnitude to guess
LEAST, MOST = 0.01, 0.5
FORGET = 0.975
SAFETY = 2.0
TREND = 0.3

_NOTHING = np.empty(0, np.int32)

GradientPart = tuple[int, Tensor]  # where it begins in the vector, and its entries
Motion = tuple[Tensor, Tensor, float]  # where the next velocity is written, the velocity, momentum


class Candidates:
    """Entries at or above a floor, in consecutive parts, positions ascending."""

    def __init__(self, parts: tuple[tuple[Tensor, Tensor], ...], floor: float) -> None:
        self.parts = parts  # positions (int32 or int64), values
        self.floor = floor
        self._number: int | None = None  # once it is known

    def count(self) -> int:
        """Return how many there are."""
        return sum([positions.numel() for positions, _ in self.parts])

    def __len__(self) -> int:
        if self._number is None:
            self._number = self.count()
        return self._number

    @property
    def positions(self) -> Tensor:
        """The positions, int64."""
        return torch.cat([positions.to(torch.int64) for positions, _ in self.parts])

    @property
    def like(self) -> Tensor:
        """A vector of the kind that the candidates are of."""
        return self.parts[0][1]

    def hold(self, r: int) -> bool:
        """Return whether `pick` can find the r largest with these."""
        return len(self) >= r


class Pending(Candidates, ABC):
    """Candidates that a device has yet to find; `picking` finds the r largest whatever they are.

    If `refuse` is set and an entry of the vector turns out not to be finite, `picking` and `checking` call it; it
    raises.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self.refuse: Callable[[], None] | None = None
        self._number = None

    @abstractmethod
    def count(self) -> int:
        """Wait, and return how many there are."""

    def hold(self, r: int) -> bool:
        """Return True."""
        return True

    @abstractmethod
    def picking(self, r: int, words: Any, k: int) -> "Asking[Picked]":
        """Do what `kernels.pick` does; ask for all that the host must know at once, if the guess was good."""

    @abstractmethod
    def is_finite(self) -> Tensor:
        """Return, on the device, whether all entries of the vector are finite."""

    def checking(self, *tensors: Tensor) -> Asking[list[Tensor]]:
        """Ask for tensors, and whether the vector is finite if it must be."""
        if self.refuse is None:
            return (yield from ask(*tensors))
        finite, *here = yield from ask(self.is_finite(), *tensors)
        if not bool(finite):
            self.refuse()
        return here

    def arrive(self, number: int, finite: bool) -> None:
        """Note how many there are; raise if the vector is not finite and must be."""
        self._number = number
        if self.refuse is not None and not finite:
            self.refuse()


class Picked(NamedTuple):
    """Entries picked from the r largest, and the r-th magnitude."""

    positions: Tensor  # int64, ascending
    values: Tensor
    magnitude: float
    here: tuple[Tensor, Tensor] | None = None  # positions and values in host memory, if these are on a device


class Search:
    """What to look for in one vector, the arrays for candidates, and what was found.

    `floor` is the smallest magnitude of a candidate. The `wanted` largest are enough (None: all); only the first
    `size` entries compete (None: all). `found` is valid until the next pass with this search.

    With a floor of Inf it is `blind`: it finds what is not finite, which on a device spares a wait of its own.
    """

    def __init__(self, floor: float = 0.0, wanted: int | None = None, size: int | None = None) -> None:
        if not floor >= 0.0:
            raise ValueError(f"floor must be a magnitude of at least 0, got {floor}")
        self.floor, self.wanted, self.size = floor, wanted, size
        self.found: Candidates | None = None
        self.steps = 0
        self.second_scans = 0  # steps with too few candidates, including the first
        self.checks = CHECKS  # the number of further passes in which the floor is compared with a sample
        self._used_for = ""  # the ranges whose arrays are kept
        self._arrays: dict[Hashable, tuple[Any, Any]] = {}  # of ranges of the vector
        self._counts: dict[Hashable, int] = {}  # how many candidates they held last
        self._last: tuple[float, int] | None = None  # the r-th magnitude of the last step, and its r
        self._trend = 0.0  # recent growth of its logarithm per step
        self._margin = FIRST_MARGIN  # how far it may fall below that

    @property
    def blind(self) -> bool:
        """Whether it looks for nothing but what is not finite."""
        return self.floor == math.inf

    def aim(self, r: int, size: int) -> bool:
        """Aim at the r largest of the first `size` entries; return whether there is a guess, else it is blind."""
        self.found, self.floor = None, math.inf
        self.wanted, self.size = r, size
        if self._last is None or r == size:
            return False
        magnitude, at = self._last
        # If r has changed, assume a power law: half the magnitude for twice the entries.
        self.floor = magnitude * math.exp(self._trend - self._margin) * min(1.0, at / r)
        return True

    def checking(self, *tensors: Tensor) -> Asking[list[Tensor]]:
        """Ask for tensors; if it is not known yet whether the vector is finite, also that."""
        if isinstance(self.found, Pending):
            return (yield from self.found.checking(*tensors))
        return (yield from ask(*tensors))

    def learn(self, magnitude: float, r: int) -> None:
        """Record the r-th magnitude; the worst recent shortfall, which decays slowly, sets the next margin."""
        self.steps += 1
        self.second_scans += self.found is None or len(self.found) < r  # `pick` has waited for them
        if self._last is not None and self._last[1] == r and min(magnitude, self._last[0]) > 0.0:
            grown = min(MOST, max(-MOST, math.log(magnitude / self._last[0])))
            self._margin = min(MOST, max(LEAST, self._margin * FORGET, SAFETY * (self._trend - grown)))
            self._trend += TREND * (grown - self._trend)
        self._last = (magnitude, r)

    def take(self, key: Hashable, room: int, place: Any) -> tuple[Any, Any]:
        """Return arrays with about that much room: the kept ones, unless they are far too small or too large.

        Arrays are reused from step to step because the first write to new memory is slow.
        """
        positions, values = self._arrays.pop(key, (_NOTHING, _NOTHING))
        if positions.dtype == place and room - room // 8 <= positions.size <= room + room // 4 + 256:
            return positions, values
        del positions, values  # before the new ones are made
        return np.empty(room, place), np.empty(room, np.float32)

    def put(self, key: Hashable, positions: Any, values: Any, count: int) -> None:
        """Keep the arrays of a range, and how many candidates it had."""
        self._arrays[key], self._counts[key] = (positions, values), count

    def last(self, key: Hashable, unknown: int) -> int:
        """Return how many candidates a range had last, or `unknown`."""
        return self._counts.get(key, unknown)

    def use(self, ranges_of: str) -> None:
        """Look at these ranges next; the arrays of others are not held beside theirs."""
        if self._used_for != ranges_of:
            self._used_for = ranges_of
            self._arrays.clear()


def room_for(r: int, size: int) -> int:
    """Return for how many candidates of `size` entries a device makes room: it does not know their number."""
    return min(size, r + max(r // 3, size // 1024) + 128)


def stride(d: int) -> int:
    """Return a sampling stride that shares no period with the data: it has no factor 2, 3 or 5."""
    step = max(1, d // SAMPLE)
    while math.gcd(step, 30) > 1:
        step += 1
    return step


def quantiles(sample: Any, r: int, d: int) -> tuple[float, float]:
    """Return a magnitude that almost surely more than r of d entries reach, and one that about r reach."""
    n = sample.size
    expected = r * n / d
    lower = math.ceil(expected + 3.0 * math.sqrt(expected) + 4.0) if n < d else r
    if lower >= n:
        return 0.0, math.inf
    upper = max(1, round(expected))
    magnitudes = np.abs(sample)
    magnitudes.partition(n - lower)
    low = float(magnitudes[n - lower])
    rest = magnitudes[n - lower :]
    rest.partition(lower - upper)
    return low, float(rest[lower - upper])
