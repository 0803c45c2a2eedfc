"""`rtopk data`: the data sets of the experiments."""

import os
from dataclasses import asdict
from pathlib import Path

import typer

app = typer.Typer(help="The data sets of the experiments.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass  # keeps `check` a command of its own name


@app.command()
def check(
    data_dir: Path | None = typer.Option(None, help="Folder of the data sets; default $RTOPK_DATA."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Say what is found where, and whether it is whole.

    Exit code 1 if a file is damaged.
    """
    from rich.table import Table

    from rtopk.studies.tasks import inventory
    from rtopk.studies.tasks.data import VARIABLE
    from rtopk.studies.tasks.data import data_dir as folder
    from rtopk.tools.show.terminal import console, print_json

    if data_dir is not None:
        os.environ[VARIABLE] = str(data_dir)
    root = folder()
    found = inventory.take()
    if as_json:
        print_json({"data_dir": str(root), "sets": [asdict(entry) for entry in found]})
    else:
        table = Table(title=f"Data in {root}", title_justify="left")
        for heading in ("data set", "state", "what", "needed for"):
            table.add_column(heading)
        for entry in found:
            table.add_row(entry.name, entry.state, entry.detail, entry.needed_for)
        console.print(table)
    if any(entry.state == "damaged" for entry in found):
        raise typer.Exit(1)
