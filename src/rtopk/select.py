"""Which k of the d entries are sent (the paper's Definitions 1 to 3).

`rtop_k` draws k of the r entries of largest magnitude, uniformly, without replacement. r = k is top-k,
r = d is random-k: one rule, three names. A selector is the rule for r, given k and d; it draws from the
generator it is handed and never from torch's global one.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rtopk.kernels import largest, require_finite


def top_k(vector: Tensor, k: int) -> Tensor:
    """Return the positions of the k entries of largest magnitude (Definition 1).

    >>> top_k(torch.tensor([0.1, -3.0, 2.0, 2.0]), k=2)
    tensor([1, 2])
    """
    _check(vector, k, r=k)
    return largest(vector, k)


def random_k(vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
    """Return k positions drawn uniformly without replacement (Definition 2)."""
    return rtop_k(vector, k, vector.numel(), rng)


def rtop_k(vector: Tensor, k: int, r: int, rng: torch.Generator) -> Tensor:
    """Return k positions drawn uniformly without replacement from the r of largest magnitude (Definition 3).

    Positions are int64, ascending and unique. Ties at the r-th magnitude: the lower index wins.
    """
    _check(vector, k, r)
    drawn = draw(r, k, rng).to(vector.device)
    if r == vector.numel():
        return drawn
    return largest(vector, r)[drawn]


def draw(r: int, k: int, rng: torch.Generator) -> Tensor:
    """Return a uniform k-subset of {0, ..., r-1}, ascending, on the generator's device.

    Time and memory are O(k), also where r is the whole vector. Every step treats all positions alike, so
    every k-subset has the same probability.
    """
    if 2 * k > r:  # draw what stays out instead
        keep = torch.ones(r, dtype=torch.bool, device=rng.device)
        if k < r:
            keep[draw(r, r - k, rng)] = False
        return keep.nonzero()[:, 0]
    distinct = torch.empty(0, dtype=torch.int64, device=rng.device)
    while distinct.numel() < k:
        missing = k - distinct.numel()
        more = torch.randint(r, (missing + missing // 2 + 8,), generator=rng, device=rng.device)
        distinct = torch.unique(torch.cat([distinct, more]))
    surplus = distinct.numel() - k
    if surplus:  # leave out a uniform subset of what was drawn too many
        order = torch.randperm(distinct.numel(), generator=rng, device=rng.device)
        distinct = distinct[order[:k]].sort().values
    return distinct


class Selector(Protocol):
    """Choose k positions of a vector, ascending."""

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""


@dataclass(frozen=True)
class TopK:
    """Send the k largest entries: rTop-k with r = k."""

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        return top_k(vector, k)


@dataclass(frozen=True)
class RandomK:
    """Send k entries drawn from all: rTop-k with r = d."""

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        return random_k(vector, k, rng)


@dataclass(frozen=True)
class RTopK:
    """Send k entries drawn from the r largest, with r = `r_over_k` times k, at most d.

    Give `r_over_k`, or `nodes` for the paper's choice k / r = 1 / n: an entry that is among the r largest
    of all n nodes is then sent by one of them on average.
    """

    r_over_k: float | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        if (self.r_over_k is None) == (self.nodes is None):
            raise ValueError(
                f"give r_over_k or nodes, not both, got r_over_k={self.r_over_k}, nodes={self.nodes}"
            )
        if self._factor < 1 or not math.isfinite(self._factor):
            raise ValueError(f"r / k must be a number of at least 1, got {self._factor}")

    @property
    def _factor(self) -> float:
        return float(self.nodes if self.r_over_k is None else self.r_over_k)  # type: ignore[arg-type]

    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries among which the k are drawn."""
        return min(d, round(k * self._factor))

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        return rtop_k(vector, k, self.considered(k, vector.numel()), rng)


def _check(vector: Tensor, k: int, r: int) -> None:
    if vector.dim() != 1 or not vector.is_floating_point():
        raise ValueError(
            f"vector must be a 1-D floating-point tensor, got {vector.dim()}-D {vector.dtype}; "
            "flatten it first"
        )
    if not 1 <= k <= r <= vector.numel():
        raise ValueError(f"need 1 <= k <= r <= d, got k={k}, r={r}, d={vector.numel()}")
    require_finite(vector, "vector")
