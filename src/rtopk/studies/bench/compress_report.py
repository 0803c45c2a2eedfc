"""What is measured beside the times of `rtopk bench compress`, and its result as tables: terminal, or Markdown."""

import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rtopk.kernels import reaches
from rtopk.seed import generator
from rtopk.select import draw_largest
from rtopk.sparsifier import Sparsifier, entries_sent
from rtopk.studies.bench import Gradients, real, synthetic
from rtopk.studies.bench.compress import (
    DENSITIES,
    WARM,
    Bar,
    CompressRow,
    Floor,
    Fused,
    bars,
    beside_neighbour,
)  # fmt: skip
from rtopk.studies.config import Config
from rtopk.studies.tasks import wide_digits
from rtopk.studies.train.loop import Run
from rtopk.studies.train.records import processor
from rtopk.tools.show.terminal import console, table
from rtopk.tools.show.terminal import markdown as markdown_table

Measured = list[tuple[str, list[CompressRow]]]  # what the gradients are, and their rows
HEAD = (
    "gradients",
    "d",
    "density",
    "threads",
    "floor ms",
    "hook ms",
    "hook",
    "momentum",
    "alone",
    "dgc",
    "topk",
)
NOTE = (
    "hook: rtopk as in the DDP hook; momentum: the same with momentum in the memory; alone: as in "
    "Sparsifier.compress. From hook on: times the floor, the median of the ratios within a repetition"
)


@dataclass(frozen=True)
class Extras:
    """What is measured beside the times."""

    peaks: dict[float, float]  # density -> extra memory of a step, as a share of the vector
    scans: dict[float, tuple[int, int, float]]  # density -> d, steps, share of steps with a second scan
    parts: dict[tuple[int, float], dict[str, float]]  # threads, density -> part of a step, times the floor
    beside: dict[
        float, tuple[float, float]
    ]  # density -> ms with one and two threads beside a spinning process


def breakdown(gradients: Gradients, threads: int, density: float, repetitions: int = 11) -> dict[str, float]:
    """Say where a step spends its time, each part as the median of its ratios to the floor.

    The check is what `add` does first; here it is timed by itself, and taken off the time of `add`.
    """
    d, flush = gradients.size, torch.zeros(32_000_000)
    k = entries_sent(d, density)
    floor, method = Floor(d, k, k), Fused(d, k, k)
    ratios: dict[str, list[float]] = {"check": [], "pass": [], "select": [], "subtract": []}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for step in range(-WARM, repetitions):
        gradient = gradients.at(step + WARM)
        flush.sum()
        least = _seconds(partial(floor.step, gradient, 0))[0]
        flush.sum()
        check = _seconds(partial(reaches, gradient, 2.0**100))[0]
        flush.sum()
        search = method.node.search
        search.aim(k, d)  # before there is a guess, from zero
        adding, vector = _seconds(partial(method.memory.add, gradient, search))
        selecting, sent = _seconds(partial(draw_largest, vector, k, k, generator(step), search))
        taking = _seconds(partial(method.memory.subtract, sent))[0]
        if step >= 0:
            taken = {"check": check, "pass": adding - check, "select": selecting, "subtract": taking}
            for name, seconds in taken.items():
                ratios[name].append(seconds / least)
    torch.set_num_threads(before)
    return {name: statistics.median(found) for name, found in ratios.items()}


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def peak_memory(gradients: Gradients, density: float = 0.001) -> float:
    """Return the extra memory of a step at its peak, as a share of the vector.

    Extra is all but gradient and residual, the arrays that are kept for the next step included. Every array
    of the step is made by numpy, which reports to tracemalloc.
    """
    d, k = gradients.size, entries_sent(gradients.size, density)
    warm = Fused(100_000, 100, 100)  # compiles the loops
    for step in range(3):
        warm.step(gradients.vectors[step][:100_000], step)
    tracemalloc.start()
    try:
        method = Fused(d, k, k)
        for step in range(WARM):
            method.step(gradients.at(step), step)
        peak = 0.0
        for step in range(WARM, WARM + 6):
            tracemalloc.reset_peak()
            method.step(gradients.at(step), step)
            peak = max(peak, tracemalloc.get_traced_memory()[1])
        return peak / (4 * d) - 1.0  # without the residual
    finally:
        tracemalloc.stop()


def second_scans(steps: int = 400, density: float = 0.01) -> tuple[int, int, float]:
    """Train an MLP on digits; return d, steps and the share of steps that needed a second scan."""
    config = Config(
        nodes=1, rounds=steps, density=density, r_over_k=1.0, momentum=0.0, learning_rate=0.1,
        rate_schedule="constant",
    )  # fmt: skip
    run = Run(config, wide_digits(256)(config))
    for _ in range(steps):
        run.advance()
    node = run.nodes[0].sparsifier
    assert isinstance(node, Sparsifier)
    return run.layout.size, steps, node.search.second_scans / node.search.steps


def measure_extras(quick: bool) -> Extras:
    """Measure peak memory and the share of second scans."""
    gradients = synthetic(11_200_000, 3)
    held = gradients, real(11_200_000, 3)
    steps = 300 if quick else 2000
    return Extras(
        {d: max(peak_memory(each, d) for each in held) for d in DENSITIES if d == 0.001 or not quick},
        {d: second_scans(steps, d) for d in DENSITIES},
        {(t, d): breakdown(gradients, t, d) for t in (1, 2) for d in DENSITIES if not quick},
        {d: beside_neighbour(gradients, d, 60) for d in DENSITIES},
    )


def show(measured: Measured, extras: Extras) -> None:
    """Print everything on the terminal."""
    console.print(table(f"compress on {machine()}", HEAD, lines(measured), left=len(HEAD)), NOTE)
    verdict = [
        [bar.text, f"{bar.limit:g}", f"{bar.measured:.2f}", "yes" if bar.met else "NO"]
        for bar in all_bars(measured, extras)
    ]
    console.print(table("", ["bar", "limit", "measured", "met"], verdict, left=4), *remarks(extras), sep="\n")


def markdown(measured: Measured, extras: Extras) -> str:
    """Return everything as Markdown."""
    text = [f"Machine: {machine()}.", "", *markdown_table(HEAD, lines(measured), right=False)]
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
        by_setting: dict[tuple[int, float, int], dict[str, CompressRow]] = {}
        for row in rows:
            by_setting.setdefault((row.d, row.density, row.threads), {})[row.method] = row
        for (d, density, threads), of in by_setting.items():
            cells = [source, f"{d / 1e6:.2f} M", f"{100 * density:g} %", f"{threads}"]
            cells += [f"{of['floor'].ms:.2f}", f"{of['hook'].ms:.2f}", f"{of['hook'].over_floor:.2f}"]
            cells += [f"{of[name].over_floor:.2f}" for name in ("momentum", "rtopk")]
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
    for density, (one, two) in extras.beside.items():
        text = f"two threads over one, beside a spinning process, at {100 * density:g} %"
        found.append(Bar(text, two / one, 1.05, two <= 1.05 * one))
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
    for density, (one, two) in extras.beside.items():
        found.append(
            f"the hook's step beside a process that spins, 11.2 M, density {100 * density:g} %, mean: {one:.1f} ms "
            f"with one thread, {two:.1f} ms with two"
        )
    for density, (d, steps, share) in extras.scans.items():
        found.append(
            f"second scans, training an MLP (d = {d:,}) on digits for {steps} steps at density "
            f"{100 * density:g} %: {100 * share:.2f} % of the steps"
        )
    return found


def machine() -> str:
    """Name the processor."""
    return f"{os.cpu_count()} x {processor()}"
