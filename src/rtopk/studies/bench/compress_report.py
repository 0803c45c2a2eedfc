"""The result of `rtopk bench compress` as tables: on the terminal with rich, or as Markdown for the docs."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from rtopk.studies.bench.compress import DENSITIES, Bar, Row, bars, breakdown, peak_memory, second_scans
from rtopk.studies.bench.workloads import real, synthetic

Measured = list[tuple[str, list[Row]]]  # what the gradients are, and their rows
HEAD = ("gradients", "d", "density", "threads", "floor ms", "rtopk ms", "rtopk", "dgc", "topk")
NOTE = "rtopk, dgc, topk: times the floor, the median of the ratios within a repetition"


@dataclass(frozen=True)
class Extras:
    """What is measured beside the times."""

    peaks: dict[float, float]  # density -> extra memory of a step, as a share of the vector
    scans: dict[float, tuple[int, int, float]]  # density -> d, steps, share of steps with a second scan
    parts: dict[tuple[int, float], dict[str, float]]  # threads, density -> part of a step, times the floor


def measure_extras(quick: bool) -> Extras:
    """Measure peak memory and the share of second scans."""
    gradients = synthetic(11_200_000, 3)
    held = gradients, real(11_200_000, 3)
    steps = 300 if quick else 2000
    return Extras(
        {
            density: max(peak_memory(each, density) for each in held)
            for density in DENSITIES
            if density == 0.001 or not quick
        },
        {density: second_scans(steps, density) for density in DENSITIES},
        {
            (threads, density): breakdown(gradients, threads, density)
            for threads in (1, 2)
            for density in DENSITIES
            if not quick
        },
    )


def show(measured: Measured, extras: Extras) -> None:
    """Print everything on the terminal."""
    console = Console()
    table = Table(*HEAD, title=f"compress on {machine()}", caption=NOTE)
    for line in lines(measured):
        table.add_row(*line)
    console.print(table)
    verdict = Table("bar", "limit", "measured", "met")
    for bar in all_bars(measured, extras):
        verdict.add_row(bar.text, f"{bar.limit:g}", f"{bar.measured:.2f}", "yes" if bar.met else "NO")
    console.print(verdict)
    for text in remarks(extras):
        console.print(text)


def markdown(measured: Measured, extras: Extras) -> str:
    """Return everything as Markdown."""
    text = [f"Machine: {machine()}.", "", _row(HEAD), _row(["---"] * len(HEAD))]
    text += [_row(line) for line in lines(measured)]
    text += ["", f"({NOTE}.)", "", *(f"- {remark}" for remark in remarks(extras)), ""]
    checked = all_bars(measured, extras)
    missed = [bar for bar in checked if not bar.met]
    text.append(f"Bars: {len(checked) - len(missed)} of {len(checked)} met.")
    text += [f"- missed: {bar.text}: {bar.measured:.2f}, limit {bar.limit:g}" for bar in missed]
    return "\n".join(text)


def lines(measured: Measured) -> list[list[str]]:
    """Return the cells of the table, a line for each setting."""
    found = []
    for source, rows in measured:
        by_setting: dict[tuple[int, float, int], dict[str, Row]] = {}
        for row in rows:
            by_setting.setdefault((row.d, row.density, row.threads), {})[row.method] = row
        for (d, density, threads), of in by_setting.items():
            cells = [source, f"{d / 1e6:.2f} M", f"{100 * density:g} %", f"{threads}"]
            cells += [f"{of['floor'].ms:.2f}", f"{of['rtopk'].ms:.2f}", f"{of['rtopk'].over_floor:.2f}"]
            found.append([*cells, f"{of['dgc'].over_floor:.1f}", f"{of['topk'].over_floor:.1f}"])
    return found


def all_bars(measured: Measured, extras: Extras) -> list[Bar]:
    """Return every bar, those of the rows and those of the extras."""
    found = bars([row for _, rows in measured for row in rows])
    peak = extras.peaks[0.001]
    found.append(Bar("extra memory of a step at 0.1 %, in % of the vector", 100 * peak, 2.0, peak <= 0.02))
    for density, (_, _, share) in extras.scans.items():
        text = f"steps with a second scan in training at {100 * density:g} %, in %"
        found.append(Bar(text, 100 * share, 2.0, share < 0.02))
    return found


def remarks(extras: Extras) -> list[str]:
    """Say what was measured beside the times."""
    found = [
        f"extra memory of a step (11.2 M, {torch.get_num_threads()} threads, synthetic and real) at density "
        f"{100 * density:g} %: at most {100 * peak:.2f} % of the vector"
        for density, peak in extras.peaks.items()
    ]
    for (threads, density), parts in extras.parts.items():
        times = ", ".join(f"{name} {part:.2f}" for name, part in parts.items())
        where = f"11.2 M, density {100 * density:g} %, threads {threads}"
        found.append(f"where a step spends its time, in floors ({where}): {times}")
    for density, (d, steps, share) in extras.scans.items():
        found.append(
            f"second scans, training an MLP (d = {d:,}) on digits for {steps} steps at density "
            f"{100 * density:g} %: {100 * share:.2f} % of the steps"
        )
    return found


def machine() -> str:
    """Name the processor."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return f"{len(names)} x {names[0].split(':')[1].strip()}" if names else platform.processor()


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
