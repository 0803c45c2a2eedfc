"""What the records of the paper's tables show: each row's score with its interval, and how methods compare.

Markdown for docs/reproduction.md has the paper beside ours; Figures 2 to 6 show training loss and score against
rounds, mean over seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from rtopk.studies.paper import TABLES, Scale, Table, TableRow
from rtopk.studies.paper.ablations import STUDIES
from rtopk.studies.paper.reproduce import results_file, tuning
from rtopk.studies.train.records import Record, SeedRuns, read
from rtopk.studies.train.runner import key_of
from rtopk.tools.show.intervals import plus_minus, welch
from rtopk.tools.show.palette import style
from rtopk.tools.show.terminal import markdown

Kind = tuple[str, float]  # method, density


@dataclass(frozen=True)
class RowResult(SeedRuns):
    """What a row of a table reached so far."""

    row: TableRow
    rate: float  # chosen on validation data
    validation: float  # the rate's score there, larger for better ones
    at_edge: bool  # the best rate is the first or last of those tried: one further out might do better
    records: tuple[Record, ...]  # by seed


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
            best, at_edge = tuned.value(tuned.rate), tuned.at_edge
            found.append(RowResult(row, tuned.rate, best, at_edge, tuple(runs)))
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


def render_table(heading: str, table: Table, scale: Scale, results: Path) -> str:
    """Return one table with its orderings; rows that have not run say so."""
    found = {result.row: result for result in row_results(table, scale, results)}
    lines = [f"### {heading}: {table.heading(scale)}", ""]
    if not found:
        return "\n".join([*lines, "Not run yet."])
    some = next(iter(found.values()))
    heads = [
        "row",
        f"paper, {some.metric}",
        f"ours, {scale}",
        "seeds",
        "learning rate",
        "bytes sent per round",
    ]
    lines += markdown(heads, [_cells(row, found.get(row)) for row in table.rows])
    if pairs := comparisons(list(found.values())):
        lines += ["", *_orderings(pairs, beside_paper=table.figure is not None)]
    if table.figure is not None:
        lines += ["", f"![As the paper's figure {table.figure}](pictures/figure-{table.figure}.png)"]
    missing = [row.label for row in table.rows if row not in found]
    few = min(len(result.records) for result in found.values())
    if missing or few < 3:
        said = f"{len(missing)} of {len(table.rows)} rows have not run; the fewest seeds of a row are {few}."
        lines += ["", f"**Incomplete**: {said}"]
    if any(result.at_edge for result in found.values()):
        lines += ["", "\\* the best rate is at the edge of those tried; one further out might do better."]
    return "\n".join(lines)


def _cells(row: TableRow, result: RowResult | None) -> list[str | None]:
    paper = "" if row.paper is None else f"{row.paper:.2f}"
    if result is None:
        return [row.label, paper, "not run yet", None, None, None]
    gone = sum(bool(record.get("diverged")) for record in result.records)
    score = f"{result.mean:.2f}{plus_minus(result.half_width)}{f' ({gone} diverged)' if gone else ''}"
    rate = f"{result.rate:g}{'*' if result.at_edge else ''}"
    return [row.label, paper, score, str(len(result.records)), rate, f"{result.sent_bytes_per_round:,.0f}"]


def _orderings(pairs: Sequence[Comparison], beside_paper: bool) -> list[str]:
    rows: list[list[str | None]] = []
    for pair in pairs:
        name = f"{pair.first.row.label} against {pair.second.row.label}"
        row: list[str | None] = [name, f"{pair.advantage:+.2f}{plus_minus(pair.half_width)}", pair.verdict]
        if beside_paper:
            row += [None, None] if pair.paper is None else [f"{pair.paper:+.2f}", _agrees(pair)]
        rows.append(row)
    heads = ["rTop-k against another", "our lead", "rTop-k is", "paper's lead", "as in the paper"]
    lines = markdown(heads if beside_paper else heads[:3], rows)
    lines[1] = "| --- | ---: | --- | ---: | --- |" if beside_paper else "| --- | ---: | --- |"
    return lines


def _agrees(pair: Comparison) -> str:
    if pair.verdict == "undecided" or pair.half_width == math.inf:
        return "open"
    assert pair.paper is not None
    return "yes" if (pair.paper > 0) == (pair.advantage > 0) else "no"


def render_all(scale: Scale, results: Path) -> str:
    """Return all five tables and the studies."""
    tables = [
        render_table(f"Table {name}", table, scale, results)
        for name, table in zip(("I", "II", "III", "IV", "V"), TABLES.values(), strict=True)
    ]
    studies = [
        render_table(f"Study {name}", table, scale, results)
        for name, table in STUDIES.items()
        if scale in table.setups
    ]
    return "\n\n".join([*tables, *studies]) + "\n"


BEGIN, END = "<!-- tables: begin (written by `rtopk tables`) -->", "<!-- tables: end -->"


def insert(page: str, tables: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the page with the tables between its two marks."""
    head, first, rest = page.partition(begin)
    _, last, tail = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the page must hold the lines {begin} and {end}")
    return f"{head}{begin}\n\n{tables}\n{end}{tail}"


def draw_figure(table: Table, scale: Scale, results: Path, path: Path) -> bool:
    """Draw the curves of a table's rows; return whether there was anything to draw."""
    from matplotlib.figure import Figure

    rows = row_results(table, scale, results)
    if not rows:
        return False
    groups = [
        ("the paper's rows", [s for s in rows if s.row.paper is not None]),
        ("rows of our own", [s for s in rows if s.row.paper is None]),
    ]
    groups = [(name, group) for name, group in groups if group]
    figure = Figure(figsize=(12, 4.2 * len(groups)))
    grid = figure.subplots(len(groups), 2, squeeze=False)
    for axes, (name, group) in zip(grid, groups, strict=True):
        for result in group:
            look = {"linestyle": "-" if result.row.density >= 0.01 else "--", "linewidth": 1.4}
            # Rows of our own differ in more than the method: they keep matplotlib's own colours.
            if result.row.paper is not None:
                look["color"] = style(result.row.method)[0]
            for axis, value in zip(axes, ("train_loss", result.metric), strict=True):
                axis.plot(*_mean_curve(result, value), label=result.row.label, **look)
        axes[0].set(title=f"{name}: training loss", xlabel="round")
        axes[1].set(title=f"{name}: {rows[0].metric} on test data", xlabel="round")
        if not rows[0].higher_is_better:
            axes[1].set_yscale("log")
        for axis in axes:
            axis.grid(alpha=0.3)
        axes[1].legend(fontsize=8)
    figure.suptitle(f"{table.heading(scale)}: scale {scale}, as the paper's figure {table.figure}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _mean_curve(result: RowResult, name: str) -> tuple[list[int], list[float]]:
    """Return the mean over seeds at the rounds that all of them reached."""
    curves = [{int(p["round"]): float(p[name]) for p in record["curve"]} for record in result.records]
    rounds = sorted(set.intersection(*[set(curve) for curve in curves]))
    return rounds, [mean(curve[r] for curve in curves) for r in rounds]
