"""Seconds to a score on a link: the rounds of recorded curves times the measured steps of `rtopk bench link`.

The curves are of a small model and the steps of a large one, so the seconds answer a question of the form "if the
large model needed as many rounds as the small one". What is joined is said beside every table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rtopk.studies.bench.link import LinkRow
from rtopk.studies.paper.ablations import STUDIES
from rtopk.studies.paper.results import RowResult, row_results
from rtopk.studies.train.records import Record
from rtopk.tools.show.palette import rate, style, with_density
from rtopk.tools.show.terminal import markdown, save_picture

STUDY, MODEL, NODES = STUDIES["shipped-cifar10"], "resnet18", 4
RATES = (10.0, 100.0, 1000.0)  # Mbit/s
SHARES = (0.9, 0.95, 0.98)  # of the score that dense training ends with
# A row of the study -> the method of the link benchmark: name, density, values.
STEPS: dict[str, tuple[str, float | None, str | None]] = {
    "baseline": ("dense", None, None),
    "baseline, fp16": ("fp16", None, None),
    "PowerSGD, rank 1": ("powersgd-1", None, None),
    "Top-k 99 %, momentum in the memory": ("rtopk", 0.01, "fp16"),
    "Top-k 99.9 %, momentum in the memory": ("rtopk", 0.001, "fp16"),
}

# Whose colour and marker a method has.
LOOKS = {
    "dense": "dense",
    "fp16": "threshold",
    "powersgd-1": "powersgd",
}  # others: rtop-k's


@dataclass(frozen=True)
class Times:
    """One method: the rounds to a score, and what a round takes on each link."""

    result: RowResult
    method: str
    seconds: dict[float, float]  # a step at so many Mbit/s

    def rounds(self, target: float) -> float | None:
        """Return the rounds to a score, mean over seeds; None if a seed never reaches it."""
        found = [reached(record, target) for record in self.result.records]
        return None if None in found else mean(r for r in found if r is not None)


def reached(record: Record, target: float) -> float | None:
    """Return the round at which a run's score first reaches a target, on the line between two evaluations."""
    last = (0.0, 0.0)
    for point in record["curve"]:
        here = (float(point["round"]), float(point[record["metric"]]))
        if here[1] >= target:
            return last[0] + (here[0] - last[0]) * (target - last[1]) / (here[1] - last[1])
        last = here
    return None


def times(results: Path, links: Sequence[LinkRow]) -> list[Times]:
    """Return the methods that have curves, with their steps; raise ValueError if a step is missing."""
    found = {result.row.label: result for result in row_results(STUDY, "small", results)}
    steps = {
        (row.method, row.density, row.values, row.mbit): row.step_ms / 1000.0
        for row in links
        if (row.model, row.nodes) == (MODEL, NODES)
    }
    wanted = {(*key, mbit) for label, key in STEPS.items() if label in found for mbit in RATES}
    if missing := wanted - steps.keys():
        raise ValueError(
            f"the steps must have {MODEL} on {NODES} nodes with every method at {', '.join(map(rate, RATES))}; "
            f"{len(missing)} of {len(wanted)} are missing: run `rtopk bench link` for them"
        )
    return [
        Times(found[label], with_density(*key), {mbit: steps[(*key, mbit)] for mbit in RATES})
        for label, key in STEPS.items()
        if label in found
    ]


def target_of(methods: Sequence[Times], share: float) -> float:
    """Return a share of the score that dense training ends with."""
    return share * next(one.result.mean for one in methods if one.method == "dense")


def render(methods: Sequence[Times]) -> str:
    """Return a table for each score."""
    parts = []
    for share in SHARES:
        target = target_of(methods, share)
        rows: list[list[str | None]] = []
        for one in methods:
            rounds = one.rounds(target)
            told = (
                [None] * len(RATES) if rounds is None else [f"{rounds * one.seconds[m]:,.0f}" for m in RATES]
            )
            rows.append(
                [one.method, one.result.row.label, "never" if rounds is None else f"{rounds:,.0f}", *told]
            )
        heads = ["method", "row of the study", "rounds", *(f"s at {rate(mbit)}" for mbit in RATES)]
        lines = markdown(heads, rows)
        lines[1] = lines[1].replace("| ---: |", "| --- |", 1)
        parts.append(
            "\n".join([f"Accuracy {target:.1f} ({100 * share:g} % of dense training's end):", "", *lines])
        )
    return "\n\n".join(parts) + "\n"


def draw(methods: Sequence[Times], path: Path, mbit: float = 100.0) -> None:
    """Draw the score against seconds on one link, mean over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2))
    axis = figure.subplots()
    for one in methods:
        curves = [record["curve"] for record in one.result.records]
        metric = one.result.metric
        colour, marker = style(LOOKS.get(one.method, "rtop-k"))
        axis.plot(
            [p["round"] * one.seconds[mbit] for p in curves[0]],
            [mean(curve[i][metric] for curve in curves) for i in range(len(curves[0]))],
            color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=one.method,
            linestyle="--" if "0.1 %" in one.method else "-",
        )  # fmt: skip
    counts = sorted({len(one.result.records) for one in methods})
    seeds = f"{counts[0]}{f' to {counts[-1]}' if counts[1:] else ''}"
    axis.set(
        xscale="log", xlabel=f"seconds at {rate(mbit)} (measured steps of ResNet-18, {NODES} nodes)",
        ylabel="accuracy on test data (%)",
        title=f"{STUDY.title.partition(': ')[2]}, mean of {seeds} seeds",
    )  # fmt: skip
    axis.title.set_fontsize(9)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.tight_layout()
    save_picture(figure, path, dpi=120)
