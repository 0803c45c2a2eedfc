"""The example app: in one process always, on SuperLink and SuperNodes when there is time."""

import json
import shutil
import sys
from pathlib import Path

import engines
import pytest
from flwr.app import Context, RecordDict
from harness import LocalGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-app"
SETTINGS = {"num-server-rounds": 10, "local-steps": 10, "learning-rate": 0.1}


def test_the_example_learns_and_saves_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("SUMMARY", str(tmp_path / "summary.json"))
    from flowerapp import client, server, task

    grid = LocalGrid([client.app] * 2, run_config=SETTINGS)
    server.app(grid, Context(1, 0, {}, RecordDict(), SETTINGS))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy"] > 0.9
    # Four messages carry about 9,500 numbers each in a round of plain Flower; the first round sends the model.
    dense = 4 * 4 * sum(p.numel() for p in task.make_model().parameters())
    assert summary["bytes"]["10"] < dense / 4
    assert len(list((tmp_path / "client-state").glob("*.state"))) == 2
    for name in [name for name in sys.modules if name.startswith("flowerapp")]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_example_on_flower(tmp_path):
    """As its README says: SuperLink, two SuperNodes, `flwr run`."""
    with engines.fleet_of(tmp_path, {"SUMMARY": str(tmp_path / "summary.json")}) as fleet:
        for number, name in enumerate("ab"):
            fleet.add_node({"partition-id": number, "client-id": name})
        app = shutil.copytree(EXAMPLE, tmp_path / "app")
        run = fleet.submit(app, "--run-config", "num-server-rounds=2")
        assert fleet.wait(run, done=(tmp_path / "summary.json").exists, seconds=400) == "finished:completed"
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy"] > 0.7
    assert len(list((tmp_path / "fleet" / "client-state").glob("*.state"))) == 2


def test_it_is_an_ordinary_app_plus_two_lines():
    """Only these lines name rtopk beyond the imports; without them it is FedAvg."""
    used = [
        line.strip()
        for path in sorted((EXAMPLE / "flowerapp").glob("*.py"))
        for line in path.read_text().splitlines()
        if "RTopK" in line and "import" not in line
    ]
    assert len(used) == 2
