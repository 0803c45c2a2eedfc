"""What a pass over a vector looks for, and what it finds: entries at or above a floor, the r largest among them.

A `Search` accompanies one vector from step to step. It guesses how large the r-th entry will be, so that the pass
which accumulates the gradient can note the candidates on the way. The guess decides how long a step takes and
never what is selected, so a search is in no state.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SAMPLE = 4096
CHECKS = 8  # passes for which a guess is compared with a sample, after a bad one
LARGE = 8 * SAMPLE  # from this r on, a sample costs less than the candidates of a bad guess

# How the guess at the next r-th magnitude follows the last ones, in logarithms; see docs/performance.md.
FIRST_MARGIN = 0.04  # how far below what the trend predicts to guess
LEAST, MOST = 0.01, 0.5
FORGET = 0.975
SAFETY = 2.0
TREND = 0.3

_NOTHING = np.empty(0, np.int32)


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


class Search:
    """What to look for in one vector, the memory that candidates are written to, and what was found.

    `floor` is the least magnitude of a candidate. `wanted` of the largest are enough (None: all); only the first
    `size` entries compete (None: all). What was found is valid until the next pass with this search.
    """

    def __init__(self, floor: float = 0.0, wanted: int | None = None, size: int | None = None) -> None:
        if not floor >= 0.0:
            raise ValueError(f"floor must be a magnitude of at least 0, got {floor}")
        self.floor, self.wanted, self.size = floor, wanted, size
        self.found: Candidates | None = None
        self.steps = 0
        self.second_scans = 0  # steps in which the candidates did not suffice, the first step among them
        self.checks = CHECKS  # for so many passes more, the floor is compared with a sample
        self.shares: list[float] = []  # of the last candidates, the share of each part
        self._arrays: dict[int, tuple[Any, Any]] = {}
        self._last: tuple[float, int] | None = None  # the r-th magnitude of the last step, and its r
        self._trend = 0.0  # how its logarithm has grown in a step, of late
        self._margin = FIRST_MARGIN  # how far it may fall short of that

    def aim(self, r: int, size: int) -> bool:
        """Look for the r largest of the first `size` entries; say whether there is a guess to begin with."""
        self.found = None
        if self._last is None or r == size:
            return False
        magnitude, at = self._last
        # Between two densities, take the tail of a power law: half the magnitude for twice the entries.
        self.floor = magnitude * math.exp(self._trend - self._margin) * min(1.0, at / r)
        self.wanted, self.size = r, size
        return True

    def learn(self, magnitude: float, r: int) -> None:
        """Note the r-th magnitude; the worst shortfall of late, slowly forgotten, says how low to guess next."""
        self.steps += 1
        self.second_scans += self.found is None or len(self.found) < r
        if self._last is not None and self._last[1] == r and min(magnitude, self._last[0]) > 0.0:
            grown = min(MOST, max(-MOST, math.log(magnitude / self._last[0])))
            self._margin = min(MOST, max(LEAST, self._margin * FORGET, SAFETY * (self._trend - grown)))
            self._trend += TREND * (grown - self._trend)
        self._last = (magnitude, r)

    def take(self, part: int, room: int, place: Any) -> tuple[Any, Any]:
        """Return arrays with about that much room: those kept, unless they are far too small or too large.

        They are kept from step to step because fresh memory is slow to touch.
        """
        positions, values = self._arrays.pop(part, (_NOTHING, _NOTHING))
        if positions.dtype == place and room - room // 8 <= positions.size <= room + room // 4 + 256:
            return positions, values
        del positions, values  # before the new ones are made
        return np.empty(room, place), np.empty(room, np.float32)

    def put(self, part: int, positions: Any, values: Any) -> None:
        """Keep the arrays."""
        self._arrays[part] = positions, values


def stride(d: int) -> int:
    """Return a step that takes a sample and follows no period of the data: shapes are products of 2, 3 and 5."""
    step = max(1, d // SAMPLE)
    while math.gcd(step, 30) > 1:
        step += 1
    return step


def quantiles(sample: Any, r: int, d: int) -> tuple[float, float]:
    """Return a magnitude that r of the d entries and a few more reach, almost surely, and one that about r do."""
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
