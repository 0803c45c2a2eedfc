"""Pictures of the lab, as PNG and SVG: every line has its own colour and marker."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rtopk.studies.lab import LOWER, UPPER
from rtopk.studies.lab.convergence import ConvergenceStudy, Outcome
from rtopk.studies.lab.experiments import BoundsStudy, RiskStudy
from rtopk.tools.show.palette import CYCLE, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

(RED, _), (BLUE, _) = style("rtop-k"), style("top-k")
STYLE = {  # colour and marker, label
    "paper": (style("rtop-k"), "paper: random k' ones, scaled"),
    "top": (style("top-k"), "largest k' ones, scaled (top-k)"),
    "lowest": (style(CYCLE[3]), "lowest k' ones, unscaled (ties by index)"),
    "random": (style("random-k"), "random coordinates (random-k)"),
    "central": (style("dense"), "no limit (centralised)"),
    "bernoulli": (style(CYCLE[0]), "sparse Bernoulli"),
    "gaussian": (style(CYCLE[1]), "Gaussian"),
    "sparse gaussian": (style(CYCLE[2]), "sparse Gaussian"),
    "rtop-k": (style("rtop-k"), "rTop-k, r = n k"),
    "random-k": (style("random-k"), "random-k, r = d"),
}
STYLES = [style(slot) for slot in CYCLE]


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        # Without dates, so that the same numbers give the same file.
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _log(axis: "Axes", x: str, y: str, title: str) -> None:
    axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y, title=title)
    if axis.get_xlim()[1] < 100 * axis.get_xlim()[0]:  # a short axis shows no whole powers of ten
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(FuncFormatter(_some_labels))
        axis.tick_params(axis="x", which="both", labelsize=8)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _some_labels(value: float, _: int | None) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def risk_sweeps(study: RiskStudy, folder: Path) -> list[Path]:
    """Draw risk against k, n, s and d with both bounds and every scheme."""
    figure = Figure(figsize=(10, 8))
    axes = figure.subplots(2, 2)
    for axis, sweep in zip(axes.flat, study.sweeps, strict=True):
        for scheme, risks in sweep.risks.items():
            (colour, marker), label = STYLE[scheme]
            slope = f" ({sweep.slopes[scheme].value:+.2f})"
            x = [getattr(risk.setting, sweep.axis) for risk in risks]
            y = [risk.mean for risk in risks]
            spread = [[risk.mean - risk.low for risk in risks], [risk.high - risk.mean for risk in risks]]
            axis.errorbar(x, y, yerr=spread, color=colour, marker=marker, capsize=2, label=label + slope)
        axis.plot(x, sweep.upper, color="grey", linestyle="--", label="Theorem 1, C = 1")
        if all(sweep.lower):
            axis.plot(x, sweep.lower, color="grey", linestyle=":", label="Theorem 2, c = 1")
        _log(axis, sweep.axis, "squared error", f"risk against {sweep.axis} (slope)")
    return _save(figure, folder, "lab-risk")


def amplitudes(study: RiskStudy, folder: Path) -> list[Path]:
    """Draw what the paper's draw and top-k miss against the number of nodes, a line for each spread."""
    if not study.amplitudes:
        return []
    figure = Figure(figsize=(10, 4.2))
    for axis, family in zip(figure.subplots(1, 2), ("flat", "power"), strict=True):
        rows = [row for row in study.amplitudes if row.setting.family == family]
        spreads = sorted({row.setting.spread for row in rows})
        for dashes, spread in zip(("-", "--", "-.", ":"), spreads, strict=False):
            here = [row for row in rows if row.setting.spread == spread]
            for scheme in ("paper", "top"):
                (colour, marker), _ = STYLE[scheme]
                # The draw is the same for all spreads, as far as can be seen: one entry will do.
                name = (
                    f"top-k, amplitudes 1 to {1 + spread:g}"
                    if scheme == "top"
                    else "uniform draw, any amplitudes"
                )
                missed = [getattr(row, scheme).mean for row in here]
                axis.plot(
                    [row.setting.n for row in here], missed, color=colour, marker=marker, markersize=4,
                    linestyle=dashes, label=name if scheme == "top" or not spread else None,
                )  # fmt: skip
        at = next((row.setting.n for row in rows if row.reach == 1), None)
        if at is not None:
            axis.axvline(at, color="grey", linewidth=0.8, label="n k = d log(d/s)")
        _log(axis, "n", "part of the truth that is missed", f"theta: {family}")
    return _save(figure, folder, "lab-amplitudes")


def bits(study: RiskStudy, folder: Path) -> list[Path]:
    """Draw the bits of encoded messages against k, and the bits needed against d."""
    figure = Figure(figsize=(10, 4))
    (left, right) = figure.subplots(1, 2)
    k = [row["k"] for row in study.bits]
    left.plot(k, k, color="grey", linestyle="--", label="limit k")
    left.plot(k, [row["used"] for row in study.bits], color=RED, label="bits of the encoded message")
    twin = left.twinx()
    twin.plot(k, [row["kept"] for row in study.bits], color=BLUE, linestyle=":", label="k' (right)")
    twin.set_ylabel("ones named, k'")
    left.set(xlabel="k", ylabel="bits", title=f"bits really used, d = {study.bits[0]['d']}")
    left.legend(fontsize=7, loc="upper left")
    twin.legend(fontsize=7, loc="lower right")
    for model, rows in study.needed.items():
        (colour, marker), label = STYLE[model]
        points = [(d, need) for d, need in rows if need is not None]
        right.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
    _log(right, "d", "bits a node", "bits for 3 x the centralised risk")
    return _save(figure, folder, "lab-bits")


def bounds(study: BoundsStudy, folder: Path) -> list[Path]:
    """Draw measured risk over both bounds for every setting of the grid."""
    figure = Figure(figsize=(8, 4))
    axis = figure.subplots()
    order = np.argsort([row.over_upper for row in study.rows])
    rows = [study.rows[i] for i in order]
    x = np.arange(len(rows))
    axis.plot(x, [row.over_upper for row in rows], "o", markersize=3, color=RED, label="risk / Theorem 1")
    axis.plot(x, [row.over_lower for row in rows], "^", markersize=3, color=BLUE, label="risk / Theorem 2")
    axis.axhline(UPPER, color=RED, linestyle="--", label=f"C = {UPPER:g}: no red point above")
    axis.axhline(LOWER, color=BLUE, linestyle=":", label=f"c = {LOWER:g}: no blue point below")
    axis.set(yscale="log", xlabel="setting, by risk / Theorem 1", ylabel="measured risk over bound")
    axis.set_title(f"{len(rows)} settings between the two bounds")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return _save(figure, folder, "lab-bounds")


def convergence(study: ConvergenceStudy, folder: Path) -> list[Path]:
    """Draw measured squared gradient norms under their bounds, and the cost of sparsifying against k."""
    figure = Figure(figsize=(10, 4.2))
    (left, right) = figure.subplots(1, 2)
    for (colour, marker), k in zip(STYLES, study.ks(), strict=False):
        rows: Sequence[Outcome] = [o for o in study.outcomes if o.k == k]
        horizon = [o.T for o in rows]
        label = f"k/d = {k / rows[0].d:g} (slope {study.slopes[k].value:+.2f})"
        left.plot(horizon, [o.measured for o in rows], color=colour, marker=marker, label=label)
        left.plot(
            horizon, [sum(o.bound) for o in rows], color=colour, linestyle="--", marker=marker, alpha=0.5
        )
    _log(left, "T", "mean of ||grad f||^2", "measured (solid) and Theorem 3 (dashed)")
    for name, excess in study.excess.items():
        (colour, marker), label = STYLE[name]
        shown = [(k, e) for k, e in excess if e > 0]
        slope = f" (slope {study.excess_slopes[name].value:+.2f})" if name in study.excess_slopes else ""
        right.plot(*zip(*shown, strict=True), color=colour, marker=marker, label=label + slope)
    right.plot(
        *zip(*study.second_terms, strict=True), color="grey", linestyle="--", label="Theorem 3, second term"
    )
    _log(right, "k", "measured(k) - measured(d)", f"what sparsifying costs, T = {study.excess_horizon}")
    return _save(figure, folder, "lab-convergence")


def gradients(looks: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw magnitudes by rank, and each scheme's error against r / k."""
    figure = Figure(figsize=(13, 4))
    (left, middle, right) = figure.subplots(1, 3)
    for (colour, marker), look in zip(STYLES, looks, strict=False):
        x, y = zip(*look["magnitudes"], strict=True)
        left.plot(x, np.maximum(y, 1e-8), color=colour, label=f"round {look['round']}")
        r = [row["r_over_k"] for row in look["schemes"]]
        for column, dashes in (("error", "--"), ("error_with_residual", "-")):
            words = f"round {look['round']}, {'with' if dashes == '-' else 'no'} residual"
            middle.plot(
                r,
                [row[column] for row in look["schemes"]],
                color=colour,
                marker=marker,
                linestyle=dashes,
                label=words,
            )
        lags = [row["lag"] for row in look["schemes"]]
        right.plot(r, lags, color=colour, marker=marker, label=f"after round {look['round']}")
    left.axvline(looks[0]["k"], color="grey", linestyle=":", label="k")
    _log(left, "rank", "magnitude / rms", "a node's gradient")
    _log(
        middle, "r / k (1: top-k, d/k: random-k)", "error / ||true||^2", "one round against the true gradient"
    )
    _log(right, "r / k", "lag", "not yet delivered of all that was due")
    return _save(figure, folder, "lab-gradients")
