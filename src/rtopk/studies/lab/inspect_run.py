"""Look into a run: the nodes' gradients of every round and the full-batch gradient at chosen rounds.

For `rtopk lab inspect`. The run goes its own way, exactly as without being looked at.
"""

from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor

from rtopk.studies.lab.gradients import Inspector
from rtopk.studies.tasks.objectives import Classification
from rtopk.studies.tasks.shards import Examples
from rtopk.studies.train.loop import Run, seeded
from rtopk.studies.train.node import Node

CHUNK = 500  # examples of a full-batch gradient at a time


def inspect(
    run: Run, inspector: Inspector, rounds: Collection[int], on_round: Callable[[], None] = lambda: None
) -> None:
    """Advance a run to the last of the chosen rounds, showing the inspector every round up to it."""
    if run.config.setting != "distributed":
        raise ValueError(f"inspect needs the distributed setting, got {run.config.setting}: there a node sends "
                         "a gradient, and there is a true one to hold it against")  # fmt: skip
    last = max(rounds, default=-1)
    if last < 0 or min(rounds) < run.round or last >= run.config.rounds:
        raise ValueError(
            f"rounds must be in [{run.round}, {run.config.rounds}), got {sorted(rounds)}; raise --rounds"
        )
    while run.round <= last:
        gradients = [node_gradient(run, node) for node in run.nodes]
        inspector.observe(gradients)
        if run.round in rounds:
            inspector.look(run.round, gradients, full_gradient(run))
        run.advance()
        on_round()


def node_gradient(run: Run, node: Node) -> Tensor:
    """Return the gradient that the node will send from in this round; leave its buffers as they are."""
    buffers = node.buffers
    with run.at(node), seeded(run.config.seed, "forward", node.number, run.round):
        gradient, _ = run._gradient(node, run.config.rate(run.round))
    node.buffers = buffers
    return gradient


def full_gradient(run: Run) -> Tensor:
    """Return the gradient of the mean loss of all nodes' examples at the common weights."""
    task = run.task
    if not isinstance(task, Classification):
        raise ValueError(f"inspect needs a task with classes, got {run.config.task}")
    total = torch.zeros(run.layout.size)
    examples = 0
    for node in run.nodes:
        buffers, shard = node.buffers, cast(Examples, node.shard)
        with run.at(node), seeded(run.config.seed, "full", node.number, run.round):
            for count, batch in task.chunks(shard, CHUNK):
                loss = task.loss(run.model, batch) * count
                gradients = torch.autograd.grad(loss, list(run.parameters.values()))
                total += run.layout.flatten(dict(zip(run.parameters, gradients, strict=True)))
                examples += count
        node.buffers = buffers
    return total / examples
