"""What commands print: tables of results, and the progress of many runs."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rtopk.studies.train.config import Config
from rtopk.studies.train.runner import Progress as OnProgress
from rtopk.studies.train.summary import Row

console = Console()
errors = Console(stderr=True)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(value))


def results_table(title: str, rows: Sequence[Row]) -> Table:
    """Lay out summary rows."""
    seeds = max(row.seeds for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    table.add_column(f"{rows[0].metric} %\n{seeds} seeds", justify="right")
    table.add_column("bytes sent per\nnode and round", justify="right")
    table.add_column("times less\nthan dense", justify="right")
    for row in rows:
        table.add_row(
            row.label,
            f"{row.score:.1f} ± {row.spread:.1f}",
            f"{row.sent_bytes_per_round:,.0f}",
            f"{row.times_less:,.1f}",
        )
    return table


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
def runs_progress(configs: Sequence[Config], names: Sequence[str]) -> Iterator[OnProgress]:
    """Show a bar for all, and one for each name, filled by the rounds of the configurations that bear it."""
    with make_progress() as progress:
        totals = dict.fromkeys(names, 0)
        for config, name in zip(configs, names, strict=True):
            totals[name] += config.rounds
        whole = progress.add_task("all", total=sum(totals.values()))
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        task_of = {config.key: tasks[name] for config, name in zip(configs, names, strict=True)}
        seen = dict.fromkeys(task_of, 0)

        def advance(key: str, rounds: int) -> None:
            for task in (whole, task_of[key]):
                progress.advance(task, rounds - seen[key])
            seen[key] = rounds

        yield advance
