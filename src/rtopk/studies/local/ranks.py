"""Real ranks of Gloo, started once, that train run after run as a user does: AdamW, and `LocalSGD` or DDP.

Every rank reads its own contiguous part of the text, in windows that begin where (seed, rank, step) says. The rate
rises for a twentieth of the steps and falls to a tenth as a cosine.
"""

import dataclasses
import math
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from rtopk.layout import nothing
from rtopk.local import LocalSGD
from rtopk.local.outer import SGD, Nesterov
from rtopk.memory import DecayedErrorFeedback
from rtopk.seed import generator
from rtopk.select import METHODS
from rtopk.sparsifier import entries_sent
from rtopk.studies import tasks
from rtopk.studies.config import Config
from rtopk.studies.local import LocalRun, Row, find_all, missing
from rtopk.studies.tasks.objectives import Prediction
from rtopk.studies.train.loop import seeded
from rtopk.studies.train.records import Record, Results, digest, environment
from rtopk.studies.train.runner import leave_with_parent

CLIP_NORM = 1.0
LOOKUP = 20  # bytes of a SparseLoCo message beside its entries: four levels and their mean, fp32


def make(run: LocalRun, model: nn.Module) -> LocalSGD:
    """Make the trainer of a run: its preset, with what the run changes."""
    changes: dict[str, Any] = {"seed": run.seed, "dense": nothing}
    changes |= {name: value for name in ("density", "values") if (value := getattr(run, name))}
    if run.selector:
        changes["selector"] = METHODS[run.selector].for_run(run.nodes, run.r_over_k)
    if run.preset == "sparseloco":
        changes |= {"outer": SGD(run.outer_rate), "memory": partial(DecayedErrorFeedback, run.decay)}
    else:
        changes["outer"] = Nesterov(run.outer_rate)
    return LocalSGD.preset(run.preset, model, run.local_steps, **changes)


def everyone(value: Any) -> list[Any]:
    """Return what each rank has, in rank order."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def train(run: LocalRun) -> Record:
    """Train as one of the ranks; all return the same record, but for the seconds."""
    rank, began = dist.get_rank(), time.monotonic()
    config = Config(
        task=run.task, nodes=run.nodes, batch=run.batch, seed=run.seed, part=run.part, split="contiguous"
    )
    task = cast(Prediction, tasks.load(config))
    own = dataclasses.replace(task, held_out=task.held_out.tensor_split(run.nodes)[rank])
    shard = task.shards(config)[rank]
    with seeded(run.seed, "weights"):
        model = task.make_model()
        shown = task.make_model()  # takes the common weights, to be evaluated
    local = None if run.preset == "ddp" else make(run, model)
    trained = DistributedDataParallel(model) if local is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, run.steps))
    size = sum(parameter.numel() for parameter in model.parameters())
    # Steps between two messages; fragments have their own.
    sends = run.evaluate_every if local is None else run.local_steps if len(local.fragments) == 1 else 1
    curve: list[Record] = []

    def evaluate(step: int, train_loss: float) -> None:
        if local is None:
            shown.load_state_dict(model.state_dict())
        else:
            for part in local.fragments:
                shown.load_state_dict(part.layout.unflatten(part.common), strict=False)
        with torch.no_grad():
            loss = own.evaluate(shown.eval())["loss"]
        sent = 4 * size * step if local is None else local.sent
        parts = everyone((loss, train_loss, sent, digest(parameters_to_vector(shown.parameters()))))
        if len({weights for *_, weights in parts}) > 1:
            raise RuntimeError(f"ranks have different weights after step {step} of {run}")
        loss, train_loss, sent = (sum(values) / run.nodes for values in list(zip(*parts, strict=True))[:3])
        curve.append({
            "round": step if local is None else local.round, "step": step, "loss": loss, "train_loss": train_loss,
            "perplexity": math.exp(min(loss, 50.0)), "sent_bytes": sent,
            "received_bytes": sent if local is None else (run.nodes - 1) * sent,
            "seconds": round(time.monotonic() - began, 3),
        })  # fmt: skip

    for step in range(1, run.steps + 1):
        last = len(shard.inputs) - task.unroll
        begin = int(torch.randint(last + 1, (), generator=generator(run.seed, "window", rank, step)))
        window = slice(begin, begin + task.unroll)
        loss = task.loss(trained, (shard.inputs[window], shard.targets[window], True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        # Before anything is sent: LocalSGD refuses what is not finite, and the others would wait for this rank.
        due = step % sends == 0
        diverged = due and not all(everyone(math.isfinite(norm)))
        if not diverged and local is not None:
            local.step()
        if diverged or step % run.evaluate_every == 0 or step == run.steps:
            evaluate(step, float(loss.detach()))
        if diverged:
            break
    final = curve[-1]
    rounds = max(1, final["round"])
    density = 1.0 if local is None else local.fragments[0].sparsifier.density(0)
    entries = entries_sent(size, density)
    chunked = run.preset == "sparseloco" and run.selector in ("", "chunked-k")
    return {
        "kind": "train", "key": run.key, "metric": "loss", "higher_is_better": False, "parameters": size,
        "config": {
            **dataclasses.asdict(run), "setting": "local", "method": _method(run), "density": density,
            "rounds": run.steps // run.local_steps,
        },
        "environment": environment(), "final": final, "diverged": diverged, "entries": entries,
        "sent_bytes_per_round": final["sent_bytes"] / rounds,
        "received_bytes_per_round": final["received_bytes"] / rounds,
        # The same entries as SparseLoCo writes them: a position in its chunk of 4,096, and a value of 2 bits.
        **({"published_bytes_per_round": -(-entries * (12 + 2) // 8) + LOOKUP} if chunked else {}),
        "curve": curve, "seconds": final["seconds"], "weights": digest(parameters_to_vector(shown.parameters())),
    }  # fmt: skip


def _method(run: LocalRun) -> str:
    """Return the name by which the report colours a run."""
    return run.selector or ("chunked-k" if run.preset == "sparseloco" else "dense")


def _rate(steps: int, step: int) -> float:
    """Return the part of the highest rate at a step."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))


class LocalRanks:
    """Processes of one group, which train together what `run` gives them; a context manager."""

    def __init__(self, nodes: int) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(nodes):
            here, there = context.Pipe()
            meeting = f"file://{self._folder.name}/meeting"
            process = context.Process(target=_serve, args=(rank, nodes, meeting, there), daemon=True)
            process.start()
            there.close()  # so that the end of a rank ends our wait for it
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def run(self, run: LocalRun) -> Record:
        """Train, and return the record of rank 0."""
        if run.nodes != len(self._pipes):
            raise ValueError(f"nodes must be the number of ranks, {len(self._pipes)}, got {run.nodes}")
        try:
            for pipe in self._pipes:
                pipe.send(run)
            answers = [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a rank has ended in {run}") from error
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"a rank failed in {run}:\n{answer}")
        return cast(Record, answers[0])


def _serve(rank: int, nodes: int, meeting: str, orders: Connection) -> None:
    """Train what comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=nodes)
    while True:
        try:
            answer = train(orders.recv())
        except Exception:  # and leave, so that the others do not wait
            orders.send(traceback.format_exc())
            return
        orders.send(answer)


# Labels and runs of a stage -> what is told of the keys that are done.
Stage = Callable[[Sequence[tuple[str, LocalRun]]], Callable[[str, int], None]]


def run_study(task: str, rows: Sequence[Row], seeds: int, jobs: int, file: Path, stage: Stage) -> None:
    """Run what is missing of some rows of a task, on so many groups of ranks side by side."""
    results, idle = Results(file), SimpleQueue[LocalRanks]()

    def work(run: LocalRun) -> Record:
        ranks = idle.get()
        try:
            return ranks.run(run)
        finally:
            idle.put(ranks)

    with ThreadPoolExecutor(jobs) as threads, ExitStack() as groups:
        while wanted := list(missing(find_all(task, rows, results.records), seeds)):
            while idle.qsize() < jobs:  # all are idle between two stages
                idle.put(groups.enter_context(LocalRanks(wanted[0][1].nodes)))
            tell = stage(wanted)
            futures = [threads.submit(work, run) for _, run in wanted]
            for future in futures:
                record = future.result()
                results.add(record)
                tell(record["key"], 1)
