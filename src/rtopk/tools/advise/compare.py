"""Predicted against measured, on every row of `rtopk bench link`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtopk.studies.bench.hosts import burst_bytes
from rtopk.studies.bench.standin import MODELS
from rtopk.tools.advise.cost import Link, Workload, predict
from rtopk.tools.advise.machine import Machine


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
            shapes[model] = tuple(tuple(p.shape) for p in MODELS[model]()[0].parameters())
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
