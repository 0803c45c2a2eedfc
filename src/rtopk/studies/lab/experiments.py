"""The experiments behind `rtopk lab risk`, `bounds` and `convergence`: settings in, numbers out.

Each study runs in well under a minute with its defaults; progress is one call per piece of work.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rtopk.seed import generator
from rtopk.studies.lab import bounds
from rtopk.studies.lab.bernoulli import flat, numpy_rng, sample
from rtopk.studies.lab.convergence import Outcome, Problem, compare
from rtopk.studies.lab.encoder import Encoder
from rtopk.studies.lab.gaussian import bits_needed
from rtopk.studies.lab.risk import SCHEMES, Risk, Scheme, Setting, Slope, fit, grid, measure

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
class RiskStudy:
    """Sweeps over k, n, s, d; slopes in the regime; bits used; bits needed."""

    base: Setting
    sweeps: list[Sweep]
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
            bounds.check_theorem_1(setting.d, setting.s, setting.n, setting.k)
            means.append(measure(setting, repeats=repeats, seed=seed).mean)
            advance()
        slopes[axis] = fit(values, means)
    return slopes


def study_risk(base: Setting, repeats: int = 12, seed: int = 0, advance: Advance = lambda: None) -> RiskStudy:
    """Sweep k, n, s and d around a setting, for every scheme."""
    bounds.check_theorem_1(base.d, base.s, base.n, base.k)
    sweeps = []
    for axis in ("k", "n", "s", "d"):
        risks: dict[Scheme, list[Risk]] = {scheme: [] for scheme in SCHEMES}
        upper, lower = [], []
        values = _axis(base, axis)
        for value in values:
            setting = replace(base, **{axis: value})  # type: ignore[arg-type]
            arguments = (setting.d, setting.s, setting.n, setting.k)
            upper.append(bounds.theorem_1(*arguments))
            met = bounds.holds(bounds.check_theorem_2, *arguments)
            lower.append(bounds.theorem_2(*arguments) if met else 0.0)
            for scheme in SCHEMES:
                risks[scheme].append(measure(setting, scheme, repeats, seed))
            advance()
        slopes = {scheme: fit(values, [risk.mean for risk in found]) for scheme, found in risks.items()}
        sweeps.append(Sweep(axis, risks, upper, lower, slopes))
    regime = regime_slopes(seed=seed, advance=advance)
    used = bits_used(advance=advance)
    needed: dict[str, list[tuple[int, int | None]]] = {}
    for model in MODELS:
        needed[model] = [(d, bits_needed(d, 16, 4000, model)) for d in (256, 1024, 4096, 16384, 65536)]
        advance()
    return RiskStudy(base, sweeps, regime, used, needed)


def steps_of_risk(base: Setting) -> int:
    """Count the calls of `advance` in a risk study."""
    return sum(len(_axis(base, axis)) for axis in "knsd") + 12 + 1 + len(MODELS)


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
        return self.c >= bounds.LOWER and self.C <= bounds.UPPER

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "lower": bounds.LOWER, "upper": bounds.UPPER, "inside": self.inside}


def study_bounds(repeats: int = 16, seed: int = 0, advance: Advance = lambda: None) -> BoundsStudy:
    """Measure every setting of the grid and hold it between the two theorems."""
    rows = []
    for setting in grid():
        # Small experiments scatter more and cost less.
        times = repeats * max(1, min(64, 4096 // (setting.n * max(1, round(setting.s)))))
        risk = measure(setting, repeats=times, seed=seed).mean
        arguments = (setting.d, setting.s, setting.n, setting.k)
        upper, lower = bounds.theorem_1(*arguments), bounds.theorem_2(*arguments)
        rows.append(BoundsRow(setting, risk, risk / upper, risk / lower))
        advance()
    return BoundsStudy(rows, min(row.over_lower for row in rows), max(row.over_upper for row in rows))


@dataclass(frozen=True)
class ConvergenceStudy:
    """Algorithm 1 over horizons and densities, and the excess over dense of rTop-k and random-k."""

    problem: Problem
    outcomes: list[Outcome]
    slopes: dict[int, Slope]  # k -> slope in T
    excess_horizon: int
    excess: dict[str, list[tuple[int, float]]]  # (k, measured(k) - measured(d))
    excess_slopes: dict[str, Slope]
    second_terms: list[tuple[int, float]]

    def ks(self) -> list[int]:
        """Return the different k, ascending."""
        return sorted({outcome.k for outcome in self.outcomes})

    @property
    def never_crossed(self) -> bool:
        """Whether every seed of every run stayed below Theorem 3's bound."""
        return all(outcome.largest <= sum(outcome.bound) for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        constants = {"L": self.problem.L, "G": self.problem.G, "gap": self.problem.gap()}
        return {**asdict(self), "never_crossed": self.never_crossed, "constants": constants}


EXCESS = (0.1, 0.14, 0.2, 0.28)


def study_convergence(
    problem: Problem,
    densities: Sequence[float] = (0.05, 0.2, 1.0),
    horizons: Sequence[int] = (150, 400, 1000),
    seeds: int = 1,
    advance: Advance = lambda: None,
) -> ConvergenceStudy:
    """Run Algorithm 1 against Theorem 3, then see what sparsifying costs at the longest horizon.

    For the cost the noise is a tenth, so that the small excess stands out.
    """
    outcomes = compare(problem, densities, horizons, seeds, on_step=advance)
    slopes = {
        k: fit([o.T for o in outcomes if o.k == k], [o.measured for o in outcomes if o.k == k])
        for k in {o.k for o in outcomes}
    }
    quiet, longest = replace(problem, sigma=problem.sigma / 10), max(horizons)
    excess: dict[str, list[tuple[int, float]]] = {}
    found: dict[str, Slope] = {}
    terms: list[tuple[int, float]] = []
    [full] = compare(quiet, [1.0], [longest], seeds, on_step=advance)
    for random in (False, True):
        some = compare(quiet, EXCESS, [longest], seeds, random=random, on_step=advance)
        name = some[0].selector
        excess[name] = [(o.k, o.measured - full.measured) for o in some]
        terms = [(o.k, o.bound[1]) for o in some]
        if all(e > 0 for _, e in excess[name]):
            found[name] = fit([k for k, _ in excess[name]], [e for _, e in excess[name]])
    return ConvergenceStudy(problem, outcomes, slopes, longest, excess, found, terms)


def steps_of_convergence(densities: Sequence[float], horizons: Sequence[int], seeds: int) -> int:
    """Count the calls of `advance` in a convergence study."""
    return seeds * (len(densities) * sum(horizons) + (1 + 2 * len(EXCESS)) * max(horizons))
