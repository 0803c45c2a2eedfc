"""Scenarios with the project's own training loop, one node per process."""

import dataclasses
import os
from typing import Any

import torch
from ddp_scenarios_faults import attempt
from ddp_worker import Place
from torch import nn

from rtopk.seed import generator
from rtopk.studies.config import Config
from rtopk.studies.tasks.objectives import Classification
from rtopk.studies.train.execute import Interrupted, execute
from rtopk.studies.train.loop import Run
from rtopk.studies.train.processes import ProcessRun
from rtopk.studies.train.records import digest

SMALL = Config(rounds=12, nodes=2, evaluate_every=4, learning_rate=0.05, density=0.05)
KEPT = dataclasses.replace(SMALL, exchange="all-reduce")  # owners keep something too
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"method": "dense", "values": "fp16"},
    "corrected": {"memory": "momentum-correction", "clip_norm": 0.5, "dense_biases": True},
    "dealt": {"method": "dealt-k", "split": "class"},
    "federated": {"setting": "federated", "local_steps": 3, "mean": "received", "split": "dirichlet"},
    "all-reduce": {"exchange": "all-reduce", "dense_biases": True, "owner_density": 0.2},
    "all-reduce, federated": {"exchange": "all-reduce", "setting": "federated", "local_steps": 3},
    "received": {"mean": "received", "weighted": True, "split": "dirichlet", "clip_norm": 0.5, "warm_up": 6},
}


def normed() -> Classification:
    """A task whose model has buffers and draws in its forward pass."""
    data = torch.randn(90, 6, generator=generator("data"))
    targets = (data.sum(1) > 0).long()
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))  # noqa: E731
    return Classification((data[:60], targets[:60]), (data[60:], targets[60:]), model)


def same_as_in_one_process(at: Place) -> dict[str, Any]:
    os.environ.update(RANK=str(at.rank), WORLD_SIZE=str(at.world))
    found: dict[str, Any] = {}
    for name, options in VARIANTS.items():
        for task in (None, normed()):
            config = dataclasses.replace(SMALL, **options)
            here, there = Run(config, task), ProcessRun(config, task)
            for _ in range(config.rounds):
                here.advance()
                there.advance()
            scores = [here.evaluate(), there.evaluate()]
            found[f"{name} {task is None}"] = {
                "weights": [digest(here.vector()), digest(there.vector())],
                "scores": scores,
                "losses": [here.loss, there.loss],
                "norms": [here.residual_norm(), there.residual_norm()],
            }
    return found


def stops_and_resumes(at: Place) -> dict[str, Any]:
    """A run under torchrun is stopped, goes on under torchrun, and goes on in one process."""
    os.environ.update(RANK=str(at.rank), WORLD_SIZE=str(at.world))
    folder = at.folder / "train"
    whole = execute(KEPT)["weights"]
    seen: list[int] = []

    def stop() -> bool:  # only rank 1 is asked to stop; both do
        seen.append(1)
        return at.rank == 1 and len(seen) == 5

    try:
        execute(KEPT, folder, should_stop=stop)
        stopped = "not stopped"
    except Interrupted as interrupted:
        stopped = str(interrupted)
    torch.distributed.barrier()
    alone = ""
    if at.rank == 0:
        del os.environ["RANK"]
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        run = Run(KEPT)
        run.load_state_dict(state["run"])
        while run.round < KEPT.rounds:
            run.advance()
        alone = digest(run.vector())
        os.environ["RANK"] = "0"
    torch.distributed.barrier()
    resumed = execute(KEPT, folder, resume=True)["weights"]
    torch.distributed.barrier()
    wrong = attempt(ProcessRun, dataclasses.replace(KEPT, nodes=3))
    powersgd = attempt(ProcessRun, dataclasses.replace(KEPT, method="powersgd", matrix_rank=1))
    return {
        "powersgd": powersgd,
        "whole": whole,
        "stopped": stopped,
        "resumed": resumed,
        "alone": alone,
        "wrong": wrong,
        "files": sorted(path.name for path in folder.iterdir()),
    }
