"""Which method to use, where each wins, and how predictions compare with measurements.

The fastest method is recommended, unless one that sends more of the gradient is nearly as fast.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtopk.studies.bench import MODELS
from rtopk.studies.bench.hosts import burst_bytes
from rtopk.tools.advise.cost import Link, Prediction, Workload, predict
from rtopk.tools.advise.machine import Machine
from rtopk.tools.show.palette import with_density

WORTH = 0.75  # compression must save a quarter of dense's step: less is not worth tuning rates anew
NEARLY = 1.05  # within this factor of the fastest, the one that sends more is preferred


@dataclass(frozen=True)
class Advice:
    """The recommendation and the reason."""

    choice: Prediction
    reason: str

    @property
    def line(self) -> str:
        """The line to paste into a DDP job; empty where DDP's own all-reduce is best."""
        hooks = "torch.distributed.algorithms.ddp_comm_hooks"
        if self.choice.method.startswith("rtopk"):
            exchange = ', exchange="all-reduce"' if self.choice.method == "rtopk-allreduce" else ""
            return (
                f"rtopk.ddp.register(model, density={self.choice.density:g}, "
                f'values="{self.choice.values}"{exchange})'
            )
        if self.choice.method == "fp16":
            return f"model.register_comm_hook(None, {hooks}.default_hooks.fp16_compress_hook)"
        if self.choice.method.startswith("powersgd-"):
            hook = f"{hooks}.powerSGD_hook"
            rank = self.choice.method.removeprefix("powersgd-")
            return f"model.register_comm_hook({hook}.PowerSGDState(None, {rank}), {hook}.powerSGD_hook)"
        return ""


def information(prediction: Prediction) -> tuple[float, ...]:
    """Order methods by how much of the gradient they send: entries, bits, and whether all of it is passed on."""
    bits = {"fp32": 32, "fp16": 16, "4bit": 4}.get(prediction.values or "fp32", 32)
    if prediction.method == "dense":
        return (2.0, 32)
    if prediction.method == "fp16":
        return (2.0, 16)
    return (prediction.density or 0.0, bits, prediction.method != "rtopk-allreduce")


def choose(predictions: Sequence[Prediction]) -> Advice:
    """Recommend a method; dense wherever compression does not pay."""
    dense = next(p for p in predictions if p.method == "dense")
    fastest = min(predictions, key=lambda p: p.step_ms)
    if fastest.step_ms > WORTH * dense.step_ms:
        return Advice(
            dense,
            f"nothing is more than {100 * (1 - WORTH):.0f} % faster than dense all-reduce "
            f"({dense.step_ms:,.0f} ms; the fastest, {fastest.label}, {fastest.step_ms:,.0f} ms): use dense",
        )
    near = [p for p in predictions if p.step_ms <= NEARLY * fastest.step_ms]
    choice = max(near, key=information)
    return Advice(
        choice,
        f"{choice.label} takes {choice.step_ms:,.0f} ms a step, dense {dense.step_ms:,.0f} ms: "
        f"{dense.step_ms / choice.step_ms:.1f} times as fast",
    )


NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
MBITS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0)


@dataclass(frozen=True)
class Scenario:
    """A model, what its step takes without communication, and how far apart the nodes are."""

    name: str
    size: int
    step_ms: float
    latency_ms: float


SCENARIOS = (
    Scenario("ResNet-18 (11 M), one room", 11_200_000, 100, 0.1),
    Scenario("ResNet-18 (11 M), across a continent", 11_200_000, 100, 30),
    Scenario("7 B model, one room", 7_000_000_000, 5_000, 0.1),
    Scenario("7 B model, across a continent", 7_000_000_000, 5_000, 30),
)


@dataclass(frozen=True)
class Point:
    """What is predicted for a scenario on one link."""

    scenario: Scenario
    nodes: int
    mbit: float
    predictions: list[Prediction]
    advice: Advice

    @property
    def dense(self) -> Prediction:
        """What dense all-reduce is expected to take."""
        return next(p for p in self.predictions if p.method == "dense")


def simulate(
    machine: Machine,
    scenarios: Sequence[Scenario] = SCENARIOS,
    nodes: Sequence[int] = NODES,
    mbits: Sequence[float] = MBITS,
) -> Iterator[Point]:
    """Predict and choose on every combination."""
    for scenario in scenarios:
        work = Workload.of_size(scenario.size, scenario.step_ms)
        for n in nodes:
            for mbit in mbits:
                predictions = predict(machine, work, Link(n, mbit, scenario.latency_ms))
                yield Point(scenario, n, mbit, predictions, choose(predictions))


@dataclass(frozen=True)
class Compared:
    """One row: what was measured, and what was predicted without looking at it."""

    model: str
    mbit: float | None
    nodes: int
    method: str
    density: float | None
    values: str | None
    measured_ms: float
    predicted_ms: float

    @property
    def label(self) -> str:
        """Name the method with its density and values."""
        return with_density(self.method, self.density, self.values)

    @property
    def error(self) -> float:
        """The difference as a part of what was measured."""
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


def compare(machine: Machine, rows: Sequence[Mapping[str, Any]], cores: int) -> list[Compared]:
    """Predict every measured row from the step without communication, the link and the machine's parts.

    Ranks of the benchmark share the cores of one machine, so their local work takes nodes / cores as long.
    """
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    compared = []
    for row in rows:
        model, mbit, nodes = row["model"], row["mbit"], row["nodes"]
        if model not in shapes:
            shapes[model] = tuple(tuple(p.shape) for p in MODELS[model][0]().parameters())
        link = Link(
            nodes, mbit, burst=0 if mbit is None else burst_bytes(mbit), sharing=max(1.0, nodes / cores)
        )
        key = (row["method"], row["density"], row["values"])
        found = {
            (p.method, p.density, p.values): p.step_ms
            for p in predict(machine, Workload(shapes[model], row["off_ms"]), link)
        }
        if key in found:
            compared.append(Compared(model, mbit, nodes, *key, row["step_ms"], found[key]))
    return compared


def median_error(compared: Sequence[Compared]) -> float:
    """Return the median error over all rows."""
    return statistics.median(row.error for row in compared)
