"""The same seeds give the same weights in the loop, in simulation and in deployment; failure is an exit code."""

import json
import shlex

import engines
import pytest
import torch
from flwr.app import Context, RecordDict
from harness import LocalGrid

from rtopk.studies.config import Config, command
from rtopk.studies.federation.app import Federation, client_app, server_app
from rtopk.studies.train.loop import Run
from rtopk.studies.train.records import digest

SIZES = ["--nodes", "2", "--rounds", "3", "--local-steps", "3"]


def make_config(**options):
    values = {"nodes": 2, "rounds": 3, "local_steps": 3, "density": 0.01, "learning_rate": 0.02, **options}
    return Config(task="digits", setting="federated", evaluate_every=3, **values)


def in_process(**options):
    """Train in the one loop and return the digest of the weights."""
    torch.set_num_threads(1)  # as clients do: torch's sums depend on the number of threads
    run = Run(make_config(**options))
    for _ in range(3):
        run.advance()
    return digest(run.vector())


def trained(folder, **options):
    """Train with `rtopk train`, which uses the instructions that `rtopk fed` uses, and return the digest."""
    line = shlex.split(command(make_config(**options).to_dict()))
    done = engines.rtopk(*line[1:], "--out", str(folder), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["weights"]


def flower(engine, folder, *more):
    done = engines.rtopk("fed", engine, *SIZES, *more, "--out", str(folder), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "options", [{}, {"weighted": True, "mean": "received", "split": "dirichlet", "density": 0.1}]
)
def test_the_apps_end_with_the_weights_of_the_loop(tmp_path, options):
    """The same apps, mods and strategy without an engine."""
    config = make_config(**options)
    federation = Federation(config=config, result=str(tmp_path / "result.json"), store=str(tmp_path / "c"))
    grid = LocalGrid([client_app(federation)] * 2)
    server_app(federation)(grid, Context(1, 0, {}, RecordDict(), {}))
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["weights"] == in_process(**options)
    assert sum(entry["snapshots"] for entry in record["ledger"].values()) == 0  # made from the seed


@pytest.mark.slow
def test_simulation_ends_with_the_weights_of_the_loop(tmp_path):
    record = flower("sim", tmp_path / "run")
    assert record["weights"] == trained(tmp_path / "loop")
    assert record["refused"] == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"memory": "none", "values": "4bit", "method": "top-k"}])
def test_deployment_ends_with_the_weights_of_the_loop(tmp_path, options):
    more = [part for name, value in options.items() for part in (f"--{name}", value)]
    record = flower("deploy", tmp_path / "run", *more)
    assert record["weights"] == trained(tmp_path / "loop", **options)
    assert engines.leftovers(tmp_path) == []
    check_ledger(record)


def check_ledger(record):
    """What the proxy saw is what the ledger says and the engine's own bytes, which are bounded.

    Seen: 27 KB a message, and with polling and heartbeats 300 bytes a second and node.
    """
    polling = 2_000 * record["seconds"] * record["config"]["nodes"]
    messages = sum(entry["messages"] for entry in record["ledger"].values())
    for way in ("up", "down"):
        ours = sum(entry[f"{way}_payload"] + entry[f"{way}_framing"] for entry in record["ledger"].values())
        engine = record["wire"][way] - ours
        assert ours > 0
        assert 0 < engine < 60_000 * (messages + record["config"]["nodes"]) + polling, way
        rounds = record["wire"]["by_round"]
        assert sum(entry[way] for entry in rounds.values()) <= record["wire"][way]
        for entry in record["ledger"].values():
            assert 0 < entry[f"{way}_engine"] < 60_000 * entry["messages"] + polling


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sim", "deploy"])
def test_a_failed_run_is_an_exit_code(tmp_path, engine):
    """Clients that diverge in the first step: Flower's own command line would exit with 0."""
    done = engines.rtopk("fed", engine, *SIZES, "--learning-rate", "1e38", "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "rtopk: FleetError: the run" in done.stderr
    assert engines.leftovers(tmp_path) == []
