"""What the records of the paper's tables show: Markdown for docs/reproduction.md, and Figures 2 to 6.

Tables have the paper beside ours; figures show training loss and score against rounds, mean over seeds.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from rtopk.studies.paper.ablations import STUDIES
from rtopk.studies.paper.results import Comparison, Standing, comparisons, standings
from rtopk.studies.paper.definitions import TABLES, Row, Scale, Table
from rtopk.studies.train.demo import STYLE


def render_table(heading: str, table: Table, scale: Scale, results: Path) -> str:
    """Return one table with its orderings; rows that have not run say so."""
    found = {standing.row: standing for standing in standings(table, scale, results)}
    lines = [f"### {heading}: {table.heading(scale)}", ""]
    if not found:
        return "\n".join([*lines, "Not run yet."])
    some = next(iter(found.values()))
    lines += [
        f"| row | paper, {some.metric} | ours, {scale} | seeds | learning rate | bytes sent per round |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *[_line(row, found.get(row)) for row in table.rows],
    ]
    if pairs := comparisons(list(found.values())):
        lines += ["", *_orderings(pairs, beside_paper=table.figure is not None)]
    if table.figure is not None:
        lines += ["", f"![As the paper's figure {table.figure}](pictures/figure-{table.figure}.png)"]
    missing = [row.label for row in table.rows if row not in found]
    few = min(len(standing.records) for standing in found.values())
    if missing or few < 3:
        said = f"{len(missing)} of {len(table.rows)} rows have not run; the fewest seeds of a row are {few}."
        lines += ["", f"**Incomplete**: {said}"]
    if any(standing.at_edge for standing in found.values()):
        lines += ["", "\\* the best rate is at the edge of those tried; one further out might do better."]
    return "\n".join(lines)


def _line(row: Row, standing: Standing | None) -> str:
    paper = "" if row.paper is None else f"{row.paper:.2f}"
    if standing is None:
        return f"| {row.label} | {paper} | not run yet | | | |"
    width = "" if standing.half_width == math.inf else f" ± {standing.half_width:.2f}"
    gone = sum(bool(record.get("diverged")) for record in standing.records)
    return (
        f"| {row.label} | {paper} | {standing.mean:.2f}{width}{f' ({gone} diverged)' if gone else ''} | "
        f"{len(standing.records)} | {standing.rate:g}{'*' if standing.at_edge else ''} | "
        f"{standing.sent_bytes_per_round:,.0f} |"
    )


def _orderings(pairs: Sequence[Comparison], beside_paper: bool) -> list[str]:
    lines = ["| rTop-k against another | our lead | rTop-k is |", "| --- | ---: | --- |"]
    if beside_paper:
        lines = [
            line + more
            for line, more in zip(lines, (" paper's lead | as in the paper |", " ---: | --- |"), strict=True)
        ]
    for pair in pairs:
        name = f"{pair.first.row.label} against {pair.second.row.label}"
        width = "" if pair.half_width == math.inf else f" ± {pair.half_width:.2f}"
        line = f"| {name} | {pair.advantage:+.2f}{width} | {pair.verdict} |"
        if beside_paper:
            line += " | |" if pair.paper is None else f" {pair.paper:+.2f} | {_agrees(pair)} |"
        lines.append(line)
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
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = standings(table, scale, results)
    if not rows:
        return False
    groups = [
        ("the paper's rows", [s for s in rows if s.row.paper is not None]),
        ("rows of our own", [s for s in rows if s.row.paper is None]),
    ]
    groups = [(name, group) for name, group in groups if group]
    figure, grid = plt.subplots(len(groups), 2, figsize=(12, 4.2 * len(groups)), squeeze=False)
    for axes, (name, group) in zip(grid, groups, strict=True):
        for standing in group:
            look = {"linestyle": "-" if standing.row.density >= 0.01 else "--", "linewidth": 1.4}
            if (
                standing.row.paper is not None
            ):  # ours differ in more than the method: matplotlib's own colours
                look["color"] = STYLE[standing.row.method][0]
            for axis, value in zip(axes, ("train_loss", standing.metric), strict=True):
                axis.plot(*_mean_curve(standing, value), label=standing.row.label, **look)
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
    plt.close(figure)
    return True


def _mean_curve(standing: Standing, name: str) -> tuple[list[int], list[float]]:
    """Return the mean over seeds at the rounds that all of them reached."""
    curves = [{int(p["round"]): float(p[name]) for p in record["curve"]} for record in standing.records]
    rounds = sorted(set.intersection(*[set(curve) for curve in curves]))
    return rounds, [mean(curve[r] for curve in curves) for r in rounds]
