"""Which k of the d entries to send (the paper's Definitions 1 to 3).

`rtop_k` draws k of the r entries of largest magnitude, uniformly, without replacement. r = k is top-k,
r = d is random-k: one rule, three names. A selector says what r is, given k and d. It draws from the
generator that it is passed, never from torch's global one.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.kernels import draws
from rtopk.kernels.host import Asking, answer, ask, send
from rtopk.kernels.search import Pending, Picked, Search
from rtopk.select.rule import Rule
from rtopk.sparse import SparseVector

BITS_UP_TO = 64  # a bit for each of r takes less memory than k numbers, up to this r / k


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
    return answer([_pick(vector, k, r, rng, None)])[0].positions


def draw(r: int, k: int, rng: torch.Generator) -> Tensor:
    """Return a uniform k-subset of {0, ..., r-1}, ascending, on the generator's device.

    The generator gives one seed; the subset is the first k distinct numbers of that seed's stream (or, where
    k is more than half of r, all but the first r - k). Every number is equally likely at every place of the
    stream, so every k-subset has the same probability. Time and memory are O(k).

    >>> draw(10, 3, torch.Generator().manual_seed(1)).numel()
    3
    """
    if r > BITS_UP_TO * k:
        return draws.draw_few(r, k, _seed(rng)).to(rng.device)
    return draws.set_bits(draws.draw_words(r, k, _seed(rng)), k).to(rng.device)


def _seed(rng: torch.Generator) -> int:
    return int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device))


def draw_largest(
    vector: Tensor, k: int, r: int, rng: torch.Generator, search: Search | None = None
) -> SparseVector:
    """Return k entries of a finite vector, drawn from its r largest, which a search may have found already."""
    return answer([drawing_largest(vector, k, r, rng, search)])[0]


def drawing_largest(
    vector: Tensor, k: int, r: int, rng: torch.Generator, search: Search | None = None
) -> Asking[SparseVector]:
    """Do what `draw_largest` does, and ask for what a device has found."""
    if not 1 <= k <= r <= vector.numel():
        raise ValueError(f"need 1 <= k <= r <= d, got k={k}, r={r}, d={vector.numel()}")
    picked = yield from _pick(vector, k, r, rng, search)
    if search is not None and r < vector.numel():
        search.learn(picked.magnitude, r)
    return SparseVector(picked.positions, picked.values, vector.numel(), picked.here)


def _pick(vector: Tensor, k: int, r: int, rng: torch.Generator, search: Search | None) -> Asking[Picked]:
    """Draw k of the r largest; fewer than r candidates are not used."""
    if r == vector.numel():
        drawn = draw(r, k, rng)
        positions = send(drawn, vector.device)
        values = vector[positions]
        (here,) = yield from ask(values) if search is None else search.checking(values)
        return Picked(positions, values, 0.0, None if positions is drawn else (drawn, here))
    candidates = None if search is None else search.found
    if candidates is None or not candidates.hold(r):
        candidates = kernels.search_largest(vector, r)
    words = partial(draws.draw_words, r, k, _seed(rng))
    if isinstance(candidates, Pending):
        return (yield from candidates.picking(r, words, k))
    return kernels.pick(candidates, r, words, k)


class _Family(Rule, ABC):
    """Draw k of the r largest; subclasses define r."""

    @abstractmethod
    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries among which the k are drawn."""

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        return rtop_k(vector, k, self.considered(k, vector.numel()), rng)


@dataclass(frozen=True)
class TopK(_Family, method="top-k"):
    """Send the k largest entries: rTop-k with r = k."""

    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries among which the k are drawn."""
        return k

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions; nothing is drawn."""
        return top_k(vector, k)


@dataclass(frozen=True)
class RandomK(_Family, method="random-k"):
    """Send k entries drawn from all: rTop-k with r = d."""

    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries among which the k are drawn."""
        return d


@dataclass(frozen=True)
class RTopK(_Family, method="rtop-k"):
    """Send k entries drawn from the r largest, with r = `r_over_k` times k, at most d.

    Pass `r_over_k`, or `nodes` for the paper's choice k / r = 1 / n: an entry that is among the r largest
    on all n nodes is then sent by one of them on average.
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

    @classmethod
    def for_run(cls, nodes: int, r_over_k: float = 0.0, threshold: float = 0.0) -> "RTopK":
        """Make the rule for a run."""
        return cls(r_over_k=r_over_k) if r_over_k else cls(nodes=nodes)

    @property
    def _factor(self) -> float:
        return float(self.nodes if self.r_over_k is None else self.r_over_k)  # type: ignore[arg-type]

    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries among which the k are drawn."""
        return min(d, round(k * self._factor))


def _check(vector: Tensor, k: int, r: int) -> None:
    if vector.dim() != 1 or not vector.is_floating_point():
        raise ValueError(
            f"vector must be a 1-D floating-point tensor, got {vector.dim()}-D {vector.dtype}; "
            "flatten it first"
        )
    if not 1 <= k <= r <= vector.numel():
        raise ValueError(f"need 1 <= k <= r <= d, got k={k}, r={r}, d={vector.numel()}")
    kernels.require_finite(vector, "vector")
