"""Run a federation on Flower's two engines: simulation in this process (ray), deployment in processes.

Both return the record that the server wrote, with the engine's own facts beside it; a run whose status is
not `completed` is an error, whatever Flower's exit code was.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rtopk.experiments.federated import Federation, client_app, server_app
from rtopk.experiments.fleet import OFFLINE, Fleet, FleetError, write_app
from rtopk.flower.proxy import CountingProxy

Progress = Callable[[int], None]


def simulate(federation: Federation, folder: Path, cores: int = 2) -> dict[str, Any]:
    """Run all clients in ray actors of this machine."""
    os.environ.update(OFFLINE)
    from flwr.simulation import run_simulation

    federation = _placed(federation, folder)
    run_simulation(
        server_app(federation),
        client_app(federation),
        federation.config.nodes,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "log_to_driver": False, "include_dashboard": False},
        },
    )
    return _result(federation, folder, {"engine": "simulation", "status": "finished:completed"})


def deploy(federation: Federation, folder: Path, on_progress: Progress = lambda done: None) -> dict[str, Any]:
    """Run a SuperLink and one SuperNode a client, each a process; count the bytes between them."""
    federation = _placed(federation, folder)
    marks: dict[int, tuple[int, int]] = {}  # bytes up and down when a round was seen to be done
    with Fleet(folder) as fleet, CountingProxy(fleet.port) as proxy:
        for number in range(federation.config.nodes):
            fleet.add_node({"partition-id": number}, through=proxy.port)
        run = fleet.submit(write_app(folder / "app", federation.to_json()))

        def poll() -> None:
            with suppress(OSError, ValueError):
                done = int(Path(federation.result + ".progress").read_text())
                marks.setdefault(done, (proxy.up, proxy.down))
                on_progress(done)

        status = fleet.wait(run, done=Path(federation.result).exists, on_poll=poll)
        if status != "finished:completed":
            raise FleetError(f"the run ended as {status}: {fleet.tail('superlink')}")
        facts = {"engine": "deployment", "status": status, "wire": {"up": proxy.up, "down": proxy.down},
                 "wire_by_round": {str(n): list(mark) for n, mark in marks.items()}}  # fmt: skip
    return _result(federation, folder, facts)


def _placed(federation: Federation, folder: Path) -> Federation:
    folder = folder.absolute()
    if (folder / "result.json").exists():
        raise ValueError(f"{folder} holds a finished run already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    store = federation.store or str(folder / "clients")
    return dataclasses.replace(federation, result=str(folder / "result.json"), store=store)


def _result(federation: Federation, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    path = Path(federation.result)
    if not path.exists():
        raise FleetError(f"the run left no result in {folder}: see the logs there")
    record: dict[str, Any] = {**json.loads(path.read_text()), **facts}
    path.write_text(json.dumps(record, indent=1))
    return record
