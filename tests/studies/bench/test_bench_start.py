"""The start-up benchmark runs, and what it measures is in order: compiling costs, and is done once."""

import pytest

from rtopk.studies.bench.start import measure


@pytest.mark.slow
def test_a_cold_first_step_takes_longer_than_a_warm_one():
    found = {row.name: row.seconds for row in measure(runs=1, ranks=2, tell=lambda text: None)}
    assert found["first step, cold"] > 3 * found["first step, warm"]
    assert found["first step, 2 ranks at once, cold"] > 3 * found["first step, 2 ranks at once, warm"]
    assert found["first step, read-only"] > 3 * found["first step, warm"]
    assert found["rtopk --help"] < found["import torch"]
