"""Risk E || estimate - theta ||^2 of each scheme: exact where the proof gives it, and measured with an interval.

Each scheme says how many ones of each node arrive, which, and what a received one counts; this is the fast path,
with the law of the bit-exact Encoder but without the bit string.

- paper: a uniform k' of a node's N ones, each counting N / k' (proof of Theorem 1).
- top: the k' ones of largest |Y|, each counting N / k': top-k under refinement (iii), Y = X + Z. Where all ones
  have one amplitude, that is a uniform k' of them too: the perturbation breaks the ties.
- lowest: the k' ones of lowest index, unscaled and without a header: what top-k is if ties go by index.
- random: the values of k coordinates that node and centre draw alike: random-k, no bits for positions.
- central: no limit.

A setting is (family of theta, d, s, n, k), and a spread of amplitudes. fit reads a slope off log-log axes; grid is
the set of settings on which the two bounds are held against measurement.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, get_args

import numpy as np
from scipy import stats

from rtopk.studies.lab import check_theorem_1, check_theorem_2, holds
from rtopk.studies.lab.bernoulli import FAMILIES, Floats, Integers, Ones, Theta, numpy_rng, sample
from rtopk.studies.lab.encoder import Encoder, capacity
from rtopk.tools.show.intervals import half_width, t_quantile

Scheme = Literal["paper", "top", "lowest", "random", "central"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
Error = Callable[[Integers, Floats, Theta], float]  # of an estimate, given where it is not zero
DENSE = 1 << 24  # up to this d the estimate is one array


def kept_ones(theta: Theta, k: int, scheme: Scheme = "paper") -> int:
    """Return k', how many ones (for `random`: coordinates) k bits can carry."""
    if scheme == "central":
        return theta.d
    if scheme == "random":
        return min(k, theta.d) if theta.signs is None else min(int(k / np.log2(3)), theta.d)
    encoder = Encoder(theta.d, k, signed=theta.signs is not None)
    return capacity(theta.d, k, encoder.marks) if scheme == "lowest" else encoder.kept


def receive(
    ones: Ones, theta: Theta, kept: int, scheme: Scheme, rng: np.random.Generator
) -> tuple[Ones, Floats]:
    """Return the ones that arrive and how often each counts."""
    if scheme == "central":
        return ones, np.ones(len(ones.node))
    if scheme == "lowest":
        arrived = _first(ones, ones.coordinate, np.minimum(ones.counts, kept))
        return arrived, np.ones(len(arrived.node))
    drawn = rng.random(len(ones.node))
    if scheme == "top":  # |Y|: the amplitude, and a perturbation from [-1/2, 1/2)
        order = np.lexsort((-np.abs(theta.one(ones.coordinate)) - drawn, ones.node))
    else:
        order = np.argsort(ones.node + drawn)
    if scheme == "random":
        if theta.d >= 10**9:
            raise ValueError(f"random coordinates need d < 10^9, got {theta.d}; lower d")
        seen = rng.hypergeometric(ones.counts, theta.d - ones.counts, kept)  # ones among the k coordinates
        arrived = _first(ones, ones.coordinate[order], seen.astype(np.int64))
        return arrived, np.full(len(arrived.node), theta.d / kept)
    arrived = _first(ones, ones.coordinate[order], np.minimum(ones.counts, kept))
    return arrived, np.maximum(ones.counts[arrived.node] / kept, 1.0)


def _first(ones: Ones, coordinate: Integers, numbers: Integers) -> Ones:
    """Keep the first so many of each node, in the order given."""
    begin = np.cumsum(ones.counts) - ones.counts
    taken = np.arange(len(ones.node)) - begin[ones.node] < numbers[ones.node]
    return Ones(ones.node[taken], coordinate[taken], numbers)


def estimate(
    chunks: Iterable[Ones], theta: Theta, k: int, scheme: Scheme, rng: np.random.Generator
) -> tuple[Integers, Floats]:
    """Return the estimate where it is not zero: coordinates and values."""
    kept = kept_ones(theta, k, scheme)
    nodes = 0
    total = np.zeros(theta.d if theta.d <= DENSE else 0)
    touched: list[Integers] = []
    counting: list[Floats] = []
    for ones in chunks:
        nodes += ones.nodes
        arrived, weight = receive(ones, theta, kept, scheme, rng)
        weight = weight * theta.one(arrived.coordinate)
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


def missed(where: Integers, values: Floats, theta: Theta) -> float:
    """Return the least || c x estimate - truth ||^2 over all factors c, as a part of || truth ||^2.

    It is sin^2 of the angle between both: what is left when a learning rate is tuned, which sets the length.
    """
    length = float(np.square(values).sum())
    along = float((values * theta.at(where)).sum())
    return 1.0 - along**2 / (length * theta.squares) if length else 1.0


@dataclass(frozen=True)
class Setting:
    """One point at which risk is measured."""

    d: int
    s: float
    n: int
    k: int
    family: str = "flat"
    signed: bool = False
    spread: float = 0.0  # of the amplitudes, which are 1 to 1 + spread

    def theta(self) -> Theta:
        """Make the parameter."""
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {sorted(FAMILIES)}, got {self.family!r}")
        theta = FAMILIES[self.family](self.d, self.s)
        theta = theta.with_signs(numpy_rng(0, "signs", self.d)) if self.signed else theta
        return (
            theta.with_amplitudes(self.spread, numpy_rng(0, "amplitudes", self.d)) if self.spread else theta
        )

    def key(self) -> tuple[int | str, ...]:
        """Name the setting for the generator."""
        spread = (repr(float(self.spread)),) if self.spread else ()
        return (self.family, self.d, repr(float(self.s)), self.n, self.k, int(self.signed), *spread)


@dataclass(frozen=True)
class Risk:
    """Measured risk with its 95 % interval."""

    setting: Setting
    scheme: Scheme
    mean: float
    low: float
    high: float
    repeats: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def measure(
    setting: Setting, scheme: Scheme = "paper", repeats: int = 16, seed: int = 0, error: Error = squared_error
) -> Risk:
    """Run the whole experiment `repeats` times and average the error, of one kind or the other."""
    if repeats < 2:
        raise ValueError(f"an interval needs at least 2 repeats, got {repeats}")
    errors = list(itertools.islice(all_errors(setting, scheme, seed, error), repeats))
    mean = fmean(errors)
    half = half_width(errors)
    return Risk(setting, scheme, mean, mean - half, mean + half, repeats)


def all_errors(
    setting: Setting, scheme: Scheme = "paper", seed: int = 0, error: Error = squared_error
) -> Iterator[float]:
    """Yield the error of one whole experiment of n nodes after the other, without end."""
    theta = setting.theta()
    rng = numpy_rng(seed, "risk", scheme, *setting.key())
    while True:
        where, values = estimate(sample(theta, setting.n, rng), theta, setting.k, scheme, rng)
        yield error(where, values, theta)


def exact(setting: Setting, scheme: Scheme = "paper") -> float:
    """Return the risk by the error formula of the proof, before it is bounded.

    For the paper's scheme that is (E[N max(1, N / k')] - sum theta_j^2) / n, with N the number of ones; with
    amplitudes, for a flat theta, the mean of their squares times the first term.
    """
    theta = setting.theta()
    kept = kept_ones(theta, setting.k, scheme)
    if scheme == "lowest" or (
        setting.spread and (scheme == "top" or (scheme == "paper" and not theta.is_flat))
    ):
        raise ValueError(f"there is no formula for {scheme} at {setting}; use measure")
    if scheme == "random":
        return (theta.weighted(theta.levels) * theta.d / kept - theta.squares) / setting.n
    if scheme == "central":
        return (theta.weighted(theta.levels) - theta.squares) / setting.n
    law = theta.count_law()
    ones = np.arange(len(law))
    second = float((law * ones * np.maximum(1.0, ones / kept)).sum())
    if theta.amplitudes is not None:
        second = theta.weighted(np.array([second / theta.d]))
    return (second - theta.squares) / setting.n


@dataclass(frozen=True)
class Slope:
    """A slope on log-log axes with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def fit(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit log y = slope log x + constant by least squares; the interval is from the scatter of the points."""
    if len(x) < 3:
        raise ValueError(f"a slope with an interval needs at least 3 points, got {len(x)}")
    result = stats.linregress(np.log(x), np.log(y))
    half = float(t_quantile(len(x) - 2) * result.stderr)
    return Slope(float(result.slope), float(result.slope) - half, float(result.slope) + half)


def grid() -> list[Setting]:
    """Return more than 100 settings that meet the assumptions of both theorems."""
    found: list[Setting] = []
    for d, share, part, factor in itertools.product(
        (64, 256, 1024, 4096), (1 / 64, 1 / 16, 1 / 4, 1 / 2), (0.0, 0.15, 0.5, 1.0), (1, 4)
    ):
        s = share * d
        low, high = 2 * d.bit_length(), int(s * math.log2(d))  # whole bits: 2 log d is not enough for k' = 1
        k = round(low * (high / low) ** part) if high >= low else 0
        n = factor * math.ceil(d * math.log2(d / s) / k) if k else 0
        families = ("flat", "cube") if factor == 1 else ("flat",)
        for family in families:
            setting = Setting(d, s, n, k, family)
            met = k and holds(check_theorem_1, d, s, n, k)
            if met and holds(check_theorem_2, d, s, n, k) and setting not in found:
                found.append(setting)
    return found
