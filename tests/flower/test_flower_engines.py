"""On Flower's own engines: bad luck costs no mass, and a client that was killed goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import engines
import faulty_app
import pytest
import torch

from rtopk.codec import Codec
from rtopk.flower.records import Model
from rtopk.studies.federation.deployment import Fleet


def books(folder, client, without=()):
    """Return what a client moved, and what of it was accepted plus what it keeps."""
    result = torch.load(folder / "result.pt", weights_only=True)
    layout = Model.from_json(result["layout"]).layout
    moved = torch.zeros(layout.size, dtype=torch.float64)
    for path in (folder / "moved" / client).iterdir():
        if int(path.name.split("-")[0]) not in without:
            moved += layout.flatten(torch.load(path, weights_only=True)).double()
    state = result["states"][client]
    held = result["accepted"][client] + state["sparsifier"]["memory"]["residual"]
    pending = state["pending"]
    if pending and pending["round"] != result["rounds"][client]:
        held += Codec(fingerprint=layout.fingerprint).decode(pending["payload"]).to_dense()
    return moved, held


def check_books(folder, rolled_back):
    for client in faulty_app.CLIENTS:
        # An engine that takes back the context after an exception makes it a round that never was.
        without = (faulty_app.EXCEPTION,) if rolled_back and client == "faulty-context" else ()
        moved, held = books(folder, client, without)
        assert torch.allclose(held, moved, atol=1e-5), client
    result = torch.load(folder / "result.pt", weights_only=True)
    assert set(result["rounds"].values()) == {faulty_app.ROUNDS - 1}  # all were there in the last round
    for client in ("faulty-file", "faulty-context"):
        reasons = [(round_, reason) for round_, who, reason in result["refusals"] if who == client]
        expected = [
            (faulty_app.EXCEPTION, "after the change"),
            (faulty_app.DUPLICATE, "came already"),
            (faulty_app.STALE, "has acted on message"),
            (faulty_app.STALE, "it is of round 1, this is round 8"),
            (faulty_app.LATE + 1, "has acted on message"),
        ]
        assert len(reasons) == len(expected), reasons
        for when, words in expected:
            assert any(round_ == when and words in reason for round_, reason in reasons), (words, reasons)


def test_an_app_in_a_relative_folder_is_found(tmp_path, monkeypatch):
    """`rtopk fed deploy` writes one into runs/ beside us, and Flower's command line runs in the fleet's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Fleet, "flwr", lambda self, *arguments: {"success": True, "run-id": arguments[1]})
    folder = engines.write_app(Path("runs") / "app", "faulty_app")
    assert Fleet(Path("runs")).submit(folder) == str(tmp_path / "runs" / "app")


@pytest.mark.slow
def test_faults_in_the_simulation(tmp_path):
    """Exception after the change, dropped reply, duplicate, reordered messages, ten rounds away."""
    engines.python(tmp_path, "import faulty_app; faulty_app.simulate()")
    check_books(tmp_path, rolled_back=True)


@pytest.mark.slow
def test_faults_in_the_deployment(tmp_path):
    with engines.fleet_of(tmp_path) as fleet:
        for client in faulty_app.CLIENTS:
            fleet.add_node({"client-id": client})
        run = engines.submit(fleet, "faulty_app")
        assert fleet.wait(run, done=(tmp_path / "result.pt").exists, seconds=600) == "finished:completed"
    check_books(tmp_path, rolled_back=False)
    assert engines.leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_killed_supernode_goes_on(tmp_path):
    """Killed between rounds and in the middle of training; the name brings residual and model back."""
    (tmp_path / "wait-2").touch()
    (tmp_path / "hang-a-file-5").touch()
    with engines.fleet_of(tmp_path, {"RTOPK_TEST_TIMEOUT": "20"}) as fleet:
        names = [{"client-id": "a-file"}, {"client-id": "b-file"}]
        a, _ = [fleet.add_node(name) for name in names]
        run = engines.submit(fleet, "calm_app")
        engines.await_file(tmp_path / "round-2")
        fleet.stop_node(a)
        a = fleet.add_node(names[0])
        (tmp_path / "wait-2").unlink()
        engines.await_file(tmp_path / "hangs-a-file")
        fleet.stop_node(a)
        fleet.add_node(names[0])
        assert fleet.wait(run, done=(tmp_path / "result.pt").exists, seconds=600) == "finished:completed"
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    for client in ("a-file", "b-file"):
        moved, held = books(tmp_path, client)
        assert torch.allclose(held, moved, atol=1e-5), client
        assert result["rounds"][client] == 8  # it was there in the last round
    rounds = sorted(int(path.name.split("-")[0]) for path in (tmp_path / "moved" / "a-file").iterdir())
    assert rounds[:2] == [1, 2]
    assert 5 not in rounds
    assert len(list((tmp_path / "clients").glob("*.state"))) == 2  # no third identity
    assert engines.leftovers(tmp_path) == []


@pytest.mark.slow
def test_nothing_outlives_a_killed_deployment(tmp_path):
    """A SuperLink and a SuperNode, each with children of its own, whose starter ends without a word."""
    program = """
import sys, time
from pathlib import Path
from rtopk.studies.federation.deployment import Fleet
with Fleet(Path(sys.argv[1])) as fleet:
    fleet.add_node({"partition-id": 0})
    print("up", flush=True)
    time.sleep(600)
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "fleet")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert starter.stdout.readline() == "up\n"
    assert len(engines.leftovers(tmp_path, seconds=0)) >= 2
    starter.kill()
    starter.communicate()
    assert engines.leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_killed_command(tmp_path, number):
    """`rtopk fed deploy` in mid-run; it once left seven processes."""
    command = [sys.executable, "-m", "rtopk", "fed", "deploy", "--rounds", "1000", "--nodes", "2"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def listen() -> (
        None
    ):  # what a shell starts in the background ignores SIGINT, and so does what that starts
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    starter = subprocess.Popen([*command, "--out", str(tmp_path / "run")], preexec_fn=listen, **quiet)
    try:
        engines.await_file(tmp_path / "run" / "result.json.progress")
        starter.send_signal(number)
        starter.wait(60)
        assert engines.leftovers(tmp_path, seconds=40) == []
    finally:
        starter.terminate()  # if it is still there
