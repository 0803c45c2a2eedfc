"""A job that was stopped ends with the same bits; residuals belong to their rank; ranks may come and go."""

import ddp_scenarios_resume as resume
import pytest
from ddp_launch import Results, clean


@pytest.mark.parametrize("variant", [str(variant) for variant in resume.VARIANTS])
def test_resume_in_fresh_processes_is_exact(pair: Results, fresh: Results, variant: str) -> None:
    undisturbed, resumed = clean(pair, "first_half"), clean(fresh, "second_half")
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after[variant]["weights"] == before[variant]["weights"]
        assert after[variant]["state"] == before[variant]["state"]
    # The ranks' residuals differ, so loading rank 0's everywhere could not have passed.
    assert undisturbed[0][variant]["saved"] != undisturbed[1][variant]["saved"]


def test_a_state_moves_between_scopes(pair: Results) -> None:
    for found in clean(pair, "switch_scope"):
        assert found["same"]


@pytest.mark.parametrize(
    ("name", "rank_0", "rank_1"),
    [
        ("truncated", "rank 1 could not read its state", "truncated or damaged"),
        ("empty", "rank 1 could not read its state", "not a state written by rtopk"),
        ("flipped", "rank 1 could not read its state", "truncated or damaged"),
        ("swapped", "rank 1 could not read its state", "the file of rank 1 holds the state of rank 0"),
        (
            "missing",
            "rank 1 could not read its state",
            "no complete set of states (files of ranks: {2: [0]})",
        ),
        ("steps", "step 2 on rank 0, step 7 on rank 1", "step 2 on rank 0, step 7 on rank 1"),
        ("other_seed", "is of seed 9, this job has seed 0", "is of seed 9, this job has seed 0"),
        ("other_model", "is of another model", "is of another model"),
        (
            "other_memory",
            "this memory needs ['residual', 'velocity']",
            "this memory needs ['residual', 'velocity']",
        ),
        ("next_rank", "the state is rank 1's, this is rank 0", "the state is rank 0's, this is rank 1"),
        ("nan", "residual of the state is not finite", "residual of the state is not finite"),
        ("format", "not a state of format 1", "not a state of format 1"),
    ],
)
def test_what_does_not_fit_is_refused(pair: Results, name: str, rank_0: str, rank_1: str) -> None:
    one, two = clean(pair, "does_not_fit")
    assert rank_0 in one["said"][name]
    assert rank_1 in two["said"][name]


def test_refusals_change_nothing_and_leave_no_litter(pair: Results) -> None:
    for found in clean(pair, "does_not_fit"):
        assert found["same"]
        assert found["files"] == ["rtopk-rank0-of-2.state", "rtopk-rank1-of-2.state"]
        assert found["loads"] == "nothing raised"


def test_machines_need_not_share_a_disk(pair: Results) -> None:
    one, two = clean(pair, "own_disks")
    for found in (one, two):
        assert found["said"] == "nothing raised"
        assert found["same"]
        assert "holds states of several jobs (of 2 ranks on rank 0; 1 ranks on rank 1)" in found["jobs"]
        assert found["unchanged"]
    assert "rank 1 could not read its state" in one["strange"]
    assert two["strange"].startswith("StateError: ")


def test_torch_distributed_checkpoint_keeps_every_rank(pair: Results) -> None:
    one, two = clean(pair, "distributed_checkpoint")
    assert one["saved"] == one["loaded"]
    assert two["saved"] == two["loaded"]
    assert one["saved"] != two["saved"]
    assert one["step"] == two["step"] == 2
    for found in (one, two):
        assert found["old"] == found["saved"], "a checkpoint without a digest must load"
        assert "of the checkpoint is damaged: checksum is wrong" in found["flipped"]
        assert "holds ['residual', 'velocity'], and this job reads ['residual']" in found["others"]
        assert found["same"]


@pytest.mark.parametrize(
    ("change", "reader", "holds"),
    [
        ("4 to 2", 1, "rank 3 holds the state of rank 1 of 4"),
        ("2 to 4", 0, "rank 0 holds the state of rank 1 of 2"),
    ],
)
def test_every_rank_must_be_there_once(four: Results, change: str, reader: int, holds: str) -> None:
    results = [found for found in clean(four, "copied_over") if change in found]
    assert len(results) == int(change[-1])
    assert holds in results[reader][change][0]
    for found in results:
        said, same = found[change]
        assert said.startswith("StateError: ")
        assert same
        assert "part 1 of the checkpoint holds the state of rank 0 of 2" in found["twice"]


@pytest.mark.parametrize("change", ["to_2", "to_3"])
def test_another_number_of_ranks_loses_nothing(four: Results, change: str) -> None:
    for found in clean(four, "elastic"):
        assert found[change]["residual"] <= 1e-6
        assert found[change]["velocity"] <= 1e-6


def test_the_model_receives_what_was_kept_back(four: Results) -> None:
    for found in clean(four, "elastic")[:2]:
        assert found["size"] > 0.01
        assert found["arrived"] <= 1e-6
