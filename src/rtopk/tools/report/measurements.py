"""Benchmarks and lab experiments -> a table, and a chart where there is something to see."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rtopk.tools.report.inputs import Study
from rtopk.tools.report.plots import Plain, short
from rtopk.tools.report.summary import number, table
from rtopk.tools.show.palette import with_density

Shown = tuple[str, list[Plain]]  # HTML of the tables, charts


def show(study: Study) -> Shown:
    """Return what a page shows of a study."""
    return SHOWN.get(study.kind, _bench)(study)


def flatten(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return a row with nested objects as columns of their own.

    >>> flatten({"setting": {"d": 8}, "risk": 0.5})
    {'setting d': 8, 'risk': 0.5}
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found.update(flatten(value, f"{before}{name} "))
        elif isinstance(value, list):
            found[f"{before}{name}"] = ", ".join(map(number, value))
        else:
            found[f"{before}{name}"] = value
    return found


def rows_table(caption: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of any list of objects: a column for every name."""
    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    cells = [[number(row.get(name)) for name in columns] for row in flat]
    return table(caption, [name.replace("_", " ") for name in columns], cells)


def _bench(study: Study) -> Shown:
    rows = study.data["rows"]
    others = {k: v for k, v in study.data.items() if isinstance(v, str | int | float | bool)}
    html = rows_table(f"{study.title}, {study.source}", rows)
    if others:
        html += _facts("Also measured", others)
    return html, _bars(rows)


def _facts(caption: str, facts: Mapping[str, Any]) -> str:
    return rows_table(caption, [{"what": name, "value": value} for name, value in facts.items()])


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[Plain]:
    """Return bars where rows name a method (or codec) and a time: one group for each setting."""
    who = next((name for name in ("method", "codec", "name") if all(name in row for row in rows)), None)
    what = next((name for name in MEASURES if all(_is_number(row.get(name)) for row in rows)), None)
    if who is None or what is None:
        return []
    rows = _compared(rows, who)
    differing = [name for name in SETTINGS if len({str(row.get(name)) for row in rows}) > 1]
    groups = list(dict.fromkeys(_place(row, differing) for row in rows))
    series = []
    for label in dict.fromkeys(str(row[who]) for row in rows):
        mine = {_place(row, differing): short(float(row[what])) for row in rows if str(row[who]) == label}
        series.append({"label": label, "x": groups, "y": [mine.get(group) for group in groups]})
    title = what.replace("_", " ")
    chart = {
        "kind": "bars",
        "title": title,
        "x": ", ".join(differing),
        "y": title,
        "log_y": True,
        "series": series,
    }
    return [chart]


MEASURES = ("over_floor", "total_bits", "bytes", "bits_per_entry", "ms", "seconds", "step_ms")
# of a row of a benchmark
SETTINGS = ("model", "d", "mbit", "nodes", "density", "data", "source", "values", "threads")


def _link(study: Study) -> Shown:
    """Show steps on links: a chart for each model, number of nodes and rate."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for row in study.data["rows"]:
        rate = f"{row['mbit']:g} Mbit/s" if row["mbit"] else "no limit"
        sites = row.get("per_host", 1) > 1
        nodes = f"{row['nodes']} " + (f"sites of {row['per_host']} ranks" if sites else "nodes")
        cells.setdefault(f"{row['model']}, {nodes}, {rate}", []).append(row)
    charts, html = [], ""
    for cell, rows in cells.items():
        names = [with_density(row["method"], row.get("density"), row.get("values")) for row in rows]
        series = [
            {"label": label, "x": names, "y": [short(row[part]) for row in rows]}
            for label, part in (("step", "step_ms"), ("without communication", "off_ms"))
        ]
        title = f"Milliseconds a step: {cell}"
        charts.append({"kind": "bars", "title": title, "x": "", "y": "ms", "series": series})
        same = ("model", "nodes", "per_host", "mbit", "size", "method", "density", "values")
        plain = [{k: v for k, v in row.items() if k not in same} for row in rows]
        html += rows_table(cell, [{"method": n, **row} for n, row in zip(names, plain, strict=True)])
    return html, charts


def _compared(rows: Sequence[Mapping[str, Any]], who: str) -> Sequence[Mapping[str, Any]]:
    """Keep the settings in which several methods were measured, if there are any; the table has the others."""
    methods: dict[str, set[str]] = {}
    for row in rows:
        methods.setdefault(_place(row, SETTINGS), set()).add(str(row[who]))
    return [row for row in rows if len(methods[_place(row, SETTINGS)]) > 1] or rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _place(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {number(row.get(name))}" for name in names)


def _risk(study: Study) -> Shown:
    html, charts = "", []
    for sweep in study.data["sweeps"]:
        axis = sweep["axis"]
        series = []
        for scheme, risks in sweep["risks"].items():
            values = [risk["setting"][axis] for risk in risks]
            series.append({"label": scheme, "x": values, "y": [short(risk["mean"]) for risk in risks]})
        for name, label in (("lower", "Theorem 2"), ("upper", "Theorem 1")):
            bound = [value or None for value in sweep[name]]
            series.append({"label": label, "x": series[0]["x"], "y": bound})
        charts.append(_lines(f"Risk against {axis}", axis, "risk", series))
        slopes = [{"scheme": scheme, **slope} for scheme, slope in sweep["slopes"].items()]
        html += rows_table(f"Slope of the risk in {axis}", slopes)
    regime = [{"axis": axis, **slope} for axis, slope in study.data["regime"].items()]
    return html + rows_table("Slopes where Theorem 1 predicts -1, -1 and 2", regime), charts


def _bounds(study: Study) -> Shown:
    rows = study.data["rows"]
    series = [
        {"label": label, "x": list(range(1, len(rows) + 1)), "y": [short(row[name]) for row in rows]}
        for name, label in (("over_upper", "risk / Theorem 1"), ("over_lower", "risk / Theorem 2"))
    ]
    chart = _lines("Measured risk over each bound", "setting", "times the bound", series, log_x=False)
    facts = {name: value for name, value in study.data.items() if name in ("c", "C", "inside")}
    return _facts("The constants that the grid needs", facts) + rows_table("Every setting", rows), [chart]


def _convergence(study: Study) -> Shown:
    outcomes = study.data["outcomes"]
    series = []
    for k in dict.fromkeys(row["k"] for row in outcomes):
        mine = sorted((row for row in outcomes if row["k"] == k), key=lambda row: row["T"])
        horizons = [row["T"] for row in mine]
        for label, values in (
            ("measured", [row["measured"] for row in mine]),
            ("Theorem 3", [sum(row["bound"]) for row in mine]),
        ):
            series.append({"label": f"k = {k}, {label}", "x": horizons, "y": [short(v) for v in values]})
    chart = _lines("Mean squared gradient against the horizon", "T", "mean squared gradient", series)
    return rows_table("Algorithm 1 against Theorem 3", outcomes), [chart]


def _inspect(study: Study) -> Shown:
    html, looks, series = "", study.data["looks"], []
    for look in looks:
        drawn = sorted((row["r_over_k"], row["error_with_residual"]) for row in look["schemes"])
        x, y = [r for r, _ in drawn], [short(error) for _, error in drawn]
        series.append({"label": f"round {look['round']}", "x": x, "y": y})
        html += rows_table(f"Round {look['round']}: every scheme on the same gradients", look["schemes"])
    facts = {**flatten(study.data["verdict"]), **flatten(study.data.get("recommendation", {}))}
    html = _facts("Verdict", facts) + html
    title = "Error of the mean with residual: top-k is r / k = 1, random-k the last"
    return html, [_lines(title, "r / k", "error", series)]


def _lines(title: str, x: str, y: str, series: list[Plain], log_x: bool = True) -> Plain:
    return {"kind": "lines", "title": title, "x": x, "y": y, "log_x": log_x, "log_y": True, "series": series}


SHOWN: Mapping[str, Callable[[Study], Shown]] = {
    "lab risk": _risk,
    "lab bounds": _bounds,
    "lab convergence": _convergence,
    "lab inspect": _inspect,
    "bench link": _link,
}
