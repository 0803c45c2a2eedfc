"""Every known bug of DDP hooks, put into ours, is noticed by its test; and what DDP asks of a hook's form."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ddp_scenarios_mutants as mutants
import pytest
import test_ddp_exact as exact
import test_ddp_faults as faults
import test_ddp_resume as resume
import torch
import torch.distributed as dist
from ddp_launch import Results, clean, launch

import rtopk.ddp

# mutant, scenario it disturbs, the test that must fail, its other arguments
CASES: list[tuple[Callable[..., Any], str, Callable[..., None], tuple[str, ...]]] = [
    (
        mutants.residuals_lost_when_buckets_change,
        "equals_reference",
        exact.test_weights_equal_the_reference_to_the_bit,
        ("global",),
    ),
    (mutants.sum_instead_of_mean, "dense_phase_is_plain_ddp", exact.test_dense_phase_equals_plain_ddp, ()),
    (
        mutants.unused_parameters_drained,
        "unused",
        faults.test_the_residual_of_an_unused_parameter_waits,
        ("global",),
    ),
    (
        mutants.residuals_in_scaled_units,
        "grad_scaler",
        faults.test_a_moving_loss_scale_changes_nothing,
        ("global",),
    ),
    (
        mutants.skipped_steps_change_the_residual,
        "not_finite",
        faults.test_a_gradient_that_is_not_finite_is_skipped_by_all,
        ("global",),
    ),
    (
        mutants.momentum_twice,
        "refused",
        faults.test_what_cannot_work_is_refused,
        ("momentum_in_step", "SGD has momentum=0.9: it would act twice"),
    ),
    (mutants.biases_compete, "dense_phase_is_plain_ddp", exact.test_dense_phase_equals_plain_ddp, ()),
    (
        mutants.first_k_in_index_order,
        "every_coordinate",
        exact.test_every_coordinate_is_sent_and_none_twice,
        (),
    ),
]


@pytest.fixture(scope="session")
def disturbed(shared: Path) -> Results:
    """What two ranks find with each bug."""
    scenarios = [mutant for mutant, _, _, _ in CASES]
    return launch(shared / "mutants", "mutants", 2, [*scenarios, mutants.residuals_of_rank_0_for_all])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "scenario", "test", "arguments"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_a_known_bug_is_noticed(
    disturbed: Results,
    mutant: Callable[..., Any],
    scenario: str,
    test: Callable[..., None],
    arguments: tuple[str, ...],
) -> None:
    found = clean(disturbed, mutant.__name__)
    with pytest.raises(AssertionError):
        test({scenario: found}, *arguments)


@pytest.mark.slow
def test_one_rank_s_residuals_for_all_are_noticed(pair: Results, disturbed: Results) -> None:
    resumed = {"second_half": clean(disturbed, "residuals_of_rank_0_for_all")}
    with pytest.raises(AssertionError):
        resume.test_resume_in_fresh_processes_is_exact(pair, resumed, "('global', 'error-feedback', 2)")


def test_the_hook_has_the_form_that_ddp_compares_by_identity() -> None:
    # Bug 4: another name, or annotations that are strings, and DDP refuses the hook.
    signature = inspect.signature(rtopk.ddp.hook)
    assert list(signature.parameters) == ["state", "bucket"]
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
