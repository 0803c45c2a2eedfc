"""What commands print and write: tables (on the terminal and in Markdown), JSON, pictures, the progress of runs."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERY = 5.0  # seconds between lines of progress; more in a long job

console = Console()
errors = Console(stderr=True)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(value))


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]] = (), left: int = 1) -> Table:
    """Lay out a table; so many columns are aligned left, the others right."""
    laid = Table(title=title or None, title_justify="left")
    for number, head in enumerate(heads):
        laid.add_column(head, justify="left" if number < left else "right")
    for row in rows:
        laid.add_row(*row)
    return laid


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str | None]], right: bool = True) -> list[str]:
    """Return the lines of a table; the first column is aligned left, the others right if asked. None is empty.

    >>> print(*markdown(["method", "bytes"], [["top-k", "12"], ["dense", None]]), sep="\\n")
    | method | bytes |
    | --- | ---: |
    | top-k | 12 |
    | dense | |
    """
    rule = ["---", *["---:" if right else "---"] * (len(heads) - 1)]
    return [
        "|" + "".join(" |" if cell is None else f" {cell} |" for cell in row) for row in (heads, rule, *rows)
    ]


def save_picture(figure: "Figure", path: Path, dpi: int = 110) -> None:
    """Write a picture, and the folder that it goes into."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def make_progress() -> Progress:
    """Make a progress display on stderr, so that stdout stays clean; in a log or a pipe there is none."""
    return Progress(
        TextColumn("{task.description}", justify="left"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )


@contextmanager
def counted(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show one bar; yield what is called after each of its steps."""
    with make_progress() as progress:
        bar = progress.add_task(name, total=total)
        yield lambda: progress.advance(bar)


@contextmanager
def runs_progress(runs: Sequence[tuple[str, str, int]]) -> Iterator[Callable[[str, int], None]]:
    """Show a bar for all runs (key, name, rounds), and one for each name; yield what is told of a key's rounds.

    In a log or a pipe, print a line every few seconds instead.
    """
    if not errors.is_terminal:
        with _lines({key: rounds for key, _, rounds in runs}) as advance:
            yield advance
        return
    with make_progress() as progress:
        totals = dict.fromkeys((name for _, name, _ in runs), 0)
        for _, name, rounds in runs:
            totals[name] += rounds
        whole = progress.add_task("all", total=sum(totals.values()))
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        task_of = {key: tasks[name] for key, name, _ in runs}
        seen = dict.fromkeys(task_of, 0)

        def advance_bars(key: str, rounds: int) -> None:
            for task in (whole, task_of[key]):
                progress.advance(task, rounds - seen[key])
            seen[key] = rounds

        yield advance_bars


@contextmanager
def _lines(rounds: dict[str, int]) -> Iterator[Callable[[str, int], None]]:
    """Yield what is told of a key's rounds; every few seconds print what is done and what remains."""
    done, total, began, over = dict.fromkeys(rounds, 0), sum(rounds.values()), time.monotonic(), Event()
    found = 0  # rounds that were recorded already

    def advance(key: str, count: int) -> None:
        nonlocal found
        if time.monotonic() - began < 0.5 and count == rounds[key]:
            found += count
        done[key] = count

    def tell() -> None:
        while not over.wait(max(EVERY, (time.monotonic() - began) / 20)):
            passed, whole = time.monotonic() - began, sum(done.values())
            known = whole - found > (total - found) / 50
            left = f"about {passed * (total - whole) / (whole - found):.0f} s left" if known else "starting"
            ended = sum(done[key] == rounds[key] for key in rounds)
            errors.print(
                f"{ended} of {len(rounds)} runs, {100 * whole / total:.0f} % of the rounds, {passed:.0f} s passed, "
                f"{left}",
                highlight=False,
            )

    Thread(target=tell, daemon=True).start()
    try:
        yield advance
    finally:
        over.set()
