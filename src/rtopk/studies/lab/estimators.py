"""What the centre makes of n messages of k bits: the paper's unbiased estimator and its rivals.

Each scheme says how many ones of each node arrive, which, and what a received one counts; this is the fast
path, with the law of the bit-exact `Encoder` but without the bit string.

- `paper`: a uniform k' of a node's N ones, each counting N / k' (proof of Theorem 1).
- `truncate`: the first k' ones, unscaled: top-k on 0/1 vectors, lower index first; without a header.
- `random`: the values of k coordinates that node and centre draw alike: random-k, no bits for positions.
- `central`: no limit.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np

from rtopk.studies.lab.encoder import Encoder
from rtopk.studies.lab.enumerative import capacity
from rtopk.studies.lab.models import Integers, Ones
from rtopk.studies.lab.theta import Floats, Theta

Scheme = Literal["paper", "truncate", "random", "central"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
DENSE = 1 << 24  # up to this d the estimate is one array


def kept_ones(theta: Theta, k: int, scheme: Scheme = "paper") -> int:
    """Return k', how many ones (for `random`: coordinates) k bits can carry."""
    if scheme == "central":
        return theta.d
    if scheme == "random":
        return min(k, theta.d) if theta.signs is None else min(int(k / np.log2(3)), theta.d)
    encoder = Encoder(theta.d, k, signed=theta.signs is not None)
    return encoder.kept if scheme == "paper" else capacity(theta.d, k, encoder.marks)


def receive(ones: Ones, d: int, kept: int, scheme: Scheme, rng: np.random.Generator) -> tuple[Ones, Floats]:
    """Return the ones that arrive and what each counts."""
    if scheme == "central":
        return ones, np.ones(len(ones.node))
    if scheme == "truncate":
        arrived = _first(ones, ones.coordinate, np.minimum(ones.counts, kept))
        return arrived, np.ones(len(arrived.node))
    shuffled = ones.coordinate[np.argsort(ones.node + rng.random(len(ones.node)))]
    if scheme == "random":
        if d >= 10**9:
            raise ValueError(f"random coordinates need d < 10^9, got {d}; lower d")
        seen = rng.hypergeometric(ones.counts, d - ones.counts, kept)  # ones among the k coordinates
        arrived = _first(ones, shuffled, seen.astype(np.int64))
        return arrived, np.full(len(arrived.node), d / kept)
    arrived = _first(ones, shuffled, np.minimum(ones.counts, kept))
    return arrived, np.maximum(ones.counts[arrived.node] / kept, 1.0)


def _first(ones: Ones, coordinate: Integers, numbers: Integers) -> Ones:
    """Keep the first so many of each node, in the order given."""
    begin = np.cumsum(ones.counts) - ones.counts
    taken = np.arange(len(ones.node)) - begin[ones.node] < numbers[ones.node]
    return Ones(ones.node[taken], coordinate[taken], numbers)


def estimate(
    chunks: Iterable[Ones], theta: Theta, k: int, scheme: Scheme, rng: np.random.Generator
) -> tuple[Integers, Floats]:
    """Return the estimate of theta where it is not zero: coordinates and values."""
    kept = kept_ones(theta, k, scheme)
    nodes = 0
    total = np.zeros(theta.d if theta.d <= DENSE else 0)
    touched: list[Integers] = []
    counting: list[Floats] = []
    for ones in chunks:
        nodes += ones.nodes
        arrived, weight = receive(ones, theta.d, kept, scheme, rng)
        if theta.signs is not None:
            weight = weight * theta.signs[arrived.coordinate]
        if theta.d <= DENSE:
            total += np.bincount(arrived.coordinate, weight, minlength=theta.d)
        else:
            touched.append(arrived.coordinate)
            counting.append(weight)
    if theta.d <= DENSE:
        where = np.flatnonzero(total)
        return where, total[where] / nodes
    where, slot = np.unique(np.concatenate(touched), return_inverse=True)
    return where, np.bincount(slot, np.concatenate(counting), minlength=len(where)) / nodes


def squared_error(where: Integers, values: Floats, theta: Theta) -> float:
    """Return || estimate - theta ||^2 from the coordinates that the estimate touches."""
    true = theta.at(where)
    return float((np.square(values - true) - np.square(true)).sum() + theta.squares)
