"""The paper's Figures 2 to 6 from the records: training loss and score against rounds, mean over seeds."""

from pathlib import Path
from statistics import mean

from rtopk.studies.paper.standings import Standing, standings
from rtopk.studies.paper.tables import Scale, Table
from rtopk.studies.train.picture import STYLE


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
