"""rtopk between the replicas of a sharded model: real ranks on Gloo, two sites of two."""

import os
from pathlib import Path

import fsdp_scenarios as scenarios
import pytest
from ddp_launch import HERE, Results, clean, launch

FOUR = [
    scenarios.dense_is_native,
    scenarios.bf16_reduction,
    scenarios.equals_reference,
    scenarios.momentum_moves,
    scenarios.balance,
    scenarios.tiny,
    scenarios.not_finite,
    scenarios.idle,
    scenarios.idle_from_the_start,
    scenarios.idle_in_a_second_backward,
    scenarios.idle_after_a_deferral,
    scenarios.cleared_after_a_deferral,
    scenarios.clipped,
    scenarios.kinds_through_dcp,
    scenarios.options_differ,
    scenarios.experts,
    scenarios.what_users_do,
    scenarios.shards_apart,
    scenarios.drift,
    scenarios.other_start,
    scenarios.refused,
    scenarios.interrupted,
    scenarios.reentrant,
    scenarios.owners_through_dcp,
    scenarios.first_half,
]


def run(shared: Path, tag: str, world: int, functions: list) -> Results:
    paths = os.pathsep.join([str(Path(__file__).parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    return launch(shared, tag, world, functions, PYTHONPATH=paths)


@pytest.fixture(scope="session")
def four(shared: Path) -> Results:
    return run(shared, "four", 4, FOUR)


def same(found: list[dict], name: str) -> None:
    """The two entries of a pair are equal on every rank, and equal on all ranks."""
    assert len({tuple(rank[name][:2]) for rank in found}) == 1, name
    assert found[0][name][0] == found[0][name][1], name


@pytest.mark.parametrize("name", [*scenarios.DENSE, "global, sharded together"])
def test_density_1_is_native_hybrid_sharding_to_the_bit(four: Results, name: str) -> None:
    same(clean(four, "dense_is_native"), name)


def test_momentum_moves_from_the_optimizer_into_the_memory(four: Results) -> None:
    found = clean(four, "momentum_moves")
    same(found, "bits")
    assert {rank["left"] for rank in found} == {0.0}


@pytest.mark.slow
def test_density_1_is_native_in_more_settings(shared: Path) -> None:
    results = run(shared, "more", 4, [scenarios.more_dense_is_native])
    for name in [*scenarios.MORE_DENSE, "bucket, sharded together"]:
        same(clean(results, "more_dense_is_native"), name)


def test_replicas_are_added_in_fp32_whatever_the_reduction_within_a_site(four: Results) -> None:
    for rank in clean(four, "bf16_reduction"):
        assert rank["fp32"] == 0.0
        assert 0.0 < rank["bf16"] < 0.01  # FSDP adds replicas in bf16, which keeps 8 bits


REFERENCES = ["global", "bucket", "draws", "4bit", "momentum correction", "all-reduce", "all-reduce, bucket"]


@pytest.mark.parametrize("name", REFERENCES)
def test_equals_the_reference_on_the_shards(four: Results, name: str) -> None:
    found = clean(four, "equals_reference")
    same(found, name)
    for rank in found:
        assert rank[f"{name}, residual"][0] == rank[f"{name}, residual"][1]


def test_what_owners_keep_goes_through_dcp(four: Results) -> None:
    for rank in clean(four, "owners_through_dcp"):
        assert rank["same"]
        assert rank["kept"] > 0.0
        assert rank["bits"][0] == rank["bits"][1]


@pytest.mark.parametrize("scope", ["global", "bucket", "all-reduce"])
def test_nothing_is_lost(four: Results, scope: str) -> None:
    for worst, entries, size in (rank[scope] for rank in clean(four, "balance")):
        assert worst < 1e-5
        assert entries < size / 4  # it was sparse


@pytest.mark.parametrize("scope", ["global", "bucket", "all-reduce"])
def test_a_shard_may_be_empty(four: Results, scope: str) -> None:
    found = clean(four, "tiny")
    same(found, scope)
    assert [rank[f"{scope}, sizes"] for rank in found] == [20, 0, 20, 0]


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_all_shards_of_all_replicas_skip_together(four: Results, scope: str) -> None:
    for rank in (result[scope] for result in clean(four, "not_finite")):
        assert rank["nan"]
        assert rank["unchanged"]
        assert "shard 0" in rank["refusal"]
        assert "5.weight is not finite on rank 1" in rank["refusal"]
        assert (rank["skipped"], rank["steps"], rank["goes on"]) == (1, 4, True)


def test_all_ranks_raise_if_the_options_say_so(four: Results) -> None:
    for rank in clean(four, "not_finite"):
        assert rank["stopped"].startswith("GradientNotFinite: step 0: shard")


@pytest.mark.parametrize("name", ["global", "bucket", "clipping", "momentum", "momentum, bucket"])
def test_the_residual_of_an_idle_layer_waits(four: Results, name: str) -> None:
    found = [rank[name] for rank in clean(four, "idle")]
    assert len({rank.pop("replicas") for rank in found}) == 1
    assert all(all(rank.values()) for rank in found), found


def test_a_layer_may_be_idle_from_the_start(four: Results) -> None:
    found = clean(four, "idle_from_the_start")
    for name in found[0].keys() - {"seconds"}:
        assert {tuple(rank[name]) for rank in found} == {(found[0][name][0], 2)}, name


@pytest.mark.parametrize("name", ["global, False", "global, True", "bucket, False", "bucket, True"])
def test_a_layer_in_one_of_two_backwards_equals_native_hybrid_sharding(four: Results, name: str) -> None:
    same(clean(four, "idle_in_a_second_backward"), name)


def test_options_must_be_the_same_on_all_ranks(four: Results) -> None:
    found = clean(four, "options_differ")
    for rank in found:
        assert all(rank.values()), rank
        assert rank["all are wrong"] == "density must be in (0, 1], got 2.0"
    assert "density is 0.05 on rank 0, 1, 2; 0.1 on rank 3" in found[0]["one rank"]
    assert "seed is 0 on rank 0, 1; 1 on rank 2, 3" in found[0]["one site"]
    assert "values is fp32 on rank 0, 2; fp16 on rank 1, 3" in found[0]["one shard"]


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_a_layer_that_the_last_micro_batch_leaves_out_is_exchanged(four: Results, scope: str) -> None:
    same(clean(four, "idle_after_a_deferral"), scope)


def test_a_mean_that_was_cleared_does_not_come_back(four: Results) -> None:
    for rank in clean(four, "cleared_after_a_deferral"):
        cases = {name: pair for name, pair in rank.items() if name != "seconds"}
        assert len(cases) == 8
        for name, (found, expected) in cases.items():
            assert found == expected, name


def test_clipping_bounds_the_gradient_of_a_site_over_all_shards(four: Results) -> None:
    for rank in clean(four, "clipped"):
        assert rank["worst"] < 1e-5 * rank["largest"]


def test_what_dcp_would_leave_out_is_refused(four: Results) -> None:
    for rank in clean(four, "kinds_through_dcp"):
        for kind in ("velocity", "owner_residual"):
            refusal, unchanged = rank[kind]
            assert refusal.startswith("StateError: rank")
            assert f"holds ['residual', '{kind}'], and this job reads ['residual']" in refusal
            assert unchanged
        assert rank["older"] == 3


@pytest.mark.parametrize("name", ["global, 0.02", "global, 1.0", "bucket, 0.02", "bucket, 1.0"])
def test_parameters_that_one_site_uses_have_a_gradient_on_all_ranks(four: Results, name: str) -> None:
    found = [rank[name] for rank in clean(four, "experts")]
    assert len({weights for weights, _ in found}) == 1
    assert all(given == found[0][1] for _, given in found)
    assert all(all(step) for step in found[0][1])


@pytest.mark.parametrize(
    "name",
    [
        "assign",
        "divisor",
        "divisor of 0",
        "divisor of 3",
        "divisor of 5",
        "no all-reduce, global",
        "no all-reduce, bucket",
    ],
)
def test_what_users_do_with_fsdp_equals_native_hybrid_sharding(four: Results, name: str) -> None:
    found = clean(four, "what_users_do")
    same(found, name)
    assert found[0][name][2:] in ([], [3])  # rounds: one for three micro-batches


@pytest.mark.parametrize(("name", "reason"), [
    ("thawed", "RuntimeError: 1 parameters became trainable after registration, 3.weight among them"),
    ("in backward", "has a hook that acts when its gradient is accumulated"),
    ("in backward, later", "was removed during backward"),
])  # fmt: skip
def test_what_would_not_be_exchanged_is_refused(four: Results, name: str, reason: str) -> None:
    for rank in clean(four, "what_users_do"):
        assert reason in rank[name]


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_a_zero_gradient_left_over_is_no_gradient(four: Results, scope: str) -> None:
    for rank in clean(four, "what_users_do"):
        assert rank[f"zeros, {scope}"] == [True, True]


def test_shards_at_different_steps_stop_all_ranks(four: Results) -> None:
    for rank in clean(four, "shards_apart"):
        assert "RanksDisagree: the shards of a replica are not at the same point" in rank["stopped"]


def test_drift_stops_all_ranks(four: Results) -> None:
    found = clean(four, "drift")
    assert ["RanksDisagree" in rank["raised_here"] for rank in found] == [False, True, False, True]
    assert all("have drifted apart" in rank["raised_here"] for rank in found)


def test_replicas_must_start_from_the_same_weights(four: Results) -> None:
    for rank in clean(four, "other_start"):
        assert "weights differs between ranks" in rank["raised_here"]
        assert "started from different weights" in rank["raised_here"]


@pytest.mark.parametrize(("name", "reason"), [
    ("2-D", "FSDP reduces the whole gradient between replicas"),
    ("no mesh", "TypeError: mesh must be the DeviceMesh of the replicas, got 0.01: mesh = init_device_mesh("),
    ("2-D mesh given", "mesh must have one dimension, got 2"),
    ("the shard's mesh given", "one of each site"),
    ("ranks in another order", "the ranks of a mesh must ascend"),
    ("hook", "has an all-reduce hook already"),
    ("fsdp1", "FSDP1"),
    ("plain", "Sequential is not sharded: call fully_shard first"),
    ("sparse", "makes sparse gradients"),
    ("memory clips", "clip_norm=0.5 would bound each of 2 shards by itself; give it to register(..., clip_norm=)"),
    ("partly", "trainable parameters are not sharded"),
    ("ddp", "use rtopk.fsdp.register"),
    ("momentum", "it would act twice"),
    ("one rank's mesh", "refused on 1 of 4 ranks. rank 3: mesh must hold the ranks that have the same shard"),
    ("side by side", "holds 4 sharded modules side by side"),
    ("all frozen", "no trainable parameters"),
    ("meta", "on the meta device"),
])  # fmt: skip
def test_refused_with_the_fix(four: Results, name: str, reason: str) -> None:
    for rank in clean(four, "refused"):
        assert reason in rank[name], rank[name]


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_an_interrupted_backward_changes_nothing_and_going_on_is_refused(four: Results, scope: str) -> None:
    for rank in clean(four, "interrupted"):
        assert rank[f"{scope}, saved"]
        assert rank[f"{scope}, still"]
        assert "RuntimeError: FSDP has not ended this backward pass" in rank[scope]


def test_a_backward_inside_a_backward_is_refused(four: Results) -> None:
    for rank in clean(four, "reentrant"):
        assert "use use_reentrant=False" in rank["stopped"]


@pytest.fixture(scope="session")
def resumed(four: Results, shared: Path) -> Results:
    return run(shared, "again", 4, [scenarios.second_half])


WAYS = ["global, files", "global, dcp", "bucket, files", "bucket, dcp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS[:2])
def test_a_restart_changes_no_bit(resumed: Results, name: str) -> None:
    found = clean(resumed, "second_half")
    same(found, name)
    assert found[0][name][2] == 20


@pytest.mark.slow
def test_a_hundred_steps_with_a_restart_equal_the_reference(shared: Path) -> None:
    clean(run(shared, "fifty", 4, [scenarios.first_fifty]), "first_fifty")
    found = clean(run(shared, "fifty-more", 4, [scenarios.last_fifty]), "last_fifty")
    for name in WAYS:
        same(found, name)
        assert found[0][name][2] == 100


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 6])
def test_another_number_of_sites_goes_on(four: Results, shared: Path, world: int) -> None:
    found = clean(run(shared, f"sites-{world}", world, [scenarios.other_replicas]), "other_replicas")
    assert {rank["step"] for rank in found} == {10}
    assert max(rank["worst"] for rank in found) < 1e-6
    assert len({rank["weights"] for rank in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 6])
def test_another_number_of_shards_goes_on_through_dcp(four: Results, shared: Path, world: int) -> None:
    before = clean(four, "first_half")
    found = clean(run(shared, f"shards-{world}", world, [scenarios.other_shards]), "other_shards")
    for rank, result in enumerate(found):
        assert result["step"] == 10
        assert result["model"] == before[0]["global"][0]
        assert result["residual"] == before[0 if rank < world // 2 else 2]["global"][1]
        assert "state.sharded()" in result["refusal"] or "no complete set" in result["refusal"]
    assert len({result["weights"] for result in found}) == 1
