"""Records of a table -> where each row ended: mean over seeds, 95 % interval, and how methods compare."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from rtopk.studies.paper.definitions import Scale, Table, TableRow
from rtopk.studies.paper.reproduce import results_file, tuning
from rtopk.studies.train.records import Record, read
from rtopk.studies.train.runner import key_of
from rtopk.tools.show.intervals import half_width, welch

Kind = tuple[str, float]  # method, density


@dataclass(frozen=True)
class RowResult:
    """What a row of a table reached so far."""

    row: TableRow
    rate: float  # chosen on validation data
    validation: float  # the rate's score there, larger for better ones
    at_edge: bool  # the best rate is the first or last of those tried: one further out might do better
    records: tuple[Record, ...]  # by seed
    metric: str
    higher_is_better: bool

    @property
    def scores(self) -> list[float]:
        """Return the final scores by seed."""
        return [float(record["final"][self.metric]) for record in self.records]

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return mean(self.scores)

    @property
    def half_width(self) -> float:
        """Return half the 95 % interval of the mean (Student's t); infinite for one seed."""
        return half_width(self.scores)

    @property
    def sent_bytes_per_round(self) -> float:
        """Return the bytes that a node sent in a round, measured, mean over seeds."""
        return float(mean(record["sent_bytes_per_round"] for record in self.records))


@dataclass(frozen=True)
class Comparison:
    """Two rows against each other: positive where the first is better."""

    first: RowResult
    second: RowResult
    advantage: float  # in units of the metric
    half_width: float  # of the advantage's 95 % interval (Welch); infinite with one seed
    paper: float | None  # the paper's advantage of these methods at this density, where it has both figures

    @property
    def verdict(self) -> str:
        """Say in a word what the interval says."""
        if self.half_width == math.inf:
            return "ahead (one seed)" if self.advantage > 0 else "behind (one seed)"
        if abs(self.advantage) <= self.half_width:
            return "undecided"
        return "ahead" if self.advantage > 0 else "behind"


def row_results(table: Table, scale: Scale, results: Path, seeds: int = 50) -> list[RowResult]:
    """Return the rows of a table that have results, in the table's order."""
    records = {key_of(r): r for r in read(results_file(results, table, scale)) if r["kind"] == "train"}
    found = []
    for row in table.rows:
        tuned = tuning(table, scale, row, records)
        if not tuned.whole:
            continue
        runs = _leading(records, [c.key for c in table.results(scale, row, tuned.rate, seeds)])
        if runs:
            rate, some = tuned.rate, runs[0]
            found.append(
                RowResult(row, rate, tuned.value(rate), tuned.at_edge, tuple(runs), some["metric"],
                         some["higher_is_better"])
            )  # fmt: skip
    return found


def _leading(records: dict[str, Record], keys: Sequence[str]) -> list[Record]:
    found = []
    for key in keys:
        if key not in records:
            break
        found.append(records[key])
    return found


def compare(first: RowResult, second: RowResult, figures: Mapping[Kind, float]) -> Comparison:
    """Compare two rows by their final scores (Welch's interval; seeds also share their data split)."""
    sign = 1.0 if first.higher_is_better else -1.0
    advantage = sign * (first.mean - second.mean)
    one, other = (figures.get((s.row.method, s.row.density)) for s in (first, second))
    paper = None if one is None or other is None else sign * (one - other)
    return Comparison(first, second, advantage, welch(first.scores, second.scores), paper)


def best(rows: Sequence[RowResult], method: str, density: float, note: str = "") -> RowResult | None:
    """Return a method's better mean at a density, by validation data, among the rows with a note."""
    fitting = [
        s
        for s in rows
        if s.row.method == method and (method == "dense" or s.row.density == density) and s.row.note == note
    ]
    return max(fitting, key=lambda s: s.validation, default=None)


def comparisons(rows: Sequence[RowResult]) -> list[Comparison]:
    """Return rTop-k against each other method at the same density and note, each with its better mean."""
    figures = {(s.row.method, s.row.density): s.row.paper for s in rows if s.row.paper is not None}
    found = []
    notes = dict.fromkeys(s.row.note for s in rows)  # the paper's rows, without one, come first
    densities = sorted({s.row.density for s in rows if s.row.method == "rtop-k"}, reverse=True)
    for note, density in product(notes, densities):
        ours = best(rows, "rtop-k", density, note)
        for rival in ("top-k", "random-k", "dense"):
            other = best(rows, rival, density, note)
            if ours is not None and other is not None:
                found.append(compare(ours, other, figures))
    return found
