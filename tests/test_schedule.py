"""Schedules: DGC's warm-up as one instance, by epoch and by step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtopk import constant, warm_up


def test_constant():
    assert [constant(0.01)(step) for step in (0, 1, 10**9)] == [0.01] * 3


def test_dgc_over_five_epochs():
    dgc = [0.25, 0.0625, 0.015625, 0.004, 0.001]
    assert [warm_up(0.001, steps=5)(epoch) for epoch in range(5)] == pytest.approx(dgc, rel=0.02)
    assert warm_up(0.001, steps=5)(5) == warm_up(0.001, steps=5)(10_000) == 0.001


def test_by_step_in_stages_equals_by_epoch():
    by_epoch, by_step = warm_up(0.001, steps=5), warm_up(0.001, steps=5 * 78, every=78)
    assert all(by_step(step) == by_epoch(step // 78) for step in range(6 * 78))


@given(
    density=st.floats(1e-4, 0.2),
    start=st.floats(0.2, 1.0),
    steps=st.integers(2, 50),
    every=st.integers(1, 50),
)
def test_falls_from_start_to_density_in_equal_factors(density, start, steps, every):
    every = min(every, steps)
    values = [warm_up(density, steps, start, every)(step) for step in range(0, steps + every, every)]
    assert values[0] == pytest.approx(start)
    assert values[-1] == density
    if len(values) > 3:
        factors = [b / a for a, b in pairwise(values[:-1])]
        assert factors == pytest.approx([factors[0]] * len(factors))
        assert values[-2] == pytest.approx(density)  # the last stage already has the final density


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.0, "steps": 5},
        {"density": 0.1, "steps": 0},
        {"density": 0.1, "steps": 5, "every": 6},
        {"density": 0.1, "steps": 5, "start": 0.05},
        {"density": 0.1, "steps": 5, "start": 1.5},
    ],
)
def test_refuses(options):
    with pytest.raises(ValueError, match="got"):
        warm_up(**options)
