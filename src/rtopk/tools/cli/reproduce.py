"""`rtopk reproduce`: the paper's tables."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rtopk.studies.paper.standings import Standing

_STUDIES = (
    "warm-up, candidates, candidates-plain, candidates-federated, split, "
    "split-distributed, visits, momentum or nodes."
)


def reproduce(
    table: int = typer.Option(0, min=0, max=5, help="Which of the paper's tables: 1 to 5."),
    study: str = typer.Option("", help="A study instead: " + _STUDIES),
    scale: str = typer.Option("small", help="smoke (seconds), small (an hour or two), paper (GPUs)."),
    rows: str = typer.Option("all", help="all; paper: those with a figure there; or a part of their labels."),
    seeds: int = typer.Option(3, min=1, help="Runs of each row, with different seeds."),
    jobs: int = typer.Option(2, min=1, help="Runs side by side, one core each."),
    results: Path = typer.Option(Path("results"), help="Folder of the records."),
    work: Path = typer.Option(Path("runs/reproduce"), help="Folder of runs under way."),
    data_dir: Path | None = typer.Option(None, help="Folder of the data sets; default $RTOPK_DATA."),
    device: str | None = typer.Option(None, help="cpu or cuda; default $RTOPK_DEVICE, else cpu."),
    tensorboard: bool = typer.Option(False, help="Write TensorBoard event files of every run too."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Run one of the paper's tables and print both side by side.

    Each row's learning rate is tuned on validation data, then the row runs on
    test data with every seed. Stopped or killed, the same command goes on where
    it was; what is in the results already is not run again. Under torchrun with
    five processes every process is a node.
    """
    from rtopk.studies.paper import questions as studies
    from rtopk.studies.paper import tables
    from rtopk.studies.paper.reproduce import run_table
    from rtopk.studies.paper.standings import comparisons, standings
    from rtopk.studies.tasks.data import VARIABLE
    from rtopk.studies.train.config import Config
    from rtopk.studies.train.processes import leads
    from rtopk.studies.train.runner import Progress
    from rtopk.studies.train.tensorboard import VARIABLE as tensorboard_variable  # noqa: N811
    from rtopk.tools.show.terminal import console, print_json, runs_progress

    try:
        if bool(table) == bool(study):
            raise ValueError("name one of --table 1 to 5 and --study")
        chosen = studies.study(study) if study else tables.table(table)
        size = tables.check_scale(scale)
        if size not in chosen.setups:
            raise ValueError(f"a study has the scales {', '.join(chosen.setups)}, got {scale!r}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    wanted = [row for row in chosen.rows if rows in ("all", "paper") or rows in row.label]
    groups = [[row for row in wanted if row.paper is not None]]
    if rows != "paper":
        groups.append([row for row in wanted if row.paper is None])
    groups = [group for group in groups if group]
    if not groups:
        labels = "; ".join(row.label for row in chosen.rows)
        raise typer.BadParameter(f"rows must be all, paper or a part of a label ({labels}), got {rows!r}")
    if device is not None:
        os.environ["RTOPK_DEVICE"] = device
    if tensorboard:
        os.environ[tensorboard_variable] = "1"
    if data_dir is not None:
        os.environ[VARIABLE] = str(data_dir)  # the workers inherit it
    with ExitStack() as stack:

        def stage(what: str, configs: Sequence[Config], names: Sequence[str]) -> Progress:
            stack.close()  # the display of the stage before
            return stack.enter_context(runs_progress(configs, [f"{what}: {name}" for name in names]))

        for group in groups:  # the paper's rows first
            run_table(chosen, group, size, seeds, jobs, results, work, stage)
    if not leads():
        return
    found = standings(chosen, size, results, seeds)
    if as_json:
        print_json({"table": chosen.name, "scale": scale, "rows": [_plain(standing) for standing in found]})
        return
    console.print(_layout(chosen.heading(size), size, found))
    for pair in comparisons(found):
        width = "" if pair.half_width == inf else f" ± {pair.half_width:.2f}"
        console.print(
            f"{pair.first.row.label} against {pair.second.row.label}: {pair.advantage:+.2f}{width}, {pair.verdict}",
            highlight=False,
        )


def _plain(standing: "Standing") -> dict[str, Any]:
    return {
        "row": standing.row.label,
        "paper": standing.row.paper,
        "metric": standing.metric,
        "mean": standing.mean,
        "half_width": None if standing.half_width == inf else standing.half_width,
        "seeds": len(standing.records),
        "scores": standing.scores,
        "learning_rate": standing.rate,
        "at_edge_of_grid": standing.at_edge,
        "sent_bytes_per_round": standing.sent_bytes_per_round,
    }


def _layout(title: str, scale: str, found: "Sequence[Standing]") -> "Table":
    from rich.table import Table

    laid = Table(title=f"{title}: scale {scale}", title_justify="left")
    laid.add_column("row")
    for heading in ("paper", f"ours,\n{found[0].metric}", "seeds", "rate", "bytes sent\nper round"):
        laid.add_column(heading, justify="right")
    for s in found:
        width = "" if s.half_width == inf else f" ± {s.half_width:.2f}"
        paper = "" if s.row.paper is None else f"{s.row.paper:.2f}"
        sent = f"{s.sent_bytes_per_round:,.0f}"
        laid.add_row(s.row.label, paper, f"{s.mean:.2f}{width}", str(len(s.records)), f"{s.rate:g}", sent)
    return laid
