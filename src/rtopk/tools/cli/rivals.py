"""`rtopk rivals`: every method at equal bytes."""

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rtopk.tools.cli.options import set_environment

if TYPE_CHECKING:
    from rtopk.studies.equal_bytes.fit import EntrantResult


def rivals(
    task: str = typer.Option("digits", help="digits, or with data cifar10, imagenet, ptb, shakespeare."),
    seeds: int = typer.Option(3, min=1, help="Runs of each result, with different seeds."),
    jobs: int = typer.Option(2, min=1, help="Runs side by side, one core each."),
    results: Path = typer.Option(Path("results"), help="Folder of the records."),
    work: Path = typer.Option(Path("runs/rivals"), help="Folder of runs under way."),
    picture: Path | None = typer.Option(None, help="Where the picture goes; default in the results."),
    recorded: bool = typer.Option(False, "--recorded", help="Run nothing; show what is recorded."),
    write: Path | None = typer.Option(None, help="Put the tables into this page, between its marks."),
    against: str | None = typer.Option(None, help="Show one method's score minus each other's, too."),
    data_dir: Path | None = typer.Option(None, help="Folder of the data sets; default $RTOPK_DATA."),
    device: str | None = typer.Option(None, help="cpu or cuda; default $RTOPK_DEVICE, else cpu."),
    smoke: bool = typer.Option(False, "--smoke", help="A few rounds: does everything run?"),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
) -> None:
    """Compare all methods at equal bytes sent.

    Each method's density, threshold or rank is fitted to the same bytes per
    round, its learning rate is tuned on validation data on one grid, and it
    runs on test data with every seed. A task takes one core for half an hour
    (imagenet) to three hours (ptb). The same command goes on where it stopped.
    """
    from rtopk.studies.equal_bytes import panels as data
    from rtopk.studies.equal_bytes.fit import Runs, entrant_runs, note, run_together, side_by_side
    from rtopk.studies.equal_bytes.rivals_page import differences, grid, markdown, marks, score_against_budget
    from rtopk.studies.paper.reproduction_page import insert
    from rtopk.studies.train.config import Config
    from rtopk.tools.show.terminal import console, make_progress, print_json, table

    if task not in data.PANELS:
        raise typer.BadParameter(f"task must be one of {', '.join(data.PANELS)}, got {task!r}")
    panels = [data.smoke(panel) for panel in data.PANELS[task][-2:]] if smoke else list(data.PANELS[task])
    if write is not None:
        insert(write.read_text(), "", *marks(task))  # now, not after an hour
    set_environment(data_dir, device)
    file = results / f"rivals-{task}{'-smoke' if smoke else ''}.jsonl"

    found_results: list[EntrantResult] = []
    with make_progress() as progress:
        # How many runs a search takes is known at its end: about three rates, and two fits of the bytes.
        about = [len(group) * (2 + 3 * group[0][0].tuning_seeds + seeds) for group in side_by_side(panels)]
        bar = progress.add_task("runs, about", total=sum(about))

        def on_run(config: Config) -> None:
            progress.update(bar, advance=1, description=f"runs, about; last {config.method}")

        ledger = Runs(file, work, jobs, recorded, on_run)
        for group, past in zip(side_by_side(panels), accumulate(about), strict=True):
            found_results += run_together([entrant_runs(*entrant, seeds) for entrant in group], ledger)
            progress.update(bar, completed=past)
    if not found_results:
        raise ValueError(f"{file} holds no result of {task} yet; run without --recorded")
    if not recorded:
        for result in found_results:
            note(file, result)
    picture = picture or results / f"rivals-{task}{'-smoke' if smoke else ''}.png"
    score_against_budget(found_results, picture)
    by_panel = [found for panel in panels if (found := [s for s in found_results if s.panel == panel])]
    if write is not None:
        write.write_text(insert(write.read_text(), markdown(by_panel), *marks(task)))
    if as_json:
        print_json({"rows": [_row(s) for s in found_results], "results": str(file), "picture": str(picture)})
        return
    for here in by_panel:
        console.print(table(here[0].panel.name, *grid(here)))
        if against is not None:
            console.print(table("Differences, 95 % intervals", *differences(here, against)))
        console.print()
    console.print(f"Records: {file}\nPicture: {picture}")


def _row(result: "EntrantResult") -> dict[str, object]:
    return {
        "panel": result.panel.name,
        "budget": result.budget.label if result.budget else "dense",
        "method": result.entrant.label,
        "scores": result.scores,
        "bytes_per_round": result.bytes,
        "target_bytes": result.target if result.budget else None,
        "learning_rate": result.rate,
    }
