"""`rtopk train` (one run of any task, method and setting) and `rtopk demo`."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from rtopk.studies.train.config import Config
from rtopk.tools.cli.options import options_of, set_environment


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
    try:
        config = Config(**fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    folder = out or Path("runs") / f"train-{config.key}"
    _run(config, folder, resume, threads, as_json)


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
    if as_json:
        files = {"results": str(results), "picture": str(picture), "page": str(page)}
        print_json({"rows": [asdict(row) for row in rows], **files})
        return
    for setting, what in (("distributed", "one round per batch"), ("federated", "one round per local epoch")):
        here = [row for row in rows if row.setting == setting]
        seeds = max(row.seeds for row in here)
        score = f"{here[0].metric} %\n{seeds} seeds"
        heads = ["method", score, "bytes sent per\nnode and round", "times less\nthan dense"]
        cells = [
            [
                row.label, f"{row.score:.1f} ± {row.spread:.1f}", f"{row.sent_bytes_per_round:,.0f}",
                f"{row.times_less:,.1f}",
            ]
            for row in here
        ]  # fmt: skip
        console.print(table(f"{setting} setting: {what}", heads, cells))
    console.print(f"Five nodes, {records[0]['parameters']:,} parameters. Bytes are measured on the payloads.")
    console.print(f"Records: {results}\nPicture: {picture}\nPage:    {page}")
