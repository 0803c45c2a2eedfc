"""What `rtopk advise` has to say, as rows of text for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rtopk.tools.advise.choose import Advice, name
from rtopk.tools.advise.compare import Compared, median_error
from rtopk.tools.advise.cost import Prediction
from rtopk.tools.advise.simulate import Point

Rows = list[list[str]]  # the first is the heading


def predictions(found: Sequence[Prediction]) -> Rows:
    """Return one line per method, fastest first."""
    head = ["method", "step ms", "local ms", "wire ms", "payload", "received per node"]
    return [head] + [
        [
            name(p),
            f"{p.step_ms:,.1f}",
            f"{p.local_ms:,.1f}",
            f"{p.wire_ms:,.1f}",
            amount(p.payload_bytes),
            amount(p.received_bytes),
        ]
        for p in sorted(found, key=lambda p: p.step_ms)
    ]


def compared(rows: Sequence[Compared]) -> Rows:
    """Return predicted against measured, one line per row of the benchmark."""
    return [["model", "link", "nodes", "method", "measured ms", "predicted ms", "error"]] + [
        [
            row.model,
            rate(row.mbit),
            str(row.nodes),
            name(Prediction(row.method, row.density, row.values, 0, 0, 0, 0)),
            f"{row.measured_ms:,.0f}",
            f"{row.predicted_ms:,.0f}",
            f"{100 * row.error:.0f} %",
        ]
        for row in rows
    ]


def simulated(points: Sequence[Point]) -> Rows:
    """Return a line per scene and number of nodes, a column per rate: the winner and its gain over dense."""
    mbits = sorted({point.mbit for point in points})
    rows = [["scene", "nodes", *(rate(mbit) for mbit in mbits)]]
    found = {(point.scene.name, point.nodes, point.mbit): point for point in points}
    for scene, nodes in dict.fromkeys((point.scene.name, point.nodes) for point in points):
        cells = []
        for mbit in mbits:
            point = found[scene, nodes, mbit]
            gain = _dense(point.predictions).step_ms / point.advice.choice.step_ms
            cells.append(
                f"{name(point.advice.choice)} x{gain:,.0f}"
                if gain >= 10
                else f"{name(point.advice.choice)} x{gain:.1f}"
            )
        rows.append([scene, str(nodes), *cells])
    return rows


def advice_json(found: Sequence[Prediction], advice: Advice) -> dict[str, Any]:
    """Return predictions and recommendation as plain data."""
    return {
        "methods": [asdict(p) for p in found],
        "recommended": {
            "method": advice.choice.method,
            "density": advice.choice.density,
            "values": advice.choice.values,
            "step_ms": advice.choice.step_ms,
            "reason": advice.reason,
        },
    }


def compared_json(rows: Sequence[Compared]) -> dict[str, Any]:
    """Return predicted against measured as plain data."""
    return {"rows": [{**asdict(row), "error": row.error} for row in rows], "median_error": median_error(rows)}


def simulated_json(points: Sequence[Point]) -> dict[str, Any]:
    """Return all points as plain data."""
    return {
        "points": [
            {
                **asdict(point.scene),
                "nodes": point.nodes,
                "mbit": point.mbit,
                **advice_json(point.predictions, point.advice),
            }
            for point in points
        ]
    }


def markdown(rows: Rows) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])


def amount(size: float) -> str:
    """Write a number of bytes.

    >>> amount(1234567)
    '1.23 MB'
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def rate(mbit: float | None) -> str:
    """Write a rate."""
    if mbit is None:
        return "unshaped"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def _dense(found: Sequence[Prediction]) -> Prediction:
    return next(p for p in found if p.method == "dense")
