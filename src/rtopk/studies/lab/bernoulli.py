"""The sparse Bernoulli model (equation 3 of the paper): parameters theta, and samples as lists of ones.

theta is in [0, 1]^d (signed: [-1, 1]^d) with sum |theta_j| <= s. The families are the corners of the question: flat
(where the upper bound is tight), power law (like a gradient), few ones (nothing to learn but where), and points of
the cube [s/2d, s/d]^d of the lower bound. A flat theta is one number, so its d may be far beyond the memory.

Samples are never n x d numbers. All nodes times coordinates of about the same theta are one long row of coin
tosses; the gaps between heads are geometric, so the work is that of the ones, and a coordinate's true theta is
reached by refusing some. The refinements: signs come from `Theta`; a continuous perturbation is added and taken off
again by `perturb` and `quantise`, which also scales. One is ours: an amplitude for each coordinate, which the
centre knows; what is estimated is then amplitude x theta.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rtopk.seed import derive

Floats = NDArray[np.float64]


def numpy_rng(*key: int | str) -> np.random.Generator:
    """Make the numpy generator of a key, as `rtopk.seed.generator` makes torch's."""
    return np.random.default_rng(derive(*key))


@dataclass(frozen=True, eq=False)
class Theta:
    """The probabilities of d coordinates, with the sign that a one of each coordinate has.

    >>> theta = flat(d=1000, s=10)
    >>> theta.total, f"{theta.squares:.3g}", theta.at(np.array([3, 4]))
    (10.0, '0.1', array([0.01, 0.01]))
    """

    d: int
    s: float  # the bound of the constraint set
    levels: Floats  # (d,) probabilities, or (1,) if all are the same
    signs: NDArray[np.int8] | None = None  # (d,)
    amplitudes: Floats | None = None  # (d,) at least 1: how large a one of each coordinate is

    def __post_init__(self) -> None:
        if not 0 < self.s <= self.d:
            raise ValueError(f"s must be in (0, d] = (0, {self.d}], got {self.s}")
        if self.levels.shape not in ((1,), (self.d,)):
            raise ValueError(f"levels must have shape (1,) or ({self.d},), got {self.levels.shape}")
        if self.levels.min() < 0.0 or self.levels.max() > 1.0:
            raise ValueError(f"every theta must be in [0, 1], got {self.levels.min()} to {self.levels.max()}")
        if self.total > self.s * (1 + 1e-9):
            raise ValueError(f"theta must sum to at most s={self.s}, got {self.total}; scale it down")

    @property
    def is_flat(self) -> bool:
        """Whether all coordinates have one probability."""
        return self.levels.shape == (1,)

    @property
    def total(self) -> float:
        """The expected number of ones."""
        return float(self.levels.sum()) * (self.d if self.is_flat else 1)

    @property
    def squares(self) -> float:
        """The squared norm of what is estimated."""
        return self.weighted(np.square(self.levels))

    def weighted(self, values: Floats) -> float:
        """Return the sum of amplitude^2 x value over the coordinates; one value may stand for all."""
        if self.amplitudes is not None:
            return float((np.square(self.amplitudes) * values).sum())
        return float(values.sum()) * (self.d if values.shape == (1,) else 1)

    def at(self, coordinates: NDArray[np.int64]) -> Floats:
        """Return what is estimated at these coordinates: theta, with its sign and amplitude."""
        values = np.full(len(coordinates), self.levels[0]) if self.is_flat else self.levels[coordinates]
        return values * self.one(coordinates)

    def one(self, coordinates: NDArray[np.int64]) -> Floats:
        """Return what a one of each of these coordinates is: its sign x its amplitude."""
        size = np.ones(len(coordinates)) if self.amplitudes is None else self.amplitudes[coordinates]
        return size if self.signs is None else size * self.signs[coordinates]

    def dense(self) -> Floats:
        """Return what is estimated as d numbers."""
        return self.at(np.arange(self.d))

    def with_signs(self, rng: np.random.Generator) -> "Theta":
        """Give every coordinate a random sign: refinement (i) of the paper."""
        return replace(self, signs=(1 - 2 * rng.integers(2, size=self.d)).astype(np.int8))

    def with_amplitudes(self, spread: float, rng: np.random.Generator) -> "Theta":
        """Give the coordinates amplitudes from 1 to 1 + spread, evenly spaced and in random order."""
        if spread < 0.0:
            raise ValueError(f"the spread of the amplitudes must not be negative, got {spread}")
        return replace(self, amplitudes=1.0 + spread * rng.permutation(self.d) / max(1, self.d - 1))

    def count_law(self) -> Floats:
        """Return the law of the number of ones, P(0), P(1), ...: a Poisson binomial one.

        It comes from its characteristic function at m points; mass beyond m is below rounding. Small
        probabilities enter through their power sums, so d does not matter and nothing is lost to rounding.
        """
        m = 1 << int(self.total + 12 * self.total**0.5 + 60).bit_length()
        turn = np.expm1(2j * np.pi * np.arange(m // 2 + 1) / m)  # e^{it} - 1, at most 2 in size
        small = self.levels[self.levels <= 0.05]
        times = float(self.d) if self.is_flat else 1.0
        log = np.zeros_like(turn)  # sum of log(1 + theta_j (e^{it} - 1))
        for power in range(1, 19):  # 0.1^18 is below rounding
            log -= times * float((small**power).sum()) * (-turn) ** power / power
        value = np.exp(log)
        large, counts = np.unique(self.levels[self.levels > 0.05], return_counts=True)
        for level, count in zip(large, counts * int(times), strict=True):
            value *= (1.0 + level * turn) ** count
        return np.clip(np.fft.irfft(np.conj(value), m), 0.0, 1.0)


def flat(d: int, s: float) -> Theta:
    """Give every coordinate s / d."""
    return Theta(d, s, np.array([s / d]))


def power_law(d: int, s: float) -> Theta:
    """Let theta_j fall like 1 / j, capped at 1, summing to s."""
    falling = 1.0 / np.arange(1, d + 1)
    low, high = 0.0, float(d)
    for _ in range(80):  # the factor with which the capped sum is s
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1.0, middle * falling).sum() < s else (low, middle)
    return Theta(d, s, np.minimum(1.0, low * falling))


def few_ones(d: int, s: float) -> Theta:
    """Make floor(s) coordinates certain and all others impossible."""
    levels = np.zeros(d)
    places = np.linspace(0, d - 1, int(s)).astype(np.int64) if s >= 1 else np.empty(0, np.int64)
    levels[places] = 1.0
    return Theta(d, s, levels)


def cube(d: int, s: float) -> Theta:
    """Draw every coordinate in [s/2d, s/d]: the set on which the lower bound is proved."""
    return Theta(d, s, s / d * (1.0 - numpy_rng(0, "cube", d).random(d) / 2))


FAMILIES: dict[str, Callable[[int, float], Theta]] = {
    "flat": flat,
    "power": power_law,
    "few": few_ones,
    "cube": cube,
}


Integers = NDArray[np.int64]
CHUNK = 1 << 22  # ones held at a time
HUGE = 1 << 32  # from this d on, ones are drawn by position, not by gap


@dataclass(frozen=True, eq=False)
class Ones:
    """The ones of some nodes' samples, by node and then by coordinate."""

    node: Integers  # (ones,) ascending, 0 to nodes - 1
    coordinate: Integers  # (ones,) ascending within a node
    counts: Integers  # (nodes,) ones of each node

    @property
    def nodes(self) -> int:
        """How many samples these are."""
        return len(self.counts)

    def supports(self) -> list[Integers]:
        """Return each node's coordinates."""
        return np.split(self.coordinate, np.cumsum(self.counts)[:-1])


def sample(theta: Theta, nodes: int, rng: np.random.Generator) -> Iterator[Ones]:
    """Draw the samples of this many nodes, in chunks of nodes of bounded size."""
    if nodes < 1:
        raise ValueError(f"there must be at least one node, got {nodes}")
    at_once = int(max(1, min(nodes, CHUNK // max(1.0, theta.total))))
    for begin in range(0, nodes, at_once):
        yield _draw(theta, min(at_once, nodes - begin), rng)


def _draw(theta: Theta, nodes: int, rng: np.random.Generator) -> Ones:
    if theta.is_flat and theta.d >= HUGE:
        return _draw_positions(theta, nodes, rng)
    parts = [_toss(members, bound, theta, nodes, rng) for members, bound in _groups(theta)]
    node = np.concatenate([part[0] for part in parts])
    coordinate = np.concatenate([part[1] for part in parts])
    if len(parts) > 1:
        order = np.lexsort((coordinate, node))
        node, coordinate = node[order], coordinate[order]
    return Ones(node, coordinate, np.bincount(node, minlength=nodes))


def _groups(theta: Theta) -> list[tuple[Integers | None, float]]:
    """Split the coordinates into groups whose thetas differ by a factor of at most 2, but for the least."""
    if theta.is_flat:
        return [(None, float(theta.levels[0]))]
    with np.errstate(divide="ignore"):
        power = np.ceil(np.log2(theta.levels))
    power = np.maximum(power, -40)  # what is rarer than one in 10^12 may be refused more often
    groups: list[tuple[Integers | None, float]] = []
    for exponent in np.unique(power[theta.levels > 0]):
        members = np.flatnonzero((power == exponent) & (theta.levels > 0))
        groups.append((members, float(theta.levels[members].max())))
    return groups


def _toss(
    members: Integers | None, bound: float, theta: Theta, nodes: int, rng: np.random.Generator
) -> tuple[Integers, Integers]:
    width = theta.d if members is None else len(members)
    tosses = nodes * width
    found: list[Integers] = []
    last = -1
    while bound > 0.0 and last < tosses:
        expected = (tosses - last) * bound
        gaps = rng.geometric(bound, size=int(expected + 4 * expected**0.5 + 16))
        # A sum of gaps beyond 2^63 would wrap; no toss that counts lies so far.
        heads = last + np.cumsum(np.minimum(gaps, tosses + 1))
        last = int(heads[-1])
        found.append(heads[heads < tosses])
    heads = np.concatenate(found) if found else np.empty(0, np.int64)
    node, place = np.divmod(heads, width)
    if members is None:
        return node, place
    coordinate = members[place]
    taken = rng.random(len(heads)) * bound < theta.levels[coordinate]
    return node[taken], coordinate[taken]


def _draw_positions(theta: Theta, nodes: int, rng: np.random.Generator) -> Ones:
    counts = rng.binomial(theta.d, float(theta.levels[0]), size=nodes).astype(np.int64)
    node = np.repeat(np.arange(nodes), counts)
    coordinate = rng.integers(theta.d, size=len(node))
    while True:
        order = np.lexsort((coordinate, node))
        coordinate = coordinate[order]
        twice = (np.diff(coordinate) == 0) & (np.diff(node) == 0)
        if not twice.any():
            return Ones(node, coordinate, counts)
        # A node with a repeated position draws all of its positions again: uniform given no repetition.
        again = np.isin(node, node[1:][twice])
        coordinate[again] = rng.integers(theta.d, size=int(again.sum()))


def densify(ones: Ones, theta: Theta) -> Floats:
    """Write samples out as (nodes, d) numbers with their signs and amplitudes; for small d."""
    dense = np.zeros((ones.nodes, theta.d))
    dense[ones.node, ones.coordinate] = theta.one(ones.coordinate)
    return dense


def perturb(samples: Floats, rng: np.random.Generator) -> Floats:
    """Add independent uniform noise of [-1/2, 1/2): refinement (iii)."""
    return samples + (rng.random(samples.shape) - 0.5)


def quantise(perturbed: Floats, scale: float = 1.0) -> Floats:
    """Take the perturbation off: 0 where |Y| <= 1/2, else the sign; `scale` is the M of refinement (ii)."""
    if not scale > 0:
        raise ValueError(f"the scale M must be positive, got {scale}")
    return np.where(np.abs(perturbed / scale) > 0.5, np.sign(perturbed), 0.0)
