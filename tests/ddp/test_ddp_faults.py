"""What goes wrong on one rank is known to all of them, named, and changes nothing."""

import pytest
from ddp_launch import Results, clean


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_a_gradient_that_is_not_finite_is_skipped_by_all(pair: Results, scope: str) -> None:
    one, two = (found[scope] for found in clean(pair, "not_finite"))
    reason = "step 2: the gradient of 3.weight is not finite on rank 1"
    assert one["said"] == [f"all ranks skip this step. {reason}"]
    assert two["said"] == []  # one rank logs what all know
    for found in (one, two):
        assert found["same"], "weights, momentum, residual or step moved"
        assert found["skipped"] == [1, True, 2]
        assert found["refusal"] == reason
        hooked, undisturbed = found["weights"]
        assert hooked == undisturbed
        assert found["finite"]
    assert one["weights"] == two["weights"]


def test_stopping_instead_of_skipping(pair: Results) -> None:
    for found in clean(pair, "not_finite_stops"):
        assert found["said"].startswith(
            "GradientNotFinite: step 2: the gradient of 3.weight is not finite on rank 1"
        )
        assert found["same"]
        assert "3 rounds in a row" in found["many"]
        assert found["skipped"] == 2


def test_a_closure_that_meets_nan_is_skipped(pair: Results) -> None:
    for found in clean(pair, "not_finite_in_a_closure"):
        for how in ("positional", "named"):
            assert found[how] == [[False, True], [False, True], [True, True], [False, True]]


@pytest.mark.parametrize("memory", ["error-feedback", "momentum-correction"])
def test_a_round_that_was_broken_off_is_not_in_the_state(pair: Results, memory: str) -> None:
    for found in clean(pair, "broken_off"):
        said, sent, same, again, still = found[memory]
        assert said == "ZeroDivisionError: broken layer"
        assert sent > 0, "nothing was sent, so there was nothing to take back"
        assert same
        assert again == "nothing raised"
        assert still


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_a_moving_loss_scale_changes_nothing(pair: Results, scope: str) -> None:
    for found in clean(pair, "grad_scaler"):
        assert found[scope]["scale"] == 64.0  # it moved three times
        assert found[scope]["moving"] == found[scope]["plain"]
        # Without the scaler the residual is in wrong units: the bug that this option is for.
        assert found[scope]["untold"] != found[scope]["plain"]


def test_an_overflow_on_one_rank_lowers_the_scale_on_all(pair: Results) -> None:
    one, two = (found["overflow"] for found in clean(pair, "grad_scaler"))
    assert one == two
    assert one["history"] == [[False, 1024.0], [True, 512.0], [False, 512.0], [False, 512.0]]
    assert one["skipped"] == 1
    assert "on rank 0" in one["why"]


def test_autocast_and_clipping(pair: Results) -> None:
    one, two = clean(pair, "autocast")
    assert one["weights"] == two["weights"]
    assert one["last"] < one["first"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("density", "density is 0.02 on rank 0; 0.01 on rank 1"),
        ("schedule", "density is"),
        ("one_step", "density is 0.01 on rank 0; {0: '0.01'"),
        ("own_selector", "selector is Own {'factor': 2.0} on rank 0; Own {'factor': 3.0} on rank 1"),
        ("seed", "seed is 4 on rank 0; 5 on rank 1"),
        ("mean", "mean is nodes on rank 0; received on rank 1"),
        ("scope", "scope is global on rank 0; bucket on rank 1"),
        ("memory", "memory is MomentumCorrection {'momentum': 0.9"),
        ("selector", "selector is RTopK(r_over_k=3, nodes=None) on rank 0; TopK() on rank 1"),
        ("dense", "parameters is layout"),
        ("one_is_wrong", "refused on 1 of 2 ranks. rank 1: density must be in (0, 1], got 1.5"),
        ("all_are_wrong", "ValueError: density must be in (0, 1], got 1.5"),
        ("wrong_scope", "scope must be one of ('global', 'bucket'), got 'layer'"),
    ],
)
def test_every_rank_names_options_that_differ(pair: Results, name: str, words: str) -> None:
    one, two = clean(pair, "options_differ")
    assert words in one["said"][name]
    assert one["said"][name] == two["said"][name]
    assert one["weights"] == two["weights"]  # the group still works


def test_drift_is_found_at_the_next_check(pair: Results) -> None:
    for found in clean(pair, "drift"):
        assert found["said"][:2] == ["nothing raised", "nothing raised"]
        assert found["said"][2].startswith("RanksDisagree: weights differs between ranks (")
        assert found["step"] == 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("thawed", "DDP was made with 6 trainable parameters and there are 8 now"),
        ("not_ddp", "must be a DistributedDataParallel, got Sequential"),
        ("twice", "has a communication hook already"),
        ("sparse", "0 makes sparse gradients"),
        ("mixed_precision", "use torch.amp.autocast instead"),
        ("complex", "weight is torch.complex64"),
        ("memory", "memory must be one of"),
        ("no_memory", "or a function that makes one, got 3"),
        ("no_density", "density must be in (0, 1], got None"),
        ("half_steps", "dense_steps must be an integer, got 1.5"),
        ("no_seed", "seed must be an integer, got 'a'"),
        ("not_its_own", "SGD that was given holds none of the parameters"),
        ("values", "values must be"),
        ("dealt", "Dealt must have nodes=2, one a rank, got 3"),
        ("threshold", "messages of one size"),
        ("aged", "RAgeK keeps a state"),
        ("clip_in_bucket", "use scope='global'"),
        ("momentum", "SGD has momentum=0.9: it would act twice"),
        ("nadam", "NAdam has betas=(0.9, 0.999), and only the momentum of SGD, Adam and AdamW can move"),
        ("momentum_in_step", "SGD has momentum=0.9: it would act twice"),
        ("adam_in_step", "Adam has betas=(0.9, 0.999)"),
        ("plain_sgd", "nothing raised"),
        ("other_model", "nothing raised"),
        ("join", "the same number of batches"),
    ],
)
def test_what_cannot_work_is_refused(pair: Results, name: str, words: str) -> None:
    for found in clean(pair, "refused"):
        assert words in found["said"][name]


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_the_residual_of_an_unused_parameter_waits(pair: Results, scope: str) -> None:
    one, two = (found[scope] for found in clean(pair, "unused"))
    for log in (one, two):
        assert [step["kept"] for step in log][:2] == [False, True]
        assert log[1]["held"] > 0.0, "there must be something to drain"
        assert log[1]["no_gradient"]
        assert log[1]["others_moved"]
    assert [step["kept"] for step in one] == [False, True, False, False]  # rank 0 uses it in step 2
    assert [step["kept"] for step in two] == [False, True, True, False]  # rank 1 does not
    assert [step["gradient"] for step in one] == [step["gradient"] for step in two]


def test_a_layer_frozen_half_way(pair: Results) -> None:
    one, two = clean(pair, "frozen")
    for found in (one, two):
        assert found["rested"]
        assert found["moved"]
        assert found["thawed"]
    assert one["weights"] == two["weights"]


def test_a_failure_on_one_rank_stops_all(pair: Results) -> None:
    one, two = clean(pair, "failure_on_one_rank")
    assert one["said"] == "RuntimeError: rank 1 failed to compress in step 1; see its error"
    assert two["said"] == "ZeroDivisionError: broken selector"
    assert one["same"]
    assert two["same"]
    assert one["elsewhere"] == dict.fromkeys(
        ("snapshot", "put", "hash_weights", "mean_in"),
        "RuntimeError: rank 1 failed to compress in step 2; see its error",
    )
    assert set(two["elsewhere"].values()) == {"MemoryError: full"}


def test_statistics_reach_tensorboard(pair: Results) -> None:
    for found in clean(pair, "tensorboard"):
        assert {"rtopk/bytes_sent", "rtopk/density", "rtopk/residual_norm", "rtopk/exchange_seconds"} <= set(
            found["tags"]
        )
        assert found["steps"] == [0, 2, 4]
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-6)
