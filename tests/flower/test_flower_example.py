"""The example app: in one process always, on SuperLink and SuperNodes when there is time."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import engines
import pytest
from flwr.app import Context, RecordDict
from harness import LocalGrid

from test_readme import blocks

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
def test_the_readmes_commands_as_printed(tmp_path):
    """SuperLink and two SuperNodes in the background, then `flwr run`, in a folder with a copy of the example."""
    *servers, run = blocks(EXAMPLE / "README.md", "")[0].splitlines()
    assert len(servers) == 3
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "flower-app")
    environment = engines.environment(tmp_path)
    del environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"]  # the README must do without
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    started = []
    try:
        for line in servers:
            with (tmp_path / f"{len(started)}.log").open("w") as log:
                started.append(subprocess.Popen(
                    ["bash", "-c", f"exec {line}"], cwd=tmp_path, env=environment, stdout=log, stderr=log,
                    start_new_session=True,
                ))  # fmt: skip
            time.sleep(20 if len(started) == 1 else 1)
        done = subprocess.run(["bash", "-c", run], cwd=tmp_path, env=environment, capture_output=True, text=True,
                              timeout=1500)  # fmt: skip
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    logs = "".join((tmp_path / f"{i}.log").read_text()[-1000:] for i in range(3))
    found = re.search(r'\{"accuracy": ([\d.]+), "bytes"', done.stdout + done.stderr)
    assert found, done.stdout[-2000:] + done.stderr[-2000:] + logs
    assert float(found[1]) > 0.9
    assert len(list((tmp_path / "client-state").glob("*.state"))) == 2


def test_it_is_an_ordinary_app_plus_two_lines():
    """Only these lines name rtopk beyond the imports; without them it is FedAvg."""
    used = [
        line.strip()
        for path in sorted((EXAMPLE / "flowerapp").glob("*.py"))
        for line in path.read_text().splitlines()
        if "RTopK" in line and "import" not in line
    ]
    assert len(used) == 2
