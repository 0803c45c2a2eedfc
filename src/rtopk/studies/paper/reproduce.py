"""Run a table of the paper: tune each row's learning rate on validation data, then run it on test data.

All records of a table and scale are lines of one file, table-N-SCALE.jsonl: the tuning runs, one choice line a row,
and the results. What is there already is not run again. Every row tries the same grid of rates. A best rate at the
edge of the grid says little, so such a row goes on beyond the edge by the grid's own step, as often as its set-up
allows. Only scores on validation data count, their mean where a rate runs with several seeds.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from rtopk.studies.config import Config
from rtopk.studies.paper import Scale, Table, TableRow
from rtopk.studies.train.processes import barrier, leads
from rtopk.studies.train.records import Record, Results, read, score
from rtopk.studies.train.runner import Progress, key_of, run_all


@dataclass(frozen=True)
class Tuning:
    """What is known of a row's learning rate."""

    tried: dict[float, list[Record]]  # the runs of each rate, from the smallest to the largest
    missing: tuple[Any, ...] = ()  # configurations of the runs that come next; none when the search is over
    whole: bool = True  # all of the grid has been tried

    @property
    def rate(self) -> float:
        """Return the best rate of those tried; of equals, the smaller."""
        return max(self.tried, key=lambda rate: (self.value(rate), -rate))

    def value(self, rate: float) -> float:
        """Return a rate's mean score, larger for better ones; 0 where the rate is given and not tuned."""
        return mean(map(score, self.tried[rate])) if self.tried[rate] else 0.0

    @property
    def at_edge(self) -> bool:
        """Tell whether the best rate is the smallest or the largest of those tried."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


def tuning(
    table: Table, scale: Scale, row: TableRow, records: Mapping[str, Record], again: bool = False
) -> Tuning:
    """Return what records, by key, say of a row's learning rate, and what to run next.

    `again` searches a second time around the rate that was found: half the grid's step, whole runs, three seeds.
    """
    setup = table.setups[scale]
    grid = setup.rates
    if again:
        first = tuning(table, scale, row, records)
        if first.missing or len(first.tried) < 2:
            return first
        step = math.sqrt(grid[-1] / grid[-2])
        grid = tuple(float(f"{first.rate * factor:.4g}") for factor in (1 / step, 1.0, step))
        setup = dataclasses.replace(setup, tuning_rounds=setup.config.rounds, tuning_seeds=3)
        table = dataclasses.replace(table, setups={**table.setups, scale: setup})
    return search(grid, setup.beyond, partial(table.tuning, scale, row), records)


def search(
    grid: Sequence[float],
    beyond: int,
    runs_of: Callable[[float], Sequence[Any]],
    records: Mapping[str, Record],
) -> Tuning:
    """Return what records say of the rates of a grid, and of those that a best one at its edge leads to."""
    low, high = (grid[0] / grid[1], grid[-1] / grid[-2]) if len(grid) > 1 else (1.0, 1.0)
    tried: dict[float, list[Record]] = {}
    wanted, whole = list(grid), False
    left = iter(range(beyond))

    def further(rate: float, up: bool) -> float | None:
        return None if next(left, None) is None else float(f"{rate * (high if up else low):.4g}")

    while wanted:
        runs = {rate: runs_of(rate) for rate in wanted}
        missing = [run for group in runs.values() for run in group if run.key not in records]
        done = {
            rate: [records[run.key] for run in group if run.key in records] for rate, group in runs.items()
        }
        if missing:
            partly = tried if whole else {rate: group for rate, group in done.items() if group}
            return Tuning(partly, tuple(missing), whole)
        tried, whole = dict(sorted({**tried, **done}.items())), True
        wanted = next_rates(Tuning(tried).rate, tried, further)
    return Tuning(tried)


def next_rates(
    best: float, tried: Collection[float], further: Callable[[float, bool], float | None]
) -> list[float]:
    """Return the rate to try next, if the best is the smallest or (upwards) the largest of those tried."""
    at_edge = len(tried) > 1 and best in (min(tried), max(tried))
    rate = further(best, best == max(tried)) if at_edge else None
    return [] if rate is None else [rate]


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


Stage = Callable[[str, Sequence[Config], Sequence[str]], Progress]  # what, runs, their names -> progress


def results_file(folder: Path, table: Table, scale: Scale) -> Path:
    """Return where the records of a table are."""
    return folder / f"{table.name}-{scale}.jsonl"


def run_table(
    table: Table,
    rows: Sequence[TableRow],
    scale: Scale,
    seeds: int,
    jobs: int,
    results: Path,
    work: Path,
    stage: Stage,
    again: bool = False,
) -> dict[TableRow, list[Record]]:
    """Run what is missing of some rows of a table, tuned `again` if asked; return the result records of each."""
    file = results_file(results, table, scale)
    tuned = _tune(table, rows, scale, jobs, file, work, stage, again)
    # One seed of every row before the next seed, so that a table that is stopped is whole, with fewer seeds.
    finals = {row: table.results(scale, row, tuned[row].rate, seeds) for row in rows}
    pairs = [(row, finals[row][seed]) for seed in range(seeds) for row in rows]
    configs = [config for _, config in pairs]
    progress = stage("results", configs, [row.label for row, _ in pairs])
    notes = {config.key: _told(table, scale, row) for row, config in pairs}
    records = run_all(configs, file, work, jobs, progress, notes=notes)
    return {
        row: [record for (other, _), record in zip(pairs, records, strict=True) if other == row]
        for row in rows
    }


def _tune(
    table: Table,
    rows: Sequence[TableRow],
    scale: Scale,
    jobs: int,
    file: Path,
    work: Path,
    stage: Stage,
    again: bool,
) -> dict[TableRow, Tuning]:
    """Find the learning rate of each row: the grid, then what lies beyond its edges where that is better."""
    records = {key_of(record): record for record in read(file)}
    what = "tuning"
    while True:
        tuned = {row: tuning(table, scale, row, records, again) for row in rows}
        pairs = [(row, config) for row in rows for config in tuned[row].missing]
        if not pairs:
            break
        configs = [config for _, config in pairs]
        notes = {config.key: _told(table, scale, row) for row, config in pairs}
        progress = stage(what, configs, [row.label for row, _ in pairs])
        done = run_all(configs, file, work, jobs, progress, notes=notes)
        records |= {config.key: record for config, record in zip(configs, done, strict=True)}
        what = "tuning beyond the grid"
    for row in rows if leads() and table.setups[scale].tuning_seeds else ():
        of = {"table": table.name, "scale": scale, "row": row.label}
        note_choice(file, of, list(tuned[row].tried.values()), tuned[row].rate)
    barrier()  # nobody reads the results while a line is written
    return tuned


def _told(table: Table, scale: Scale, row: TableRow) -> Record:
    """Return where a run belongs, and what the paper says of its row."""
    told = {"table": table.name, "title": table.title, "scale": scale, "row": row.label, "value": row.paper}
    return {"paper": told}
