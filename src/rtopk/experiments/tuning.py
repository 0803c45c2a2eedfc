"""Find a row's learning rate: a grid that is the same for all rows, and on beyond its edge while that is better.

Only scores on validation data are looked at. A rate at the edge of what was tried says little: the best one may
lie further out. So a row whose best rate is the first or the last goes on by the grid's own step, as often as
the set-up allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rtopk.experiments.config import Config
from rtopk.experiments.records import Record, score
from rtopk.experiments.tables import Row, Scale, Table


@dataclass(frozen=True)
class Tuning:
    """What is known of a row's learning rate."""

    tried: tuple[Record, ...]  # from the smallest rate to the largest
    missing: tuple[Config, ...]  # the runs that come next; none when the search is over
    whole: bool  # all of the grid has been tried

    @property
    def rate(self) -> float:
        """Return the best rate of those tried; of equals, the smaller."""
        best = max(self.tried, key=lambda run: (score(run), -_rate(run)))
        return _rate(best)

    @property
    def at_edge(self) -> bool:
        """Tell whether the best rate is the smallest or the largest of those tried."""
        return self.rate in (_rate(self.tried[0]), _rate(self.tried[-1]))


def tuning(table: Table, scale: Scale, row: Row, records: Mapping[str, Record]) -> Tuning:
    """Return what records, by key, say of a row's learning rate, and what to run next."""
    setup = table.setups[scale]
    grid = setup.rates
    runs = {rate: table.tuning(scale, row, rate) for rate in grid}
    missing = tuple(config for config in runs.values() if config.key not in records)
    if missing:
        tried = tuple(records[config.key] for config in runs.values() if config.key in records)
        return Tuning(tried, missing, whole=False)
    low, high = grid[0] / grid[1], grid[-1] / grid[-2]
    found = {rate: records[config.key] for rate, config in runs.items()}
    for _ in range(setup.beyond):
        so_far = Tuning(tuple(found[rate] for rate in sorted(found)), (), whole=True)
        if not so_far.at_edge:
            break
        step = low if so_far.rate == min(found) else high
        further = float(f"{so_far.rate * step:.4g}")
        config = table.tuning(scale, row, further)
        if config.key not in records:
            return Tuning(so_far.tried, (config,), whole=True)
        found[further] = records[config.key]
    return Tuning(tuple(found[rate] for rate in sorted(found)), (), whole=True)


def _rate(run: Record) -> float:
    return float(run["config"]["learning_rate"])
