"""What a pass over a vector looks for, and what it finds: entries at or above a floor, the r largest among them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

DOUBT = 8  # passes for which a guess is compared with a sample, after a bad one
_NOWHERE = np.empty(0, np.int32)


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
        self.doubt = DOUBT  # for so many passes more, the floor is compared with a sample
        self.shares: list[float] = []  # of the last candidates, the share of each part
        self._arrays: dict[int, tuple[Any, Any]] = {}

    def take(self, part: int, room: int, place: Any) -> tuple[Any, Any]:
        """Return arrays with about that much room: those kept, unless they are far too small or too large."""
        positions, values = self._arrays.pop(part, (_NOWHERE, _NOWHERE))
        if positions.dtype == place and room - room // 8 <= positions.size <= room + room // 4 + 256:
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
