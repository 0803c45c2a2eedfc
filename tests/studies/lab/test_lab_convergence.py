"""Algorithm 1 on the problem with known constants stays below Theorem 3."""

import math

import pytest
import torch

from rtopk import RandomK, RTopK
from rtopk.seed import generator
from rtopk.studies import lab as bounds
from rtopk.studies.lab.convergence import Problem, compare, run
from rtopk.studies.lab.risk import fit

PROBLEM = Problem(d=40, nodes=2)


def value(problem, node, w):
    x2 = (w - problem.centres()[node]) ** 2
    return (problem.scales() * x2 / (1 + x2)).sum()


def gradient(problem, node, w):
    w = w.clone().requires_grad_()
    return torch.autograd.grad(value(problem, node, w), w)[0]


def test_constants_hold_and_are_attained():
    """Autograd at many points: no gradient above G, no curvature above L; both reached at the named points."""
    a, c = PROBLEM.scales(), PROBLEM.centres()
    rng = generator(0)
    for _ in range(300):
        w = 3 * torch.randn(40, generator=rng, dtype=torch.float64)
        v = w + 0.5 * torch.randn(40, generator=rng, dtype=torch.float64)
        g, h = gradient(PROBLEM, 1, w), gradient(PROBLEM, 1, v)
        assert float(g.square().sum()) + PROBLEM.sigma**2 <= PROBLEM.G**2
        assert float((g - h).norm()) <= PROBLEM.L * float((w - v).norm())
    steepest = gradient(PROBLEM, 1, c[1] + 1 / math.sqrt(3))
    assert float(steepest.square().sum()) + PROBLEM.sigma**2 == pytest.approx(PROBLEM.G**2)
    step = torch.zeros(40, dtype=torch.float64)
    step[0] = 1e-6
    assert float(gradient(PROBLEM, 1, c[1] + step)[0]) / 1e-6 == pytest.approx(PROBLEM.L, rel=1e-6)
    assert a.max() == 1.0


def test_the_minimum_is_one():
    """Descent from many points at once finds nothing lower than the grid, and comes as low."""
    a, c = PROBLEM.scales(), PROBLEM.centres()
    w = 0.5 * torch.randn(20, 1, 40, generator=generator(1), dtype=torch.float64)
    for _ in range(2000):
        x = w - c  # (20, n, d)
        w = w - (2 * x / (1 + x.square()).square()).mean(1, keepdim=True) / 2
    found = ((w - c).square() / (1 + (w - c).square())).mean(1).min(0).values  # (d,)
    assert float((a * found).sum()) == pytest.approx(PROBLEM.minimum(), abs=1e-5)


def test_density_one_is_plain_sgd():
    """Against a loop written here, with the same noise; payloads carry fp32, hence the tolerance."""
    rate, steps = 1.0, 50
    found, sent = run(PROBLEM, RTopK(nodes=2), 40, steps, rate, seed=4)
    w, total = PROBLEM.start(), 0.0
    rng = generator(4, "noise", steps)
    for _ in range(steps):
        exact = torch.stack([gradient(PROBLEM, i, w) for i in range(2)])
        total += float(exact.mean(0).square().sum())
        noise = (2.0 * torch.randint(2, (2, 40), generator=rng) - 1.0) / math.sqrt(40)
        w = w - rate / math.sqrt(steps) * (exact + noise).mean(0)
    assert found == pytest.approx(total / steps, rel=1e-4)
    assert sent > 50 * 40 * 4


@pytest.mark.slow
def test_theorem_3_is_never_crossed():
    for problem in (PROBLEM, Problem(d=40, nodes=1, sigma=0.2, spread=0.0), Problem(d=20, nodes=2, batch=4)):
        horizons = (130, 300)
        outcomes = compare(problem, (0.05, 0.3, 1.0), horizons)
        outcomes += compare(problem, (0.05, 0.3), horizons, C_hat=0.5, random=True)
        assert len(outcomes) == 10
        for outcome in outcomes:
            assert 0.0 < outcome.largest < sum(outcome.bound), outcome


@pytest.mark.slow
def test_slope_in_the_horizon():
    """The first term's -1/2, within 0.1, at densities 1 and 0.2."""
    horizons = (150, 400, 1000)
    outcomes = compare(PROBLEM, (0.2, 1.0), horizons)
    for k in (8, 40):
        slope = fit(horizons, [o.measured for o in outcomes if o.k == k]).value
        assert abs(slope + 0.5) < 0.1, (k, slope)


@pytest.mark.slow
def test_what_sparsifying_costs_falls_with_k():
    """Random-k keeps the gradients longest, and its cost falls steeply in k; rTop-k pays far less."""
    quiet = Problem(d=40, nodes=3, sigma=0.1)
    full = run(quiet, RandomK(), 40, 600, 2.0, 0)[0]
    cost = {k: run(quiet, RandomK(), k, 600, 2.0, 0)[0] - full for k in (4, 8, 16)}
    assert cost[4] > 2 * cost[8] > 4 * cost[16] > 0
    assert run(quiet, RTopK(nodes=3), 4, 600, 2.0, 0)[0] - full < cost[4] / 2


def test_theorem_3_by_hand():
    first, second = bounds.theorem_3(gap=2, L=1, G=3, B=1, n=4, T=100, k=5, d=10, C_hat=2.0)
    assert first == pytest.approx((2 / 2 + 2 * 9 / 4) * 4 / 10)
    assert second == pytest.approx(8 * (4 * 3 + 1) * 4 * 9 / 100)
    assert sum(bounds.corollary(2, 1, 3, 1, 4, 100, 10, 10)) == pytest.approx(
        8 * math.sqrt(2 * 9 / 400) + 8 * 4 * 2 / 100
    )
    with pytest.raises(bounds.AssumptionError, match="raise T to 16 or lower C_hat"):
        bounds.theorem_3(gap=2, L=1, G=3, B=1, n=4, T=15, k=5, d=10, C_hat=2.0)
    with pytest.raises(bounds.AssumptionError, match="1 <= k <= d = 10, got k=11"):
        bounds.proposition_1(11, 10)
    with pytest.raises(ValueError, match="d=1"):
        Problem(d=1)
