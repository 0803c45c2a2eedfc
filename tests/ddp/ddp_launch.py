"""Start the processes of a launch, once a session, however many pytest workers ask for it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock  # torch depends on it

HERE = Path(__file__).parent
Results = dict[str, list[dict[str, Any]]]  # scenario -> rank -> what it returned


def environment(**extra: str) -> dict[str, str]:
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "MALLOC_MMAP_THRESHOLD_": "1000000",  # what is freed leaves the process, so that memory can be measured
    }
    return {**os.environ, **own, **extra}


def launch(
    folder: Path,
    tag: str,
    world: int,
    scenarios: list[Callable[..., Any]],
    timeout: float = 900,  # of one collective it is RTOPK_TEST_TIMEOUT, if that is longer
    **variables: str,
) -> Results:
    """Run scenarios in `world` fresh processes and return what they returned."""
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"{tag}.store"
    names = [f"{scenario.__module__}:{scenario.__name__}" for scenario in scenarios]
    with FileLock(str(folder / f"{tag}.lock")):
        done = folder / f"{tag}.done"
        if not done.exists():
            timeout = max(timeout, float(os.environ.get("RTOPK_TEST_TIMEOUT", "0")))
            _run(folder, store, world, names, timeout, environment(**variables))
            done.touch()
    results: Results = {}
    for scenario in scenarios:
        name = scenario.__name__
        paths = [Path(f"{store}.{name}.{rank}.json") for rank in range(world)]
        results[name] = [json.loads(p.read_text()) if p.exists() else {"raised": "died"} for p in paths]
    return results


def _run(
    folder: Path, store: Path, world: int, names: list[str], timeout: float, variables: dict[str, str]
) -> None:
    processes = []
    for rank in range(world):
        command = [
            sys.executable,
            str(HERE / "ddp_worker.py"),
            str(rank),
            str(world),
            str(store),
            str(folder),
            *names,
        ]
        with Path(f"{store}.{rank}.log").open("wb") as output:
            processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=output))
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def clean(results: Results, name: str) -> list[dict[str, Any]]:
    """Return a scenario's results; fail with the traceback if a rank raised."""
    for rank, result in enumerate(results[name]):
        assert "raised" not in result, f"rank {rank} raised:\n{result['raised']}"
    return results[name]
