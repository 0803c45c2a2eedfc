"""What each entrant reached: a row per entrant, a column per budget (screen, docs/rivals.md); and a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rtopk.studies.equal_bytes import PANELS, Budget, Entrant, Panel, suitable_mean
from rtopk.studies.equal_bytes.fit import CLOSE, EntrantResult, recorded_results
from rtopk.studies.paper.results import insert
from rtopk.tools.show.intervals import Verdict, judge, plus_minus, rules
from rtopk.tools.show.palette import mixed, style
from rtopk.tools.show.terminal import markdown as markdown_table
from rtopk.tools.show.terminal import save_picture

Grid = tuple[list[str], list[list[str]]]  # heads of the columns; rows


def grid(results: Sequence[EntrantResult]) -> Grid:
    """Lay out a panel, entrants in its own order; a star: the best rate is at the edge of those there are."""
    panel = results[0].panel
    targets = {s.budget: s.target for s in results if s.budget is not None}
    budgets = sorted(targets, key=lambda budget: targets[budget])
    heads = ["method", *(f"{targets[budget]:,.0f} bytes ({budget.label})" for budget in budgets)]
    cells = {(s.entrant, s.budget): _cell(s) for s in results}
    rows = [
        [entrant.label, *(cells.get((entrant, budget), "") for budget in budgets)]
        for entrant in panel.entrants
        if any(entrant == result.entrant for result in results)
    ]
    # Dense training has no budget: its bytes stand beside its score, in the first column.
    dense = [cells[entrant, budget] for entrant, budget in cells if budget is None]
    return heads, [[Entrant("dense").label, *dense, *[""] * (len(budgets) - 1)] for _ in dense] + rows


Pairs = dict[tuple[Entrant, Budget], tuple[EntrantResult, EntrantResult]]


def pairs(results: Sequence[EntrantResult], against: str | None = None) -> Pairs:
    """Return whom each entrant of a panel is compared with, at each budget: the one named, else top-k of its mean.

    Top-k over the received is compared with top-k over the nodes. Dense training and PowerSGD, for which both means
    are the same, are compared with top-k over the mean that suits the panel's draws.
    """
    found = {(s.entrant, s.budget): s for s in results}
    budgets = {s.budget: s.target for s in results if s.budget is not None}
    labels = {s.entrant.label: s.entrant for s in results if s.budget is not None}
    if against is not None and against not in labels:
        known = ", ".join(map(repr, labels))
        raise ValueError(
            f"no results of {against!r} with a budget in {results[0].panel.name}; there are {known}"
        )
    chosen: Pairs = {}
    for entrant in (Entrant("dense"), *results[0].panel.entrants):
        for budget in sorted(budgets, key=lambda budget: budgets[budget]):
            one = found.get((entrant, budget)) or found.get((entrant, None))
            rival = _top_k(entrant, results[0].panel) if against is None else labels[against]
            other = found.get((rival, budget))
            if one is not None and other is not None and one is not other:
                chosen[entrant, budget] = (one, other)
    return chosen


def _top_k(entrant: Entrant, panel: Panel) -> Entrant:
    if entrant.method in ("dense", "powersgd"):
        return Entrant("top-k", suitable_mean(panel.config.memory))
    return Entrant("top-k", "nodes" if entrant.method == "top-k" else entrant.mean)


def leads(compared: Pairs, judged: Iterator[Verdict], over: str) -> Grid:
    """Lay out the leads of a panel: paired interval / Welch's, verdict."""
    budgets = {budget: other.target for (_, budget), (_, other) in compared.items()}
    cells = {
        at: f"{lead.mean:+.1f}{plus_minus(lead.half, 1)} /{plus_minus(lead.welch, 1)}, {verdict.word}"
        for at, (one, other) in compared.items()
        for lead, verdict in [(one.lead(other), next(judged))]
    }
    heads = [
        f"lead over {over}",
        *(f"{target:,.0f} bytes ({budget.label})" for budget, target in budgets.items()),
    ]
    entrants = dict.fromkeys(entrant for entrant, _ in compared)
    return heads, [[one.label, *(cells.get((one, budget), "") for budget in budgets)] for one in entrants]


def verdicts(panels: Sequence[Sequence[EntrantResult]]) -> str:
    """Return the leads of all panels of the page, judged together."""
    compared = [pairs(results) for results in panels]
    all_leads = [one.lead(other) for some in compared for one, other in some.values()]
    judged = iter(judge(all_leads))
    parts = [rules(all_leads)]
    for results, some in zip(panels, compared, strict=True):
        table = markdown_table(*leads(some, judged, "top-k"))
        parts.append("\n".join([f"{results[0].panel.name}; {results[0].metric}:", "", *table]))
    return "\n\n".join(parts) + "\n"


def _cell(result: EntrantResult) -> str:
    text = f"{result.mean:.1f}{plus_minus(result.half_width, 1)}{'*' if result.at_edge else ''}"
    if result.budget is None:
        return f"{text} ({result.sent_bytes_per_round:,.0f} bytes)"
    off = result.sent_bytes_per_round / result.target - 1
    return f"{text} ({100 * off:+.0f} %)" if abs(off) >= CLOSE else text


def markdown(panels: Sequence[Sequence[EntrantResult]]) -> str:
    """Return the panels of a task as they stand in the page."""
    return "\n\n".join(_panel(results) for results in panels) + "\n"


def _panel(results: Sequence[EntrantResult]) -> str:
    heads, rows = grid(results)
    metric = results[0].metric
    better = "higher" if results[0].higher_is_better else "lower"
    table = [line.replace("*", "\\*") for line in markdown_table(heads, rows)]
    return "\n".join([f"{results[0].panel.name}; {metric}, {better} is better:", "", *table])


def marks(task: str) -> tuple[str, str]:
    """Return the lines of the page between which the tables of a task go."""
    return (
        f"<!-- {task}: begin (written by `rtopk rivals --task {task} --recorded --write docs/rivals.md`) -->",
        f"<!-- {task}: end -->",
    )


VERDICTS = (
    "<!-- verdicts: begin (written by every `rtopk rivals --task ... --recorded --write docs/rivals.md`) -->",
    "<!-- verdicts: end -->",
)


def check_page(page: Path, task: str) -> None:
    """Raise ValueError if a page has no place for the tables of a task."""
    insert(page.read_text(), "", *marks(task))


def write_page(
    page: Path, task: str, results: Sequence[Sequence[EntrantResult]], seeds: int, records: Path
) -> None:
    """Put the panels of a task into a page, and the verdicts on all tasks that are recorded, if it has them."""
    text = insert(page.read_text(), markdown(results), *marks(task))
    if VERDICTS[0] in text:
        every = [
            recorded_results(panel, records_of(name, records), seeds)
            for name, panels in PANELS.items()
            for panel in panels
        ]
        text = insert(text, verdicts([found for found in every if found]), *VERDICTS)
    page.write_text(text)


def records_of(task: str, folder: Path, smoke: bool = False) -> Path:
    """Return where the records of a task are."""
    return folder / f"rivals-{task}{'-smoke' if smoke else ''}.jsonl"


LINES = {  # by mean, and whether values are rounded
    ("nodes", False): "-",
    ("received", False): "--",
    ("nodes", True): ":",
    ("received", True): "-.",
}


def score_against_budget(results: Sequence[EntrantResult], path: Path) -> None:
    """Draw a line per entrant through its budgets, and dense training as a level."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(result.panel for result in results))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6.4, 5.2 * columns), 4.2 * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        here = [result for result in results if result.panel == panel]
        shown = [result for result in here if result.budget is not None]
        for entrant in panel.entrants:
            line = sorted((s for s in shown if s.entrant == entrant), key=lambda s: s.sent_bytes_per_round)
            if not line:
                continue
            colour, marker = style(entrant.method)
            if entrant.r_over_k:  # a darker variant of the same method
                colour, marker = mixed(colour, "#000000", 0.4), "h"
            axis.plot(
                [s.sent_bytes_per_round for s in line], [s.mean for s in line], color=colour, marker=marker,
                markersize=5, linestyle=LINES[entrant.mean, entrant.values != "fp32"], linewidth=1.1, alpha=0.85,
                label=entrant.label,
                markerfacecolor=colour if entrant.mean == "nodes" else "white",
                markeredgecolor="black" if entrant.values != "fp32" else colour,
            )  # fmt: skip
        for dense in (result for result in here if result.budget is None):
            axis.axhline(dense.mean, color="black", linewidth=0.8)
            axis.annotate(
                f"dense, {dense.sent_bytes_per_round:,.0f} bytes", (0.02, dense.mean), fontsize=7,
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
    axes[0][0].set_ylabel(results[0].metric)
    beside = 3 if columns == 1 else 5
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncol=beside, fontsize=8)
    figure.tight_layout(rect=(0, 0.02 + 0.05 * (-(-len(handles) // beside)) / rows, 1, 1))
    save_picture(figure, path)


def _frame(axis: Any, results: Sequence[EntrantResult]) -> None:
    """Leave out what failed altogether: it would press all others together."""
    scores = sorted(s.mean for s in results)
    low, middle, high = scores[0], scores[len(scores) // 2], scores[-1]
    if low == high:
        return
    if results[0].higher_is_better:
        reach = 5 * (high - middle) or high - low
        axis.set_ylim(max(low, middle - reach) - 0.05 * reach, high + 0.1 * reach)
    else:
        reach = 5 * (middle - low) or high - low
        axis.set_ylim(low - 0.1 * reach, min(high, middle + reach) + 0.05 * reach)
