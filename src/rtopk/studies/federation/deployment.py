"""A Flower deployment on this machine: a SuperLink, SuperNodes and a run, each a process that is ended by id.

Everything listens on 127.0.0.1, with Flower's telemetry, update check and installation of dependencies off.
`flwr run` exits with 0 even if the run fails, so the run's own status is asked for.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TIMEOUT = 180.0  # seconds for a process to be ready
GRACE = 10.0  # seconds for a process to end when asked

# Ends what we started when we are gone, however we went: its input then ends. It is told the ids of our children,
# which are the ids of their groups too; an empty line says that all have been ended already.
WATCHDOG = """
import os, signal, sys, time
groups = []
for line in sys.stdin:
    groups = [*groups, int(line)] if line.strip() else []

def signalled(number):
    left = []
    for group in groups:
        try:
            os.killpg(group, number)
            left.append(group)
        except ProcessLookupError:
            pass
    return left

groups = signalled(signal.SIGTERM)
deadline = time.monotonic() + GRACE
while groups and time.monotonic() < deadline:
    time.sleep(0.2)
    groups = signalled(0)
signalled(signal.SIGKILL)
""".replace("GRACE", str(GRACE))


class FleetError(RuntimeError):
    """A part of the deployment did not do what it should."""


class Fleet:
    """A SuperLink and its SuperNodes, as long as the `with` block lasts; logs and state are in `folder`.

    They end with this process too, even if it is killed. `secure` is (CA certificate, server certificate, server
    key) for TLS; with `authenticated`, only SuperNodes whose key is registered are let in.
    """

    def __init__(
        self, folder: Path, *, secure: tuple[Path, Path, Path] | None = None, authenticated: bool = False
    ) -> None:
        self.folder = folder.absolute()
        self.secure = secure
        self.authenticated = authenticated
        self.port = free_port()
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._watchdog: subprocess.Popen[str] | None = None
        self.environment = {**os.environ, **OFFLINE, "FLWR_HOME": str(self.folder / "home")}
        # The scripts of this environment first: a SuperLink starts others of Flower's by name.
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

    def __enter__(self) -> "Fleet":
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        options = ["--insecure"]
        if self.secure:
            authority, certificate, key = map(str, self.secure)
            options = ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        if self.authenticated:
            options.append("--enable-supernode-auth")
        connection = f'address = "127.0.0.1:{self.port}"\n' + (
            f'root-certificates = "{self.secure[0]}"\n' if self.secure else "insecure = true\n"
        )
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "fleet"\n\n[superlink.fleet]\n{connection}'
        )
        self._watchdog = subprocess.Popen(
            [sys.executable, "-c", WATCHDOG], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            self._link = self._start(
                "superlink", ["flower-superlink", *options, "--host", "127.0.0.1", "--port", str(self.port)]
            )
            self._await_link()
        except BaseException:
            self.stop()
            raise
        return self

    def add_node(
        self, config: Mapping[str, object], *, through: int | None = None, key: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a SuperNode; `through` is the port of a proxy, `key` its private key."""
        port = free_port()
        options = ["--root-certificates", str(self.secure[0])] if self.secure else ["--insecure"]
        if key is not None:
            options += ["--auth-supernode-private-key", str(key)]
        values = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        node = self._start(
            f"supernode-{len(self.nodes)}",
            ["flower-supernode", *options, "--superlink", f"127.0.0.1:{through or self.port}",
             "--host", "127.0.0.1", "--port", str(port), "--node-config", values],
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run Flower's command line and return what it prints as JSON."""
        done = subprocess.run(
            ["flwr", *arguments, "--format", "json"], env=self.environment, cwd=self.folder, capture_output=True,
            text=True, timeout=TIMEOUT,
        )  # fmt: skip
        start = done.stdout.find("{")
        try:
            answer: dict[str, Any] = json.loads(done.stdout[start:])
        except ValueError as error:
            raise FleetError(
                f"flwr {' '.join(arguments)} said: {done.stdout[-500:]} {done.stderr[-500:]}"
            ) from error
        return answer

    def submit(self, app: Path, *options: str) -> str:
        """Start a run of an app folder with options of `flwr run`, return its id."""
        answer = self.flwr("run", str(app.absolute()), "fleet", *options)
        if not answer.get("success") or "run-id" not in answer:
            raise FleetError(f"flwr run did not start a run: {answer}")
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """Return the status of a run, such as `running` or `finished:completed`."""
        answer = self.flwr("ls", "fleet", "--run-id", run)
        return str(answer["runs"][0]["status"])

    def wait(self, run: str, *, done: Callable[[], bool] = lambda: False, seconds: float = 3600.0) -> str:
        """Wait until a run has finished, return its status; `done` says that asking is worth while."""
        deadline = time.monotonic() + seconds
        asked = time.monotonic()
        while time.monotonic() < deadline:
            self._check_link()
            if done() or time.monotonic() - asked > 15.0:
                status = self.status(run)
                asked = time.monotonic()
                if status.startswith("finished"):
                    return status
            time.sleep(0.2)
        raise FleetError(f"run {run} did not finish in {seconds:.0f} s; its logs are in {self.folder}")

    def stop_node(self, node: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
        """End a SuperNode and what it started."""
        _end(node, number)

    def stop(self) -> None:
        """End all that was started."""
        for child in reversed(self._children):
            _end(child, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for child in reversed(self._children):
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))
            _end(child, signal.SIGKILL)
            child.wait()
        if self._watchdog is not None:
            self._watchdog.communicate("\n")

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            # In a session of its own: its children form a group, which is ended with it.
            child = subprocess.Popen(
                list(command), env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        self._children.append(child)
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(f"{child.pid}\n")
        self._watchdog.stdin.flush()
        return child

    def _await_link(self) -> None:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            self._check_link()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise FleetError(f"superlink did not listen within {TIMEOUT:.0f} s: {self.tail('superlink')}")

    def _check_link(self) -> None:
        if self._link.poll() is not None:
            raise FleetError(f"the SuperLink ended with {self._link.returncode}: {self.tail('superlink')}")

    def tail(self, name: str, characters: int = 2000) -> str:
        """Return the end of a log."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-characters:] if path.exists() else ""


def _end(child: subprocess.Popen[bytes], number: int) -> None:
    """Signal the group of a child: the group has the child's own id, nobody else's."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Return the files of TLS in a folder: CA certificate, server certificate, server key."""
    files = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} must hold ca.crt, server.pem and server.key, lacks {', '.join(missing)}")
    return files


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_app(folder: Path, source: str, settings: Mapping[str, str] | None = None) -> Path:
    """Write a Flower app whose `server_app()` and `client_app()` come from the module `source`."""
    module = folder / "fleetapp"
    module.mkdir(parents=True, exist_ok=True)
    (module / "__init__.py").write_text("")
    for side in ("server", "client"):
        (module / f"{side}.py").write_text(f"from {source} import {side}_app\n\napp = {side}_app()\n")
    config = "".join(f"{name} = {json.dumps(value)}\n" for name, value in (settings or {}).items())
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "fleetapp"\nversion = "1.0.0"\nlicense = { text = "Apache-2.0" }\ndependencies = []\n\n'
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n'
        '[tool.flwr.app]\npublisher = "rtopk"\n\n'
        '[tool.flwr.app.components]\nserverapp = "fleetapp.server:app"\nclientapp = "fleetapp.client:app"\n\n'
        f"[tool.flwr.app.config]\n{config}"
    )
    return folder
