"""`rtopk train`: one run of any task, method and setting."""

import os
from pathlib import Path
from typing import Any

import typer

from rtopk.studies.train.config import Config
from rtopk.studies.train.tensorboard import VARIABLE
from rtopk.tools.cli.options import options_of


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
    if data_dir is not None:
        os.environ["RTOPK_DATA"] = str(data_dir)
    try:
        config = Config(**fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    folder = out or Path("runs") / f"train-{config.key}"
    if tensorboard:
        os.environ[VARIABLE] = "1"
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
