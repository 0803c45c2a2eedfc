"""The estimator is unbiased, its error is the proof's formula, and it lies between the theorems."""

import itertools
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rtopk import rtop_k, top_k
from rtopk.seed import generator
from rtopk.studies import lab as bounds
from rtopk.studies.lab.bernoulli import FAMILIES, densify, flat, numpy_rng, perturb, quantise, sample
from rtopk.studies.lab.encoder import Encoder
from rtopk.studies.lab.experiments import (
    GaussianSetting,
    bits_needed,
    bits_used,
    gaussian_risk,
    regime_slopes,
    study_amplitudes,
    study_bounds,
)
from rtopk.studies.lab.risk import (
    Setting,
    all_errors,
    estimate,
    exact,
    fit,
    grid,
    kept_ones,
    measure,
    missed,
    receive,
    squared_error,
)

FALSE_ALARM = 1e-6


def mean_estimate(theta, k, scheme, nodes):
    """The mean of estimates of n nodes each is the estimate of all their nodes."""
    rng = numpy_rng(1, scheme)
    where, values = estimate(sample(theta, nodes, rng), theta, k, scheme, rng)
    full = np.zeros(theta.d)
    full[where] = values
    return full


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("scheme", ["paper", "random", "central"])
def test_unbiased(scheme, signed):
    """50000 nodes, false alarm 1e-6 over 40 coordinates; finds a bias of 0.05 where theta is about 0.25."""
    theta = FAMILIES["cube"](40, 12.0)
    theta = theta.with_signs(numpy_rng(2)) if signed else theta
    k, n = 24, 50_000
    kept = kept_ones(theta, k, scheme)
    # A received one counts at most `most`, so a coordinate's variance is at most theta x most.
    most = {"paper": 40 / kept, "random": 40 / kept, "central": 1.0}[scheme]
    limit = stats.norm.isf(FALSE_ALARM / 80) * np.sqrt(np.abs(theta.dense()) * most / n)
    assert limit.max() < 0.05
    assert (np.abs(mean_estimate(theta, k, scheme, n) - theta.dense()) < limit).all()


def test_truncation_is_biased():
    """What the test above would say of the rival: the last coordinates are never heard of."""
    theta = flat(40, 12.0)
    found = mean_estimate(theta, 24, "lowest", 20_000)
    assert found[:3] == pytest.approx(theta.dense()[:3], abs=0.03)
    assert found[-1] < theta.dense()[-1] / 10


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["paper", "top", "random", "central"])
def test_error_formula(scheme, family, signed):
    """400 experiments each, false alarm 1e-6 in all; finds a risk that is off by 12 %."""
    setting = Setting(200, 20.0, 10, 60, family, signed)
    errors = np.array(list(itertools.islice(all_errors(setting, scheme, seed=3), 400)))
    standard = errors.std(ddof=1) / 20
    expected = exact(setting, scheme)
    limit = stats.t.isf(FALSE_ALARM / 64, 399) * standard
    assert abs(errors.mean() - expected) <= limit + 1e-12
    assert limit < 0.12 * expected or standard < 1e-12


def test_error_formula_with_amplitudes():
    """As above. Top-k has no formula there, and is worse: it answers too much for large ones, nothing for small."""
    setting = Setting(200, 20.0, 200, 60, spread=3.0)
    for one, scheme in (
        (setting, "paper"),
        (setting, "random"),
        (replace(setting, family="power"), "central"),
    ):
        errors = np.array(list(itertools.islice(all_errors(one, scheme, seed=3), 400)))
        limit = stats.t.isf(FALSE_ALARM / 6, 399) * errors.std(ddof=1) / 20
        assert abs(errors.mean() - exact(one, scheme)) <= limit < 0.12 * exact(one, scheme)
    assert exact(setting) == pytest.approx(
        np.square(setting.theta().amplitudes).mean() * exact(Setting(200, 20.0, 200, 60)), rel=1e-9
    )
    top = measure(setting, "top", 20)
    assert top.low > 2 * exact(setting)
    bias = mean_estimate(setting.theta(), 60, "top", 20_000) - setting.theta().dense()
    order = np.argsort(setting.theta().amplitudes)
    assert (bias[order[:50]] < 0).all()
    assert (bias[order[-10:]] > 0).all()
    for refused, scheme in (
        (setting, "top"),
        (setting, "lowest"),
        (replace(setting, family="power"), "paper"),
    ):
        with pytest.raises(ValueError, match=f"there is no formula for {scheme} at"):
            exact(refused, scheme)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_top_is_the_librarys_top_k_of_the_perturbed_vector(spread):
    """What arrives of a node, as a category, both ways; false alarm 1e-6 each.

    20000 against 20000 draws; finds a category of probability 0.02 that is off by a fifth. Without a spread of the
    amplitudes it is also the paper's draw.
    """
    setting = Setting(7, 3.5, 1, 8, signed=True, spread=spread)
    theta, kept, times = setting.theta(), 2, 20_000
    (ones,) = sample(theta, times, numpy_rng(8, "library"))
    observed = np.abs(perturb(densify(ones, theta), numpy_rng(9)))
    taken = np.sort(np.argsort(-observed, axis=1)[:, :kept], axis=1)
    for row, at in zip(observed[:200], taken, strict=False):  # a call for each of all would take long
        assert top_k(torch.from_numpy(row), kept).tolist() == at.tolist()
    tables = [Counter(tuple(at[row[at] > 0.5]) for at, row in zip(taken, observed, strict=True))]
    for scheme in ("top", "paper"):
        (ones,) = sample(theta, times, numpy_rng(8, scheme))
        arrived, _ = receive(ones, theta, kept, scheme, numpy_rng(10, scheme))
        tables.append(Counter(tuple(sorted(support)) for support in arrived.supports()))
    keys = list(set().union(*tables))
    assert len(keys) == 1 + 7 + 21
    library, top, paper = ([table[key] for key in keys] for table in tables)
    assert stats.chi2_contingency([library, top]).pvalue > FALSE_ALARM
    assert (stats.chi2_contingency([library, paper]).pvalue > FALSE_ALARM) == (spread == 0.0)


@given(st.lists(st.floats(-10, 10), min_size=6, max_size=6), st.floats(0.01, 100))
def test_what_is_missed_is_the_error_at_the_best_length(values, factor):
    theta = Setting(6, 3.0, 1, 8, "power", signed=True, spread=2.0).theta()
    where, found = np.arange(6), np.array(values)
    truth = theta.dense()
    part = missed(where, found, theta)
    assert -1e-12 <= part <= 1.0
    assert missed(where, factor * found, theta) == pytest.approx(part, abs=1e-9)
    if np.square(found).sum() > 1e-6:
        best = found @ truth / (found @ found)
        assert part == pytest.approx(squared_error(where, best * found, theta) / theta.squares, abs=1e-9)
    assert missed(where, truth, theta) == pytest.approx(0.0, abs=1e-12)
    assert missed(where, np.zeros(6), theta) == 1.0


def test_the_draw_beats_top_k_where_amplitudes_differ_and_nodes_are_many():
    """With one amplitude the two are one; with few nodes top-k is better; it turns at the paper's condition."""
    rows = {
        (row.setting.family, row.setting.spread, row.reach): row
        for row in study_amplitudes(Setting(512, 16, 1, 60), repeats=8)
    }
    assert len(rows) == 2 * 4 * 5
    for family, reach in itertools.product(("flat", "power"), (1 / 32, 1 / 8, 1, 4, 16)):
        same = rows[family, 0.0, reach]
        assert abs(same.paper.mean - same.top.mean) < 4 * max(same.paper.high - same.paper.low, 0.002)
    for spread in (1.0, 4.0):
        assert rows["flat", spread, 1 / 8].better == "top"
        assert rows["flat", spread, 4].better == "paper"
        assert rows["flat", spread, 16].better == "paper"
        assert rows["power", spread, 1].better == "paper"
        stuck = rows["flat", spread, 16].top.mean / rows["flat", spread, 4].top.mean
        assert stuck > 2 * rows["flat", spread, 16].paper.mean / rows["flat", spread, 4].paper.mean


def test_the_quoted_theorem_4_needs_the_k_that_it_leaves_out():
    """As printed, d^2 / (C N^2 n + ...), it would say s^2 log(d/s) / n for any k; the paper's scheme is far below.

    With k = s log d the risk is of order s / n, so the ratio falls like 1 / (s log(d/s)), and no constant holds.
    """
    ratios = []
    for s in (16, 64, 256, 1024):
        d, n = 64 * s, 1000
        setting = Setting(d, s, n, int(s * np.log2(d)))
        ratios.append(exact(setting) / (s**2 * np.log2(d / s) / n))
    assert fit([16, 64, 256, 1024], ratios).high < -0.9
    assert ratios[-1] < 1e-3


def test_fast_path_has_the_law_of_the_bits():
    """What the centre learns of one node, as a category, both ways; false alarm 1e-6.

    20000 against 20000 draws; finds a category of probability 0.02 that is off by a fifth.
    """
    theta, k, times = flat(7, 3.5), 8, 20_000
    encoder = Encoder(7, k)
    assert encoder.kept == 2
    tables = []
    for path in ("bits", "fast"):
        (ones,) = sample(theta, times, numpy_rng(4, path))
        seen = {}
        if path == "bits":
            rng = generator(4)
            for support in ones.supports():
                got = encoder.decode(encoder.encode(support, rng))
                key = (got.count, tuple(got.support.tolist()))
                seen[key] = seen.get(key, 0) + 1
        else:
            arrived, weights = receive(ones, theta, encoder.kept, "paper", numpy_rng(5))
            for node, support in enumerate(arrived.supports()):
                key = (int(ones.counts[node]), tuple(sorted(support.tolist())))
                seen[key] = seen.get(key, 0) + 1
            assert weights == pytest.approx(np.maximum(1, ones.counts[arrived.node] / 2))
        tables.append(seen)
    keys = [key for key in set(tables[0]) | set(tables[1]) if sum(t.get(key, 0) for t in tables) >= 20]
    assert len(keys) > 80
    table = [[t.get(key, 0) for key in keys] for t in tables]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_bits_estimate_has_the_exact_risk_also_when_refined():
    """Signed, scaled and perturbed samples through real bits: same formula. False alarm 1e-6, finds 15 %."""
    setting = Setting(60, 10.0, 20, 40, "flat", signed=True)
    theta, scale = setting.theta(), 3.0
    encoder = Encoder(60, 40, signed=True)
    rng, draws = numpy_rng(6), generator(6)
    errors = []
    for _ in range(150):
        (ones,) = sample(theta, setting.n, rng)
        observed = scale * perturb(densify(ones, theta), rng)
        total = np.zeros(60)
        for row in quantise(observed, scale):
            support = np.flatnonzero(row)
            message = encoder.encode(support, draws, row[support].astype(np.int64))
            assert message.length <= 40
            got = encoder.decode(message)
            total[got.support] += got.signs * got.inverse_fraction()
        errors.append(np.square(scale * total / setting.n - scale * theta.dense()).sum())
    z = (np.mean(errors) - scale**2 * exact(setting)) / (np.std(errors, ddof=1) / np.sqrt(len(errors)))
    assert abs(z) < stats.t.isf(FALSE_ALARM / 2, len(errors) - 1)


def test_between_the_bounds_on_the_grid():
    study = study_bounds(repeats=3)
    assert len(study.rows) >= 100
    assert study.c >= bounds.LOWER
    assert study.C <= bounds.UPPER
    assert bounds.UPPER < bounds.PROVED


def test_formula_between_the_bounds_far_and_wide():
    """The exact risk needs no Monte Carlo, so d can go from 4 to 2^40, and every family below C x upper."""
    seen = 0
    for power, share, part in itertools.product(
        range(2, 41, 3), (1e-4, 0.01, 0.1, 0.5, 1.0), (0.0, 0.3, 1.0)
    ):
        d = 2**power
        s = max(2.0, share * d)
        low, high = 2 * d.bit_length(), s * power
        if high < low or s > 1e5:
            continue
        setting = Setting(d, s, 1, int(low * (high / low) ** part))
        upper = bounds.theorem_1(d, s, 1, setting.k)
        assert exact(setting) <= bounds.UPPER * upper
        seen += 1
        if d <= 4096:
            for family in FAMILIES:
                assert exact(Setting(d, s, 1, setting.k, family)) <= bounds.UPPER * upper
    assert seen > 60


def test_slopes_in_the_regime():
    slopes = regime_slopes(repeats=2)
    for axis, want in (("k", -1.0), ("n", -1.0), ("s", 2.0)):
        assert abs(slopes[axis].value - want) < 0.05 * abs(want), (axis, str(slopes[axis]))


def test_a_million_entries_and_a_thousand_nodes():
    """n x d doubles would be 8 GB."""
    setting = Setting(10**6, 1000, 1000, 4000)
    tracemalloc.start()
    found = measure(setting, repeats=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400e6
    assert found.mean == pytest.approx(exact(setting), rel=0.02)


def test_same_seed_same_risk():
    setting = Setting(500, 20.0, 10, 60)
    assert measure(setting, repeats=3, seed=1) == measure(setting, repeats=3, seed=1)
    assert measure(setting, repeats=3, seed=1).mean != measure(setting, repeats=3, seed=2).mean


def test_fit_reads_a_power():
    x = [1.0, 2.0, 4.0, 8.0]
    slope = fit(x, [3 * v**-1.5 for v in x])
    assert slope.value == pytest.approx(-1.5)
    assert slope.low <= slope.value <= slope.high
    with pytest.raises(ValueError, match="at least 3 points, got 2"):
        fit([1, 2], [1, 2])


def test_bits_used_never_exceed_k():
    rows = bits_used()
    assert all(row["used"] <= row["k"] for row in rows)
    assert max(row["used"] - row["k"] for row in rows) == 0


def test_bits_needed_grow_with_d_only_for_gaussians():
    """From d = 256 to 4096: Bernoulli like log d (times 1.5), Gaussians like d (times 16)."""
    growth = {}
    for model in ("bernoulli", "gaussian", "sparse gaussian"):
        growth[model] = bits_needed(4096, 16, 4000, model) / bits_needed(256, 16, 4000, model)
    assert growth["bernoulli"] < 2
    assert growth["gaussian"] == pytest.approx(16, rel=0.3)
    assert growth["sparse gaussian"] == pytest.approx(16, rel=0.4)


def test_gaussian_risk_is_the_textbook_one():
    """Centralised d sigma^2 / n, to 5 %: its standard error at 64 repeats of 1000 entries is 0.6 %."""
    assert gaussian_risk(GaussianSetting(1000, 500), None, 64) == pytest.approx(2.0, rel=0.05)


def test_assumptions_are_checked():
    for bad, words in (
        ((1024, 32, 100, 19), "20 to 320, got k=19; raise k"),
        ((1024, 32, 100, 321), "20 to 320, got k=321; lower k or raise s"),
        ((1024, 0, 100, 100), "got d=1024, s=0"),
    ):
        with pytest.raises(bounds.AssumptionError, match=words):
            bounds.theorem_1(*bad)
    with pytest.raises(bounds.AssumptionError, match="s <= d / 2 = 512, got s=600"):
        bounds.theorem_2(1024, 600, 100, 200)
    with pytest.raises(bounds.AssumptionError, match="raise n to 52 or k to 5120"):
        bounds.theorem_2(1024, 32, 1, 100)
    assert bounds.theorem_2(1024, 32, 52, 100) == pytest.approx(32 * 32 * 5 / 5200)
    assert bounds.theorem_1(1024, 32, 52, 100) == pytest.approx(32 * 32 * 10 / 5200)
    assert len(grid()) == len(set(grid()))


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=30), st.data())
def test_proposition_1(values, data):
    w = torch.tensor(values)
    r = data.draw(st.integers(1, len(values)))
    k = data.draw(st.integers(1, r))
    lost = bounds.lost_by_rtop_k(w, k, r)
    assert lost <= (1 - bounds.proposition_1(k, len(values))) * float(w.double().square().sum()) + 1e-9


def test_the_loss_of_rtop_k_is_the_formula():
    """2000 draws of the library's rtop_k; false alarm 1e-6, finds 1 %."""
    rng = generator(7)
    w = torch.randn(50, generator=rng, dtype=torch.float64)
    losses = []
    for _ in range(2000):
        rest = w.clone()
        rest[rtop_k(w, 5, 20, rng)] = 0.0
        losses.append(float(rest.square().sum()))
    z = (np.mean(losses) - bounds.lost_by_rtop_k(w, 5, 20)) / (np.std(losses) / np.sqrt(2000))
    assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)
