"""The rows of `rtopk bench link` as tables (terminal, Markdown for docs/links.md) and as a picture."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console

from rtopk.studies.bench.link import METHODS, ORDER, LinkRow
from rtopk.tools.show.palette import mixed, rate, style, with_density
from rtopk.tools.show.terminal import markdown as markdown_table
from rtopk.tools.show.terminal import save_picture, table

COLUMNS: tuple[tuple[str, Callable[[LinkRow], str]], ...] = (
    ("method", lambda row: row.label),
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


def due_bytes(row: LinkRow) -> float:
    """Return what a rank must receive: payload x fan-out.

    All-gather brings the payloads of the other nodes; a ring all-reduce brings 2 (n - 1) / n of one. The payload
    of our all-reduce is what a rank receives.
    """
    if row.method == "rtopk-allreduce":
        return row.payload_bytes * row.per_host
    fan_out = row.nodes - 1.0
    if row.method not in ("rtopk", "topk-allgather"):
        fan_out *= 2 / row.nodes
    return row.payload_bytes * row.per_host * fan_out


def title(row: LinkRow) -> str:
    """Name the cell of a row."""
    return (
        f"{row.model} ({row.size / 1e6:.1f} M), {_nodes(row)}, {rate(row.mbit)}; "
        f"computation {row.compute_ms:.0f} ms, step without communication {row.off_ms:.0f} ms"
    )


def _nodes(row: LinkRow) -> str:
    return f"{row.nodes} nodes" if row.per_host == 1 else f"{row.nodes} sites of {row.per_host} ranks"


def cells(rows: Sequence[LinkRow]) -> list[list[LinkRow]]:
    """Split rows by cell: models by size, more nodes later, fast links first; methods in their usual order."""
    ordered = sorted(
        rows,
        key=lambda row: (
            row.size,
            row.per_host,
            row.nodes,
            0.0 if row.mbit is None else 1 / row.mbit,
            ORDER.index((row.method, row.density, row.values)),
        ),
    )
    return [
        list(group)
        for _, group in groupby(ordered, key=lambda row: (row.model, row.per_host, row.nodes, row.mbit))
    ]


def show(rows: Sequence[LinkRow], console: Console) -> None:
    """Print one table per cell."""
    for cell in cells(rows):
        columns = [column for column in COLUMNS if console.width > 110 or column[0] in NARROW]
        rows_ = [[text(row) for _, text in columns] for row in cell]
        console.print(table(title(cell[0]), [name for name, _ in columns], rows_))


def markdown(rows: Sequence[LinkRow]) -> str:
    """Return the tables in Markdown."""
    lines: list[str] = []
    for cell in cells(rows):
        table_ = markdown_table(
            [name for name, _ in COLUMNS], [[text(row) for _, text in COLUMNS] for row in cell]
        )
        lines += [f"### {title(cell[0])}", "", *table_, ""]
    return "\n".join(lines)


# The strongest compression of a method has its colour, the others are paler.
FAMILY = {"dense": "dense", "fp16": "dense", "powersgd-1": "powersgd", "powersgd-2": "powersgd",
          "topk-allgather": "top-k", "rtopk": "rtop-k", "rtopk-allreduce": "rtop-k"}  # fmt: skip
PALER = {"fp16": 0.6, "powersgd-2": 0.4, "topk-allgather 1 %": 0.45}
_OURS = (("1 % fp16", 0.66), ("1 % 4bit", 0.44), ("0.1 % fp16", 0.22), ("0.1 % 4bit", 0.0))
PALER |= {f"rtopk {what}": share for what, share in _OURS}
DARKER = {f"rtopk-allreduce {what}": 0.7 - 0.8 * share for what, share in _OURS}
COLOURS = {
    (label := with_density(*key)): mixed(
        style(FAMILY.get(key[0], key[0]))[0],
        "#000000" if label in DARKER else "#ffffff",
        DARKER.get(label, PALER.get(label, 0.0)),
    )
    for key in METHODS
}
UNSHAPED = 10_000.0  # where links without limit are drawn, Mbit/s


def draw_measured(rows: Sequence[LinkRow], nodes: int, path: Path) -> None:
    """Draw one panel per model, for the cells of so many nodes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    rows = [row for row in rows if row.nodes == nodes and row.per_host == 1]
    if not rows:
        raise ValueError(f"nothing was measured with {nodes} nodes")
    models = list(dict.fromkeys(row.model for row in sorted(rows, key=lambda row: row.size)))
    figure = Figure(figsize=(max(6.5, 5.2 * len(models)), 4.8), layout="constrained")
    for axis, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        here = sorted(
            (row for row in rows if row.model == model), key=lambda row: _place(row.mbit), reverse=True
        )
        for name, colour in COLOURS.items():
            line = [row for row in here if row.label == name]
            places = [_place(row.mbit) for row in line]
            dashes = "-." if name.startswith("rtopk-allreduce") else "-" if name.startswith("rtopk") else "--"
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
    save_picture(figure, path)


def _place(mbit: float | None) -> float:
    return UNSHAPED if mbit is None else mbit
