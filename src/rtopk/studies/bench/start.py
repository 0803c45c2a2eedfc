"""How long it takes to start: help, imports and the first step, with and without compiled loops on disk.

Everything is measured in new processes, by the clock and in CPU seconds, which other load on the machine changes
less. The step is that of the DDP hook, on a model of a million parameters, from the start of backward to its end.
"Cold" finds no compiled loops, as in a new container: it starts without, and a thread compiles them. "Read-only"
finds no folder to keep them in either. The
operating system has the files of torch in memory: a first start from disk takes longer.
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
def now():
    return time.perf_counter(), time.process_time()
marks = [now()]
import torch
import torch.distributed as dist
marks.append(now())
import rtopk
rtopk.ddp.register
marks.append(now())
rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
network = torch.nn.Sequential(torch.nn.Linear(1000, 990), torch.nn.ReLU(), torch.nn.Linear(990, 10))
model = torch.nn.parallel.DistributedDataParallel(network)
rtopk.ddp.register(model, density=0.01)
spans = list(zip(marks, marks[1:]))
for step in range(3):
    loss = model(torch.randn(8, 1000)).square().mean()
    dist.barrier()
    begin = now()
    loss.backward()
    spans.append((begin, now()))
dist.destroy_process_group()
names = ["import torch", "import rtopk after it", "first step", "second step", "third step"]
print(json.dumps({n: [b - a for a, b in zip(*span)] for n, span in zip(names, spans)}))
"""
HELP = [sys.executable, "-m", "rtopk", "--help"]
Times = tuple[float, float]  # by the clock, and of the processor


@dataclass(frozen=True)
class Start:
    """One thing that was timed: medians over repetitions; over ranks, the slowest."""

    name: str
    seconds: float
    cpu_seconds: float
    runs: int


def measure(runs: int = 3, ranks: int = 8, tell: Callable[[str], None] = print) -> list[Start]:
    """Time everything, in turns."""
    found: dict[str, list[Times]] = {}
    many = f"first step, {ranks} ranks at once"
    for turn in range(runs):
        tell(f"turn {turn + 1} of {runs}")
        found.setdefault("rtopk --help", []).append(_help())
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            cold, waited = _steps(1, one), _steps(1, other, wait=True)
            warm, several_warm = _steps(1, other), _steps(ranks, other)
        with tempfile.TemporaryDirectory() as folder:
            several_cold = _steps(ranks, folder)
        for name, times in (
            ("import torch", warm["import torch"]),
            ("import rtopk after it", warm["import rtopk after it"]),
            ("first step, cold", cold["first step"]),
            ("second step, cold", cold["second step"]),
            ("first step, cold, all loops compiled first", waited["first step"]),
            ("first step, warm", warm["first step"]),
            ("first step, read-only", _steps(1, None)["first step"]),
            (f"{many}, cold", several_cold["first step"]),
            (f"{many}, warm", several_warm["first step"]),
            ("third step, warm", warm["third step"]),
        ):
            found.setdefault(name, []).append(times)
    return [
        Start(
            name, statistics.median(t[0] for t in times), statistics.median(t[1] for t in times), len(times)
        )
        for name, times in found.items()
    ]


def _help() -> Times:
    begin, used = time.perf_counter(), os.times()
    subprocess.run(HELP, check=True, capture_output=True)
    after = os.times()
    cpu = after.children_user + after.children_system - used.children_user - used.children_system
    return time.perf_counter() - begin, cpu


def _steps(ranks: int, cache: str | None, *, wait: bool = False) -> dict[str, Times]:
    """Start so many ranks, which may wait until their loops are compiled; return the times of the slowest."""
    with _package(cache is None) as source, tempfile.TemporaryDirectory() as meeting:
        environment = {**os.environ, "PYTHONPATH": source, "NUMBA_CACHE_DIR": cache or ""}
        environment["RTOPK_BACKEND"] = "cpu" if wait else ""
        if cache is None:
            environment |= {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", STEP, str(rank), str(ranks), str(Path(meeting) / "meet")],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        told = [json.loads(process.communicate(timeout=600)[0]) for process in processes]
    return {
        name: tuple(max(each) for each in zip(*(one[name] for one in told), strict=True)) for name in told[0]
    }


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
