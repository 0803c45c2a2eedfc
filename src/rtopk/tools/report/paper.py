"""Records of `rtopk reproduce` -> the paper's tables beside ours, and how each learning rate was found.

Small models and few rounds cannot reach the paper's figures; what can be compared is the distance of a method
from dense, so both distances stand side by side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rtopk.tools.report.series import Estimate, Series, difference
from rtopk.tools.report.summary import number, table

Record = dict[str, Any]


def tables(panels: Mapping[str, Sequence[Series]]) -> str:
    """Return the paper's figures beside ours, a table for each of the paper's; empty without such runs."""
    found: dict[tuple[str, str], list[Series]] = {}
    for series in panels.values():
        for one in series:
            told = one.runs[0].get("paper")
            if told is not None and one.measured:
                found.setdefault((told["table"], told.get("scale", "")), []).append(one)
    return "".join(_table(number, scale, series) for (number, scale), series in sorted(found.items()))


def _table(name: str, scale: str, series: Sequence[Series]) -> str:
    dense = next((one for one in series if one.is_dense), None)
    base = dense.runs[0]["paper"]["value"] if dense else None
    rows = []
    for one in series:
        told, ours = one.runs[0]["paper"]["value"], one.score()
        rows.append(
            [
                one.label,
                _figure(told),
                str(ours),
                "–" if told is None else f"{ours.mean - told:+.2f}",
                "–" if told is None or base is None or one.is_dense else f"{told - base:+.2f}",
                "–" if dense is None or one.is_dense else _plus(difference(one.scores, dense.scores)),
                str(ours.count),
            ]
        )
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


def _plus(gap: Estimate) -> str:
    return f"+{gap}" if gap.mean > 0 else str(gap)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def tuning(choices: Sequence[Record]) -> str:
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
