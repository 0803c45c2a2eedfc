"""Samples of the sparse Bernoulli model have its law, in every family and refinement."""

import numpy as np
import pytest
from scipy import stats

from rtopk.studies.lab.bernoulli import (
    FAMILIES,
    HUGE,
    Theta,
    densify,
    flat,
    numpy_rng,
    perturb,
    quantise,
    sample,
)

FALSE_ALARM = 1e-6


def drawn(theta, nodes, *key):
    (ones,) = sample(theta, nodes, numpy_rng(0, *key))
    return ones


@pytest.mark.parametrize("family", FAMILIES)
def test_families_keep_the_constraint(family):
    for d, s in ((10, 5), (1000, 3.5), (64, 32)):
        theta = FAMILIES[family](d, s)
        values = theta.dense()
        assert values.min() >= 0.0
        assert values.max() <= 1.0
        assert values.sum() <= s * (1 + 1e-9)
        assert theta.total == pytest.approx(values.sum())
        assert theta.squares == pytest.approx(np.square(values).sum())
    if family == "cube":
        assert values.min() >= 32 / 64 / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_coordinate_has_its_probability(family):
    """n = 40000: false alarm 1e-6 over all coordinates; finds one off by 0.02 (z > 8 at theta = 1/2)."""
    theta, n = FAMILIES[family](60, 12.0), 40_000
    ones = drawn(theta, n, family)
    heads = np.bincount(ones.coordinate, minlength=60)
    for count, probability in zip(heads, theta.dense(), strict=True):
        assert stats.binomtest(int(count), n, probability).pvalue > FALSE_ALARM / 60


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_ones_has_its_law(family):
    """False alarm 1e-6. Dependence between coordinates that moves the variance by 5 % is found."""
    theta, n = FAMILIES[family](60, 12.0), 40_000
    law = theta.count_law()
    assert law.sum() == pytest.approx(1.0)
    brute = np.array([1.0])
    for p in theta.dense():
        brute = np.convolve(brute, [1 - p, p])
    assert np.abs(law[: len(brute)] - brute).max() < 1e-12
    counts = np.bincount(drawn(theta, n, "count", family).counts, minlength=len(law))
    often = law * n >= 5
    assert counts[law < 1e-15].sum() == 0
    seen = [*counts[often], counts[~often].sum()]
    expected = [*(law[often] * n), max(n - (law[often] * n).sum(), 1e-9)]
    if expected[-1] < 5:  # too rare a rest joins its neighbour
        seen, expected = [*seen[:-2], sum(seen[-2:])], [*expected[:-2], sum(expected[-2:])]
    if len(seen) > 1:
        expected = np.array(expected) * n / sum(expected)
        assert stats.chisquare(seen, expected).pvalue > FALSE_ALARM


def test_ones_are_ordered_and_distinct_also_for_huge_d():
    for theta in (flat(500, 100), flat(2 * HUGE, 300), FAMILIES["power"](500, 100)):
        ones = drawn(theta, 200, "order", theta.d)
        assert ones.nodes == 200
        assert ones.counts.sum() == len(ones.node)
        for support in ones.supports():
            assert (np.diff(support) > 0).all()
        assert ones.coordinate.max() < theta.d


def test_huge_d_has_the_right_counts():
    """Mean of 2000 counts of variance 300; false alarm 1e-6; finds a mean off by 1 %."""
    counts = drawn(flat(2**60, 300), 2000, "huge").counts
    assert abs(counts.mean() - 300) / np.sqrt(300 / 2000) < stats.norm.isf(FALSE_ALARM / 2)


def test_chunks_hold_all_nodes():
    chunks = list(sample(flat(5000, 2500), 2000, numpy_rng(0)))
    assert len(chunks) > 1
    assert sum(chunk.nodes for chunk in chunks) == 2000


def test_perturbation_comes_off_again():
    """Refinements (i), (ii), (iii) together: after quantising, the very sample, not only its law."""
    rng = numpy_rng(3)
    theta = flat(80, 20).with_signs(rng)
    exact = densify(drawn(theta, 400, "signed"), theta)
    assert set(np.unique(exact)) == {-1.0, 0.0, 1.0}
    for scale in (1.0, 0.01, 250.0):
        observed = scale * perturb(exact, rng)
        assert len(np.unique(observed)) > 30_000  # continuous
        assert (quantise(observed, scale) == exact).all()
    with pytest.raises(ValueError, match="must be positive, got 0"):
        quantise(exact, 0.0)


def test_refusals():
    with pytest.raises(ValueError, match="sum to at most s=2"):
        Theta(4, 2.0, np.full(4, 0.9))
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        Theta(2, 2.0, np.array([0.5, 1.5]))
    with pytest.raises(ValueError, match="s must be in"):
        flat(10, 11)
    with pytest.raises(ValueError, match="at least one node"):
        next(sample(flat(10, 1), 0, numpy_rng(0)))
