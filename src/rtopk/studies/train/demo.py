"""The demo: five nodes learn scikit-learn's digits with every method, in both settings.

The rounds are chosen so that even at 99.9 % compression the five nodes together send every coordinate several
times (nodes x rounds x density is 4.5 in the distributed setting, 2.25 in the federated one); with fewer, a
comparison says nothing. Three seeds say more than two with more rounds: their 95 % intervals are a third as wide.
The learning rate is one that suits every method: rTop-k's entries wait about n rounds longer than top-k's and bear
only a smaller one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from rtopk.studies.config import Config
from rtopk.studies.train.records import Record
from rtopk.tools.show.palette import style, with_compression
from rtopk.tools.show.terminal import save_picture

ROWS = (("dense", 1.0), ("top-k", 0.01), ("random-k", 0.01), ("rtop-k", 0.01), ("rtop-k", 0.001))


def configs(seeds: int, rounds: int = 900) -> Sequence[Config]:
    """Return every run of the demo; all methods share every option but their own."""
    distributed = Config(rounds=rounds, learning_rate=0.02, evaluate_every=max(1, rounds // 30))
    federated = Config(
        setting="federated",
        rounds=rounds // 2,
        batch=128,  # a round is an epoch of two batches
        learning_rate=0.05,
        evaluate_every=max(1, rounds // 60),
    )
    return [
        Config(**{**setting.to_dict(), "method": method, "density": density, "seed": seed})
        for setting in (distributed, federated)
        for method, density in ROWS
        for seed in range(seeds)
    ]


@dataclass(frozen=True)
class MethodSummary:
    """What one configuration reached over its seeds."""

    setting: str
    method: str
    density: float
    metric: str
    score: float  # mean over seeds, at the end of the run
    spread: float  # standard deviation over seeds, 0 for one
    seeds: int
    sent_bytes_per_round: float  # per node, measured on the payloads
    sent_bytes: float  # per node, whole run
    times_less: float  # dense bytes / these bytes, same setting; nan without a dense row

    @property
    def label(self) -> str:
        """Name the row as the paper does: method and compression."""
        return with_compression(self.method, self.density)


def summarise(records: Iterable[Record]) -> list[MethodSummary]:
    """Group records that differ only by seed, in the order in which they first appear."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        name = str({key: value for key, value in record["config"].items() if key != "seed"})
        groups.setdefault(name, []).append(record)
    dense = {
        group[0]["config"]["setting"]: mean(r["sent_bytes_per_round"] for r in group)
        for group in groups.values()
        if group[0]["config"]["method"] == "dense"
    }
    return [_row(group, dense.get(group[0]["config"]["setting"], math.nan)) for group in groups.values()]


def _row(group: list[Record], dense_bytes: float) -> MethodSummary:
    config, metric = group[0]["config"], group[0]["metric"]
    scores = [record["final"][metric] for record in group]
    sent = mean(record["sent_bytes_per_round"] for record in group)
    return MethodSummary(
        setting=config["setting"],
        method=config["method"],
        density=1.0 if config["method"] == "dense" else config["density"],
        metric=metric,
        score=mean(scores),
        spread=stdev(scores) if len(scores) > 1 else 0.0,
        seeds=len(scores),
        sent_bytes_per_round=sent,
        sent_bytes=mean(record["final"]["sent_bytes"] for record in group),
        times_less=dense_bytes / sent,
    )


def score_against_bytes(records: Sequence[Record], path: Path) -> None:
    """Draw each run's curve, and where each method ended with its spread over seeds."""
    from matplotlib.figure import Figure

    rows = summarise(records)
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = Figure(figsize=(5.5 * len(settings), 4.2))
    axes = figure.subplots(1, len(settings), sharey=True, squeeze=False)
    for axis, setting in zip(axes[0], settings, strict=True):
        for row in (row for row in rows if row.setting == setting):
            colour, marker = style(row.method)
            faint = 0.45 if row.density < 0.005 else 1.0  # the stronger compression of the same method
            for record in records:
                if _is(record, row):
                    curve = record["curve"]
                    axis.plot(
                        [p["sent_bytes"] for p in curve], [p[row.metric] for p in curve], color=colour,
                        alpha=0.25 * faint, linewidth=0.9,
                    )  # fmt: skip
            axis.errorbar(
                row.sent_bytes, row.score, yerr=row.spread, color=colour, marker=marker, markersize=8,
                markerfacecolor=colour if faint == 1.0 else "white", capsize=3, linestyle="none",
                label=f"{row.label} ({row.score:.1f})",
            )  # fmt: skip
        axis.set(xscale="log", title=f"{setting} setting", xlabel="bytes sent per node")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel(f"{rows[0].metric} on held-out data (%)")
    figure.tight_layout()
    save_picture(figure, path, dpi=120)


def _is(record: Record, row: MethodSummary) -> bool:
    config = record["config"]
    density = 1.0 if config["method"] == "dense" else config["density"]
    return (config["setting"], config["method"], density) == (row.setting, row.method, row.density)
