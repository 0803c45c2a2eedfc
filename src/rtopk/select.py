"""Which k of the d entries are sent (the paper's Definitions 1 to 3).

`rtop_k` draws k of the r entries of largest magnitude, uniformly, without replacement. r = k is top-k,
r = d is random-k: one rule, three names. A selector is the rule for r, given k and d; it draws from the
generator it is handed and never from torch's global one.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.kernels.search import Candidates, Picked, Search
from rtopk.sparse import SparseVector

FEW = 64  # a bit for each of r takes less memory than k numbers, up to this r / k

# How the guess at the next r-th magnitude follows the last ones, in logarithms; see docs/performance.md.
AT_FIRST = 0.04  # how far below what the trend predicts to guess
LEAST, MOST = 0.01, 0.5
FORGET = 0.975
SAFETY = 2.0
TREND = 0.3


def top_k(vector: Tensor, k: int) -> Tensor:
    """Return the positions of the k entries of largest magnitude (Definition 1).

    >>> top_k(torch.tensor([0.1, -3.0, 2.0, 2.0]), k=2)
    tensor([1, 2])
    """
    _check(vector, k, r=k)
    return kernels.largest(vector, k)


def random_k(vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
    """Return k positions drawn uniformly without replacement (Definition 2)."""
    return rtop_k(vector, k, vector.numel(), rng)


def rtop_k(vector: Tensor, k: int, r: int, rng: torch.Generator) -> Tensor:
    """Return k positions drawn uniformly without replacement from the r of largest magnitude (Definition 3).

    Positions are int64, ascending and unique. Ties at the r-th magnitude: the lower index wins.
    """
    _check(vector, k, r)
    return _choose(vector, k, r, rng, None).positions


def draw(r: int, k: int, rng: torch.Generator) -> Tensor:
    """Return a uniform k-subset of {0, ..., r-1}, ascending, on the generator's device.

    The generator gives one seed; the subset is the first k distinct numbers of that seed's stream (or, where
    k is more than half of r, all but the first r - k). Every number is equally likely at every place of the
    stream, so every k-subset has the same probability. Time and memory are O(k).

    >>> draw(10, 3, torch.Generator().manual_seed(1)).numel()
    3
    """
    from rtopk.kernels import draws

    if r > FEW * k:
        return draws.draw_few(r, k, _seed(rng)).to(rng.device)
    return draws.set_bits(draws.draw_words(r, k, _seed(rng)), k).to(rng.device)


def _seed(rng: torch.Generator) -> int:
    return int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device))


def _choose(vector: Tensor, k: int, r: int, rng: torch.Generator, candidates: Candidates | None) -> Picked:
    """Draw k of the r largest; candidates that hold fewer than r are not used."""
    if r == vector.numel():
        positions = draw(r, k, rng).to(vector.device)
        return Picked(positions, vector[positions], 0.0)
    from rtopk.kernels import draws

    if candidates is None or len(candidates) < r:
        candidates = kernels.search_largest(vector, r)
    return kernels.pick(candidates, r, partial(draws.draw_words, r, k, _seed(rng)), k)


class Selector(Protocol):
    """Choose k positions of a vector, ascending."""

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""


@dataclass(frozen=True)
class TopK:
    """Send the k largest entries: rTop-k with r = k."""

    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries among which the k are drawn."""
        return k

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        return top_k(vector, k)


@dataclass(frozen=True)
class RandomK:
    """Send k entries drawn from all: rTop-k with r = d."""

    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries among which the k are drawn."""
        return d

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


def usual(nodes: int) -> RTopK:
    """Return the rule that users get who name none: k of the 2 k largest; for one node, the k largest.

    The paper's r = n k is `RTopK(nodes=n)`. docs/decisions.md says why it is not this one.
    """
    return RTopK(r_over_k=min(2, nodes))


_BY_RULE = (TopK.select, RandomK.select, RTopK.select)


class Tracker:
    """Select from one vector, step after step, guessing how large its r-th entry will be.

    The guess lets the memory find the candidates in its own pass. It decides how long a step takes and never
    what is selected, so it is in no state. A selector with a `select` of its own, subclasses among them, is
    asked as it is.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.steps = 0
        self.second_scans = 0  # steps in which the candidates did not suffice, the first step among them
        self._last: tuple[float, int] | None = None  # the r-th magnitude of the last step, and its r
        self._trend = 0.0  # how its logarithm has grown in a step, of late
        self._margin = AT_FIRST  # how far it may fall short of that

    def search(self, k: int, d: int) -> Search | None:
        """Return what the memory shall look for among the first d entries; None before there is a guess."""
        r = self._considered(k, d)
        if r is None or r == d or self._last is None:
            return None
        magnitude, at = self._last
        # Between two densities, take the tail of a power law: half the magnitude for twice the entries.
        return Search(magnitude * math.exp(self._trend - self._margin) * min(1.0, at / r), r, d)

    def select(
        self, vector: Tensor, k: int, rng: torch.Generator, candidates: Candidates | None = None
    ) -> SparseVector:
        """Return k entries of a finite vector, drawn by the selector's rule."""
        r = self._considered(k, vector.numel())
        if r is None:
            return SparseVector.gather(vector, self.selector.select(vector, k, rng))
        if not 1 <= k <= r <= vector.numel():
            raise ValueError(f"need 1 <= k <= r <= d, got k={k}, r={r}, d={vector.numel()}")
        picked = _choose(vector, k, r, rng, candidates)
        if r < vector.numel():
            self.steps += 1
            self.second_scans += candidates is None or len(candidates) < r
            self._learn(picked.magnitude, r)
        return SparseVector(picked.positions, picked.values, vector.numel())

    def _considered(self, k: int, d: int) -> int | None:
        """Return r if the selector selects by this file's rule; a `select` of its own is asked instead."""
        if getattr(self.selector.select, "__func__", None) not in _BY_RULE:
            return None
        return int(self.selector.considered(k, d))  # type: ignore[attr-defined]

    def _learn(self, magnitude: float, r: int) -> None:
        """Remember the magnitude; the worst shortfall of late, slowly forgotten, says how low to guess next."""
        if self._last is not None and self._last[1] == r and min(magnitude, self._last[0]) > 0.0:
            grown = min(MOST, max(-MOST, math.log(magnitude / self._last[0])))
            self._margin = min(MOST, max(LEAST, self._margin * FORGET, SAFETY * (self._trend - grown)))
            self._trend += TREND * (grown - self._trend)
        self._last = (magnitude, r)


def _check(vector: Tensor, k: int, r: int) -> None:
    if vector.dim() != 1 or not vector.is_floating_point():
        raise ValueError(
            f"vector must be a 1-D floating-point tensor, got {vector.dim()}-D {vector.dtype}; "
            "flatten it first"
        )
    if not 1 <= k <= r <= vector.numel():
        raise ValueError(f"need 1 <= k <= r <= d, got k={k}, r={r}, d={vector.numel()}")
    kernels.require_finite(vector, "vector")
