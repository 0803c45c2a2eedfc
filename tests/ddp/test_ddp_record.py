"""A job that records its gradients trains as plain DDP does, and writes what each rank had."""

from pathlib import Path

from ddp_launch import Results, clean
from ddp_parts import bits

from rtopk.replicas.recording import Recording


def test_a_recording_holds_every_ranks_own_gradients(pair: Results, shared: Path) -> None:
    found = clean(pair, "record")
    recording = Recording.read(shared / "recorded")
    assert (recording.nodes, recording.steps, recording.size) == (2, 4, 20 * 40 + 40 * 30 + 30 * 5)
    steps = list(recording)
    for rank, own in enumerate(found):
        assert own["ends"][0] == own["ends"][1]
        assert [bits({"gradient": step[rank]}) for step in steps] == own["own"]
    assert found[0]["own"] != found[1]["own"]


def test_a_recording_that_cannot_be_made_is_refused(pair: Results) -> None:
    for rank, found in enumerate(clean(pair, "record")):
        said = found["said"]
        assert f"holds gradients of rank {rank} already; give a new folder" in said["used"]
        assert said["steps"] == "steps must be at least 1, got 0"
        assert "nothing to record" in said["flat"]
        assert "has a communication hook already" in said["registered"]
        assert not found["made"]
