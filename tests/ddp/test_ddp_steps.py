"""A step that is skipped, refused or raises changes nothing else, and the model can be used afterwards."""

import ddp_scenarios_books as books
import pytest
from ddp_launch import Results, clean


@pytest.mark.parametrize("case", ["shared_trunk", "wrapped_anew", "local_steps"])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_skipped_round_costs_one_step_only(pair: Results, case: str, stepped: bool) -> None:
    for found in clean(pair, "skip_is_one_step"):
        disturbed, undisturbed = found[f"{case} {stepped}"]
        assert disturbed == undisturbed


@pytest.mark.parametrize("option", ["", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
def test_two_exchanges_in_a_step_add_up_and_lose_nothing(pair: Results, option: str) -> None:
    case = f"{'bucket' if 'view' in option else 'global'} { ({option: True} if option else {}) }"
    one, two = clean(pair, "second_backward")
    for found in (one, two):
        assert found[case]["step"] == 6
        assert found[case]["apart"] <= 1e-6, "the first mean was selected from again"
        assert found[case]["lost"] <= 1e-6
        assert found[case]["rested"]
        assert found["shared"] <= 1e-6
        assert found["skips"] == [[1, 1], [2, 0]]
        assert found["shared_finite"][1]
        assert all(0.0 < norm < 10.0 for norm in found["norms"])
        assert found["some"] == "nothing raised"
        assert found["one_rank"].startswith(
            "RanksDisagree: gradients still hold the mean of the last exchange on"
        )
    assert one["weights"] == two["weights"]
    assert one["shared_finite"] == two["shared_finite"]


@pytest.mark.parametrize("view", ["", "_view"])
def test_a_parameter_that_the_second_exchange_leaves_out_keeps_its_mean(pair: Results, view: str) -> None:
    one, two = clean(pair, "second_backward")
    for found in (one, two):
        _, mean, after = found[f"idle_some{view}"]
        assert mean != after  # rank 0's second gradient came
        _, mean, after = found[f"idle_all{view}"]
        assert mean == after
        assert found[f"lost_some{view}"] <= 1e-6
        assert found[f"lost_all{view}"] <= 1e-6
    for name in (f"idle_some{view}", f"idle_all{view}"):
        assert one[name] == two[name]


@pytest.mark.parametrize("name", ["global", "bucket", "static_graph", "find_unused_parameters"])
def test_a_model_can_be_used_after_an_error(pair: Results, name: str) -> None:
    for found in clean(pair, "after_a_raise"):
        said = found[name]["said"]
        raised = [number for number, words in enumerate(said) if words != "nothing raised"]
        assert raised == [6, 9]  # four good steps; two, a bad one and two; a bad one
        assert "GradientNotFinite: step 2: the gradient of 3.weight is not finite on rank 1" in said[6]
        assert "GradientNotFinite: step 0: the gradient of 3.weight is not finite on rank 1" in said[9]
        disturbed, undisturbed = found[name]["ends"]
        assert disturbed == undisturbed
        assert found[name]["rested"], "NaN reached the weights"


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_densities_that_differ_are_named_by_all(pair: Results, scope: str) -> None:
    one, two = (found[scope] for found in clean(pair, "densities_differ"))
    for found in (one, two):
        assert found["said"].startswith(
            "RanksDisagree: density differs between ranks (0.05 on rank 0; 0.25 on rank 1)"
        )
        assert "call state.set_epoch with the same epoch on all ranks" in found["said"]
        assert found["same"]
        assert found["step"] == 4
    assert one["weights"] == two["weights"]


def test_a_schedule_that_breaks_on_one_rank_stops_all(pair: Results) -> None:
    one, two = clean(pair, "densities_differ")
    assert one["broken"] == "RuntimeError: rank 1 failed to compress in step 2; see its error"
    assert two["broken"] == "ValueError: density must be in (0, 1], got 1.5"


@pytest.mark.parametrize(
    ("name", "headers", "looks_again"),
    [
        ("constant", [0, 0, 0, 0, 0, 0], False),
        ("dense_steps", [1, 1, 1, 0, 0, 0], True),
        ("warm_up", [1, 1, 1, 1, 0, 0], True),
        ("function", [1, 1, 1, 1, 1, 1], True),
    ],
)
def test_a_header_goes_first_while_the_density_may_change(
    pair: Results, name: str, headers: list[int], looks_again: bool
) -> None:
    for found in clean(pair, "openings"):
        assert found[name]["headers"] == headers
        assert found[name]["sent"][0] == found[name]["sent"][1]
        assert found[name]["unsettled"] == looks_again


def test_a_schedule_is_asked_seldom(pair: Results) -> None:
    for found in clean(pair, "openings"):
        at_registration, in_six_rounds = found["function"]["asked"]
        assert at_registration <= 20
        assert in_six_rounds == 6


@pytest.mark.parametrize("mean", ["sparse", "dense"])
@pytest.mark.parametrize("memory", ["error-feedback", "momentum-correction"])
def test_half_precision_keeps_what_it_cannot_hold(pair: Results, mean: str, memory: str) -> None:
    for found in clean(pair, "half_overflow"):
        assert found[f"{mean} {memory}"]["finite"]
        assert found[f"{mean} {memory}"]["lost"] == 0.0
    assert found[f"sparse {memory}"]["largest"] > 65504


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "fsdp2",
            "sharded with FSDP (FSDPSequential), and rtopk.ddp serves whole replicas; use rtopk.fsdp.register",
        ),
        ("fsdp1", "sharded with FSDP (FullyShardedDataParallel), and rtopk.ddp serves whole replicas"),
        ("sparse", "table got a sparse gradient, as F.embedding(sparse=True) makes them; use sparse=False"),
        ("python_reducer", "set it to 'ddp_optimizer' (the default) before you wrap the model"),
        ("weights", "weights must be finite, not negative and not all zero, got [1.0, nan]"),
    ],
)
def test_riddles_are_refusals(pair: Results, name: str, words: str) -> None:
    for found in clean(pair, "riddles"):
        assert words in found["said"][name]


@pytest.mark.parametrize("case", list(books.CASES))
def test_the_books_balance_whatever_the_loop_does(pair: Results, case: str) -> None:
    one, two = (found[case] for found in clean(pair, "books"))
    for found in (one, two):
        assert found["worst"] <= 1e-4  # sums of some dozen gradients of size one, in fp32
        assert min(found["done"].values()) >= 2, "every operation must have happened"
    assert one["weights"] == two["weights"]
