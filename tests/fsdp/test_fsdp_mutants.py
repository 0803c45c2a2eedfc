"""Each bug that an engine for sharded models could have is noticed by its test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_scenarios_mutants as mutants
import pytest
import test_fsdp as tests
from ddp_launch import Results, clean
from test_fsdp import run

CASES: list[tuple[Callable[..., Any], str, Callable[..., None], tuple[str, ...]]] = [
    (
        mutants.shards_skip_alone,
        "not_finite",
        tests.test_all_shards_of_all_replicas_skip_together,
        ("global",),
    ),
    (
        mutants.shards_draw_alike,
        "equals_reference",
        tests.test_equals_the_reference_on_the_shards,
        ("draws",),
    ),
    (
        mutants.earlier_means_sent_again,
        "dense_is_native",
        tests.test_density_1_is_native_hybrid_sharding_to_the_bit,
        ("global, twice",),
    ),
    (
        mutants.only_the_last_of_modules_sharded_together,
        "dense_is_native",
        tests.test_density_1_is_native_hybrid_sharding_to_the_bit,
        ("global, sharded together",),
    ),
    (mutants.idle_layers_drained, "idle", tests.test_the_residual_of_an_idle_layer_waits, ("global",)),
]


@pytest.fixture(scope="session")
def disturbed(shared: Path) -> Results:
    return run(shared / "mutants", "mutants", 4, [mutant for mutant, _, _, _ in CASES])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "scenario", "test", "arguments"), CASES, ids=[c[0].__name__ for c in CASES]
)
def test_a_bug_is_noticed(
    disturbed: Results, mutant: Callable[..., Any], scenario: str, test: Callable[..., None], arguments: Any
) -> None:
    found = clean(disturbed, mutant.__name__)
    with pytest.raises(AssertionError):
        test({scenario: found}, *arguments)
