"""`inspect` sees sparsity where there is some, and looks without touching."""

import pytest
import torch

from rtopk.seed import generator
from rtopk.studies.config import Config
from rtopk.studies.lab.arrival import overlap
from rtopk.studies.lab.gradients import Candidate, Inspector, describe, full_gradient, inspect
from rtopk.studies.train.loop import Run


def test_effective_sparsity():
    assert describe(torch.ones(100))["s"] == pytest.approx(100)
    assert describe(torch.eye(100)[3])["s"] == pytest.approx(1)
    gaussian = describe(torch.randn(100_000, generator=generator(0)))
    assert gaussian["s_over_d"] == pytest.approx(2 / 3.14159, abs=0.01)
    assert gaussian["energy_in_largest"]["0.1"] < 0.5
    with pytest.raises(ValueError, match="zero everywhere"):
        describe(torch.zeros(4))


def test_hill_finds_the_tail():
    """Pareto with index 2: the estimate of 1000 largest has a standard error of 3 %; this allows six."""
    magnitudes = torch.rand(100_000, generator=generator(1), dtype=torch.float64).pow(-1 / 2)
    assert describe(magnitudes)["tail_index"] == pytest.approx(2.0, rel=0.2)


def test_overlap():
    a, b = torch.tensor([9.0, 8, 1, 0]), torch.tensor([9.0, 0, 8, 1])
    assert overlap([a, a], 2) == 1.0
    assert overlap([a, b], 2) == 0.5


def watched(make, rounds=15, d=2000, nodes=4):
    inspector = Inspector(nodes, d, 0.02, (0.005, 0.2))
    rng = generator(2)
    for _ in range(rounds):
        gradients, true = make(rng, nodes, d)
        inspector.observe(gradients)
    inspector.look(rounds - 1, gradients, true)
    return inspector


def sparse(rng, nodes, d):
    """The paper's model, perturbed: theta is large on 200 coordinates."""
    theta = torch.zeros(d)
    theta[:200] = 0.5
    noise = 0.02 * torch.randn(nodes, d, generator=rng)
    return [torch.bernoulli(theta, generator=rng) + z for z in noise], theta


def dense(rng, nodes, d):
    true = 0.1 * torch.randn(d, generator=generator(3))
    return [true + torch.randn(d, generator=rng) for _ in range(nodes)], true


def test_the_premise_holds_on_the_papers_model_and_not_on_gaussians():
    good, bad = watched(sparse).verdict(), watched(dense).verdict()
    assert good["parts"]["skewed"]
    assert good["parts"]["beats_random_k_unbiased"]
    assert good["overlap_over_chance"] > 3
    assert bad["premise"] == "does not hold"
    assert not bad["parts"]["skewed"]
    assert not bad["parts"]["nodes_agree"]


def test_lag_is_the_residual():
    inspector = watched(sparse)
    for plan, nodes in inspector.candidates.items():
        residual = torch.stack([node.memory.residual for node in nodes]).mean(0)
        expected = float(residual.square().sum() / inspector.due.square().sum())
        assert inspector.lag(plan) == pytest.approx(expected, rel=1e-3)


def test_schemes_are_compared_at_equal_bytes():
    """Positions of a random choice cost more bits, so at the same k the schemes differ by 3 % and more."""
    inspector = watched(lambda rng, nodes, d: sparse(rng, nodes, d), d=20_000)
    rows = inspector.looks[0]["schemes"]
    sizes = [row["bytes"] for row in rows]
    assert max(sizes) <= 1.02 * min(sizes)
    assert len({row["k"] for row in rows}) > 1


def test_recommendation_is_the_least_density_within_tolerance():
    inspector = watched(sparse)
    advice = inspector.recommend()
    assert advice["k"] <= advice["r"] <= 2000
    assert advice["scheme"] == "top-k"
    for plan in inspector.candidates:
        if plan.r_over_k == 1 and plan.density < advice["density"]:
            assert inspector.lag(plan) > inspector.tolerance
        if plan.r_over_k == 1 and plan.density == advice["density"]:
            assert inspector.lag(plan) == advice["lag"] <= inspector.tolerance
    inspector.tolerance = 1e-9
    strict = inspector.recommend()
    assert strict["density"] == 0.2
    assert not strict["within_tolerance"]


def test_refusals():
    inspector = Inspector(2, 10, 0.1)
    with pytest.raises(ValueError, match="expected 2 gradients of 10 entries, got 1"):
        inspector.observe([torch.zeros(10)])
    assert inspector.step == -1
    with pytest.raises(ValueError, match="nothing was looked at"):
        inspector.verdict()
    with pytest.raises(ValueError, match="tolerance"):
        Inspector(2, 10, 0.1, tolerance=2.0)
    assert Candidate(0.1, 1.0).name(10) == "top-k"
    assert Candidate(0.1, 10.0).name(10) == "random-k"


def test_looking_changes_nothing_and_the_true_gradient_is_true():
    config = Config(method="rtop-k", nodes=3, rounds=6, batch=16)
    alone, watched_run = Run(config), Run(config)
    inspector = Inspector(3, alone.layout.size, 0.01)
    inspect(watched_run, inspector, [0, 3])
    for _ in range(4):
        alone.advance()
    assert torch.equal(alone.vector(), watched_run.vector())
    assert [look["round"] for look in inspector.looks] == [0, 3]
    inputs = torch.cat([node.shard.inputs for node in alone.nodes])
    targets = torch.cat([node.shard.targets for node in alone.nodes])
    loss = alone.task.loss(alone.model, (inputs, targets))
    gradients = torch.autograd.grad(loss, list(alone.parameters.values()))
    expected = alone.layout.flatten(dict(zip(alone.parameters, gradients, strict=True)))
    torch.testing.assert_close(full_gradient(alone), expected, rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="rounds must be in \\[4, 6\\), got \\[2\\]"):
        inspect(watched_run, inspector, [2])
    with pytest.raises(ValueError, match="distributed setting, got federated"):
        inspect(Run(Config(setting="federated")), inspector, [0])
