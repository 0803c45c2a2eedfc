"""What `rtopk advise` says: rows of text, plain data for JSON, and pictures."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rtopk.studies.bench.link_report import COLOURS
from rtopk.tools.advise.advice import Advice, Compared, Point, median_error
from rtopk.tools.advise.cost import Prediction
from rtopk.tools.show import palette
from rtopk.tools.show.palette import is_dark
from rtopk.tools.show.terminal import save_picture

Rows = list[list[str]]  # the first is the heading


def predictions(found: Sequence[Prediction]) -> Rows:
    """Return one line per method, fastest first."""
    rows = [["method", "step ms", "local ms", "wire ms", "payload", "received per node"]]
    for p in sorted(found, key=lambda p: p.step_ms):
        times = [f"{ms:,.1f}" for ms in (p.step_ms, p.local_ms, p.wire_ms)]
        rows.append([p.label, *times, amount(p.payload_bytes), amount(p.received_bytes)])
    return rows


def compared(found: Sequence[Compared]) -> Rows:
    """Return predicted against measured, one line per row of the benchmark."""
    rows = [["model", "link", "nodes", "method", "measured ms", "predicted ms", "error"]]
    for row in found:
        times = [f"{row.measured_ms:,.0f}", f"{row.predicted_ms:,.0f}", f"{100 * row.error:.0f} %"]
        rows.append([row.model, rate(row.mbit), str(row.nodes), row.label, *times])
    return rows


def simulated(points: Sequence[Point]) -> Rows:
    """Return a line per scenario and number of nodes, a column per rate: the winner and its gain over dense."""
    mbits = sorted({point.mbit for point in points})
    rows = [["scene", "nodes", *(rate(mbit) for mbit in mbits)]]
    found = {(point.scenario.name, point.nodes, point.mbit): point for point in points}
    for scenario, nodes in dict.fromkeys((point.scenario.name, point.nodes) for point in points):
        here = [found[scenario, nodes, mbit] for mbit in mbits]
        rows.append([scenario, str(nodes), *(f"{p.advice.choice.label} x{_gain(p, ',.0f')}" for p in here)])
    return rows


def _gain(point: Point, large: str) -> str:
    """Write how many times as fast as dense the choice is; `large` is the format from ten on."""
    gain = point.dense.step_ms / point.advice.choice.step_ms
    return format(gain, large if gain >= 10 else ".1f")


def advice_json(found: Sequence[Prediction], advice: Advice) -> dict[str, Any]:
    """Return predictions and recommendation as plain data."""
    choice = {name: getattr(advice.choice, name) for name in ("method", "density", "values", "step_ms")}
    return {
        "methods": [asdict(p) for p in found],
        "recommended": {**choice, "reason": advice.reason, "line": advice.line},
    }


def compared_json(rows: Sequence[Compared]) -> dict[str, Any]:
    """Return predicted against measured as plain data."""
    plain = [{**asdict(row), "error": row.error} for row in rows]
    return {"rows": plain, "median_error": median_error(rows)}


def simulated_json(points: Sequence[Point]) -> dict[str, Any]:
    """Return all points as plain data."""
    return {
        "points": [
            {
                **asdict(point.scenario), "nodes": point.nodes, "mbit": point.mbit,
                **advice_json(point.predictions, point.advice),
            }
            for point in points
        ]
    }  # fmt: skip


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
    """Write a rate, fast ones in Gbit/s."""
    return palette.rate(mbit) if mbit is None or mbit < 1000 else f"{mbit / 1000:g} Gbit/s"


def draw_winners(points: Sequence[Point], path: Path) -> None:
    """Draw one map per scenario: nodes across, rate up, coloured by what is recommended."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    scenarios = list(dict.fromkeys(point.scenario for point in points))
    columns = 2 if len(scenarios) > 1 else 1
    rows = -(-len(scenarios) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    shown = set()
    for axis, scenario in zip(axes, scenarios, strict=False):
        here = [point for point in points if point.scenario == scenario]
        nodes = sorted({point.nodes for point in here})
        mbits = sorted({point.mbit for point in here})
        for point in here:
            label = point.advice.choice.label
            shown.add(label)
            x, y = nodes.index(point.nodes), mbits.index(point.mbit)
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLOURS[label]))
            ink = "white" if is_dark(COLOURS[label]) else "black"
            axis.text(x, y, _gain(point, ".0f"), ha="center", va="center", size=7, color=ink)
        axis.set_xlim(-0.5, len(nodes) - 0.5)
        axis.set_ylim(-0.5, len(mbits) - 0.5)
        axis.set_xticks(range(len(nodes)), [str(n) for n in nodes])
        axis.set_yticks(range(len(mbits)), [f"{m:g}" for m in mbits])
        axis.set_title(
            f"{scenario.name}\nstep {scenario.step_ms:g} ms, latency {scenario.latency_ms:g} ms", size=9
        )
        axis.set_xlabel("nodes")
        axis.set_ylabel("Mbit/s of each link")
    for axis in axes[len(scenarios) :]:
        axis.set_visible(False)
    patches = [Patch(color=colour, label=label) for label, colour in COLOURS.items() if label in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("Recommended method; the number is how many times as fast as dense", size=10)
    save_picture(figure, path)


def draw_compared(compared: Sequence[Compared], path: Path) -> None:
    """Draw predicted over measured step time, with the band of 20 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axis = figure.subplots()
    for label, colour in COLOURS.items():
        rows = [row for row in compared if row.label == label]
        measured, predicted = [row.measured_ms for row in rows], [row.predicted_ms for row in rows]
        axis.scatter(measured, predicted, color=colour, edgecolors="black", linewidths=0.4, label=label, s=28)
    times = [ms for row in compared for ms in (row.measured_ms, row.predicted_ms)]
    ends = [min(times) / 1.3, max(times) * 1.3]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="black", alpha=0.08)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured step, ms")
    axis.set(ylabel="predicted step, ms", title="Predicted against measured; grey is ±20 %")
    axis.legend(fontsize=7)
    save_picture(figure, path)
