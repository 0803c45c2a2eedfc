"""The studies behind `rtopk lab risk` and `bounds`: settings in, numbers out; and a contrast, the Gaussian model.

Each study runs in well under a minute with its defaults; progress is one call per piece of work.

In the Gaussian location model N(theta, sigma^2 I), dense and sparse, the bits grow with d. The scheme (ours; the
paper only cites the rate): nodes take turns over the coordinates, k each, and send the sign bit of each of
theirs. The centre inverts P(positive) = Phi(theta / sigma) and clips to the known box [-sigma, sigma]. In the
sparse variant it then sets to zero what is below sqrt(2 ln d) standard errors, and so does the centralised
estimator it is compared with. Counts of signs are binomial, so nothing is n x d.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from rtopk.seed import generator
from rtopk.studies.lab import LOWER, UPPER, check_theorem_1, check_theorem_2, holds, theorem_1, theorem_2
from rtopk.studies.lab.bernoulli import Floats, flat, numpy_rng, sample
from rtopk.studies.lab.encoder import Encoder
from rtopk.studies.lab.risk import (
    DENSE,
    SCHEMES,
    Risk,
    Scheme,
    Setting,
    Slope,
    exact,
    fit,
    grid,
    measure,
    missed,
)

Advance = Callable[[], None]
MODELS = ("bernoulli", "gaussian", "sparse gaussian")
REGIME = Setting(d=2**60, s=3000, n=50, k=4000)  # where the theorem's slopes are seen: k' << s, k' <<< d


@dataclass(frozen=True)
class Sweep:
    """Risk of every scheme along one axis, with both bounds (lower 0 where it does not apply)."""

    axis: str
    risks: dict[Scheme, list[Risk]]
    upper: list[float]
    lower: list[float]
    slopes: dict[Scheme, Slope]


@dataclass(frozen=True)
class Amplitude:
    """What the paper's draw and top-k miss of the truth, at the best length, where amplitudes differ."""

    setting: Setting
    reach: float  # n k over d log(d/s), which Theorem 2 wants to be at least 1
    paper: Risk
    top: Risk

    @property
    def better(self) -> str:
        """Name the scheme that misses less; nothing where the intervals meet."""
        if max(self.paper.low, self.top.low) <= min(self.paper.high, self.top.high):
            return ""
        return "paper" if self.paper.mean < self.top.mean else "top"


@dataclass(frozen=True)
class RiskStudy:
    """Sweeps over k, n, s, d; amplitudes; slopes in the regime; bits used; bits needed."""

    base: Setting
    sweeps: list[Sweep]
    amplitudes: list[Amplitude]
    regime: dict[str, Slope]  # axis -> slope of the paper's scheme at REGIME
    bits: list[dict[str, int]]
    needed: dict[str, list[tuple[int, int | None]]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def _axis(base: Setting, axis: str) -> list[float]:
    """Return values around the base that keep to Theorem 1's assumptions."""
    if axis == "k":
        low, high = 2.0 * base.d.bit_length(), base.s * math.log2(base.d)
        return [round(low * (high / low) ** (i / 6)) for i in range(6)]
    if axis == "n":
        return [base.n // 4, base.n // 2, base.n, 2 * base.n, 4 * base.n]
    if axis == "s":
        low, high = max(2.0, 1.05 * base.k / math.log2(base.d)), base.d / 2
        return [low * (high / low) ** (i / 5) for i in range(5)]
    first = 1 << math.ceil(math.log2(2 * base.s))
    most = 2 ** (base.k // 2 - 1)
    return [first << i for i in range(0, 12, 2) if first << i < most and (first << i) * 2 <= 1 << 24]


def regime_slopes(repeats: int = 2, seed: int = 0, advance: Advance = lambda: None) -> dict[str, Slope]:
    """Measure the slopes in k, n, s that Theorem 1 predicts as -1, -1, 2."""
    axes: dict[str, list[float]] = {
        "k": [4000, 8000, 16000, 32000],
        "n": [25, 50, 100, 200],
        "s": [1000, 2000, 4000, 8000],
    }
    slopes = {}
    for axis, values in axes.items():
        base = replace(REGIME, s=8000) if axis == "k" else REGIME
        means = []
        for value in values:
            setting = replace(base, **{axis: value})  # type: ignore[arg-type]
            check_theorem_1(setting.d, setting.s, setting.n, setting.k)
            means.append(measure(setting, repeats=repeats, seed=seed).mean)
            advance()
        slopes[axis] = fit(values, means)
    return slopes


def study_risk(base: Setting, repeats: int = 12, seed: int = 0, advance: Advance = lambda: None) -> RiskStudy:
    """Sweep k, n, s and d around a setting, for every scheme."""
    check_theorem_1(base.d, base.s, base.n, base.k)
    sweeps = []
    for axis in ("k", "n", "s", "d"):
        risks: dict[Scheme, list[Risk]] = {scheme: [] for scheme in SCHEMES}
        upper, lower = [], []
        values = _axis(base, axis)
        for value in values:
            setting = replace(base, **{axis: value})  # type: ignore[arg-type]
            arguments = (setting.d, setting.s, setting.n, setting.k)
            upper.append(theorem_1(*arguments))
            met = holds(check_theorem_2, *arguments)
            lower.append(theorem_2(*arguments) if met else 0.0)
            for scheme in SCHEMES:
                risks[scheme].append(measure(setting, scheme, repeats, seed))
            advance()
        slopes = {scheme: fit(values, [risk.mean for risk in found]) for scheme, found in risks.items()}
        sweeps.append(Sweep(axis, risks, upper, lower, slopes))
    amplitudes = study_amplitudes(base, max(2, repeats // 2), seed, advance)
    regime = regime_slopes(seed=seed, advance=advance)
    used = bits_used(advance=advance)
    needed: dict[str, list[tuple[int, int | None]]] = {}
    for model in MODELS:
        needed[model] = [(d, bits_needed(d, 16, 4000, model)) for d in (256, 1024, 4096, 16384, 65536)]
        advance()
    return RiskStudy(base, sweeps, amplitudes, regime, used, needed)


_SPREADS, _REACHES = (0.0, 0.25, 1.0, 4.0), (1 / 32, 1 / 8, 1, 4, 16)


def study_amplitudes(
    base: Setting, repeats: int = 6, seed: int = 0, advance: Advance = lambda: None
) -> list[Amplitude]:
    """Compare the paper's draw with top-k from few nodes to many, from equal amplitudes to different ones.

    In a flat theta all coordinates are alike; in one that falls like 1 / j the nodes agree on some. Beyond 2^24
    coordinates, which have no array of amplitudes, there are no rows.
    """
    rows: list[Amplitude] = []
    if base.d > DENSE:
        return rows
    for family, spread in itertools.product(("flat", "power"), _SPREADS):
        for reach in _REACHES:
            n = max(1, round(reach * base.d * math.log2(base.d / base.s) / base.k))
            setting = replace(base, n=n, family=family, spread=spread)
            schemes: tuple[Scheme, Scheme] = ("paper", "top")
            paper, top = (measure(setting, scheme, repeats, seed, missed) for scheme in schemes)
            rows.append(Amplitude(setting, reach, paper, top))
        advance()
    return rows


def steps_of_risk(base: Setting) -> int:
    """Count the calls of `advance` in a risk study."""
    return sum(len(_axis(base, axis)) for axis in "knsd") + 2 * len(_SPREADS) + 12 + 1 + len(MODELS)


def bits_used(
    d: int = 1000, s: float = 30, seed: int = 0, advance: Advance = lambda: None
) -> list[dict[str, int]]:
    """Encode samples at many k and return the bits of the longest message of each."""
    rng, draws = numpy_rng(seed, "bits"), generator(seed, "bits")
    supports = next(sample(flat(d, s), 8, rng)).supports()
    rows = []
    for k in range(2 * d.bit_length(), 300, 2):
        encoder = Encoder(d, k)
        used = max(encoder.encode(support, draws).length for support in supports)
        rows.append({"d": d, "k": k, "used": used, "kept": encoder.kept})
    advance()
    return rows


@dataclass(frozen=True)
class BoundsRow:
    """One setting of the grid: measured risk over each bound (constants 1)."""

    setting: Setting
    risk: float
    over_upper: float
    over_lower: float


@dataclass(frozen=True)
class BoundsStudy:
    """The whole grid, with the constants that it needs."""

    rows: list[BoundsRow]
    c: float  # least risk / Theorem 2
    C: float  # largest risk / Theorem 1

    @property
    def inside(self) -> bool:
        """Whether one fixed pair (LOWER, UPPER) encloses every setting."""
        return self.c >= LOWER and self.C <= UPPER

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "lower": LOWER, "upper": UPPER, "inside": self.inside}


def study_bounds(repeats: int = 16, seed: int = 0, advance: Advance = lambda: None) -> BoundsStudy:
    """Measure every setting of the grid and hold it between the two theorems."""
    rows = []
    for setting in grid():
        # Small experiments scatter more and cost less.
        times = repeats * max(1, min(64, 4096 // (setting.n * max(1, round(setting.s)))))
        risk = measure(setting, repeats=times, seed=seed).mean
        arguments = (setting.d, setting.s, setting.n, setting.k)
        upper, lower = theorem_1(*arguments), theorem_2(*arguments)
        rows.append(BoundsRow(setting, risk, risk / upper, risk / lower))
        advance()
    return BoundsStudy(rows, min(row.over_lower for row in rows), max(row.over_upper for row in rows))


@dataclass(frozen=True)
class GaussianSetting:
    """n nodes with one sample of d entries each; `s` nonzero means of half sigma, or all d if None."""

    d: int
    n: int
    s: int | None = None
    sigma: float = 1.0

    def theta(self) -> Floats:
        """Make the mean: +- sigma / 2 on s coordinates spread over the vector, or on all."""
        theta = np.zeros(self.d)
        places = np.arange(self.d) if self.s is None else np.linspace(0, self.d - 1, self.s).astype(int)
        theta[places] = self.sigma / 2 * (1 - 2 * (np.arange(len(places)) % 2))
        return theta


def gaussian_risk(setting: GaussianSetting, k: int | None, repeats: int = 8, seed: int = 0) -> float:
    """Measure the risk with k bits a node, or without a limit if k is None."""
    theta = setting.theta()
    label = "central" if k is None else k
    rng = numpy_rng(seed, "gaussian", setting.d, setting.n, setting.s or 0, label)
    total = 0.0
    for _ in range(repeats):
        total += float(np.square(_estimate(setting, theta, k, rng) - theta).sum())
    return total / repeats


def _estimate(setting: GaussianSetting, theta: Floats, k: int | None, rng: np.random.Generator) -> Floats:
    sigma, d, n = setting.sigma, setting.d, setting.n
    if k is None:
        estimate = theta + rng.normal(size=d) * sigma / math.sqrt(n)
        error = np.full(d, sigma / math.sqrt(n))
    else:
        if not 1 <= k <= d:
            raise ValueError(f"the one-bit scheme uses 1 to d = {d} bits a node, got {k}")
        senders = np.full(d, n * k // d)  # how many nodes send this coordinate: they take turns
        senders[: n * k % d] += 1
        share = rng.binomial(senders, stats.norm.cdf(theta / sigma)) / np.maximum(senders, 1)
        inside = np.clip(share, stats.norm.cdf(-1.0), stats.norm.cdf(1.0))
        estimate = np.where(senders > 0, sigma * stats.norm.ppf(inside), 0.0)
        error = sigma * math.sqrt(math.pi / 2) / np.sqrt(np.maximum(senders, 1))
    if setting.s is not None:
        estimate[np.abs(estimate) < error * math.sqrt(2 * math.log(d))] = 0.0
    return np.clip(estimate, -sigma, sigma)


def bits_needed(
    d: int, s: int, n: int, model: str, factor: float = 3.0, repeats: int = 16, seed: int = 0
) -> int | None:
    """Return the fewest bits a node for a risk of at most `factor` x centralised; None if none suffice.

    `model` is "bernoulli" (the paper's scheme, exact risk, flat theta), "gaussian" or "sparse gaussian".
    """
    if model == "bernoulli":
        goal = factor * exact(Setting(d, s, n, d), "central")
        low, high = 2 * d.bit_length() - 1, d + d.bit_length()
    elif model in ("gaussian", "sparse gaussian"):
        gaussian = GaussianSetting(d, n, s if model == "sparse gaussian" else None)
        goal = factor * gaussian_risk(gaussian, None, repeats, seed)
        low, high = 0, d
    else:
        raise ValueError(f"model must be bernoulli, gaussian or sparse gaussian, got {model!r}")

    def enough(k: int) -> bool:
        if model == "bernoulli":
            return exact(Setting(d, s, n, k)) <= goal
        return gaussian_risk(gaussian, k, repeats, seed) <= goal

    if not enough(high):
        return None
    while high - low > max(1, high // 100):  # to one percent
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
