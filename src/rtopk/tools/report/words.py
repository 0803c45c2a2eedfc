"""Series -> sentences: what was run, and what it shows, with its uncertainty."""

import math
from collections.abc import Mapping, Sequence

from rtopk.tools.report.series import Series, difference


def what_was_run(panels: Mapping[str, Sequence[Series]], tuning: int = 0) -> str:
    """Describe the runs in a sentence or two."""
    runs = [run for series in panels.values() for one in series for run in one.runs]
    if not runs:
        return ""
    nodes = _range([run["config"]["nodes"] for run in runs])
    sizes = _range([run["parameters"] for run in runs if "parameters" in run])
    rounds = _range([run["config"]["rounds"] for run in runs])
    places = "; ".join(panels)
    text = f"{_count(len(runs), 'run')} of {_count(sum(map(len, panels.values())), 'configuration')} ({places}): "
    text += f"{nodes} nodes, {rounds} rounds" + (f", {sizes} parameters" if sizes else "") + "."
    if tuning:
        text += f" {_count(tuning, 'more run')} on validation data tuned learning rates and are not shown."
    going = sum("weights" not in run for run in runs)
    if going:
        text += f" {_count(going, 'run')} not at the end: figures are those of the last evaluation."
    return text


def what_it_shows(series: Sequence[Series]) -> str:
    """Say how the best compressed method compares with dense, or which method is ahead."""
    measured = [one for one in series if one.measured]
    if not measured:
        return "No evaluation yet."
    where = measured[0].panel
    dense = next((one for one in measured if one.is_dense), None)
    rivals = [one for one in measured if not one.is_dense and not math.isnan(one.score().mean)]
    if not rivals:
        return f"{where}: {measured[0].label} reached {measured[0].score()} {measured[0].metric}."
    up = 1.0 if rivals[0].higher_is_better else -1.0
    best = max(rivals, key=lambda one: up * one.score().mean - _half(one))  # not by a lucky, wide interval
    text = f"{where}: {best.label} reached {best.score()} {best.metric}"
    if dense is None:
        return text + (", the best of those compared." if len(rivals) > 1 else ".")
    less = dense.over_runs(_sent) / best.over_runs(_sent)
    text += f" and sent {less:,.1f} times fewer bytes than dense, which reached {dense.score()}"
    text += f": {_gap(best, dense)}."
    least = min(rivals, key=lambda one: one.over_runs(_sent))
    if least.over_runs(_sent) < 0.9 * best.over_runs(_sent):
        less = dense.over_runs(_sent) / least.over_runs(_sent)
        text += (
            f" {least.label} sent {less:,.1f} times fewer and reached {least.score()}: {_gap(least, dense)}."
        )
    return text


def _gap(one: Series, dense: Series) -> str:
    """Say how far a method is from dense, and whether these seeds show it."""
    gap = difference(one.scores, dense.scores)
    if math.isnan(gap.half):
        return f"{gap.mean:+.2f}, from one seed, so without an interval"
    clear = "a clear difference" if abs(gap.mean) > gap.half else "no difference that these seeds could show"
    return f"{gap.mean:+.2f} ± {gap.half:.2f}, {clear}"


def _half(one: Series) -> float:
    half = one.score().half
    return 0.0 if math.isnan(half) else half


def _sent(run: dict[str, float]) -> float:
    return run["sent_bytes_per_round"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _range(values: Sequence[int]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
