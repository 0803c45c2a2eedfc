"""Run a federation on Flower's two engines: simulation in this process (ray), deployment in processes.

Both return the record that the server wrote, with the engine's own facts beside it; a run whose status is not
completed is an error, whatever Flower's exit code was. A deployment's SuperNodes talk through a proxy that counts
the bytes of the TCP streams: payloads, Flower's records, gRPC, polling, heartbeats; not TCP's own headers.
`compare` holds deployments side by side: steady is a round after the first; total is everything from the first
connection to the end, the app itself and the first model too.
"""

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rtopk.state_file import write_atomically
from rtopk.studies.federation import Federation
from rtopk.studies.federation.app import client_app, server_app
from rtopk.studies.federation.deployment import OFFLINE, Fleet, FleetError, certificates, write_app

Progress = Callable[[int], None]


def simulate(
    federation: Federation, folder: Path, on_progress: Progress = lambda done: None, cores: int = 2
) -> dict[str, Any]:
    """Run all clients in ray actors of this machine."""
    os.environ.update(OFFLINE)
    from flwr.simulation import run_simulation

    federation = _placed(federation, folder)
    watcher = _Watcher(federation, on_progress)
    try:
        run_simulation(
            server_app(federation),
            client_app(federation),
            federation.config.nodes,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": cores, "log_to_driver": False, "include_dashboard": False},
            },
        )
    except Exception as error:  # whatever the app raised
        raise FleetError(f"the run failed: {type(error).__name__}: {error}") from error
    finally:
        watcher.stop()
    return _result(federation, folder, {"engine": "simulation", "status": "finished:completed"})


def deploy(
    federation: Federation, folder: Path, on_progress: Progress = lambda done: None, tls: Path | None = None
) -> dict[str, Any]:
    """Run a SuperLink and one SuperNode a client, each a process; count the bytes between them.

    `tls` is a folder with the certificates of 127.0.0.1.
    """
    secure = certificates(tls.absolute()) if tls else None
    federation = dataclasses.replace(_placed(federation, folder), watched=True)
    marks: dict[int, tuple[int, int]] = {}  # bytes up and down when a round was done
    with Fleet(folder, secure=secure) as fleet, CountingProxy(fleet.port) as proxy:
        for number in range(federation.config.nodes):
            fleet.add_node({"partition-id": number}, through=proxy.port)
        settings = {"federation": federation.to_json().encode().hex()}
        run = fleet.submit(write_app(folder / "app", "rtopk.studies.federation.app", settings))

        def mark(done: int) -> None:
            marks.setdefault(done, (proxy.up, proxy.down))
            on_progress(done)

        watcher = _Watcher(federation, mark)
        try:
            status = fleet.wait(run, done=Path(federation.result).exists)
        finally:
            watcher.stop()
        if status != "finished:completed":
            raise FleetError(f"the run ended as {status}: {fleet.tail('superlink')}")
        wire = {"up": proxy.up, "down": proxy.down, "by_round": _by_round(marks)}
        facts = {"engine": "deployment", "status": status, "wire": wire, "tls": tls is not None}
    return _result(federation, folder, facts)


class _Watcher(threading.Thread):
    """See the server finish rounds, report each once, and let it go on."""

    def __init__(self, federation: Federation, on_round: Progress) -> None:
        super().__init__(daemon=True, name="watcher")
        self.progress, self.seen = (Path(federation.result + end) for end in (".progress", ".seen"))
        self.on_round = on_round
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Look until stopped."""
        last = -1
        while not self._over.wait(0.02):
            with suppress(OSError, ValueError):
                done = int(self.progress.read_text())
                if done > last:
                    last = done
                    self.on_round(done)
                    write_atomically(self.seen, str(done).encode())

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()


def _by_round(marks: dict[int, tuple[int, int]]) -> dict[str, dict[str, int]]:
    """Return the bytes of each round; round 0 is joining the federation and fetching the app."""
    rounds, before = {}, (0, 0)
    for number, (up, down) in sorted(marks.items()):
        rounds[str(number)] = {"up": up - before[0], "down": down - before[1]}
        before = (up, down)
    return rounds


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
    for number, wire in record.get("wire", {}).get("by_round", {}).items():
        entry = record.get("ledger", {}).get(number, {})
        for way in ("up", "down") if entry else ():  # what the engine adds to our messages
            entry[f"{way}_engine"] = wire[way] - entry[f"{way}_payload"] - entry[f"{way}_framing"]
    path.write_text(json.dumps(record, indent=1))
    return record


def compare(
    federation: Federation,
    folder: Path,
    on_run: Callable[[str], None] = lambda name: None,
    *,
    brief: bool = False,
) -> dict[str, Any]:
    """Run dense FedAvg, the federation as given and (unless brief) with other ways down; return the bytes."""
    variants = {
        "dense FedAvg": dataclasses.replace(federation, compressed=False),
        "rtopk": federation,
        "rtopk, first model sent": dataclasses.replace(federation, initial_known=False),
        "rtopk, exact downlink": dataclasses.replace(
            federation, downlink_density=1.0, downlink_values="fp32"
        ),
    }
    rows: list[dict[str, Any]] = []
    for number, (name, variant) in enumerate(list(variants.items())[: 2 if brief else 4]):
        on_run(name)
        rows.append(row(name, deploy(variant, folder / str(number))))
    for entry in rows:
        entry["steady_times_less"] = rows[0]["steady"] / entry["steady"]
        entry["total_times_less"] = rows[0]["total"] / entry["total"]
    return {"config": federation.config.to_dict(), "rows": rows}


def row(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of one deployment."""
    rounds = {
        int(number): entry["up"] + entry["down"] for number, entry in record["wire"]["by_round"].items()
    }
    last = max(rounds)
    later = [size for number, size in rounds.items() if number >= 2]
    own = record.get("ledger", {})
    content = sum(entry[f"{way}_{part}"] for entry in own.values() for way in ("up", "down")
                  for part in ("payload", "framing"))  # fmt: skip
    total = record["wire"]["up"] + record["wire"]["down"]
    return {
        "name": name,
        "rounds": last,
        "parameters": record["parameters"],
        "up": record["wire"]["up"],
        "down": record["wire"]["down"],
        "total": total,
        "steady": sum(later) / len(later),
        "engine": total - content if own else None,
        "weights": record["weights"],
    }


class CountingProxy:
    """Forward connections from a free port of this machine to a port of it, and count both ways."""

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self.target = (host, target)
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.up = self.down = 0  # bytes from clients to the server so far, and back
        self.connections = 0  # so far
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="proxy").start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self.target)
            except OSError:  # nobody there yet: the client will try again
                client.close()
                continue
            with self._lock:
                self.connections += 1
                self._open |= {client, server}
                if self._closed:
                    client.close()
                    server.close()
                    return
            for source, sink, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    if up:
                        self.up += len(data)
                    else:
                        self.down += len(data)
        except OSError:
            pass
        finally:
            for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
                with suppress(OSError):
                    end.shutdown(how)

    def close(self) -> None:
        """Stop listening and cut what is open."""
        self._listener.close()
        with self._lock:
            self._closed = True
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> "CountingProxy":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
