"""Start Flower's real engines from a test, and see that nothing of them is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

from rtopk.studies.federation.deployment import OFFLINE, Fleet, write_app

HERE = Path(__file__).parent


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", "RTOPK_TEST_FOLDER": str(folder),
        "PYTHONPATH": path, **more,
    }  # fmt: skip


def python(folder: Path, code: str) -> None:
    """Run code in a process of its own; ray and pytest's strict warnings do not go together."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(folder), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]


def rtopk(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "rtopk", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def fleet_of(folder: Path, settings: dict[str, str] | None = None, **options) -> Fleet:
    """Make a fleet whose processes see the test's folder and settings."""
    fleet = Fleet(folder / "fleet", **options)
    own = ("OMP_NUM_THREADS", "RTOPK_TEST_FOLDER", "PYTHONPATH")
    fleet.environment |= {name: environment(folder)[name] for name in own} | (settings or {})
    return fleet


def submit(fleet: Fleet, source: str) -> str:
    return fleet.submit(write_app(fleet.folder / "app", source))


def await_file(path: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.05)


def leftovers(folder: Path, seconds: float = 20) -> list[int]:
    """Return processes that still run with this folder in their environment."""
    deadline = time.monotonic() + seconds
    while (found := _with_folder(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _with_folder(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in data and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found
