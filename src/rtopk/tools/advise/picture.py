"""Pictures of where each method wins, and of predictions against measurements."""

from collections.abc import Sequence
from pathlib import Path

from rtopk.studies.bench.link_picture import COLOURS
from rtopk.tools.advise.choose import name
from rtopk.tools.advise.compare import Compared
from rtopk.tools.advise.simulate import Point


def draw_winners(points: Sequence[Point], path: Path) -> None:
    """Draw one map per scene: nodes across, rate up, coloured by what is recommended."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    scenes = list(dict.fromkeys(point.scene for point in points))
    columns = 2 if len(scenes) > 1 else 1
    rows = -(-len(scenes) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    shown = set()
    for axis, scene in zip(axes, scenes, strict=False):
        here = [point for point in points if point.scene == scene]
        nodes = sorted({point.nodes for point in here})
        mbits = sorted({point.mbit for point in here})
        for point in here:
            label = name(point.advice.choice)
            shown.add(label)
            x, y = nodes.index(point.nodes), mbits.index(point.mbit)
            axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLOURS[label]))
            dense = next(p.step_ms for p in point.predictions if p.method == "dense")
            gain = dense / point.advice.choice.step_ms
            dark = label in ("rtopk 0.1 % 4bit", "rtopk 0.1 % fp16", "powersgd-1")
            axis.text(
                x,
                y,
                f"{gain:.0f}" if gain >= 10 else f"{gain:.1f}",
                ha="center",
                va="center",
                size=7,
                color="white" if dark else "black",
            )
        axis.set_xlim(-0.5, len(nodes) - 0.5)
        axis.set_ylim(-0.5, len(mbits) - 0.5)
        axis.set_xticks(range(len(nodes)), [str(n) for n in nodes])
        axis.set_yticks(range(len(mbits)), [f"{m:g}" for m in mbits])
        axis.set_title(f"{scene.name}\nstep {scene.step_ms:g} ms, latency {scene.latency_ms:g} ms", size=9)
        axis.set_xlabel("nodes")
        axis.set_ylabel("Mbit/s of each link")
    for axis in axes[len(scenes) :]:
        axis.set_visible(False)
    patches = [Patch(color=colour, label=label) for label, colour in COLOURS.items() if label in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("Recommended method; the number is how many times as fast as dense", size=10)
    figure.savefig(path, dpi=110)


def draw_compared(compared: Sequence[Compared], path: Path) -> None:
    """Draw predicted over measured step time, with the band of 20 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for label, colour in COLOURS.items():
        rows = [row for row in compared if _label(row) == label]
        measured, predicted = [row.measured_ms for row in rows], [row.predicted_ms for row in rows]
        axis.scatter(measured, predicted, color=colour, edgecolors="black", linewidths=0.4, label=label, s=28)
    ends = [
        min(min(r.measured_ms, r.predicted_ms) for r in compared) / 1.3,
        max(max(r.measured_ms, r.predicted_ms) for r in compared) * 1.3,
    ]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="black", alpha=0.08)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured step, ms")
    axis.set(ylabel="predicted step, ms", title="Predicted against measured; grey is ±20 %")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _label(row: Compared) -> str:
    density = "" if row.density is None else f" {100 * row.density:g} %"
    return row.method + density + (f" {row.values}" if row.values else "")
