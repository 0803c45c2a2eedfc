"""Series -> what the plots show: plain numbers that page.js draws."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rtopk.tools.report.series import Estimate, Series

AXES = {"round": "round", "bytes": "sent_bytes", "seconds": "seconds"}  # of the plots -> of a point
STAGES = ("gradient", "compress", "exchange", "apply")
Plain = dict[str, Any]


def panel(title: str, series: Sequence[Series]) -> Plain:
    """Return everything that the plots of a panel show."""
    measured = [one for one in series if one.records]
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
    has = one.records[0]["final"]
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
    runs = [run for run in one.records if "spent" in run["final"]]
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
