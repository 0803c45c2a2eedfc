"""Samples of the sparse Bernoulli model (equation 3 of the paper), as lists of ones: never n x d numbers.

All nodes times coordinates of about the same theta are one long row of coin tosses; the gaps between heads
are geometric, so the work is that of the ones, and a coordinate's true theta is reached by refusing some.
The refinements: signs come from `Theta`, scaling is `scaled`, and a continuous perturbation is added and
taken off again by `perturb` and `quantise`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rtopk.studies.lab.theta import Floats, Theta

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
    """Write samples out as (nodes, d) numbers with their signs; for small d."""
    dense = np.zeros((ones.nodes, theta.d))
    dense[ones.node, ones.coordinate] = 1.0 if theta.signs is None else theta.signs[ones.coordinate]
    return dense


def perturb(samples: Floats, rng: np.random.Generator) -> Floats:
    """Add independent uniform noise of [-1/2, 1/2): refinement (iii)."""
    return samples + (rng.random(samples.shape) - 0.5)


def quantise(perturbed: Floats, scale: float = 1.0) -> Floats:
    """Take the perturbation off: 0 where |Y| <= 1/2, else the sign; `scale` is the M of refinement (ii)."""
    if not scale > 0:
        raise ValueError(f"the scale M must be positive, got {scale}")
    return np.where(np.abs(perturbed / scale) > 0.5, np.sign(perturbed), 0.0)
