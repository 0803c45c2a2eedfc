"""`rtopk reproduce`, `tables`, `rivals`, `gpt` and `data`: the studies, and the data that they need."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rtopk.tools.cli import set_environment, wrong_use
from rtopk.tools.show.intervals import judge, plus_minus

if TYPE_CHECKING:
    from rtopk.studies.equal_bytes.fit import EntrantResult
    from rtopk.studies.paper.results import RowResult

JOBS = typer.Option(2, min=1, help="Runs side by side, one core each.")
RESULTS = typer.Option(Path("results"), help="Folder of the records.")
DATA_DIR = typer.Option(None, help="Folder of the data sets; default $RTOPK_DATA.")
DEVICE = typer.Option(None, help="cpu or cuda; default $RTOPK_DEVICE, else cpu.")
RETUNE = typer.Option(False, "--retune", help="Tune a second time, with three seeds and more rates.")
_STUDIES = (
    "warm-up, candidates, candidates-plain, candidates-federated, split, "
    "split-distributed, visits, momentum, nodes, exchange, exchange-cifar10, exchange-table-3, "
    "shipped, shipped-cifar10, shipped-ptb, shipped-shakespeare, shipped-adamw, shipped-beside, "
    "shipped-around-cifar10, shipped-around-ptb, "
    "shared-rate-1, shared-rate-2, shared-rate-3, shared-rate-4, shared-rate-5, why-sum-2, why-sum-5, "
    "why-memory-2, why-memory-3, why-memory-5, why-warm-up-1, why-warm-up-4, why-draws-2, "
    "why-tensor-2, why-tensor-4, why-correction-1, why-decay-1, why-batch-norm-1, why-long, why-long-all, "
    "why-long-few, why-agree, "
    "why-agree-cifar10, map-digits or map-cifar10."
)


def reproduce(
    table: int = typer.Option(0, min=0, max=5, help="Which of the paper's tables: 1 to 5."),
    study: str = typer.Option("", help="A study instead: " + _STUDIES),
    scale: str = typer.Option("small", help="smoke (seconds), small (an hour or two), paper (GPUs)."),
    rows: str = typer.Option("all", help="all; paper: those with a figure there; or a part of their labels."),
    seeds: int = typer.Option(3, min=1, help="Runs of each row, with different seeds."),
    jobs: int = JOBS,
    results: Path = RESULTS,
    work: Path = typer.Option(Path("runs/reproduce"), help="Folder of runs under way."),
    data_dir: Path | None = DATA_DIR,
    device: str | None = DEVICE,
    retune: bool = RETUNE,
    tensorboard: bool = typer.Option(False, help="Write TensorBoard event files of every run too."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Run one of the paper's tables and print both side by side.

    Each row's learning rate is tuned on validation data, then the row runs on
    test data with every seed. --retune then searches again around each rate:
    half steps, whole runs, three seeds. Stopped or killed, the same command goes on where
    it was; what is in the results already is not run again. Under torchrun with
    five processes every process is a node.
    """
    from rtopk.studies import paper
    from rtopk.studies.config import Config
    from rtopk.studies.paper import ablations
    from rtopk.studies.paper.reproduce import run_table
    from rtopk.studies.paper.results import comparisons, row_results
    from rtopk.studies.train.processes import leads
    from rtopk.studies.train.runner import Progress
    from rtopk.tools.show.terminal import console, print_json, runs_progress
    from rtopk.tools.show.terminal import table as lay_out

    with wrong_use():
        if bool(table) == bool(study):
            raise ValueError("name one of --table 1 to 5 and --study")
        chosen = ablations.study(study) if study else paper.table(table)
        size = paper.check_scale(scale)
        if size not in chosen.setups:
            raise ValueError(f"a study has the scales {', '.join(chosen.setups)}, got {scale!r}")
    wanted = [row for row in chosen.rows if rows in ("all", "paper") or rows in row.label]
    groups = [[row for row in wanted if row.paper is not None]]
    if rows != "paper":
        groups.append([row for row in wanted if row.paper is None])
    groups = [group for group in groups if group]
    if not groups:
        labels = "; ".join(row.label for row in chosen.rows)
        raise typer.BadParameter(f"rows must be all, paper or a part of a label ({labels}), got {rows!r}")
    set_environment(data_dir, device, tensorboard)
    with ExitStack() as stack:

        def stage(what: str, configs: Sequence[Config], names: Sequence[str]) -> Progress:
            stack.close()  # the display of the stage before
            named = zip(configs, names, strict=True)
            return stack.enter_context(
                runs_progress([(c.key, f"{what}: {name}", c.rounds) for c, name in named])
            )

        for group in groups:  # the paper's rows first
            run_table(chosen, group, size, seeds, jobs, results, work, stage, retune)
    if not leads():
        return
    found = row_results(chosen, size, results, seeds)
    if as_json:
        print_json({"table": chosen.name, "scale": scale, "rows": [_plain(result) for result in found]})
        return
    heads = ["row", "paper", f"ours,\n{found[0].metric}", "seeds", "rate", "bytes sent\nper round"]
    console.print(lay_out(f"{chosen.heading(size)}: scale {size}", heads, map(_cells, found)))
    pairs = comparisons(chosen, found)
    for pair, verdict in zip(pairs, judge([pair.lead for pair in pairs]), strict=True):
        lead = f"{pair.lead.mean:+.2f}{plus_minus(pair.lead.half)}, {verdict.word} (Holm over {len(pairs)})"
        console.print(f"{pair.label}: {lead}", highlight=False)


def _plain(result: "RowResult") -> dict[str, Any]:
    return {
        "row": result.row.label,
        "paper": result.row.paper,
        "metric": result.metric,
        "mean": result.mean,
        "half_width": None if result.half_width == inf else result.half_width,
        "seeds": len(result.records),
        "scores": result.scores,
        "learning_rate": result.rate,
        "at_edge_of_grid": result.at_edge,
        "sent_bytes_per_round": result.sent_bytes_per_round,
    }


def _cells(s: "RowResult") -> list[str]:
    paper = "" if s.row.paper is None else f"{s.row.paper:.2f}"
    score, sent = f"{s.mean:.2f}{plus_minus(s.half_width)}", f"{s.sent_bytes_per_round:,.0f}"
    return [s.row.label, paper, score, str(len(s.records)), f"{s.rate:g}", sent]


def tables(
    scale: str = typer.Option("small", help="smoke, small or paper."),
    results: Path = RESULTS,
    page: str = typer.Option(
        "reproduction", help="Whose tables: reproduction, defaults, exchange, explanations or regimes."
    ),
    write: Path | None = typer.Option(None, help="Put the tables into this page, between its marks."),
    pictures: Path | None = typer.Option(None, help="Draw figures 2 to 6 into this folder."),
    times: Path | None = typer.Option(
        None, help="Seconds to a score instead, with the steps of this file of `bench link --out`."
    ),
) -> None:
    """Print the tables that have been run, paper beside ours."""
    if times is not None:
        _times(results, times, write, pictures)
        return
    from rtopk.studies.paper import TABLES, check_scale, regimes_page
    from rtopk.studies.paper.results import draw_figure, page_tables, render_page
    from rtopk.tools.show.terminal import errors

    with wrong_use():
        size = check_scale(scale)
        page_tables(page)  # refuses what is none
        if not results.is_dir():
            raise ValueError(f"--results must be a folder of records, and there is no folder {results}")
    text = regimes_page.render(size, results) if page == "regimes" else render_page(page, size, results)
    _show(text, write)
    if pictures is not None:
        for table in TABLES.values():
            path = pictures / f"figure-{table.figure}.png"
            if draw_figure(table, size, results, path):
                errors.print(f"Figure written: {path}")


def _show(text: str, write: Path | None) -> None:
    """Print tables, or put them into a page."""
    from rtopk.studies.paper.results import insert
    from rtopk.tools.show.terminal import errors

    if write is None:
        print(text)
    else:
        write.write_text(insert(write.read_text(), text))
        errors.print(f"Tables written into {write}")


def _times(results: Path, links: Path, write: Path | None, pictures: Path | None) -> None:
    from rtopk.studies.bench import time_to_score
    from rtopk.studies.bench.link import from_json
    from rtopk.tools.show.terminal import errors

    with wrong_use():
        if not links.is_file():
            raise ValueError(
                f"--times must be a file of `rtopk bench link --out`, and there is no file {links}"
            )
        recorded = json.loads(links.read_text())
        if "rows" not in recorded:
            raise ValueError(f"--times must be a file of `rtopk bench link --out`, and {links} has no rows")
        found = time_to_score.times(results, from_json(recorded))
        if not any(one.method == "dense" for one in found):
            raise ValueError(f"{results} has no dense row of {time_to_score.STUDY.name}; run the study first")
    text = time_to_score.render(found)
    _show(text, write)
    if pictures is not None:
        path = pictures / "time-to-score.png"
        time_to_score.draw(found, path)
        errors.print(f"Picture written: {path}")


data = typer.Typer(help="The data sets of the experiments.", no_args_is_help=True, add_completion=False)


@data.callback()
def _group() -> None:
    pass  # keeps `check` a command of its own name


@data.command()
def check(
    data_dir: Path | None = DATA_DIR,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Say what is found where, and whether it is whole.

    Exit code 1 if a file is damaged.
    """
    from rtopk.studies.tasks import inventory
    from rtopk.studies.tasks.datasets import data_dir as folder
    from rtopk.tools.show.terminal import console, print_json, table

    set_environment(data_dir)
    root = folder()
    found = inventory()
    if as_json:
        print_json({"data_dir": str(root), "sets": [asdict(entry) for entry in found]})
    else:
        cells = [[entry.name, entry.state, entry.detail, entry.needed_for] for entry in found]
        heads = ["data set", "state", "what", "needed for"]
        console.print(table(f"Data in {root}", heads, cells, left=4))
    if any(entry.state == "damaged" for entry in found):
        raise typer.Exit(1)


def rivals(
    task: str = typer.Option("digits", help="digits, or with data cifar10, imagenet, ptb, shakespeare."),
    seeds: int = typer.Option(3, min=1, help="Runs of each result, with different seeds."),
    jobs: int = JOBS,
    results: Path = RESULTS,
    work: Path = typer.Option(Path("runs/rivals"), help="Folder of runs under way."),
    picture: Path | None = typer.Option(None, help="Where the picture goes; default in the results."),
    add: list[str] = typer.Option([], "--add", help="A rule of your own, FILE.py:CLASS; repeat."),
    only: list[str] = typer.Option([], "--only", help="Only these methods, beside it; repeat."),
    recorded: bool = typer.Option(False, "--recorded", help="Run nothing; show what is recorded."),
    write: Path | None = typer.Option(None, help="Put the tables into this page, between its marks."),
    against: str | None = typer.Option(None, help="Show one method's score minus each other's, too."),
    data_dir: Path | None = DATA_DIR,
    device: str | None = DEVICE,
    retune: bool = RETUNE,
    smoke: bool = typer.Option(False, "--smoke", help="A few rounds: does everything run?"),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
) -> None:
    """Compare all methods at equal bytes sent.

    Each method's density, threshold or rank is fitted to the same bytes per
    round, its learning rate is tuned on validation data on one grid, and it
    runs on test data with every seed. A task takes one core for half an hour
    (imagenet) to three hours (ptb). The same command goes on where it stopped.

    Your own rule: rtopk rivals --add mine.py:Mine --only top-k --only rtop-k
    """
    from rtopk.studies.config import Config, add_rule
    from rtopk.studies.equal_bytes import PANELS, retuned, smoke_panel, with_entrants
    from rtopk.studies.equal_bytes.fit import Runs, expected_runs, recorded_results, run_panels
    from rtopk.studies.equal_bytes.rivals_page import (
        check_page,
        grid,
        leads,
        pairs,
        records_of,
        score_against_budget,
        write_page,
    )
    from rtopk.tools.show.terminal import console, errors, make_progress, print_json, table

    if task not in PANELS:
        raise typer.BadParameter(f"task must be one of {', '.join(PANELS)}, got {task!r}")
    panels = [smoke_panel(panel) for panel in PANELS[task][-2:]] if smoke else list(PANELS[task])
    with wrong_use():
        added = [add_rule(place) for place in add]
        panels = [with_entrants(panel, only, added) for panel in panels]
    if write is not None:
        check_page(write, task)  # now, not after an hour
    set_environment(data_dir, device)
    file = records_of(task, results, smoke)

    if recorded:
        found_results = [result for panel in panels for result in recorded_results(panel, file, seeds)]
    else:
        panels = [retuned(panel) if retune else panel for panel in panels]
        about = expected_runs(panels, seeds)
        with make_progress() as progress:
            bar = progress.add_task("runs, about", total=sum(about))

            def on_run(config: Config) -> None:
                progress.update(bar, advance=1, description=f"runs, about; last {config.method}")
                if not errors.is_terminal:
                    ended = round(progress.tasks[bar].completed)
                    errors.print(f"{ended} of about {sum(about)} runs, last {config.method}", highlight=False)

            def on_group(number: int) -> None:
                progress.update(bar, completed=sum(about[: number + 1]))

            ledger = Runs(file, work, jobs, on_run=on_run)
            found_results = run_panels(panels, seeds, ledger, file, on_group)
    if not found_results:
        raise ValueError(f"{file} holds no result of {task} yet; run without --recorded")
    picture = picture or file.with_suffix(".png")
    score_against_budget(found_results, picture)
    by_panel = [
        found for panel in panels if (found := [s for s in found_results if s.panel.name == panel.name])
    ]
    found_results = [result for here in by_panel for result in here]
    if write is not None:
        write_page(write, task, by_panel, seeds, results)
    if as_json:
        print_json({"rows": [_row(s) for s in found_results], "results": str(file), "picture": str(picture)})
        return
    for here in by_panel:
        console.print(table(here[0].panel.name, *grid(here)))
        if against is not None:
            compared = pairs(here, against)
            judged = iter(judge([one.lead(other) for one, other in compared.values()]))
            title = f"Leads: paired and Welch's 95 % intervals; verdicts after Holm over {len(compared)}"
            console.print(table(title, *leads(compared, judged, against)))
        console.print()
    console.print(f"Records: {file}\nPicture: {picture}")


def _row(result: "EntrantResult") -> dict[str, object]:
    return {
        "panel": result.panel.name,
        "budget": result.budget.label if result.budget else "dense",
        "method": result.entrant.label,
        "scores": result.scores,
        "bytes_per_round": result.sent_bytes_per_round,
        "target_bytes": result.target if result.budget else None,
        "learning_rate": result.rate,
    }


def gpt(
    task: str = typer.Option("shakespeare", help="shakespeare or ptb-gpt; both need their data."),
    seeds: int = typer.Option(5, min=1, help="Runs of each result, with different seeds."),
    jobs: int = typer.Option(1, min=1, help="Runs side by side, four ranks each."),
    results: Path = RESULTS,
    picture: Path | None = typer.Option(None, help="Where the picture goes; default in the results."),
    recorded: bool = typer.Option(False, "--recorded", help="Run nothing; show what is recorded."),
    write: Path | None = typer.Option(None, help="Put the tables into this page, between its marks."),
    data_dir: Path | None = DATA_DIR,
    smoke: bool = typer.Option(False, "--smoke", help="A few steps on two ranks: does everything run?"),
) -> None:
    """Compare methods of local steps on a small GPT.

    Dense DDP, DiLoCo, SparseLoCo and ours, with AdamW on four ranks of Gloo. Rates
    are tuned on validation data, then every method runs on test data with every
    seed. A task takes some two hours of one core. The same command goes on
    where it stopped.
    """
    from rtopk.studies import local
    from rtopk.studies.local import page, ranks
    from rtopk.studies.paper.results import insert
    from rtopk.studies.train.records import read
    from rtopk.tools.show.terminal import runs_progress

    if task not in local.TASKS:
        raise typer.BadParameter(f"task must be one of {', '.join(local.TASKS)}, got {task!r}")
    if write is not None:
        insert(write.read_text(), "", *page.marks(task))  # now, not after an hour
    set_environment(data_dir)
    name = f"study-gpt-{task.removesuffix('-gpt')}{'-smoke' if smoke else ''}"
    file, rows = results / f"{name}.jsonl", local.SMOKE if smoke else local.rows_of(task)
    if not recorded:
        with ExitStack() as stack:

            def stage(wanted: Sequence[tuple[str, local.LocalRun]]) -> Any:
                stack.close()  # the display of the stage before
                return stack.enter_context(runs_progress([(run.key, label, 1) for label, run in wanted]))

            ranks.run_study(task, rows, seeds, jobs, file, stage)
    found = [one for one in local.find_all(task, rows, read(file)) if one.records]
    if not found:
        raise ValueError(f"{file} holds no result of {task} yet; run without --recorded")
    text = page.markdown(task, found)
    picture = picture or results / f"{name}.png"
    page.draw(task, found, picture)
    if write is not None:
        write.write_text(insert(write.read_text(), text, *page.marks(task)))
    print(text)
    print(f"Records: {file}\nPicture: {picture}")
