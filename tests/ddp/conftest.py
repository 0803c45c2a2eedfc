"""Launches that many tests share: each runs once a session, also under pytest-xdist."""

import os
from pathlib import Path

import ddp_scenarios_books as books
import ddp_scenarios_cost as cost
import ddp_scenarios_exact as exact
import ddp_scenarios_faults as faults
import ddp_scenarios_record as recording
import ddp_scenarios_resume as resume
import ddp_scenarios_steps as steps
import ddp_scenarios_train as loop
import pytest
from ddp_launch import Results, launch

PAIR = [
    exact.equals_reference,
    exact.momentum_moves,
    exact.buckets_are_rebuilt,
    exact.dense_phase_is_plain_ddp,
    exact.ddp_options,
    exact.accumulation,
    exact.memory_formats,
    exact.half_precision,
    exact.one_process,
    exact.two_models,
    exact.every_coordinate,
    exact.epochs,
    exact.flushed,
    exact.odd_models,
    exact.what_is_dropped_is_freed,
    faults.not_finite,
    faults.not_finite_stops,
    faults.not_finite_in_a_closure,
    faults.broken_off,
    faults.grad_scaler,
    faults.autocast,
    faults.options_differ,
    faults.drift,
    faults.refused,
    faults.unused,
    faults.frozen,
    faults.failure_on_one_rank,
    faults.tensorboard,
    recording.record,
    resume.first_half,
    resume.switch_scope,
    resume.does_not_fit,
    resume.own_disks,
    resume.distributed_checkpoint,
    loop.same_as_in_one_process,
    loop.stops_and_resumes,
    steps.skip_is_one_step,
    steps.second_backward,
    steps.after_a_raise,
    steps.openings,
    steps.half_overflow,
    books.books,
    steps.riddles,
    steps.densities_differ,
]
if os.environ.get("RTOPK_BACKEND") == "triton":  # test_ddp_triton.py; this one takes ten minutes there
    PAIR.remove(loop.same_as_in_one_process)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder that all pytest workers of this session share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if hasattr(request.config, "workerinput") else base) / "ddp"


@pytest.fixture(scope="session")
def pair(shared: Path) -> Results:
    """What two ranks found."""
    return launch(shared, "pair", 2, PAIR)


@pytest.fixture(scope="session")
def fresh(shared: Path, pair: Results) -> Results:
    """What two fresh ranks found that went on from files of the first two."""
    return launch(shared, "fresh", 2, [resume.second_half])


@pytest.fixture(scope="session")
def four(shared: Path) -> Results:
    """What four ranks found whose process group was made without naming a backend."""
    return launch(
        shared,
        "four",
        4,
        [resume.elastic, resume.copied_over, cost.without_backend],
        RTOPK_TEST_BACKEND="",
    )


@pytest.fixture(scope="session")
def costly(shared: Path) -> Results:
    """What four ranks found about memory."""
    return launch(shared, "costly", 4, [cost.memory])


@pytest.fixture(scope="session")
def eight(shared: Path) -> Results:
    """What eight ranks found."""
    return launch(shared, "eight", 8, [cost.memory])
