"""`rtopk train`: one run of any task, method and setting."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import typer

from rtopk.studies.train.config import METHODS, Config
from rtopk.studies.train.tensorboard import VARIABLE

_DEFAULT = Config()


def train(
    task: str = typer.Option(_DEFAULT.task, help="What to learn, e.g. digits, cifar10-small, ptb-small."),
    method: str = typer.Option(_DEFAULT.method, help=f"One of {', '.join(METHODS)}."),
    setting: str = typer.Option(_DEFAULT.setting, help="distributed (a round per batch) or federated."),
    seed: int = typer.Option(_DEFAULT.seed, help="The same seed repeats a run to the bit."),
    nodes: int = typer.Option(_DEFAULT.nodes, help="Number of nodes."),
    rounds: int = typer.Option(_DEFAULT.rounds, help="Number of exchanges."),
    batch: int = typer.Option(_DEFAULT.batch, help="Examples per node and step."),
    local_steps: int = typer.Option(_DEFAULT.local_steps, help="Federated: steps a round; 0 is an epoch."),
    density: float = typer.Option(_DEFAULT.density, help="Part of the entries that is sent: k / d."),
    dense_biases: bool = typer.Option(_DEFAULT.dense_biases, help="Send 1-D tensors whole."),
    values: str = typer.Option(_DEFAULT.values, help="fp32, fp16, bf16, int8, 4bit or 2bit."),
    r_over_k: float = typer.Option(_DEFAULT.r_over_k, help="rTop-k: r / k; 0 is the number of nodes."),
    threshold: float = typer.Option(_DEFAULT.threshold, help="threshold: least magnitude that is sent."),
    matrix_rank: int = typer.Option(_DEFAULT.matrix_rank, help="powersgd: columns of each factor."),
    memory: str = typer.Option(_DEFAULT.memory, help="error-feedback, momentum-correction or none."),
    masking: bool = typer.Option(_DEFAULT.masking, help="Momentum correction: forget velocity sent."),
    mean: str = typer.Option(_DEFAULT.mean, help="Average over all nodes, or over the received."),
    weighted: bool = typer.Option(_DEFAULT.weighted, help="Weigh nodes by their examples."),
    warm_up: int = typer.Option(_DEFAULT.warm_up, help="Rounds in which the density falls."),
    warm_up_start: float = typer.Option(_DEFAULT.warm_up_start, help="Density at the first round."),
    learning_rate: float = typer.Option(_DEFAULT.learning_rate, help="At the start."),
    rate_schedule: str = typer.Option(_DEFAULT.rate_schedule, help="constant, cosine, piecewise or zaremba."),
    momentum: float = typer.Option(_DEFAULT.momentum, help="At the centre, unless corrected at nodes."),
    weight_decay: float = typer.Option(_DEFAULT.weight_decay, help="Where the optimizer is."),
    clip_norm: float = typer.Option(_DEFAULT.clip_norm, help="Bound on the mean gradient; 0 is none."),
    split: str = typer.Option(_DEFAULT.split, help="iid, contiguous, dirichlet or class."),
    alpha: float = typer.Option(_DEFAULT.alpha, help="Dirichlet: the smaller, the less alike."),
    part: str = typer.Option(_DEFAULT.part, help="Evaluate on test, or on validation for tuning."),
    evaluate_every: int = typer.Option(_DEFAULT.evaluate_every, help="Rounds between evaluations."),
    data_dir: Path | None = typer.Option(None, help="Folder of the data sets; default $RTOPK_DATA."),
    out: Path | None = typer.Option(None, help="Folder of the run; default runs/train-KEY."),
    resume: bool = typer.Option(False, help="Go on from the folder's checkpoint."),
    threads: int = typer.Option(1, min=1, help="Threads of torch; more pays for large models only."),
    tensorboard: bool = typer.Option(False, help="Write TensorBoard event files into the folder too."),
    as_json: bool = typer.Option(False, "--json", help="Print the record as one JSON object."),
) -> None:
    """Train once and write a record.

    Ctrl-C finishes the round and writes a checkpoint; --resume goes on from it
    and ends with the same weights, to the bit. Under torchrun every process is
    a node: torchrun --nproc-per-node 4 -m rtopk train --nodes 4.
    """
    options = locals()
    if data_dir is not None:
        os.environ["RTOPK_DATA"] = str(data_dir)
    try:
        config = Config(**{field.name: options[field.name] for field in dataclasses.fields(Config)})
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
