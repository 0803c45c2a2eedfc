"""`rtopk bench`: measure the parts against their floors and rivals."""

import json
from pathlib import Path

import typer

from rtopk.tools.cli.link import link

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

    from rtopk.studies.bench import compress as bench
    from rtopk.studies.bench import compress_report as report

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

    from rtopk.studies.bench import codec as bench

    plan = replace(bench.QUICK if quick else bench.Plan(), data_dir=data_dir)
    with Console(stderr=True).status("") as status:
        measured = bench.measure(plan, status.update)
    if as_json:
        print(json.dumps(bench.as_json(measured)))
    else:
        bench.show(measured)


app.command()(link)


@app.command()
def aggregate(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    clients: int = typer.Option(100, min=1, help="Number of clients."),
    d: int = typer.Option(11_173_962, "--d", min=1000, help="Entries of the model."),
    density: float = typer.Option(0.01, help="Part of the entries a client sends: k / d."),
) -> None:
    """Measure the server's mean against only adding the entries."""
    from rich.console import Console

    from rtopk.studies.bench import aggregate as bench

    with Console(stderr=True).status("making payloads, then taking turns"):
        found = bench.measure(clients, d, density)
    if as_json:
        print(json.dumps(bench.as_json(found)))
        return
    print(f"{found.clients} clients x {found.d:,} entries at density {found.density:g}")
    print(f"adding the decoded entries  {found.floor_ms:8.1f} ms")
    print(f"the same by index_add_      {found.torch_ms:8.1f} ms")
    print(f"decoding alone              {found.decode_ms:8.1f} ms")
    print(f"check, decode, judge, add   {found.average_ms:8.1f} ms  {found.over_floor:.2f} x the adding")
    print(f"the same in the first round {found.first_ms:8.1f} ms")
    print(f"payloads                    {found.payload_bytes / 1e6:8.1f} MB")
    print(
        f"memory beside the payloads  {found.peak_bytes / 1e6:8.1f} MB  {found.over_dense:.2f} dense vectors"
    )
