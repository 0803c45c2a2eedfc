"""Algorithm 1 on a smooth non-convex problem whose L, G and f* are known, against Theorem 3.

Node i has f_i(w) = sum_j a_j phi(w_j - c_ij) with phi(x) = x^2 / (1 + x^2), and its stochastic gradient adds
signs of size sigma / sqrt(d). |phi'| <= 3 sqrt(3) / 8 and -1/2 <= phi'' <= 2 are attained, so
L = 2 max a_j and G^2 = (27/64) sum a_j^2 + sigma^2 exactly. The nodes' minima c_ij differ, so their residuals
do not die out. The algorithm itself is the library's `Sparsifier` and `average`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.aggregate import average
from rtopk.seed import generator
from rtopk.select import RandomK, RTopK, Selector
from rtopk.sparsifier import Sparsifier, entries_sent
from rtopk.studies.lab import corollary_rate, theorem_3
from rtopk.studies.lab.risk import Slope, fit

STEEPEST = 27 / 64  # max phi'^2


@dataclass(frozen=True)
class Problem:
    """The problem of n nodes in d dimensions; `spread` is how far the nodes' minima lie apart."""

    d: int = 100
    nodes: int = 4
    sigma: float = 1.0
    spread: float = 0.5
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.d < 2 or self.nodes < 1 or self.batch < 1 or min(self.sigma, self.spread) < 0:
            raise ValueError(
                f"need d >= 2, nodes, batch >= 1 and sigma, spread >= 0, got d={self.d}, nodes={self.nodes}, "
                f"batch={self.batch}, sigma={self.sigma}, spread={self.spread}"
            )

    def scales(self) -> Tensor:
        """Return a, falling from 1 like a power: skewed, as gradients are."""
        return torch.arange(1, self.d + 1, dtype=torch.float64).pow(-0.5)

    def centres(self) -> Tensor:
        """Return the nodes' minima, (n, d), within the spread."""
        rng = generator(self.seed, "centres", self.d, self.nodes)
        return self.spread * (2 * torch.rand(self.nodes, self.d, generator=rng, dtype=torch.float64) - 1)

    @property
    def L(self) -> float:  # noqa: N802
        """The smoothness constant of every f_i."""
        return 2.0 * float(self.scales().max())

    @property
    def G(self) -> float:  # noqa: N802
        """The root of the bound on the second moment of one sample's gradient."""
        return math.sqrt(STEEPEST * float(self.scales().square().sum()) + self.sigma**2)

    def start(self) -> Tensor:
        """Return w^0: every coordinate at 1.5, on the slope."""
        return torch.full((self.d,), 1.5, dtype=torch.float64)

    def value(self, w: Tensor) -> float:
        """Return f(w)."""
        x2 = (w - self.centres()).square()
        return float((self.scales() * x2 / (1 + x2)).sum() / self.nodes)

    def minimum(self) -> float:
        """Return f*: the coordinates are separate, and each minimum lies among the nodes' minima.

        The grid can only overestimate f*, by less than d L h^2 / 8 with h its step, which makes the bound
        a little harder to keep.
        """
        a, c = self.scales().numpy(), self.centres().numpy()
        low, high = c.min(axis=0), c.max(axis=0)
        best = np.full(self.d, np.inf)
        for part in np.linspace(0.0, 1.0, 2001):
            x2 = np.square(low + part * (high - low) - c)
            best = np.minimum(best, (x2 / (1 + x2)).mean(axis=0))
        return float((a * best).sum())

    def gap(self) -> float:
        """Return f(w^0) - f*."""
        return self.value(self.start()) - self.minimum()


@dataclass(frozen=True)
class Outcome:
    """One horizon T and one k: what was measured, and the two terms of the bound."""

    T: int
    k: int
    d: int
    selector: str
    measured: float  # mean over t (that is E over z_T) and over seeds of || grad f(w^t) ||^2
    largest: float  # the largest of the seeds' means
    bound: tuple[float, float]
    bytes_sent: int  # by one node in one run


def run(
    problem: Problem, selector: Selector, k: int, T: int, C_hat: float, seed: int,  # noqa: N803
    on_step: Callable[[], None] = lambda: None,
) -> tuple[float, int]:  # fmt: skip
    """Do T steps of Algorithm 1; return the mean of || grad f(w^t) ||^2 and the bytes one node sent."""
    a, c = problem.scales(), problem.centres()
    w = problem.start()
    nodes = [Sparsifier(selector, k / problem.d, seed=seed, node=i) for i in range(problem.nodes)]
    rng = generator(seed, "noise", T)
    size = problem.sigma / math.sqrt(problem.d * problem.batch)
    total, sent = 0.0, 0
    for step in range(T):
        x = w - c  # (n, d)
        exact = a * 2 * x / (1 + x.square()).square()  # (n, d), every node's grad f_i
        total += float(exact.mean(0).square().sum())
        # The mean of B random signs has variance 1 / B: one sign of that size has the same second moment.
        signs = 2.0 * torch.randint(2, exact.shape, generator=rng) - 1.0
        payloads = [
            node.compress(gradient, step) for node, gradient in zip(nodes, exact + size * signs, strict=True)
        ]
        sent += payloads[0].numel()
        vectors = [
            node.codec.decode(payload, size=problem.d) for node, payload in zip(nodes, payloads, strict=True)
        ]
        w = w - C_hat / math.sqrt(T) * average(vectors).double()
        on_step()
    return total / T, sent


def compare(
    problem: Problem, densities: Sequence[float], horizons: Sequence[int], seeds: int = 1,
    C_hat: float | None = None, random: bool = False,  # noqa: N803
    on_step: Callable[[], None] = lambda: None,
) -> list[Outcome]:  # fmt: skip
    """Run every density and horizon and hold each against Theorem 3; `random` takes r = d instead of n k."""
    gap, n, d = problem.gap(), problem.nodes, problem.d
    rate = corollary_rate(gap, problem.L, problem.G, problem.batch, n) if C_hat is None else C_hat
    selector: Selector = RandomK() if random else RTopK(nodes=n)
    outcomes = []
    for density in densities:
        k = entries_sent(d, density)
        for horizon in horizons:
            bound = theorem_3(gap, problem.L, problem.G, problem.batch, n, horizon, k, d, rate)
            runs = [run(problem, selector, k, horizon, rate, seed, on_step) for seed in range(seeds)]
            means = [mean for mean, _ in runs]
            name = "random-k" if random else "rtop-k"
            outcomes.append(Outcome(horizon, k, d, name, sum(means) / seeds, max(means), bound, runs[0][1]))
    return outcomes


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
    advance: Callable[[], None] = lambda: None,
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
