"""Find a row's learning rate: a grid that is the same for all rows, and on beyond its edge while that is better.

Only scores on validation data are looked at, their mean where a rate runs with several seeds. A rate at the edge
of what was tried says little: the best one may lie further out. So a row whose best rate is the first or the last
goes on by the grid's own step, as often as the set-up allows.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rtopk.studies.paper.tables import Row, Scale, Table
from rtopk.studies.train.config import Config
from rtopk.studies.train.records import Record, Results, score


@dataclass(frozen=True)
class Tuning:
    """What is known of a row's learning rate."""

    tried: dict[float, list[Record]]  # the runs of each rate, from the smallest to the largest
    missing: tuple[Config, ...] = ()  # the runs that come next; none when the search is over
    whole: bool = True  # all of the grid has been tried

    @property
    def rate(self) -> float:
        """Return the best rate of those tried; of equals, the smaller."""
        return max(self.tried, key=lambda rate: (self.value(rate), -rate))

    def value(self, rate: float) -> float:
        """Return a rate's mean score, larger for better ones."""
        return mean(map(score, self.tried[rate]))

    @property
    def at_edge(self) -> bool:
        """Tell whether the best rate is the smallest or the largest of those tried."""
        return self.rate in (min(self.tried), max(self.tried))


def tuning(table: Table, scale: Scale, row: Row, records: Mapping[str, Record]) -> Tuning:
    """Return what records, by key, say of a row's learning rate, and what to run next."""
    setup = table.setups[scale]
    grid = setup.rates
    low, high = grid[0] / grid[1], grid[-1] / grid[-2]
    tried: dict[float, list[Record]] = {}
    wanted, whole = list(grid), False
    for left in range(setup.beyond, -1, -1):
        runs = {rate: table.tuning(scale, row, rate) for rate in wanted}
        missing = [run for group in runs.values() for run in group if run.key not in records]
        done = {
            rate: [records[run.key] for run in group if run.key in records] for rate, group in runs.items()
        }
        if missing:
            partly = tried if whole else {rate: group for rate, group in done.items() if group}
            return Tuning(partly, tuple(missing), whole)
        tried, whole = dict(sorted({**tried, **done}.items())), True
        found = Tuning(tried)
        if not found.at_edge or not left:
            break
        wanted = [float(f"{found.rate * (low if found.rate == min(tried) else high):.4g}")]
    return Tuning(tried)


def note_choice(file: Path, of: Record, groups: Sequence[Sequence[Record]], chosen: float) -> None:
    """Write what was tried, its scores and the choice into the records, once; of several, the last counts.

    `of` says whose learning rate it is, `groups` holds the runs of each rate.
    """
    keys = [run["key"] for group in groups for run in group]
    key = hashlib.blake2b(f"choice {of} {keys}".encode(), digest_size=8).hexdigest()
    metric = groups[0][0]["metric"]
    record = {
        "kind": "choice",
        "key": key,
        **of,
        "metric": metric,
        "grid": [group[0]["config"]["learning_rate"] for group in groups],
        "scores": [mean(run["final"][metric] for run in group) for group in groups],
        "chosen": chosen,
    }
    Results(file).add(record)
