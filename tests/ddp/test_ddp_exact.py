"""The hook computes what Algorithm 1 says, to the bit, whatever DDP does with its buckets."""

import shutil
from pathlib import Path

import ddp_scenarios_exact as exact
import pytest
from ddp_launch import Results, clean, launch

VARIANTS = list(exact.VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_equal_the_reference_to_the_bit(pair: Results, variant: str) -> None:
    # Five steps across DDP's rebuild of its buckets: state keyed by bucket.index() would differ from step 2.
    for found in clean(pair, "equals_reference"):
        hooked, expected = found[variant]
        assert hooked == expected


@pytest.mark.slow
def test_more_weights_equal_the_reference_to_the_bit(shared: Path) -> None:
    results = launch(shared, "more", 2, [exact.equals_reference_more])
    for found in clean(results, "equals_reference_more"):
        assert [found[variant][0] for variant in exact.MORE] == [found[v][1] for v in exact.MORE]
        assert len({found[variant][0] for variant in exact.MORE}) == len(exact.MORE)


def test_variants_are_different_runs(pair: Results) -> None:
    found = clean(pair, "equals_reference")[0]
    assert len({found[variant][0] for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("nesterov", ["False", "True"])
def test_momentum_moves_from_the_optimizer_into_the_memory(pair: Results, nesterov: str) -> None:
    for found in clean(pair, "momentum_moves"):
        moved = found[nesterov]
        assert moved["held"] == [0.0, pytest.approx(0.05)]
        assert moved["bits"][0] == moved["bits"][1]
        assert moved["again"] == 0.8
        assert moved["left"] == [0.8, 0.01]
        assert moved["back"] == [0.8, 0.01, False]
        assert moved["goes_on"] == ["nothing raised", True]
        assert "groups of SGD differ in (momentum, nesterov)" in found["differ"]
        for why in ("differ", "dampening", "others"):
            assert found[f"{why}_stays"] == [True, "error-feedback"]
        for adam, decay in ((found["Adam"], pytest.approx(0.5)), (found["AdamW"], 0.1)):
            assert adam["held"] == [[0.0, 0.95], decay]
            assert adam["bits"][0] == adam["bits"][1]
            assert adam["back"] == [[0.8, 0.95], 0.1, False]
        assert all(found["others_stay"])
        assert found["innermost"]
        assert found["asked"] == ["error-feedback", 0.9]


def test_one_collective_of_the_known_size_per_step_or_bucket(pair: Results) -> None:
    for found in clean(pair, "buckets_are_rebuilt"):
        buckets = found["global"]["buckets"]
        assert buckets[0] == 1
        assert buckets[1:] == [4, 4], "these tests show something only if the rebuild makes several buckets"
        assert found["global"]["collectives"] == len(buckets)
        assert found["bucket"]["collectives"] == sum(buckets)


@pytest.mark.parametrize("scope", ["global", "bucket"])
def test_statistics_are_the_bytes_of_the_collectives(pair: Results, scope: str) -> None:
    for found in clean(pair, "buckets_are_rebuilt"):
        assert found[scope]["sent"] == found[scope]["last_bytes"] > 0
        assert found[scope]["received"] == found[scope]["last_bytes"]  # one other rank


def test_dense_phase_equals_plain_ddp(pair: Results) -> None:
    # A hook that does not divide by the world size would be off by a factor 2.
    for found in clean(pair, "dense_phase_is_plain_ddp"):
        assert found["gap"] <= 1e-6
        assert found["dense"] == found["size"]
        # 2,150 weights compete for round(0.05 * 2150) places; 155 biases and norms are always sent.
        assert found["after"] == 108 + 155


def test_ddp_options_change_nothing(pair: Results) -> None:
    for found in clean(pair, "ddp_options"):
        found.pop("seconds", None)
        assert len(found) == 6
        for name, (hooked, expected) in found.items():
            assert hooked == expected, name


def test_accumulation_with_no_sync(pair: Results) -> None:
    for found in clean(pair, "accumulation"):
        assert found["rounds"] == exact.STEPS
        assert found["gap"] <= 1e-6


def test_channels_last_is_read_in_logical_order(pair: Results) -> None:
    for found in clean(pair, "memory_formats"):
        assert found["residual"] > 1e-3
        assert found["gap"] <= 1e-5
        assert found["residual_gap"] <= 1e-5


def test_half_precision_keeps_residuals_in_fp32(pair: Results) -> None:
    one, two = clean(pair, "half_precision")
    assert one["weights"] == two["weights"]
    assert one["dtypes"] == ["torch.float32"]
    assert one["loss"][1] < one["loss"][0]


def test_one_process_is_the_same_code(pair: Results) -> None:
    for found in clean(pair, "one_process"):
        assert found["weights"] == found["expected"]
        assert found["received"] == 0


def test_two_models_in_one_process(pair: Results) -> None:
    for found in clean(pair, "two_models"):
        for name in ("one", "two"):
            hooked, expected = found[name]
            assert hooked == expected


@pytest.mark.slow
def test_compiled_modules(shared: Path) -> None:
    _compiled(launch(shared, "compiled", 2, [exact.compiled]), "compiled")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's inductor needs a C++ compiler")
def test_compiled_by_inductor(shared: Path) -> None:
    found = launch(shared, "inductor", 2, [exact.compiled_by_inductor], timeout=600)
    _compiled(found, "compiled_by_inductor")


def _compiled(results: Results, name: str) -> None:
    one, two = clean(results, name)
    assert one["weights"] == two["weights"]
    assert max(one["gaps"]) <= 1e-5
    assert one["names"][0] == one["names"][1] == one["names"][2]


def test_odd_models_equal_the_reference(pair: Results) -> None:
    for found in clean(pair, "odd_models"):
        found.pop("seconds", None)
        assert len(found) == 6
        assert max(found.values()) <= 1e-6, found


def test_a_model_that_is_dropped_is_freed(pair: Results) -> None:
    # DDP holds the hook's state in C++, where Python's garbage collector sees no circle.
    for found in clean(pair, "what_is_dropped_is_freed"):
        assert found["held"] == [True, True, True]
        assert found["left"] == [False, False, False]
        assert found["copied"]


def test_every_coordinate_is_sent_and_none_twice(pair: Results) -> None:
    # Truncation in index order starves the last quarter; drawing with replacement sends fewer than k.
    found, _ = clean(pair, "every_coordinate")
    assert found["state"] == found["k"] == 100
    assert found["entries"][0] >= 100  # two ranks, k = 100 distinct entries each
    assert found["entries"][1] <= 200
    assert found["least"] >= 3
    assert min(found["quarters"]) >= 0.8 * max(found["quarters"])


def test_a_flush_sends_the_whole_residual_and_then_the_density_is_as_before(pair: Results) -> None:
    """Both ranks have the same weights after it, so the ranks agreed on the larger message."""
    one, two = clean(pair, "flushed")
    for scope in ("global", "bucket"):
        assert one[scope][0] == [[0.05, True]] * 3 + [[1.0, False], [0.05, True]]
        assert one[scope][1] == two[scope][1]
        assert one[scope][2] == two[scope][2] == [0.05] * 5, "what was loaded knows of no flush"


def test_schedule_by_epoch(pair: Results) -> None:
    one, two = clean(pair, "epochs")
    assert one["densities"] == pytest.approx([0.25, 0.25, 0.05, 0.05, 0.01, 0.01, 0.01, 0.01])
    assert one["weights"] == two["weights"]
