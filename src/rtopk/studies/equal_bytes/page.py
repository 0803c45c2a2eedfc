"""Where the rivals stand -> a row per entrant, a column per budget; for the screen and for docs/rivals.md."""

import math
from collections.abc import Sequence
from statistics import mean

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
