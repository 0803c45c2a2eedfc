"""`rtopk train` with one node per process ends with the bits of `rtopk train` in one process."""

import ddp_scenarios_train as train
import pytest
from ddp_launch import Results, clean


@pytest.mark.parametrize("task", ["True", "False"])  # the digits, and a model with BatchNorm and dropout
@pytest.mark.parametrize("variant", train.VARIANTS)
def test_the_loop_under_torchrun_equals_the_loop_in_one_process(
    pair: Results, variant: str, task: str
) -> None:
    for found in clean(pair, "same_as_in_one_process"):
        here, there = found[f"{variant} {task}"]["weights"]
        assert here == there
        for name in ("scores", "losses", "norms"):
            one, other = found[f"{variant} {task}"][name]
            assert one == other, name


def test_stop_and_resume_under_torchrun(pair: Results) -> None:
    one, two = clean(pair, "stops_and_resumes")
    for found in (one, two):
        assert found["stopped"] == "stopped after round 5 of 12"
        assert found["resumed"] == found["whole"]
        assert found["files"] == ["checkpoint.pt", "events.jsonl", "lock", "record.json", "run.json"]
        assert "nodes must be the number of processes, 2, got 3" in found["wrong"]
        assert "under torchrun powersgd does not run" in found["powersgd"]
    assert one["alone"] == one["whole"]
