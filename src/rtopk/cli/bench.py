"""`rtopk bench`: measure the parts against their floors and rivals."""

import json
from pathlib import Path

import typer

app = typer.Typer(help="Measure the parts against their floors and rivals.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep commands of this group, also while there is only one."""


@app.command()
def codec(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    quick: bool = typer.Option(False, "--quick", help="Fewer runs and rivals, under 40 s."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", envvar="RTOPK_DATA", help="CIFAR-10; else digits."
    ),
) -> None:
    """Measure bits per entry and time of payloads against the entropy bound."""
    from dataclasses import replace

    from rich.console import Console

    from rtopk.bench import codec as bench

    plan = replace(bench.QUICK if quick else bench.Plan(), data_dir=data_dir)
    with Console(stderr=True).status("") as status:
        measured = bench.measure(plan, status.update)
    if as_json:
        print(json.dumps(bench.as_json(measured)))
    else:
        bench.show(measured)
