"""How long it takes to start: help, imports and the first step, with and without compiled loops on disk.

Everything is measured in new processes. The step is that of the DDP hook, on a model of a million parameters, from
the start of backward to its end. "Cold" finds no compiled loops, as in a new container; "read-only" finds no folder
to keep them in either. The operating system has the files of torch in memory: a first start from disk takes longer.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STEP = """
import json, sys, time
began = time.perf_counter()
import torch
import torch.distributed as dist
torch_ready = time.perf_counter()
import rtopk
rtopk.ddp.register
rtopk_ready = time.perf_counter()
rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
network = torch.nn.Sequential(torch.nn.Linear(1000, 990), torch.nn.ReLU(), torch.nn.Linear(990, 10))
model = torch.nn.parallel.DistributedDataParallel(network)
rtopk.ddp.register(model, density=0.01)
steps = []
for step in range(3):
    loss = model(torch.randn(8, 1000)).square().mean()
    dist.barrier()
    begin = time.perf_counter()
    loss.backward()
    steps.append(time.perf_counter() - begin)
dist.destroy_process_group()
print(json.dumps({"import torch": torch_ready - began, "import rtopk after it": rtopk_ready - torch_ready,
                  "first step": steps[0], "third step": steps[2]}))
"""


@dataclass(frozen=True)
class Start:
    """One thing that was timed: medians over repetitions; over ranks, the slowest."""

    name: str
    seconds: float
    runs: int


def measure(runs: int = 3, ranks: int = 8, tell: Callable[[str], None] = print) -> list[Start]:
    """Time everything, in turns."""
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for turn in range(runs):
        tell(f"turn {turn + 1} of {runs}")
        for name, words in (("rtopk --help", ["-m", "rtopk", "--help"]), ("python -c ''", ["-c", ""])):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
            note(name, time.perf_counter() - begin)
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                for name, seconds in _steps(1, folder).items():
                    note(f"{name}, {kind}" if name == "first step" else name, seconds)
        note("first step, read-only", _steps(1, None)["first step"])
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                note(f"first step, {ranks} ranks at once, {kind}", _steps(ranks, folder)["first step"])
    return [Start(name, statistics.median(seconds), len(seconds)) for name, seconds in found.items()]


def _steps(ranks: int, cache: str | None) -> dict[str, float]:
    """Start so many ranks; return the times of the slowest."""
    with _package(cache is None) as source, tempfile.TemporaryDirectory() as meeting:
        environment = {**os.environ, "PYTHONPATH": source, "NUMBA_CACHE_DIR": cache or ""}
        if cache is None:
            environment |= {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", STEP, str(rank), str(ranks), str(Path(meeting) / "meet")],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        told = [process.communicate(timeout=600)[0] for process in processes]
    times = [json.loads(text) for text in told]
    return {name: max(each[name] for each in times) for name in times[0]}


@contextmanager
def _package(read_only: bool) -> Iterator[str]:
    """Yield the path of the package; one that cannot be written to, if asked."""
    source = Path(__file__).parents[3]
    if not read_only:
        yield str(source)
        return
    with tempfile.TemporaryDirectory() as folder:
        # Root can write anywhere, so a file stands where the folder of the loops would be made.
        for path in (source / "rtopk").rglob("*.py"):
            copy = Path(folder) / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
            copy.parent.joinpath("__pycache__").touch()
        yield folder
