"""The rows of `rtopk bench link` as tables (terminal, Markdown for docs/links.md) and as a picture."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rtopk.studies.bench.link import METHODS, Row

COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("method", lambda row: label(row)),
    ("step ms", lambda row: f"{row.step_ms:,.0f}"),
    ("quartiles", lambda row: f"{row.step_low_ms:,.0f}–{row.step_high_ms:,.0f}"),
    ("/ off", lambda row: f"{row.step_ms / row.off_ms:.2f}"),
    ("select", lambda row: f"{row.select_ms:,.1f}"),
    ("codec", lambda row: f"{row.codec_ms:,.1f}"),
    ("exchange", lambda row: f"{row.exchange_ms:,.1f}"),
    ("CPU", lambda row: f"{row.cpu_ms:,.0f}"),
    ("payload B", lambda row: f"{row.payload_bytes:,}"),
    ("wire B", lambda row: f"{row.wire_bytes:,.0f}"),
    ("wire / due", lambda row: f"{row.wire_bytes / due_bytes(row):.3f}"),
)

# What fits into 80 columns.
NARROW = ("method", "step ms", "/ off", "select", "codec", "exchange", "payload B", "wire / due")


def label(row: Row) -> str:
    """Name a row's method with its density and values."""
    parts = [row.method]
    if row.density is not None:
        parts.append(f"{100 * row.density:g} %")
    if row.values is not None:
        parts.append(row.values)
    return " ".join(parts)


def due_bytes(row: Row) -> float:
    """Return what a rank must receive: payload x fan-out.

    All-gather brings the payloads of the other nodes; a ring all-reduce brings 2 (n - 1) / n of one.
    """
    fan_out = row.nodes - 1.0
    if row.method not in ("rtopk", "topk-allgather"):
        fan_out *= 2 / row.nodes
    return row.payload_bytes * fan_out


def title(row: Row) -> str:
    """Name the cell of a row."""
    rate = "unshaped" if row.mbit is None else f"{row.mbit:g} Mbit/s"
    return (
        f"{row.model} ({row.size / 1e6:.1f} M), {row.nodes} nodes, {rate}; "
        f"computation {row.compute_ms:.0f} ms, step without communication {row.off_ms:.0f} ms"
    )


def cells(rows: Sequence[Row]) -> list[list[Row]]:
    """Split rows by cell: models by size, more nodes later, fast links first; methods in their usual order."""
    ordered = sorted(
        rows,
        key=lambda row: (
            row.size,
            row.nodes,
            0.0 if row.mbit is None else 1 / row.mbit,
            METHODS.index((row.method, row.density, row.values)),
        ),
    )
    return [list(group) for _, group in groupby(ordered, key=lambda row: (row.model, row.nodes, row.mbit))]


def show(rows: Sequence[Row], console: Console) -> None:
    """Print one table per cell."""
    for cell in cells(rows):
        table = Table(title=title(cell[0]), title_justify="left")
        columns = [column for column in COLUMNS if console.width > 110 or column[0] in NARROW]
        for number, (name, _) in enumerate(columns):
            table.add_column(name, justify="right" if number else "left")
        for row in cell:
            table.add_row(*(text(row) for _, text in columns))
        console.print(table)


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables in Markdown."""
    lines: list[str] = []
    for cell in cells(rows):
        lines += [f"### {title(cell[0])}", ""]
        lines.append("| " + " | ".join(name for name, _ in COLUMNS) + " |")
        lines.append("| --- |" + " ---: |" * (len(COLUMNS) - 1))
        lines += ["| " + " | ".join(text(row) for _, text in COLUMNS) + " |" for row in cell]
        lines.append("")
    return "\n".join(lines)


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
