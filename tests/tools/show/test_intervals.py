"""The statistics of the pages: against scipy, against published examples, and by the laws that they must keep."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from rtopk.tools.show.intervals import (
    ERROR,
    POINTS,
    SHARE,
    Lead,
    half_width,
    holm,
    judge,
    lead,
    margin,
    plus_minus,
    rules,
    welch,
)

scores = st.lists(
    st.tuples(*[st.floats(0.0, 100.0).map(lambda x: round(x, 3))] * 2), min_size=2, max_size=10
).map(lambda pairs: tuple(dict(enumerate(side)) for side in zip(*pairs, strict=True)))
p_values = st.lists(st.floats(0.0, 1.0), max_size=30)


def spread(one, other):
    return len({round(one[seed] - other[seed], 6) for seed in one}) > 1


def test_intervals_are_those_of_scipy():
    values, others = [90.1, 91.5, 90.7, 92.0], [88.0, 90.5, 89.1]
    low, high = stats.t.interval(0.95, 3, loc=0, scale=stats.sem(values))
    assert (-half_width(values), half_width(values)) == pytest.approx((low, high))
    found = stats.ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
    assert welch(values, others) == pytest.approx((found.high - found.low) / 2)


@given(scores)
def test_a_lead_is_scipys_paired_test_and_two_one_sided_ones(sides):
    one, other = sides
    assume(spread(one, other))
    found = lead(one, other, "accuracy")
    test = stats.ttest_rel(list(one.values()), list(other.values()))
    interval = test.confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((interval.low, interval.high))
    assert found.p_equal == pytest.approx(test.pvalue, abs=1e-12)
    differences = [one[seed] - other[seed] for seed in one]
    above = stats.ttest_1samp(differences, -POINTS, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, POINTS, alternative="less").pvalue
    assert found.p_apart == pytest.approx(max(above, below), abs=1e-12)
    assert found.welch == pytest.approx(welch(list(one.values()), list(other.values())))


def test_student_s_own_example():
    """Student (1908), after Cushny and Peebles: hours of sleep gained with two drugs by ten patients."""
    dextro = dict(enumerate((0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)))
    laevo = dict(enumerate((1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)))
    found = lead(laevo, dextro, "hours")
    assert (found.mean, found.p_equal) == (pytest.approx(1.58), pytest.approx(0.00283, abs=1e-5))
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert found.welch > 1.5  # unpaired, the same data show nothing
    assert found.p_apart > 0.5  # of a metric without a margin nothing is level


@given(scores, st.lists(st.floats(-50, 50), min_size=10, max_size=10))
def test_what_all_methods_gain_with_a_seed_changes_nothing_but_welchs_interval(sides, shift):
    one, other = sides
    assume(spread(one, other))
    moved = [{seed: score + shift[seed] for seed, score in side.items()} for side in sides]
    before, after = lead(one, other, "accuracy"), lead(*moved, "accuracy")
    for name in ("mean", "half", "p_equal", "p_apart"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-6, abs=1e-9), name


@given(scores, st.booleans())
def test_the_other_way_round_it_is_the_opposite(sides, higher):
    one, other = sides
    there, back = lead(one, other, "accuracy", higher), lead(other, one, "accuracy", higher)
    assert back == Lead(pytest.approx(-there.mean), *(pytest.approx(x) for x in _rest(there)))
    assert lead(one, other, "accuracy", not higher).mean == pytest.approx(-there.mean)


def _rest(found):
    return found.half, found.welch, found.p_equal, found.p_apart


@given(scores)
def test_tests_agree_with_intervals(sides):
    """p < 5 % where the 95 % interval leaves out zero; level where the 90 % interval lies inside the margin."""
    one, other = sides
    assume(spread(one, other))
    found = lead(one, other, "accuracy")
    assume(min(abs(found.p_equal - 0.05), abs(found.p_apart - 0.05)) > 1e-9)
    assert (found.p_equal < 0.05) == (abs(found.mean) > found.half)
    freedom = len(one) - 1
    narrower = found.half * stats.t.ppf(0.95, freedom) / stats.t.ppf(0.975, freedom)
    assert (found.p_apart < 0.05) == (abs(found.mean) + narrower < POINTS)


def test_only_seeds_that_both_ran_are_paired():
    one, other = {0: 90.0, 1: 91.0, 2: 92.5}, {1: 90.0, 2: 91.0, 7: 10.0}
    found = lead(one, other, "accuracy")
    assert found.mean == 1.25
    assert found.half == pytest.approx(half_width([1.0, 1.5]))
    assert found.welch == pytest.approx(welch(list(one.values()), list(other.values())))
    apart = lead({0: 90.0, 1: 91.0}, {2: 80.0, 3: 82.0}, "accuracy")
    assert (apart.mean, apart.half, apart.p_equal, apart.p_apart) == (9.5, math.inf, 1.0, 1.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((90.0,), (80.0,)),  # one seed
        ((90.1, 91.1, 95.1), (90.0, 91.0, 95.0)),  # a coarse score: each time by one image
        ((90.0, 91.0), (90.0, 91.0)),  # the same runs
        ((90.0, math.nan), (80.0, 81.0)),
        ((90.0, math.inf), (80.0, 81.0)),  # diverged
    ],
)
def test_without_a_spread_nothing_is_decided(one, other):
    found = lead(dict(enumerate(one)), dict(enumerate(other)), "accuracy")
    assert (found.half, found.p_equal, found.p_apart) == (math.inf, 1.0, 1.0)
    assert [verdict.word for verdict in judge([found])] == ["undecided"]


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(p_values)
def test_holm_is_monotone_and_between_no_correction_and_bonferronis(ps):
    corrected = holm(ps)
    for p, q in zip(ps, corrected, strict=True):
        assert p <= q <= min(1.0, len(ps) * p) + 1e-15
    in_order = sorted(range(len(ps)), key=ps.__getitem__)
    assert [corrected[at] for at in in_order] == sorted(corrected)


@given(p_values, st.floats(0.0, 1.0))
def test_one_more_test_never_makes_another_more_certain(ps, more):
    assert all(q <= r for q, r in zip(holm(ps), holm([*ps, more]), strict=False))


@given(p_values)
def test_holm_rejects_what_its_step_down_procedure_rejects(ps):
    rejected = 0
    for rank, p in enumerate(sorted(ps)):  # until the first that stays
        if not (len(ps) - rank) * p <= ERROR:
            break
        rejected += 1
    assert sum(q <= ERROR for q in holm(ps)) == rejected


def made(mean, half, p_equal, p_apart):
    return Lead(mean, half, half, p_equal, p_apart)


def test_a_page_is_judged_as_a_whole():
    clear, close, open_ = made(2.0, 1.0, 0.01, 0.9), made(0.1, 0.2, 0.4, 0.01), made(0.5, 2.0, 0.6, 0.4)
    below = made(-2.0, 1.0, 0.001, 0.9)
    small = made(0.1, 0.05, 0.001, 0.001)  # inside the margin, and certain
    words = [verdict.word for verdict in judge([clear, close, open_, below, small])]
    assert words == ["ahead", "level", "undecided", "behind", "ahead"]
    among = judge([clear, close, *[open_] * 10])
    assert [verdict.word for verdict in among] == ["undecided"] * 12
    assert among[0].p == pytest.approx(0.12)
    text = rules([clear, close, open_, below, small])
    assert "over 5 tests" in text
    assert (
        "In all: 2 ahead, 1 behind, 1 level, 1 undecided. The paired interval, taken by itself, leaves out"
        in text
    )
    assert f"{stats.t.ppf(1 - ERROR / 10, 2):.1f} with 3" in text
    assert rules([]) == "No two rows have run that could be compared."
    assert "How this comparison is judged" in rules([clear])
    assert "over 1 test." in rules([clear])


def test_margins_are_less_than_the_leads_that_the_paper_calls_wins():
    assert POINTS < 93.25 - 92.46  # Table I, rTop-k over top-k at 99 %: the smallest lead in accuracy
    assert SHARE < (84.63 - 82.49) / 84.63  # Table IV, rTop-k over the baseline
    assert margin("accuracy", 60.0) == POINTS
    assert margin("perplexity", 50.0) == pytest.approx(1.0)
    assert margin("bleu", 30.0) == 0.0


def test_an_infinite_width_is_not_written():
    assert plus_minus(math.inf) == ""


def test_the_error_of_a_page_is_what_it_says():
    """2,000 pages of 20 leads without a difference, 3 seeds: 5 % say ahead or behind somewhere.

    The share that does is binomial with a standard deviation of 0.5 %; a bound of 6.9 % raises a false alarm in one
    of 10,000 and finds a page without correction (64 %) always.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    t = rng.standard_normal((2000, 20, 3))
    p = stats.ttest_1samp(t, 0.0, axis=2).pvalue
    wrong = sum(min(holm(page.tolist())) <= ERROR for page in p)
    assert 0.031 * 2000 < wrong < 0.069 * 2000
