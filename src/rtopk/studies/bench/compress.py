"""How near the compress step (accumulate, select, take out what was sent) comes to its floor.

The floor is `residual.add_(gradient)`: two reads and one write of every entry, which no scheme with error
compensation avoids. All methods run interleaved in one process, each on its own residual that it carries from
step to step; `over_floor` is the median of the ratios within a repetition, so what disturbs the machine
disturbs both sides. Before every timed step a buffer larger than the cache is read: all start cold.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rtopk.kernels import reaches
from rtopk.seed import derive, generator
from rtopk.select import draw_largest
from rtopk.studies.bench.compress_methods import FACTOR, METHODS, Floor, Fused
from rtopk.studies.bench.workloads import Gradients, real, synthetic
from rtopk.studies.tasks.models import mlp

SIZES = (1_000_000, 11_200_000, 66_000_000)
DENSITIES = (0.01, 0.001)
WARM = 12  # steps before the first measured one: the residual grows fast at first
LARGE = 11_000_000  # the bars speak of vectors from here on


@dataclass(frozen=True)
class Row:
    """One method on one kind of data."""

    d: int
    density: float
    threads: int
    data: str  # synthetic or real
    method: str  # rtopk, topk, dgc or floor
    ms: float
    over_floor: float


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    sizes: tuple[int, ...] = SIZES
    densities: tuple[float, ...] = DENSITIES
    threads: tuple[int, ...] = (1, 2)
    repetitions: int = 25
    rivals_every: int = 10  # rivals take long: they run in every n-th repetition
    data_dir: Path | None = None


QUICK = Plan(sizes=(11_200_000,), repetitions=9, rivals_every=9)


def measure(plan: Plan, say: Callable[[str], None] = lambda text: None) -> Iterator[tuple[str, list[Row]]]:
    """Yield, for each size and kind of data, what the gradients are and the rows."""
    before = torch.get_num_threads()
    try:
        for size in plan.sizes:
            for kind in ("synthetic", "real"):
                say(f"{kind} gradients, d = {size:,}")
                torch.set_num_threads(before)
                gradients = synthetic(size, 3) if kind == "synthetic" else real(size, 3, plan.data_dir)
                rows = []
                for threads in plan.threads:
                    torch.set_num_threads(threads)
                    for density in plan.densities:
                        say(
                            f"{gradients.source}, d = {gradients.size:,}, density {density:g}, {threads} threads"
                        )
                        rows += compare(gradients, kind, density, threads, plan)
                yield gradients.source, rows
    finally:
        torch.set_num_threads(before)


def compare(gradients: Gradients, kind: str, density: float, threads: int, plan: Plan) -> list[Row]:
    """Run all methods interleaved on one kind of data."""
    d = gradients.size
    k = max(1, round(density * d))
    methods = {name: make(d, k) for name, make in METHODS.items()}
    flush = torch.zeros(32_000_000)  # 128 MB
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for step in range(-WARM, plan.repetitions):
        gradient = gradients.at(step + WARM)
        once: dict[str, float] = {}
        for name, method in methods.items():
            rival = name in ("topk", "dgc")
            if rival and (step < 0 or step % plan.rivals_every):
                continue
            flush.sum()
            begin = time.perf_counter()
            method.step(gradient, step + WARM)
            once[name] = time.perf_counter() - begin
        if step >= 0:
            for name, taken in once.items():
                seconds[name].append(taken)
                ratios[name].append(taken / once["floor"])
    return [
        Row(
            d,
            density,
            threads,
            kind,
            name,
            1e3 * statistics.median(seconds[name]),
            statistics.median(ratios[name]),
        )
        for name in methods
    ]


@dataclass(frozen=True)
class Bar:
    """A requirement, and whether it is met."""

    text: str
    measured: float
    limit: float
    met: bool


def bars(rows: list[Row]) -> list[Bar]:
    """Check the rows against what the pass must reach, from 11 M entries on."""
    table = {(r.d, r.density, r.threads, r.data, r.method): r for r in rows}
    found = []
    for row in rows:
        if row.method != "rtopk" or row.d < LARGE:
            continue
        where = f"{row.data}, {row.d / 1e6:.1f} M, {100 * row.density:g} %, threads {row.threads}"
        limit = 1.5 if row.density <= 0.001 else 2.0
        found.append(Bar(f"over the floor: {where}", row.over_floor, limit, row.over_floor <= limit))
        for rival, least in (("topk", 15.0), ("dgc", 3.0)):
            other = table[(row.d, row.density, row.threads, row.data, rival)]
            times = other.over_floor / row.over_floor
            found.append(Bar(f"faster than {rival}: {where}", times, least, times >= least))
        for larger in rows:
            same = (larger.density, larger.threads, larger.data, larger.method)
            if larger.d > 3 * row.d and same == (row.density, row.threads, row.data, row.method):
                growth = (larger.ms / larger.d) / (row.ms / row.d)
                found.append(
                    Bar(f"time per entry at {larger.d / 1e6:.0f} M: {where}", growth, 1.3, growth <= 1.3)
                )
    return found


def breakdown(gradients: Gradients, threads: int, density: float, repetitions: int = 11) -> dict[str, float]:
    """Say where a step spends its time, each part as the median of its ratios to the floor.

    The check is what `add` does first; here it is timed by itself, and taken off the time of `add`.
    """
    d, flush = gradients.size, torch.zeros(32_000_000)
    floor, method = Floor(d, 0), Fused(d, round(density * d))
    ratios: dict[str, list[float]] = {"check": [], "pass": [], "select": [], "subtract": []}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for step in range(-WARM, repetitions):
        gradient = gradients.at(step + WARM)
        flush.sum()
        least = _seconds(partial(floor.step, gradient, 0))[0]
        flush.sum()
        check = _seconds(partial(reaches, gradient, 2.0**100))[0]
        flush.sum()
        search, r = method.node.search, FACTOR * method.k
        search.aim(r, d)  # before there is a guess, from zero
        adding, vector = _seconds(partial(method.memory.add, gradient, search))
        selecting, sent = _seconds(partial(draw_largest, vector, method.k, r, generator(step), search))
        taking = _seconds(partial(method.memory.subtract, sent))[0]
        if step >= 0:
            taken = {"check": check, "pass": adding - check, "select": selecting, "subtract": taking}
            for name, seconds in taken.items():
                ratios[name].append(seconds / least)
    torch.set_num_threads(before)
    return {name: statistics.median(found) for name, found in ratios.items()}


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def peak_memory(gradients: Gradients, density: float = 0.001) -> float:
    """Return the extra memory of a step at its peak, as a share of the vector.

    Extra is all but gradient and residual, the arrays that are kept for the next step included. Every array
    of the step is made by numpy, which reports to tracemalloc.
    """
    d = gradients.size
    warm = Fused(100_000, 100)  # compiles the loops
    for step in range(3):
        warm.step(gradients.vectors[step][:100_000], step)
    tracemalloc.start()
    try:
        method = Fused(d, round(density * d))
        for step in range(WARM):
            method.step(gradients.at(step), step)
        peak = 0.0
        for step in range(WARM, WARM + 6):
            tracemalloc.reset_peak()
            method.step(gradients.at(step), step)
            peak = max(peak, tracemalloc.get_traced_memory()[1])
        return peak / (4 * d) - 1.0  # without the residual
    finally:
        tracemalloc.stop()


def second_scans(steps: int = 400, density: float = 0.01) -> tuple[int, int, float]:
    """Train an MLP on digits; return d, steps and the share of steps that needed a second scan."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16.0, torch.from_numpy(digits.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive("second scans"))
        model = mlp(64, (256, 256), 10)
    rng = generator("second scans", "batches")
    parameters = list(model.parameters())
    d = sum(p.numel() for p in parameters)
    method = Fused(d, round(density * d))
    for step in range(steps):
        chosen = torch.randint(len(images), (32,), generator=rng)
        model.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters if p.grad is not None])
        _apply(parameters, _sent(method, gradient, step), 0.1)
    return d, steps, method.node.search.second_scans / method.node.search.steps


def _sent(method: Fused, gradient: Tensor, step: int) -> Tensor:
    """Return what a step takes out of the residual, dense."""
    before = torch.zeros_like(gradient) if method.memory.residual is None else method.memory.residual.clone()
    method.step(gradient, step)
    assert method.memory.residual is not None
    return before + gradient - method.memory.residual


def _apply(parameters: list[nn.Parameter], update: Tensor, lr: float) -> None:
    begin = 0
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(update[begin : begin + parameter.numel()].view_as(parameter), alpha=lr)
            begin += parameter.numel()


def as_json(rows: list[Row]) -> dict[str, list[dict[str, object]]]:
    """Return the rows as one object."""
    return {"rows": [asdict(row) for row in rows]}
