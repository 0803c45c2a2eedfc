"""`rtopk fed`: the federated setting on Flower."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from rtopk.studies.federation.settings import Federation
from rtopk.studies.train.config import Config
from rtopk.tools.cli.options import options_of

app = typer.Typer(help="Train federated on Flower, compressed both ways.", no_args_is_help=True)

_CONFIG = (
    "task", "method", "rounds", "nodes", "seed", "density", "local_steps", "learning_rate", "memory", "values",
)  # fmt: skip
_SMALL = {"rounds": 10, "nodes": 3}
PLAIN = typer.Option(False, help="Flower alone: dense FedAvg, to compare with.")
OUT = typer.Option(None, help="Folder of the run; default runs/fed-KEY.")
JSON = typer.Option(False, "--json", help="Print the record as one JSON object.")


def _federated(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a federated run."""
    return options_of(Config, *_CONFIG, defaults=_SMALL)(options_of(Federation)(command))


@app.command()
@_federated
def sim(plain: bool = PLAIN, out: Path | None = OUT, as_json: bool = JSON, **fields: Any) -> None:
    """Run in Flower's simulation: all clients on this machine, in ray."""
    _run("sim", fields, plain, out, as_json)


@app.command()
@_federated
def deploy(
    plain: bool = PLAIN,
    out: Path | None = OUT,
    as_json: bool = JSON,
    tls: Path | None = typer.Option(None, help="Folder of ca.crt, server.pem, server.key for 127.0.0.1."),
    **fields: Any,
) -> None:
    """Run a SuperLink and SuperNodes as processes on 127.0.0.1.

    The bytes between them are counted at a proxy. Everything that was started is
    stopped at the end, by its id, also if this command is killed.
    """
    _run("deploy", fields, plain, out, as_json, tls)


@app.command()
def traffic(
    task: str = typer.Option("digits-1m", help="digits-1m or digits-11m."),
    rounds: int = typer.Option(4, min=2, help="Number of exchanges."),
    nodes: int = typer.Option(5, min=1, help="Number of clients."),
    density: float = typer.Option(0.01, help="Part of the entries, up and down: k / d."),
    brief: bool = typer.Option(False, "--brief", help="Only the first two deployments."),
    out: Path | None = typer.Option(None, help="Folder of the runs; default runs/traffic-TASK."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Count the bytes on the wire against dense FedAvg, engine included.

    Four deployments: dense FedAvg, compressed, compressed without a first model
    that clients make from the seed, and compressed with an exact downlink.
    """
    from rtopk.studies.federation.engines import compare
    from rtopk.tools.show.terminal import console, errors, print_json, table

    config = Config(task=task, setting="federated", nodes=nodes, rounds=rounds, density=density,
                    local_steps=1, evaluate_every=rounds)  # fmt: skip
    folder = out or Path("runs") / f"traffic-{task}"
    with errors.status("") as status:
        federation = Federation(config=config, downlink_density=density)
        measured = compare(federation, folder, status.update, brief=brief)
    if as_json:
        print_json(measured)
        return
    rows = measured["rows"]
    cells = [
        [
            row["name"], f"{row['steady']:,.0f}", f"{row['steady_times_less']:.1f}", f"{row['total']:,}",
            f"{row['total_times_less']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["", "bytes a round", "times less", "bytes in total", "times less"]
    title = f"{rows[0]['parameters']:,} parameters, {nodes} clients, {rounds} rounds"
    console.print(table(title, heads, cells))


def _run(
    engine: str, fields: dict[str, Any], plain: bool, out: Path | None, as_json: bool, tls: Path | None = None
) -> None:
    import contextlib
    import sys

    from rtopk.studies.federation.engines import deploy as run_deployed
    from rtopk.studies.federation.engines import simulate
    from rtopk.tools.show.terminal import console, make_progress, print_json

    own = {name: fields.pop(name) for name in _CONFIG}
    try:
        config = Config(setting="federated", evaluate_every=own["rounds"], **own)
        federation = Federation(config=config, compressed=not plain, **fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    folder = out or Path("runs") / f"fed-{engine}-{config.key}"
    with make_progress() as progress:
        bar = progress.add_task(f"{engine} {config.task}", total=config.rounds)

        def on_progress(done: int) -> None:
            progress.update(bar, completed=done)

        with contextlib.redirect_stdout(sys.stderr):
            if engine == "sim":
                record = simulate(federation, folder, on_progress)
            else:
                record = run_deployed(federation, folder, on_progress, tls)
        progress.update(bar, completed=config.rounds)
    if as_json:
        print_json(record)
        return
    metric = record["metric"]
    console.print(f"{record['status']}; {metric} {record['final'][metric]:.2f}; weights {record['weights']}")
    if "wire" in record:
        up, down = record["wire"]["up"], record["wire"]["down"]
        console.print(f"On the wire: {up:,} bytes up, {down:,} down, engine included")
    console.print(f"Record: {folder / 'result.json'}")
