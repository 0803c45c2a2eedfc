"""`rtopk train` (one run of any task, method and setting), `rtopk demo`, and `rtopk fed` (on Flower)."""

import contextlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from rtopk.studies.config import Config
from rtopk.studies.federation import Federation
from rtopk.tools.cli import options_of, set_environment, wrong_use


@options_of(Config)
def train(
    data_dir: Path | None = typer.Option(None, help="Folder of the data sets; default $RTOPK_DATA."),
    out: Path | None = typer.Option(None, help="Folder of the run; default runs/train-KEY."),
    resume: bool = typer.Option(False, help="Go on from the folder's checkpoint."),
    threads: int = typer.Option(1, min=1, help="Threads of torch; more pays for large models only."),
    tensorboard: bool = typer.Option(False, help="Write TensorBoard event files into the folder too."),
    as_json: bool = typer.Option(False, "--json", help="Print the record as one JSON object."),
    **fields: Any,
) -> None:
    """Train once and write a record.

    Ctrl-C finishes the round and writes a checkpoint; --resume goes on from it
    and ends with the same weights, to the bit. Under torchrun every process is
    a node: torchrun --nproc-per-node 4 -m rtopk train --nodes 4.
    """
    set_environment(data_dir, tensorboard=tensorboard)
    with wrong_use():
        config = Config(**fields)
        _check(config)
    folder = out or Path("runs") / f"train-{config.key}"
    _run(config, folder, resume, threads, as_json)


def _check(config: Config) -> None:
    from rtopk.studies.tasks import check_task  # imports torch and the data sets' readers

    check_task(config.task)


def _run(config: Config, folder: Path, resume: bool, threads: int, as_json: bool) -> None:
    import torch

    from rtopk.studies.train.execute import Interrupted, execute
    from rtopk.studies.train.processes import leads
    from rtopk.studies.train.runner import asked_to_stop
    from rtopk.tools.show.terminal import console, errors, make_progress, print_json

    torch.set_num_threads(threads)
    try:
        with asked_to_stop() as should_stop, make_progress() as progress:
            progress.disable = progress.disable or not leads()
            bar = progress.add_task(f"{config.task} {config.method}", total=config.rounds)
            record: dict[str, Any] = execute(
                config,
                folder,
                resume=resume,
                on_round=lambda run: progress.update(bar, completed=run.round),
                should_stop=should_stop,
            )
    except Interrupted as stopped:
        errors.print(f"{stopped}; go on with --resume --out {folder}")
        raise typer.Exit(130) from stopped
    if not leads():
        return
    if as_json:
        print_json(record)
        return
    final = record["final"]
    console.print(
        f"{record['metric']} {final[record['metric']]:.2f} after {config.rounds} rounds; "
        f"{record['sent_bytes_per_round']:,.0f} bytes sent per node and round "
        f"(dense fp32: {4 * record['parameters']:,}); {record['seconds']:.1f} s"
    )
    console.print(f"Record: {folder / 'record.json'}")


def demo(
    seeds: int = typer.Option(3, min=1, help="Runs of each method, with different seeds."),
    rounds: int = typer.Option(900, min=60, help="Rounds, distributed; federated half."),
    jobs: int = typer.Option(2, min=1, help="Runs side by side, one core each."),
    out: Path = typer.Option(Path("runs/demo"), help="Where records and the picture go."),
    fresh: bool = typer.Option(False, help="Run again what is recorded there already."),
    tensorboard: bool = typer.Option(False, help="Write TensorBoard event files of every run too."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
) -> None:
    """Compare four methods on scikit-learn's digits with five nodes.

    Dense, top-k, random-k and rTop-k, in the distributed setting (one round per
    batch) and the federated one (one round per local epoch), and what each
    sent; then a page to look at. About two minutes on two cores.
    """
    from rtopk.state_file import write_atomically
    from rtopk.studies.train import demo as experiment
    from rtopk.studies.train.demo import score_against_bytes, summarise
    from rtopk.studies.train.runner import run_all
    from rtopk.tools.advise import Link, reference
    from rtopk.tools.advise.cost import transfer_seconds
    from rtopk.tools.report.inputs import Inputs
    from rtopk.tools.report.page import Page
    from rtopk.tools.show.terminal import console, print_json, runs_progress, table

    set_environment(tensorboard=tensorboard)
    results = out / "results.jsonl"
    if fresh:
        results.unlink(missing_ok=True)
        shutil.rmtree(out / "runs", ignore_errors=True)
    configs = experiment.configs(seeds, rounds)
    names = [f"{c.setting:11} {c.method:8} {'' if c.method == 'dense' else c.density}" for c in configs]
    runs = [(config.key, name, config.rounds) for config, name in zip(configs, names, strict=True)]
    with runs_progress(runs) as on_progress:
        records = run_all(configs, results, out / "runs", jobs, on_progress)
    rows = summarise(records)
    picture = out / "accuracy-against-bytes.png"
    score_against_bytes(records, picture)
    page = out / "report.html"
    write_atomically(page, Page(Inputs(records)).html().encode())
    link, machine = Link(configs[0].nodes, 100.0, 0.1), reference()
    seconds = [
        transfer_seconds(machine, link, row.sent_bytes_per_round, row.method == "dense") for row in rows
    ]
    if as_json:
        files = {"results": str(results), "picture": str(picture), "page": str(page)}
        told = [{**asdict(row), "seconds_at_100_mbit": s} for row, s in zip(rows, seconds, strict=True)]
        print_json({"rows": told, **files})
        return
    for setting, what in (("distributed", "one round per batch"), ("federated", "one round per local epoch")):
        here = [(row, s) for row, s in zip(rows, seconds, strict=True) if row.setting == setting]
        metric, seeds = here[0][0].metric, max(row.seeds for row, _ in here)
        heads = [
            "method", f"{metric} %\n{seeds} seeds", "bytes sent per\nnode and round", "times less\nthan dense",
            "seconds a round\nat 100 Mbit/s",
        ]  # fmt: skip
        cells = [
            [
                row.label, f"{row.score:.1f} ± {row.spread:.1f}", f"{row.sent_bytes_per_round:,.0f}",
                f"{row.times_less:,.1f}", f"{s:.4f}",
            ]
            for row, s in here
        ]  # fmt: skip
        console.print(table(f"{setting} setting: {what}", heads, cells))
    console.print(f"Five nodes, {records[0]['parameters']:,} parameters. Bytes are measured on the payloads.")
    console.print(
        "± is the standard deviation over seeds; the page has 95 % intervals of the mean, which are wider."
    )
    console.print(
        "Seconds: the exchange of those bytes between the nodes (dense: all-reduce, others: all-gather) on links "
        f"of 100 Mbit/s, latency 0.1 ms, by the model of `rtopk advise`. Parts of: {machine.name}"
    )
    console.print(f"Records: {results}\nPicture: {picture}\nPage:    {page}")


fed = typer.Typer(
    help="Train federated on Flower, compressed both ways.", no_args_is_help=True, add_completion=False
)

_CONFIG = (
    "task", "method", "rounds", "nodes", "seed", "density", "local_steps", "learning_rate", "memory", "values",
)  # fmt: skip
PLAIN = typer.Option(False, help="Flower alone: dense FedAvg.")
BESIDE = typer.Option(True, help="Train dense too, in this process, to compare with.")
OUT = typer.Option(None, help="Folder of the run; default runs/fed-KEY.")
JSON = typer.Option(False, "--json", help="Print the record as one JSON object.")


def _federated(rounds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a federated run of so many rounds."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        usual = {"rounds": rounds, "nodes": 3}
        return options_of(Config, *_CONFIG, defaults=usual)(options_of(Federation)(command))

    return give


@fed.command()
@_federated(80)  # after 10, what was not sent yet is most of what was learnt
def sim(
    plain: bool = PLAIN, dense: bool = BESIDE, out: Path | None = OUT, as_json: bool = JSON, **fields: Any
) -> None:
    """Run in Flower's simulation: all clients on this machine, in ray."""
    _federate("sim", fields, plain, dense, out, as_json)


@fed.command()
@_federated(10)  # a round takes seconds
def deploy(
    plain: bool = PLAIN,
    dense: bool = BESIDE,
    out: Path | None = OUT,
    as_json: bool = JSON,
    tls: Path | None = typer.Option(None, help="Folder of ca.crt, server.pem, server.key for 127.0.0.1."),
    **fields: Any,
) -> None:
    """Run a SuperLink and SuperNodes as processes on 127.0.0.1.

    The bytes between them are counted at a proxy. Everything that was started is
    stopped at the end, by its id, also if this command is killed.
    """
    _federate("deploy", fields, plain, dense, out, as_json, tls)


@fed.command()
def traffic(
    task: str = typer.Option("digits-1m", help="digits-1m or digits-11m."),
    rounds: int = typer.Option(4, min=2, help="Number of exchanges."),
    nodes: int = typer.Option(5, min=1, help="Number of clients."),
    density: float = typer.Option(0.01, help="Part of the entries, up and down: k / d."),
    brief: bool = typer.Option(False, "--brief", help="Only the first two deployments."),
    out: Path | None = typer.Option(None, help="Folder of the runs; default runs/traffic-TASK."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Count the bytes on the wire, beside those of dense FedAvg.

    The engine's own bytes count, too. Four deployments: dense FedAvg, compressed,
    compressed without a first model that clients make from the seed, and
    compressed with an exact downlink.
    """
    from rtopk.studies.federation.engines import compare
    from rtopk.tools.show.terminal import console, errors, print_json, table

    with wrong_use():
        config = Config(task=task, setting="federated", nodes=nodes, rounds=rounds, density=density,
                        local_steps=1, evaluate_every=rounds)  # fmt: skip
        _check(config)
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


def _federate(
    engine: str,
    fields: dict[str, Any],
    plain: bool,
    dense: bool,
    out: Path | None,
    as_json: bool,
    tls: Path | None = None,
) -> None:
    from rtopk.studies.federation.engines import deploy as run_deployed
    from rtopk.studies.federation.engines import simulate
    from rtopk.studies.train.execute import execute
    from rtopk.tools.show.palette import with_compression
    from rtopk.tools.show.terminal import console, make_progress, print_json, table

    own = {name: fields.pop(name) for name in _CONFIG}
    with wrong_use():
        config = Config(setting="federated", evaluate_every=max(1, own["rounds"] // 10), **own)
        _check(config)
        federation = Federation(config=config, compressed=not plain, **fields)
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
    rows = [("FedAvg on Flower" if plain else with_compression(config.method, config.density), record)]
    if dense and not plain:  # the loop in one process ends with the bits that Flower ends with
        rows.append(("dense", execute(replace(config, method="dense"), folder / "dense")))
    cells = [
        [
            name, f"{one['final'][metric]:.2f}", f"{one['sent_bytes_per_round']:,.0f}",
            f"{one['received_bytes_per_round']:,.0f}" if one is record else "as sent",
        ]
        for name, one in rows
    ]  # fmt: skip
    heads = ["method", metric, "bytes sent per\nclient and round", "bytes received per\nclient and round"]
    console.print(table(f"{config.task}, {config.nodes} clients, {config.rounds} rounds", heads, cells))
    console.print(f"{record['status']}; weights {record['weights']}")
    if "wire" in record:
        up, down = record["wire"]["up"], record["wire"]["down"]
        console.print(f"On the wire: {up:,} bytes up, {down:,} down, engine included")
    console.print(f"Records: {folder}; a page of them: rtopk report {folder}", soft_wrap=True)
