"""What the records of the paper's tables show: each row's score with its interval, and how methods compare.

Markdown for docs/reproduction.md has the paper beside ours; Figures 2 to 6 show training loss and score against
rounds, mean over seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from rtopk.studies.paper import TABLES, Scale, Table, TableRow, step_size
from rtopk.studies.paper.ablations import STUDIES
from rtopk.studies.paper.reproduce import results_file, tuning
from rtopk.studies.train.records import Record, SeedRuns, read
from rtopk.studies.train.runner import key_of
from rtopk.tools.show.intervals import Lead, Verdict, judge, margin, p_value, plus_minus, rules
from rtopk.tools.show.palette import style
from rtopk.tools.show.terminal import markdown, save_picture

Kind = tuple[str, float]  # method, density


@dataclass(frozen=True)
class RowResult(SeedRuns):
    """What a row of a table reached so far."""

    row: TableRow
    rate: float  # chosen on validation data
    validation: float  # the rate's score there, larger for better ones
    at_edge: bool  # the best rate is the first or last of those tried: one further out might do better
    tuned_again: bool
    records: tuple[Record, ...]  # by seed


@dataclass(frozen=True)
class Comparison:
    """Two rows against each other: positive where the first is better."""

    first: RowResult
    second: RowResult
    lead: Lead
    paper: float | None  # the paper's lead of these methods at this density, where it has both figures
    paper_margin: float  # a lead of the paper that is smaller counts as level

    @property
    def label(self) -> str:
        """Name both rows."""
        return f"{self.first.row.label} against {self.second.row.label}"

    def agrees(self, word: str) -> str:
        """Say whether a verdict is the paper's: yes, no, or open where ours is undecided."""
        if self.paper is None:
            return ""
        if word == "undecided":
            return "open"
        small = abs(self.paper) < self.paper_margin
        theirs = "level" if small and word == "level" else "ahead" if self.paper > 0 else "behind"
        return "yes" if word == theirs else "no"


def row_results(table: Table, scale: Scale, results: Path, seeds: int = 50) -> list[RowResult]:
    """Return the rows of a table that have results, in the table's order.

    Rates of a second search count once every row has as many runs with them as with those of the first.
    """
    records = {key_of(r): r for r in read(results_file(results, table, scale)) if r["kind"] == "train"}
    found: list[dict[TableRow, RowResult]] = [{}, {}]
    for row, again in product(table.rows, (False, True)):
        tuned = tuning(table, scale, row, records, again)
        if not tuned.whole or (again and tuned.missing):
            continue
        runs = _leading(records, [c.key for c in table.results(scale, row, tuned.rate, seeds)])
        if runs:
            best = tuned.value(tuned.rate)
            found[again][row] = RowResult(row, tuned.rate, best, tuned.at_edge, again, tuple(runs))
    first, second = found
    whole = all(row in second and len(second[row].records) >= len(first[row].records) for row in first)
    return list((second if whole and len(table.setups[scale].rates) > 1 else first).values())


def _leading(records: dict[str, Record], keys: Sequence[str]) -> list[Record]:
    found = []
    for key in keys:
        if key not in records:
            break
        found.append(records[key])
    return found


def compare(first: RowResult, second: RowResult, figures: Mapping[Kind, float]) -> Comparison:
    """Compare two rows by their final scores."""
    kinds = [(s.row.method, s.row.density) for s in (first, second)]
    one, other = map(figures.get, kinds)
    if one is None or other is None or kinds[0] == kinds[1] or _r(first.row):
        return Comparison(first, second, first.lead(second), None, 0.0)
    paper = one - other if first.higher_is_better else other - one
    return Comparison(first, second, first.lead(second), paper, margin(first.metric, other))


def best(rows: Sequence[RowResult], method: str, density: float, note: str = "") -> RowResult | None:
    """Return a method's better mean at a density, by validation data, among the rows with a note."""
    fitting = [
        s
        for s in rows
        if s.row.method == method and (method == "dense" or s.row.density == density) and s.row.note == note
    ]
    return max(fitting, key=lambda s: s.validation, default=None)


def comparisons(table: Table, rows: Sequence[RowResult]) -> list[Comparison]:
    """Return the comparisons of a table, from its rows that have results.

    The paper's r is compared with each other method at the same density and note, each with its better mean;
    another r with top-k with the same mean; then come the pairs that the table names.
    """
    figures = {(s.row.method, s.row.density): s.row.paper for s in rows if s.row.paper is not None}
    pairs: list[tuple[RowResult | None, RowResult | None]] = []
    notes = dict.fromkeys(s.row.note for s in rows)  # the paper's rows, without one, come first
    densities = sorted({s.row.density for s in rows if s.row.method == "rtop-k"}, reverse=True)
    for note, density in product(notes, densities):
        ours = best(rows, "rtop-k", density, note)
        pairs += [(ours, best(rows, rival, density, note)) for rival in ("top-k", "random-k", "dense")]
    top = {_but_r(s.row): s for s in rows if s.row.method == "top-k" or _r(s.row) == 1.0}
    pairs += [(s, top.get(_but_r(s.row))) for s in rows if _r(s.row) > 1.0]
    by_label = {s.row.label: s for s in rows}
    pairs += [(by_label.get(one), by_label.get(other)) for one, other in table.pairs]
    return [compare(one, other, figures) for one, other in pairs if one is not None and other is not None]


def _r(row: TableRow) -> float:
    """Return r / k of an rTop-k row that names one, else 0."""
    return float(dict(row.options).get("r_over_k", 0.0)) if row.method == "rtop-k" else 0.0


def _but_r(row: TableRow) -> tuple[float, str, str]:
    """Return what a row shares with rows that differ in r alone."""
    note = ", ".join(part for part in row.note.split(", ") if not part.startswith("r = "))
    return row.density, row.mean, note


Judged = Sequence[tuple[Comparison, Verdict]]


def render_table(
    heading: str, table: Table, scale: Scale, results: Sequence[RowResult], judged: Judged
) -> str:
    """Return one table with its orderings; rows that have not run say so."""
    found = {result.row: result for result in results}
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
    if judged:
        lines += ["", *_orderings(judged, beside_paper=table.figure is not None)]
    if table.figure is not None:
        lines += ["", f"![As the paper's figure {table.figure}](pictures/figure-{table.figure}.png)"]
    missing = [row.label for row in table.rows if row not in found]
    few = min(len(result.records) for result in found.values())
    if missing or few < 3:
        said = f"{len(missing)} of {len(table.rows)} rows have not run; the fewest seeds of a row are {few}."
        lines += ["", f"**Incomplete**: {said}"]
    if any(result.tuned_again for result in found.values()):
        lines += ["", "Rates were tuned a second time: half steps, whole runs, three seeds."]
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


def _orderings(judged: Judged, beside_paper: bool) -> list[str]:
    rows: list[list[str | None]] = []
    for pair, verdict in judged:
        ours = f"{pair.lead.mean:+.2f}{plus_minus(pair.lead.half)}"
        row = [pair.label, ours, plus_minus(pair.lead.welch).strip(), p_value(verdict.p), verdict.word]
        if beside_paper:
            row += ["" if pair.paper is None else f"{pair.paper:+.2f}", pair.agrees(verdict.word)]
        rows.append(list(row))
    heads = ["first against second", "our lead", "Welch's", "p, corrected", "the first is", "paper's lead"]
    lines = markdown([*heads, "as in the paper"] if beside_paper else heads[:5], rows)
    lines[1] = "| --- | ---: | ---: | ---: | --- |" + (" ---: | --- |" if beside_paper else "")
    return lines


# Which page shows a study, by the beginning of its name; the paper's tables and all other studies are on the first.
# The comparisons of a page are judged together.
PAGES: dict[str, tuple[str, ...]] = {
    "reproduction": ("",),
    "defaults": ("shipped",),
    "exchange": ("exchange",),
    "explanations": ("shared-rate", "why"),
    "regimes": ("map",),
}


def page_tables(page: str) -> dict[str, Table]:
    """Return the tables of a page, each with its heading."""
    if page not in PAGES:
        raise ValueError(f"page must be one of {', '.join(PAGES)}, got {page!r}")
    names = zip(("I", "II", "III", "IV", "V"), TABLES.values(), strict=True)
    paper = {f"Table {name}": table for name, table in names}
    of = {name: next(p for p in reversed(PAGES) if name.startswith(PAGES[p])) for name in STUDIES}
    studies = {f"Study {name}": table for name, table in STUDIES.items() if of[name] == page}
    return {**paper, **studies} if page == "reproduction" else studies


def render_page(page: str, scale: Scale, results: Path) -> str:
    """Return the tables of a page; their comparisons are judged together."""
    tables = [
        (name, table, row_results(table, scale, results))
        for name, table in page_tables(page).items()
        if scale in table.setups
    ]
    pairs = [comparisons(table, rows) for _, table, rows in tables]
    leads = [pair.lead for group in pairs for pair in group]
    verdicts = iter(judge(leads))
    rendered = [
        render_table(name, table, scale, rows, [(pair, next(verdicts)) for pair in group])
        for (name, table, rows), group in zip(tables, pairs, strict=True)
    ]
    if page == "explanations":
        rendered.append(step_size.render(scale, results))
    return "\n\n".join([rules(leads), *rendered]) + "\n"


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
    save_picture(figure, path)
    return True


def _mean_curve(result: RowResult, name: str) -> tuple[list[int], list[float]]:
    """Return the mean over seeds at the rounds that all of them reached."""
    curves = [{int(p["round"]): float(p[name]) for p in record["curve"]} for record in result.records]
    rounds = sorted(set.intersection(*[set(curve) for curve in curves]))
    return rounds, [mean(curve[r] for curve in curves) for r in rounds]
