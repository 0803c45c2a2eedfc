"""`rtopk fed`: the federated setting on Flower."""

from pathlib import Path
from typing import Any

import typer

app = typer.Typer(help="Train federated on Flower, compressed both ways.", no_args_is_help=True)

TASK = typer.Option("digits", help="What to learn.")
METHOD = typer.Option("rtop-k", help="dense, top-k, random-k or rtop-k.")
ROUNDS = typer.Option(10, min=1, help="Number of exchanges.")
NODES = typer.Option(3, min=1, help="Number of clients.")
SEED = typer.Option(0, help="The same seed gives the same weights in both engines.")
DENSITY = typer.Option(0.01, help="Part of the entries that a client sends: k / d.")
LOCAL_STEPS = typer.Option(0, help="Steps a round; 0 is an epoch.")
RATE = typer.Option(0.02, help="Learning rate of the clients.")
MEMORY = typer.Option("error-feedback", help="error-feedback or none.")
VALUES = typer.Option("fp32", help="How values go up: fp32, fp16, bf16, int8, 4bit or 2bit.")
DOWN_DENSITY = typer.Option(1.0, help="Part of the entries that the server sends.")
DOWN_VALUES = typer.Option("fp32", help="How values go down; fp32 at density 1 is exact.")
OUTER = typer.Option("sgd", help="At the centre: sgd, nesterov or sparseloco.")
PLAIN = typer.Option(False, help="Flower alone: dense FedAvg, to compare with.")
KNOWN = typer.Option(True, help="Clients make the first model from the seed.")
OUT = typer.Option(None, help="Folder of the run; default runs/fed-KEY.")
JSON = typer.Option(False, "--json", help="Print the record as one JSON object.")


@app.command()
def sim(
    task: str = TASK, method: str = METHOD, rounds: int = ROUNDS, nodes: int = NODES, seed: int = SEED,
    density: float = DENSITY, local_steps: int = LOCAL_STEPS, learning_rate: float = RATE,
    memory: str = MEMORY, values: str = VALUES, downlink_density: float = DOWN_DENSITY,
    downlink_values: str = DOWN_VALUES, outer: str = OUTER, plain: bool = PLAIN,
    initial_known: bool = KNOWN, out: Path | None = OUT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Run in Flower's simulation: all clients on this machine, in ray."""
    _run("sim", locals())


@app.command()
def deploy(
    task: str = TASK, method: str = METHOD, rounds: int = ROUNDS, nodes: int = NODES, seed: int = SEED,
    density: float = DENSITY, local_steps: int = LOCAL_STEPS, learning_rate: float = RATE,
    memory: str = MEMORY, values: str = VALUES, downlink_density: float = DOWN_DENSITY,
    downlink_values: str = DOWN_VALUES, outer: str = OUTER, plain: bool = PLAIN,
    initial_known: bool = KNOWN, out: Path | None = OUT, as_json: bool = JSON,
    tls: Path | None = typer.Option(None, help="Folder of ca.crt, server.pem, server.key for 127.0.0.1."),
) -> None:  # fmt: skip
    """Run a SuperLink and SuperNodes as processes on 127.0.0.1.

    The bytes between them are counted at a proxy. Everything that was started is
    stopped at the end, by its id, also if this command is killed.
    """
    _run("deploy", locals())


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
    from rich.table import Table

    from rtopk.studies.federation.app import Federation
    from rtopk.studies.federation.traffic import compare
    from rtopk.studies.train.config import Config
    from rtopk.tools.show.terminal import console, errors, print_json

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
    table = Table(title=f"{rows[0]['parameters']:,} parameters, {nodes} clients, {rounds} rounds")
    for heading in ("", "bytes a round", "times less", "bytes in total", "times less"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(row["name"], f"{row['steady']:,.0f}", f"{row['steady_times_less']:.1f}",
                      f"{row['total']:,}", f"{row['total_times_less']:.1f}")  # fmt: skip
    console.print(table)


def _run(engine: str, options: dict[str, Any]) -> None:
    import contextlib
    import sys

    from rtopk.studies.train.config import Config
    from rtopk.tools.show.terminal import console, make_progress, print_json

    names = ("task", "method", "rounds", "nodes", "seed", "density", "local_steps", "learning_rate")
    try:
        config = Config(
            setting="federated",
            evaluate_every=options["rounds"],
            **{name: options[name] for name in (*names, "memory", "values")},
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        from rtopk.studies.federation.app import Federation
        from rtopk.studies.federation.engines import deploy as run_deployed
        from rtopk.studies.federation.engines import simulate
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install 'rtopk[flower]'") from error

    passed = ("downlink_density", "downlink_values", "outer", "initial_known")
    federation = Federation(
        config=config, compressed=not options["plain"], **{name: options[name] for name in passed}
    )
    folder = options["out"] or Path("runs") / f"fed-{engine}-{config.key}"
    with make_progress() as progress:
        bar = progress.add_task(f"{engine} {config.task}", total=config.rounds)
        with contextlib.redirect_stdout(sys.stderr):

            def on_progress(done: int) -> None:
                progress.update(bar, completed=done)

            if engine == "sim":
                record = simulate(federation, folder, on_progress)
            else:
                record = run_deployed(federation, folder, on_progress, options["tls"])
        progress.update(bar, completed=config.rounds)
    if options["as_json"]:
        print_json(record)
        return
    metric = record["metric"]
    console.print(f"{record['status']}; {metric} {record['final'][metric]:.2f}; weights {record['weights']}")
    if "wire" in record:
        up, down = record["wire"]["up"], record["wire"]["down"]
        console.print(f"On the wire: {up:,} bytes up, {down:,} down, engine included")
    console.print(f"Record: {folder / 'result.json'}")
