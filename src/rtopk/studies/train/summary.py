"""Records of several seeds -> one row per method: mean, spread, bytes measured, times less than dense."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev

from rtopk.studies.train.records import Record


@dataclass(frozen=True)
class Row:
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
        return self.method if self.method == "dense" else f"{self.method} {100 * (1 - self.density):.4g} %"


def summarise(records: Iterable[Record]) -> list[Row]:
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


def _row(group: list[Record], dense_bytes: float) -> Row:
    config, metric = group[0]["config"], group[0]["metric"]
    scores = [record["final"][metric] for record in group]
    sent = mean(record["sent_bytes_per_round"] for record in group)
    return Row(
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
