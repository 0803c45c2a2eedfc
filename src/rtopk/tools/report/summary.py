"""Series -> what the page says: sentences with their uncertainty, and an HTML table for every plot.

Runs of `rtopk reproduce` stand beside the paper. Small models and few rounds cannot reach its figures; what can be
compared is the distance of a method from dense, so both distances are given.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rtopk.studies.config import command
from rtopk.tools.report.plots import STAGES, spent
from rtopk.tools.report.series import Series
from rtopk.tools.show.intervals import POINTS, SHARE, Verdict, judge, plus_minus

Panels = Mapping[str, Sequence[Series]]
WAYS = ("sent", "received")
RULE = (
    "Which methods are named here: first the compressed one whose 95 % interval has the best worse end, so that a "
    "wide interval does not win by luck; then the one that sent least, if it sent at least a tenth less."
)
WORDS = (
    "Differences from dense are taken seed by seed. Ahead, behind and level hold at 5 % after Holm's correction "
    f"for all that stand here; level is within {POINTS:g} points of accuracy or {100 * SHARE:g} % of perplexity."
)


def what_was_run(panels: Panels, tuning: int = 0) -> str:
    """Describe the runs in a sentence or two."""
    runs = [run for series in panels.values() for one in series for run in one.runs]
    if not runs:
        return ""
    nodes = _span([run["config"]["nodes"] for run in runs])
    sizes = _span([run["parameters"] for run in runs if "parameters" in run])
    rounds = _span([run["config"]["rounds"] for run in runs])
    places = "; ".join(panels)
    text = f"{_count(len(runs), 'run')} of {_count(sum(map(len, panels.values())), 'configuration')} ({places}): "
    text += f"{nodes} nodes, {rounds} rounds" + (f", {sizes} parameters" if sizes else "") + "."
    if tuning:
        text += f" {_count(tuning, 'more run')} on validation data tuned learning rates and are not shown."
    going = sum("weights" not in run for run in runs)
    if going:
        text += f" {_count(going, 'run')} not at the end: figures are those of the last evaluation."
    return text


def what_it_shows(panels: Iterable[Sequence[Series]]) -> list[str]:
    """Say of each panel how two compressed methods compare with dense, all judged together, or which is ahead."""
    named = [_named([one for one in series if one.records]) for series in panels]
    pairs = [(one, dense) for _, ones, dense in named if dense for one in ones]
    judged = judge([one.lead(dense) for one, dense in pairs])
    gaps = iter(_gap(*pair, verdict, len(pairs)) for pair, verdict in zip(pairs, judged, strict=True))
    return [_sentence(measured, ones, dense, gaps) for measured, ones, dense in named]


Named = tuple[list[Series], list[Series], Series | None]  # all with a score; those named, best first; dense


def _named(measured: list[Series]) -> Named:
    """Return which methods a sentence names (RULE)."""
    dense = next((one for one in measured if one.is_dense), None)
    rivals = [one for one in measured if not one.is_dense and not math.isnan(one.score().mean)]
    if not rivals:
        return measured, [], dense
    up = 1.0 if rivals[0].higher_is_better else -1.0
    best = max(rivals, key=lambda one: up * one.score().mean - _half(one))  # not by a lucky, wide interval
    least = min(rivals, key=lambda one: one.over_runs(_sent))
    less = dense is not None and least.over_runs(_sent) < 0.9 * best.over_runs(_sent)
    return measured, [best, least] if less else [best], dense


def _sentence(measured: list[Series], ones: list[Series], dense: Series | None, gaps: Iterator[str]) -> str:
    if not measured:
        return "No evaluation yet."
    where = measured[0].panel
    if not ones:
        return f"{where}: {measured[0].label} reached {measured[0].score()} {measured[0].metric}."
    best = ones[0]
    text = f"{where}: {best.label} reached {best.score()} {best.metric}"
    if dense is None:
        return text + (", the best of those compared." if len(measured) > 1 else ".")
    less = dense.over_runs(_sent) / best.over_runs(_sent)
    text += f" and sent {less:,.1f} times fewer bytes than dense, which reached {dense.score()}"
    text += f": {next(gaps)}."
    for least in ones[1:]:
        less = dense.over_runs(_sent) / least.over_runs(_sent)
        text += f" {least.label} sent {less:,.1f} times fewer and reached {least.score()}: {next(gaps)}."
    return text


def _gap(one: Series, dense: Series, verdict: Verdict, tests: int) -> str:
    """Say how far a method is from dense, and whether these seeds show it."""
    lead = one.lead(dense)
    if lead.half == math.inf:
        return f"{_from_dense(one, dense)}, without an interval (no spread over common seeds)"
    word = f"{verdict.word} after correction for {_count(tests, 'test')}"
    return f"{_from_dense(one, dense)}, {word}"


def _from_dense(one: Series, dense: Series) -> str:
    """Write a score minus that of dense, with the paired interval."""
    lead = one.lead(dense)
    return f"{lead.mean if one.higher_is_better else -lead.mean:+.2f}{plus_minus(lead.half)}"


def _half(one: Series) -> float:
    half = one.score().half
    return 0.0 if math.isnan(half) else half


def _sent(run: dict[str, float]) -> float:
    return run["sent_bytes_per_round"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _span(values: Sequence[int]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first cell of a row is its header, wide ones scroll on their own."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _per_panel(
    panels: Panels,
    caption: str,
    columns: Sequence[str],
    row: Callable[[Series, Series | None], list[str]],
) -> str:
    """Return a table for each panel. `row` gets a series and the panel's dense one; an empty row is left out."""
    parts = []
    for panel, series in panels.items():
        measured = [one for one in series if one.records]
        dense = next((one for one in measured if one.is_dense), None)
        rows = [cells for one in measured if (cells := row(one, dense))]
        if rows:
            named = [column.format(metric=measured[0].metric) for column in columns]
            parts.append(table(panel + caption, named, rows))
    return "".join(parts)


def methods(panels: Panels) -> str:
    """Return score, interval, bytes and what they are against dense, a table for each panel."""
    columns = [
        "method", "{metric}, mean and 95 % interval", "seeds", "bytes sent per node and round",
        "times fewer than dense", "rounds done",
    ]  # fmt: skip

    def row(one: Series, dense: Series | None) -> list[str]:
        sent, score = one.over_runs(_sent), one.score()
        less = f"{dense.over_runs(_sent) / sent:,.1f}" if dense else "–"
        done = min(run["final"]["round"] for run in one.records)
        rounds = f"{done:,}" + (f" of {one.config['rounds']:,}" if one.going_on else "")
        return [one.label, str(score), str(score.count), f"{sent:,.0f}", less, rounds]

    return _per_panel(panels, "", columns, row)


def ledger(panels: Panels) -> str:
    """Return the bytes of each direction, measured on the payloads, a table for each panel."""
    columns = ["method", "sent a round", "received a round", "rounds", "sent in all", "received in all"]

    def row(one: Series, dense: Series | None) -> list[str]:
        each = (one.over_runs(lambda run, way=way: run[f"{way}_bytes_per_round"]) for way in WAYS)  # type: ignore[misc]
        whole = (
            one.over_runs(lambda run, name=name: run["final"][name])  # type: ignore[misc]
            for name in ("round", "sent_bytes", "received_bytes")
        )
        return [one.label, *(f"{value:,.0f}" for value in (*each, *whole))]

    return _per_panel(panels, ": bytes of one node, by direction", columns, row)


def times(panels: Panels) -> str:
    """Return where the time of a round goes, a table for each panel; empty where no run measured it."""

    def row(one: Series, dense: Series | None) -> list[str]:
        found = spent(one)
        whole = one.over_runs(lambda run: 1000 * run["seconds"] / run["final"]["round"])
        cells = [*(found.get(stage) or 0.0 for stage in STAGES), whole]
        return [one.label, *(f"{cell:.2f}" for cell in cells)] if found else []

    what = ": milliseconds a round: gradient and compress of one node, exchange and apply of all"
    return _per_panel(panels, what, ["method", *STAGES, "whole round, all nodes"], row)


def environment(panels: Panels) -> str:
    """Return what the runs ran on, and the command that repeats each."""
    runs = [run for series in panels.values() for one in series for run in one.runs]
    names = list(dict.fromkeys(name for run in runs for name in run.get("environment", {})))
    found = (run.get("environment", {}) for run in runs)
    different = list({str(sorted(env.items())): env for env in found}.values())
    columns = [
        "",
        *(f"environment {i + 1}" if len(different) > 1 else "value" for i in range(len(different))),
    ]
    rows = [[name, *(str(env.get(name, "–")) for env in different)] for name in names]
    parts = [table("Environment", columns, rows)] if rows else []
    for panel, series in panels.items():
        lines = [run.get("command") or command(run["config"]) for one in series for run in one.runs]
        text = escape("\n".join(lines))
        parts.append(
            f"<details><summary>{escape(panel)}: the commands of {len(lines)} runs</summary>"
            f'<pre tabindex="0">{text}</pre></details>'
        )
    return "".join(parts)


def number(value: object) -> str:
    """Return a cell of a table: numbers with four digits, the rest as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return "–" if value is None else str(value)


def beside_paper(panels: Panels) -> str:
    """Return the paper's figures beside ours, a table for each of the paper's; empty without such runs."""
    found: dict[tuple[str, str], list[Series]] = {}
    for series in panels.values():
        for one in series:
            told = one.runs[0].get("paper")
            if told is not None and one.records:
                found.setdefault((told["table"], told.get("scale", "")), []).append(one)
    return "".join(_table(number, scale, series) for (number, scale), series in sorted(found.items()))


def _table(name: str, scale: str, series: Sequence[Series]) -> str:
    dense = next((one for one in series if one.is_dense), None)
    base = dense.runs[0]["paper"]["value"] if dense else None
    rows = []
    for one in series:
        told, ours = one.runs[0]["paper"]["value"], one.score()
        ours_from_dense = "–" if dense is None or one.is_dense else _from_dense(one, dense)
        row = [one.label, "–", str(ours), "–", "–", ours_from_dense, str(ours.count)]
        if told is not None:
            row[1], row[3] = f"{told:.2f}", f"{ours.mean - told:+.2f}"
            row[4] = "–" if base is None or one.is_dense else f"{told - base:+.2f}"
        rows.append(row)
    columns = [
        "method", f"paper, {series[0].metric}", "ours, 95 % interval", "ours − paper",
        "paper: from dense", "ours: from dense", "seeds",
    ]  # fmt: skip
    title = series[0].runs[0]["paper"]["title"]
    if all(one.runs[0]["paper"]["value"] is None for one in series):  # a study of ours
        keep = [i for i in range(len(columns)) if i not in (1, 3, 4)]
        columns, rows = [columns[i] for i in keep], [[row[i] for i in keep] for row in rows]
    return table(f"{_heading(name)}: {title}; ours at scale {scale}", columns, rows)


def _heading(name: str) -> str:
    return name.replace("-", " ").capitalize() + (" of the paper" if name.startswith("table") else "")


def tuning(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the grid of learning rates of every row, what each reached on validation data, and the choice."""
    by_table: dict[tuple[str, str], list[list[str]]] = {}
    for choice in choices:
        tried = ", ".join(
            f"{number(rate)}: {score:.2f}"
            for rate, score in zip(choice["grid"], choice["scores"], strict=True)
        )
        row = [choice["row"], tried, number(choice["chosen"])]
        where = _heading(choice["table"]) if "table" in choice else f"rivals on {choice['panel']}"
        by_table.setdefault((where, choice.get("scale") or choice["budget"]), []).append(row)
    return "".join(
        table(
            f"{where}, {size}: learning rates tried, and their score on validation data",
            ["method", "tried", "chosen"],
            rows,
        )
        for (where, size), rows in sorted(by_table.items())
    )
