"""The picture of a task's rivals: score against bytes per node and round, one panel per setting."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rtopk.studies.equal_bytes.fit import Standing
from rtopk.studies.equal_bytes.panels import Entrant

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
