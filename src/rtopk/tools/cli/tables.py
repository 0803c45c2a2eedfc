"""`rtopk tables`: the paper's tables and figures from the records."""

from pathlib import Path

import typer


def tables(
    scale: str = typer.Option("small", help="smoke, small or paper."),
    results: Path = typer.Option(Path("results"), help="Folder of the records."),
    write: Path | None = typer.Option(None, help="Put the tables into this page, between its marks."),
    pictures: Path | None = typer.Option(None, help="Draw figures 2 to 6 into this folder."),
) -> None:
    """Print the tables that have been run, paper beside ours."""
    from rtopk.studies.paper.figures import draw_figure
    from rtopk.studies.paper.page import insert, render_all
    from rtopk.studies.paper.tables import TABLES, check_scale
    from rtopk.tools.show.terminal import errors

    try:
        size = check_scale(scale)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    text = render_all(size, results)
    if write is None:
        print(text)
    else:
        write.write_text(insert(write.read_text(), text))
        errors.print(f"Tables written into {write}")
    if pictures is not None:
        for table in TABLES.values():
            path = pictures / f"figure-{table.figure}.png"
            if draw_figure(table, size, results, path):
                errors.print(f"Figure written: {path}")
