"""Series -> what the plots show: plain numbers that page.js draws, and the same as SVG for pages without scripts.

The SVG is drawn with matplotlib in the page's own fonts. Colours are CSS variables, so one drawing serves light
and dark.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rtopk.tools.report.series import Estimate, Series
from rtopk.tools.show.palette import DASHES, LIGHT, MARKERS, slot

AXES = {"round": "round", "bytes": "sent_bytes", "seconds": "seconds"}  # of the plots -> of a point
STAGES = ("gradient", "compress", "exchange", "apply")
Plain = dict[str, Any]


def panel(title: str, series: Sequence[Series]) -> Plain:
    """Return everything that the plots of a panel show."""
    measured = [one for one in series if one.measured]
    shown = [_series(one) for one in measured]
    return {
        "title": title,
        "metric": measured[0].metric if measured else "",
        "higher": measured[0].higher_is_better if measured else True,
        "series": shown,
        "range": _range(shown, 100.0 if measured and measured[0].metric == "accuracy" else math.inf),
    }


def _range(shown: Sequence[Plain], most: float) -> list[float] | None:
    """Return the part of the vertical axis that the last scores take, and their intervals as far as is useful."""
    scores = [(one["score"][0], one["score"][1] or 0.0) for one in shown if one["score"][0] is not None]
    if not scores:
        return None
    # One method of which the seeds say little must not make points of all others.
    far = max(mean for mean, _ in scores) - min(mean for mean, _ in scores)
    far = max(far, 4.0 * sorted(half for _, half in scores)[(len(scores) - 1) // 2])
    low = min(mean - (min(half, far) if far else half) for mean, half in scores)
    high = max(mean + (min(half, far) if far else half) for mean, half in scores)
    air = max(0.15 * (high - low), 0.01 * abs(high))
    return [low - air, min(high + air, max(most, high))]


def _series(one: Series) -> Plain:
    score, keys = one.score(), {"score": one.metric, "loss": "loss", "train_loss": "train_loss"}
    has = one.measured[0]["final"]
    curves = {name: one.curve(_reader(key)) for name, key in keys.items() if key in has}
    return {
        "label": one.label,
        "slot": one.slot,
        "dash": one.dash,
        "score": [short(score.mean), short(score.half), score.count],
        "sent": short(one.over_runs(lambda run: run["final"]["sent_bytes"])),
        "x": {x: _means(one.curve(_reader(key))) for x, key in AXES.items()},
        "y": {name: _means(curve) for name, curve in curves.items()},
        "half": {name: [short(e.half) for e in curve] for name, curve in curves.items()},
        "residual": _means(one.curve(_reader("residual_norm"))),
        "density": _means(one.curve(_reader("density"))),
        "sent_per_round": per_round(one, "sent_bytes"),
        "received_per_round": per_round(one, "received_bytes"),
        "spent": spent(one),
    }


def per_round(one: Series, name: str) -> list[float | None]:
    """Return the bytes of a round, averaged over the rounds since the point before."""
    totals, rounds = one.curve(_reader(name)), one.curve(_reader("round"))
    before, last, found = 0.0, 0.0, []
    for total, at in zip(totals, rounds, strict=True):
        found.append(short((total.mean - before) / (at.mean - last)))
        before, last = total.mean, at.mean
    return found


def spent(one: Series) -> dict[str, float | None]:
    """Return the milliseconds that a node and round spend in each stage; empty where it was not measured."""
    runs = [run for run in one.measured if "spent" in run["final"]]
    if not runs:
        return {}
    found = {}
    for stage in STAGES:
        times = [run["final"]["spent"].get(stage, 0.0) / run["final"]["round"] for run in runs]
        # One process does all nodes' work.
        nodes = one.config["nodes"] if stage in ("gradient", "compress") else 1
        found[stage] = short(1000.0 * sum(times) / len(times) / nodes)
    return found if any(found.values()) else {}  # under torchrun the stages are inside backward


def is_flat(panel: Plain, name: str) -> bool:
    """Say whether a quantity stays the same in every series, so that a chart of it says nothing."""
    for one in panel["series"]:
        found = [value for value in one[name] if value is not None]
        if found and max(found) > 1.05 * min(found):
            return False
    return True


def short(value: float) -> float | None:
    """Return a number with six digits, None for what JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _reader(name: str) -> Callable[[Mapping[str, float]], float]:
    return lambda point: point.get(name, math.nan)


def _means(estimates: Sequence[Estimate]) -> list[float | None]:
    return [short(e.mean) for e in estimates]


INK = "#010203"  # stands for the colour of the text until the drawing is in the page
STYLES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))


def headline(panel: Plain) -> str:
    """Draw the last score against the bytes sent, with intervals."""
    figure, axis = _start("bytes sent per node, whole run", panel["metric"])
    for one in panel["series"]:
        colour = LIGHT[slot(one["slot"])]
        mean, half, _ = one["score"]
        axis.plot(
            _numbers(one["x"]["bytes"]), _numbers(one["y"]["score"]), color=colour, alpha=0.35, linewidth=1
        )
        axis.errorbar(
            one["sent"], math.nan if mean is None else mean, yerr=half or 0.0, color=colour, markersize=7,
            marker=MARKERS[slot(one["slot"])],
            markerfacecolor="none" if one["dash"] else colour, capsize=3, linestyle="none", label=one["label"],
        )  # fmt: skip
    axis.set_xscale("log")
    if panel["range"]:
        axis.set_ylim(panel["range"])
    return _finish(figure, axis)


def curves(panel: Plain, name: str, label: str, log: bool = False) -> str:
    """Draw one quantity of every series against the round; scores with their intervals."""
    figure, axis = _start("round", label)
    for one in panel["series"]:
        values = one["y"].get(name) if name in one["y"] else one.get(name)
        if not values:
            continue
        x, y, colour = one["x"]["round"], _numbers(values), LIGHT[slot(one["slot"])]
        style = STYLES[DASHES[one["dash"] % len(DASHES)]]
        axis.plot(x, y, color=colour, linestyle=style, linewidth=1.5, label=one["label"])
        if name == "sent_per_round":
            received = _numbers(one["received_per_round"])
            axis.plot(x, received, color=colour, linestyle=style, linewidth=0.7, alpha=0.7)
        if name in one["half"]:
            half = [0.0 if value is None else value for value in one["half"][name]]
            low, high = ([v + sign * h for v, h in zip(y, half, strict=True)] for sign in (-1.0, 1.0))
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    if name == "score" and panel["range"] and panel["metric"] == "accuracy":
        axis.set_ylim(-2.0, 102.0)
    if log:
        axis.set_yscale("log")
    return _finish(figure, axis)


def chart(spec: Plain) -> str:
    """Draw the chart of a study: lines or bars."""
    figure, axis = _start(spec["x"], spec["y"])
    for i, one in enumerate(spec["series"]):
        colour, width = LIGHT[slot(one.get("slot", i))], 0.8 / len(spec["series"])
        if spec["kind"] == "bars":
            places = [j + i * width for j in range(len(one["x"]))]
            axis.bar(places, _numbers(one["y"]), width, color=colour, label=one["label"])
            axis.set_xticks(range(len(one["x"])), [str(x) for x in one["x"]], rotation=20, ha="right")
        else:
            marker = MARKERS[slot(one.get("slot", i))]
            axis.plot(one["x"], _numbers(one["y"]), color=colour, marker=marker, label=one["label"])
    if spec.get("log_x"):
        axis.set_xscale("log")
    if spec.get("log_y"):
        axis.set_yscale("log")
    return _finish(figure, axis)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _start(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.8))
    axis = figure.subplots()
    axis.set_xlabel(x, color=INK)
    axis.set_ylabel(y, color=INK)
    axis.tick_params(which="both", colors=INK)
    for spine in axis.spines.values():
        spine.set_color(INK)
    axis.grid(alpha=0.25, color=INK)
    return figure, axis


def _finish(figure: Any, axis: Any) -> str:
    """Write the figure as SVG that takes its colours from the page."""
    import matplotlib as mpl

    if axis.get_legend_handles_labels()[0]:
        # Beside the plot, where it hides nothing; to look for the best place inside is slow for many series.
        axis.legend(fontsize=8, labelcolor=INK, framealpha=0.0, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rtopk"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", text).replace("<svg ", '<svg aria-hidden="true" ', 1)
    text = text.replace(INK, "currentColor")
    for i, colour in enumerate(LIGHT):
        text = text.replace(colour, f"var(--s{i})")
    return text


def all_of(panel: Plain) -> dict[str, str]:
    """Draw every picture of a panel that stands in for an interactive plot."""
    if not panel["series"]:
        return {}
    kept: Sequence[tuple[str, str, str, bool]] = (
        ("curve", "score", panel["metric"], False),
        ("residual", "residual", "norm of the residual", False),
        ("density", "density", "density", True),
        ("ledger", "sent_per_round", "bytes a round", True),
    )
    return {
        "headline": headline(panel),
        **{plot: curves(panel, name, label, log) for plot, name, label, log in kept},
    }
