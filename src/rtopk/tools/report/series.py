"""Runs -> series: what differs only by seed is one series, with means and 95 % intervals over its seeds.

Series of one task and setting share a panel. A label names what tells a series from the others of its panel:
the method and its compression, then whatever option else differs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rtopk.studies.train.records import Record, SeedRuns
from rtopk.tools.report.inputs import is_going_on
from rtopk.tools.show import palette
from rtopk.tools.show.intervals import half_width
from rtopk.tools.show.palette import with_compression

POINTS = 150  # of a curve on the page; more can neither be seen nor kept small


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half width of its 95 % interval (nan for one seed)."""

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.half:.2f}" if self.count > 1 else f"{self.mean:.2f}"


@dataclass(frozen=True)
class Series(SeedRuns):
    """Runs that differ only by seed."""

    panel: str
    label: str
    runs: list[Record]
    slot: int  # of the palette
    dash: int  # 0 for the first series of its colour in the panel, then 1, 2, ...

    @property
    def config(self) -> dict[str, Any]:
        """Return the options of the first run."""
        config: dict[str, Any] = self.runs[0]["config"]
        return config

    @property
    def metric(self) -> str:
        """Name the score."""
        return str(self.runs[0]["metric"])

    @property
    def is_dense(self) -> bool:
        """Say whether it sends everything."""
        return bool(self.config["method"] == "dense")

    @property
    def records(self) -> tuple[Record, ...]:  # type: ignore[override]
        """Return the runs that have been evaluated at least once."""
        return tuple(run for run in self.runs if run["curve"])

    @property
    def going_on(self) -> bool:
        """Say whether one of its runs is not at its end."""
        return any(is_going_on(run) for run in self.runs)

    @property
    def scores(self) -> list[float]:
        """Return the score at the end of each run."""
        return [run["final"][self.metric] for run in self.records]

    def score(self) -> Estimate:
        """Return the score at the end."""
        return estimate(self.scores)

    def over_runs(self, value: Callable[[Record], float]) -> float:
        """Return the mean of something over the runs."""
        return fmean(value(run) for run in self.records)

    def curve(self, value: Callable[[Record], float]) -> list[Estimate]:
        """Return an estimate at every point that all runs have, thinned to what a page can show."""
        length = min(len(run["curve"]) for run in self.records)
        return [estimate([value(run["curve"][i]) for run in self.records]) for i in thinned(length)]


def thinned(length: int, limit: int = POINTS) -> list[int]:
    """Return at most `limit` positions, evenly spaced, the first and the last among them.

    >>> thinned(7, 3)
    [0, 3, 6]
    """
    if length <= limit:
        return list(range(length))
    return [round(i * (length - 1) / (limit - 1)) for i in range(limit)]


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and 95 % interval (Student's t) of independent values."""
    half = half_width(values) if len(values) > 1 else math.nan
    return Estimate(fmean(values) if values else math.nan, half, len(values))


def collect(runs: Sequence[Record]) -> dict[str, list[Series]]:
    """Group runs into the series of each panel, in the order in which they come."""
    groups: dict[str, dict[str, list[Record]]] = {}
    for run in runs:
        config = run["config"]
        panel = f"{config['task']}, {config['setting']}"
        if "paper" in run:  # the same task serves several tables and studies
            panel += f", {run['paper']['table'].replace('-', ' ')}"
        same = str(sorted((name, str(value)) for name, value in config.items() if name != "seed"))
        groups.setdefault(panel, {}).setdefault(same, []).append(run)
    return {panel: _panel(panel, list(found.values())) for panel, found in groups.items()}


def _panel(panel: str, groups: list[list[Record]]) -> list[Series]:
    methods = [*palette.METHODS, *dict.fromkeys(g[0]["config"]["method"] for g in groups)]
    methods = list(dict.fromkeys(methods))
    labels = _labels([group[0] for group in groups])
    used = [0] * len(methods)
    series = []
    for group, label in zip(groups, labels, strict=True):
        slot = methods.index(group[0]["config"]["method"])
        series.append(Series(panel, label, group, slot, used[slot]))
        used[slot] += 1
    return series


def _labels(runs: list[Record]) -> list[str]:
    """Name each series of a panel, no two alike: the method with its size, then the choices that differ."""
    configs: list[dict[str, Any]] = [run["config"] for run in runs]
    labels = []
    for run, config in zip(runs, configs, strict=True):
        own = [other for other in configs if other["method"] == config["method"]]
        name = run.get("paper", {}).get("row") or _with_choices(_sized(config), config, own, CHOICES)
        labels.append(name)
    for name in [name for name in dict.fromkeys(labels) if labels.count(name) > 1]:
        same = [i for i, label in enumerate(labels) if label == name]
        for i in same:
            others = [configs[j] for j in same]
            labels[i] = _with_choices(name, configs[i], others, [key for key in configs[i] if key != "seed"])
    return labels


CHOICES = ("r_over_k", "values", "mean", "memory")  # what a method's user chooses; rates are tuned


def _sized(config: dict[str, Any]) -> str:
    """Name a method with what decides its bytes."""
    if config["method"] == "powersgd":
        return f"powersgd rank {config.get('matrix_rank', 0)}"
    if config["method"] == "threshold":
        return f"threshold {config.get('threshold', 0.0):g}"
    return with_compression(config["method"], config["density"])


def _with_choices(
    name: str, config: dict[str, Any], others: list[dict[str, Any]], options: Iterable[str]
) -> str:
    """Add the options in which a series differs from the others."""
    for option in options:
        value = config.get(option)
        if any(other.get(option) != value for other in others):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            if option == "r_over_k":
                option, text = "r =", f"{text} k" if value else "n k"
            name += f", {option.replace('_', ' ')} {text}"
    return name
