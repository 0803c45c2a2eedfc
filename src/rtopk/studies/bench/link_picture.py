"""What `rtopk bench link` measured, as a picture: step time over the rate of the link, a line per method."""

from collections.abc import Sequence
from pathlib import Path

from rtopk.studies.bench.link import Row
from rtopk.studies.bench.link_report import label

COLOURS = {  # ours blue; the same in every picture of links
    "dense": "#9e9e9e",
    "fp16": "#d9d2b0",
    "powersgd-1": "#8e6bb8",
    "powersgd-2": "#b79ad6",
    "topk-allgather 1 %": "#f2b48a",
    "topk-allgather 0.1 %": "#e07b39",
    "rtopk 1 % fp16": "#a6d5f5",
    "rtopk 1 % 4bit": "#62aee3",
    "rtopk 0.1 % fp16": "#2e7fc0",
    "rtopk 0.1 % 4bit": "#124e85",
}
UNSHAPED = 10_000.0  # where links without limit are drawn, Mbit/s


def draw_measured(rows: Sequence[Row], nodes: int, path: Path) -> None:
    """Draw one panel per model, for the cells of so many nodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    rows = [row for row in rows if row.nodes == nodes]
    if not rows:
        raise ValueError(f"nothing was measured with {nodes} nodes")
    models = list(dict.fromkeys(row.model for row in sorted(rows, key=lambda row: row.size)))
    figure = Figure(figsize=(max(6.5, 5.2 * len(models)), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        here = sorted(
            (row for row in rows if row.model == model), key=lambda row: _place(row.mbit), reverse=True
        )
        for name, colour in COLOURS.items():
            line = [row for row in here if label(row) == name]
            places = [_place(row.mbit) for row in line]
            dashes = "-" if name.startswith("rtopk") else "--"
            axis.plot(places, [row.step_ms for row in line], dashes, marker="o", color=colour, label=name)
        cells = {_place(row.mbit): row.off_ms for row in here}
        axis.plot(list(cells), list(cells.values()), ":", color="black", label="without communication")
        axis.set(xscale="log", yscale="log", xlabel="link of each host, Mbit/s", ylabel="step, ms")
        axis.set_xticks(list(cells), ["unshaped" if at == UNSHAPED else f"{at:g}" for at in cells])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.minorticks_off()
        axis.invert_xaxis()
        axis.set_title(f"{model} ({here[0].size / 1e6:.1f} M), {nodes} nodes", size=10)
    figure.legend(
        *axis.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3 if len(models) == 1 else 6,
        fontsize=8,
    )
    figure.savefig(path, dpi=110)


def _place(mbit: float | None) -> float:
    return UNSHAPED if mbit is None else mbit
