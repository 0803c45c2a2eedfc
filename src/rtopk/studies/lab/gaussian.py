"""For contrast: the Gaussian location model N(theta, sigma^2 I), dense and sparse, where bits grow with d.

The scheme (ours; the paper only cites the rate): nodes take turns over the coordinates, k each, and send the
sign bit of each of theirs. The centre inverts P(positive) = Phi(theta / sigma) and clips to the known box
[-sigma, sigma]. In the sparse variant it then sets to zero what is below sqrt(2 ln d) standard errors, and so
does the centralised estimator it is compared with. Counts of signs are binomial, so nothing is n x d.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rtopk.studies.lab.bernoulli import Floats, numpy_rng
from rtopk.studies.lab.risk import Setting, exact


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
        heard = np.full(d, n * k // d)  # how many nodes send this coordinate: they take turns
        heard[: n * k % d] += 1
        share = rng.binomial(heard, stats.norm.cdf(theta / sigma)) / np.maximum(heard, 1)
        inside = np.clip(share, stats.norm.cdf(-1.0), stats.norm.cdf(1.0))
        estimate = np.where(heard > 0, sigma * stats.norm.ppf(inside), 0.0)
        error = sigma * math.sqrt(math.pi / 2) / np.sqrt(np.maximum(heard, 1))
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
