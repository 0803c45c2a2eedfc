"""`rtopk bench`: measure the parts against their floors and rivals."""

import json
from pathlib import Path

import typer

from rtopk.cli.link import link

app = typer.Typer(help="Measure the parts against their floors and rivals.", no_args_is_help=True)


@app.command()
def compress(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    markdown: bool = typer.Option(False, "--markdown", help="Print the tables of docs/performance.md."),
    quick: bool = typer.Option(False, "--quick", help="Only d = 11.2 M, in under 40 s."),
    threads: list[int] = typer.Option([], "--threads", help="Threads; repeat for several."),
    d: list[int] = typer.Option([], "--d", min=1000, help="Entries; repeat for several."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", envvar="RTOPK_DATA", help="CIFAR-10 and PTB; else digits, manual."
    ),
) -> None:
    """Measure selection against only adding the gradient.

    Accumulate, select and subtract, beside the floor and two rivals.
    """
    from dataclasses import replace

    from rich.console import Console

    from rtopk.bench import compress as bench
    from rtopk.bench import compress_report as report

    plan = replace(bench.QUICK if quick else bench.Plan(), data_dir=data_dir)
    plan = replace(plan, threads=tuple(threads) or plan.threads, sizes=tuple(d) or plan.sizes)
    with Console(stderr=True).status("") as status:
        measured = list(bench.measure(plan, status.update))
        if as_json:
            print(json.dumps(bench.as_json([row for _, rows in measured for row in rows])))
            return
        status.update("memory, second scans")
        extras = report.measure_extras(quick)
    if markdown:
        print(report.markdown(measured, extras))
    else:
        report.show(measured, extras)


@app.command()
def codec(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    quick: bool = typer.Option(False, "--quick", help="Fewer runs and rivals, under 40 s."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", envvar="RTOPK_DATA", help="CIFAR-10; else digits."
    ),
) -> None:
    """Measure bits and time of payloads against the entropy bound."""
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


app.command()(link)
