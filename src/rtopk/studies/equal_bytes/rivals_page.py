"""What each entrant reached: a row per entrant, a column per budget, for the screen and docs/rivals.md; a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rtopk.studies.equal_bytes.fit import CLOSE, Standing
from rtopk.studies.equal_bytes.panels import Entrant
from rtopk.tools.show.intervals import welch

Grid = tuple[list[str], list[list[str]]]  # heads of the columns; rows


def grid(standings: Sequence[Standing]) -> Grid:
    """Lay out a panel, entrants in its own order; a star: the best rate is at the edge of those there are."""
    panel = standings[0].panel
    targets = {s.budget: s.target for s in standings if s.budget is not None}
    budgets = sorted(targets, key=lambda budget: targets[budget])
    heads = ["method", *(f"{targets[budget]:,.0f} bytes ({budget.label})" for budget in budgets)]
    cells = {(s.entrant, s.budget): _cell(s) for s in standings}
    rows = [
        [entrant.label, *(cells.get((entrant, budget), "") for budget in budgets)]
        for entrant in panel.entrants
        if any(entrant == standing.entrant for standing in standings)
    ]
    # Dense training has no budget: its bytes stand beside its score, in the first column.
    dense = [cells[entrant, budget] for entrant, budget in cells if budget is None]
    return heads, [[Entrant("dense").label, *dense, *[""] * (len(budgets) - 1)] for _ in dense] + rows


def differences(standings: Sequence[Standing], label: str) -> Grid:
    """Lay out a panel as the score of one entrant minus that of each other, with Welch's 95 % interval."""
    ours = {s.budget: s for s in standings if s.entrant.label == label and s.budget is not None}
    if not ours:
        known = ", ".join(repr(s.entrant.label) for s in standings if s.budget is not None)
        raise ValueError(
            f"no results of {label!r} with a budget in {standings[0].panel.name}; there are {known}"
        )
    budgets = sorted(ours, key=lambda budget: ours[budget].target)
    others = dict.fromkeys(s.entrant for s in standings if s.entrant.label != label)
    found = {(s.entrant, s.budget): s for s in standings}
    rows = []
    for other in others:
        row = [other.label]
        for budget in budgets:
            theirs = found.get((other, budget)) or found.get((other, None))
            row.append("" if theirs is None else _difference(ours[budget].scores, theirs.scores))
        rows.append(row)
    heads = [f"{label}, minus", *(f"{ours[budget].target:,.0f} bytes ({budget.label})" for budget in budgets)]
    return heads, rows


def _difference(one: Sequence[float], other: Sequence[float]) -> str:
    width = welch(one, other)
    return f"{mean(one) - mean(other):+.1f}" + (f" ± {width:.1f}" if width < math.inf else "")


def _cell(standing: Standing) -> str:
    text = f"{mean(standing.scores):.1f}"
    if standing.half_width < math.inf:
        text += f" ± {standing.half_width:.1f}"
    text += "*" if standing.at_edge else ""
    if standing.budget is None:
        return f"{text} ({standing.bytes:,.0f} bytes)"
    off = standing.bytes / standing.target - 1
    return f"{text} ({100 * off:+.0f} %)" if abs(off) >= CLOSE else text


def markdown(panels: Sequence[Sequence[Standing]]) -> str:
    """Return the panels of a task as they stand in the page."""
    return "\n\n".join(_panel(standings) for standings in panels) + "\n"


def _panel(standings: Sequence[Standing]) -> str:
    heads, rows = grid(standings)
    metric = standings[0].records[0]["metric"]
    better = "higher" if standings[0].records[0]["higher_is_better"] else "lower"
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    table = [f"| {' | '.join(line)} |".replace("*", "\\*") for line in lines]
    return "\n".join([f"{standings[0].panel.name}; {metric}, {better} is better:", "", *table])


def marks(task: str) -> tuple[str, str]:
    """Return the lines of the page between which the tables of a task go."""
    return (
        f"<!-- {task}: begin (written by `rtopk rivals --task {task} --recorded --write docs/rivals.md`) -->",
        f"<!-- {task}: end -->",
    )


# Okabe and Ito's colours; a marker each for print.
STYLE = {
    "top-k": ("#0072B2", "^"),
    "rtop-k": ("#D55E00", "o"),
    "rtop-k, r = 2 k": ("#7F3800", "X"),
    "dealt-k": ("#009E73", "D"),
    "rage-k": ("#CC79A7", "v"),
    "threshold": ("#E69F00", "s"),
    "powersgd": ("#56B4E9", "P"),
}
LINES = {
    ("nodes", "fp32"): "-",
    ("received", "fp32"): "--",
    ("nodes", "4bit"): ":",
    ("received", "4bit"): "-.",
}


def score_against_budget(standings: Sequence[Standing], path: Path) -> None:
    """Draw a line per entrant through its budgets, and dense training as a level."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys(standing.panel for standing in standings))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(6.4, 5.2 * columns), 4.2 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        here = [standing for standing in standings if standing.panel == panel]
        shown = [standing for standing in here if standing.budget is not None]
        for entrant in panel.entrants:
            line = sorted((s for s in shown if s.entrant == entrant), key=lambda s: s.bytes)
            if not line:
                continue
            colour, marker = STYLE[Entrant(entrant.method, r_over_k=entrant.r_over_k).label]
            axis.plot(
                [s.bytes for s in line], [mean(s.scores) for s in line], color=colour, marker=marker, markersize=5,
                linestyle=LINES[entrant.mean, entrant.values], linewidth=1.1, alpha=0.85, label=entrant.label,
                markerfacecolor=colour if entrant.mean == "nodes" else "white",
                markeredgecolor="black" if entrant.values == "4bit" else colour,
            )  # fmt: skip
        for dense in (standing for standing in here if standing.budget is None):
            axis.axhline(mean(dense.scores), color="black", linewidth=0.8)
            axis.annotate(
                f"dense, {dense.bytes:,.0f} bytes", (0.02, mean(dense.scores)), fontsize=7,
                xycoords=("axes fraction", "data"), va="bottom",
            )  # fmt: skip
        _frame(axis, here)
        axis.set(xscale="log", title=panel.name, xlabel="bytes sent per node and round")
        budgets = sorted({round(s.target) for s in shown})
        if budgets:
            axis.set_xticks(budgets, [f"{budget:,}" for budget in budgets], minor=False)
            axis.set_xticks([], minor=True)
            axis.set_xlim(budgets[0] / 1.5, budgets[-1] * 1.5)
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    axes[0][0].set_ylabel(standings[0].records[0]["metric"])
    beside = 3 if columns == 1 else 5
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncol=beside, fontsize=8)
    figure.tight_layout(rect=(0, 0.02 + 0.05 * (-(-len(handles) // beside)) / rows, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _frame(axis: Any, standings: Sequence[Standing]) -> None:
    """Leave out what failed altogether: it would press all others together."""
    scores = sorted(mean(s.scores) for s in standings)
    low, middle, high = scores[0], scores[len(scores) // 2], scores[-1]
    if low == high:
        return
    if standings[0].records[0]["higher_is_better"]:
        reach = 5 * (high - middle) or high - low
        axis.set_ylim(max(low, middle - reach) - 0.05 * reach, high + 0.1 * reach)
    else:
        reach = 5 * (middle - low) or high - low
        axis.set_ylim(low - 0.1 * reach, min(high, middle + reach) + 0.05 * reach)
