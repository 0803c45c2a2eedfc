"""exchange="all-reduce" on real ranks: exact, counted, resumable, elastic, and it fails together."""

from pathlib import Path

import ddp_scenarios_owners as owners
import pytest
from ddp_launch import Results, clean, launch

SCENARIOS = [
    owners.equals_in_process,
    owners.counted,
    owners.goes_on,
    owners.owners_elastic,
    owners.read_back,
    owners.owner_fails,
]


@pytest.fixture(scope="module")
def ranks(shared: Path) -> Results:
    return launch(shared, "owners", 4, SCENARIOS)


@pytest.mark.parametrize("variant", [*owners.VARIANTS, "all-gather"])
def test_four_ranks_equal_the_loop_in_one_process(ranks: Results, variant: str) -> None:
    for found in clean(ranks, "equals_in_process"):
        assert found[variant][0] == found[variant][1]


@pytest.mark.slow
def test_eight_ranks_equal_the_loop_in_one_process(shared: Path) -> None:
    for found in clean(launch(shared, "eight-owners", 8, [owners.equals_in_process]), "equals_in_process"):
        for variant in (*owners.VARIANTS, "all-gather"):
            assert found[variant][0] == found[variant][1]


def test_statistics_are_the_bytes_of_the_collectives(ranks: Results) -> None:
    for found in clean(ranks, "counted"):
        for sent, really_sent, received, really_received in (found["None"], found["all"]):
            # The sizes that go ahead of payloads of unknown size, 8 bytes to each rank, are not counted.
            assert 0 <= really_sent - sent <= 8
            assert 0 <= really_received - received <= 24
            assert sent > 300


def test_a_restart_changes_no_bit(ranks: Results) -> None:
    for found in clean(ranks, "goes_on"):
        assert found["same"]
        assert found["bits"][0] == found["bits"][1]
        assert found["states"][0] == found["states"][1]


def test_another_number_of_ranks_or_exchange_loses_nothing(ranks: Results) -> None:
    for found in clean(ranks, "owners_elastic"):
        assert found["kept by owners"] > 0.1
        for name in ("to 2", "to 3", "to 4"):
            assert found[name] < 1e-6, name
    assert clean(ranks, "read_back")[0]["kinds"] == ["owner_residual", "residual"]


def test_ranks_fail_and_skip_together(ranks: Results) -> None:
    for rank, found in enumerate(clean(ranks, "owner_fails")):
        expected = (
            "MemoryError: no room"
            if rank == 1
            else "RuntimeError: rank 1 failed to reduce its share in step 2"
        )
        assert found["stopped"].startswith(expected)
        assert found["unchanged"]
        assert found["skipped"][:2] == [1, True]
        assert "is not finite on rank 2" in found["skipped"][2]
        assert "RanksDisagree: step differs between ranks (3 on rank 0; 2 on rank 1, 2, 3)" in found["apart"]
