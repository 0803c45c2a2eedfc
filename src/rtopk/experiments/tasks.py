"""Tasks: what is learned, from which data, by which model. A task is added here and nowhere else.

The loop asks a task for a model, for each node's shard of the training data, for the loss of a batch and for
the score of a model. Everything random comes from a generator the loop hands in, or from torch's global one
inside a fork that the loop has seeded (initial weights, dropout).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rtopk.experiments.config import Config, Part
from rtopk.experiments.models import mlp
from rtopk.experiments.split import split
from rtopk.seed import generator

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """What the training loop needs to know."""

    @property
    def metric(self) -> str:
        """Name the score that counts."""

    @property
    def higher_is_better(self) -> bool:
        """Say which way the metric improves."""

    def make_model(self) -> nn.Module:
        """Build a new model with freshly drawn weights."""

    def shards(self, config: Config) -> Sequence["Shard"]:
        """Divide the training data among the nodes."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss and the metric on the held-out part."""


class Shard:
    """One node's examples, served in a new order every epoch.

    The order depends on (seed, node, epoch) alone, so the batch of any step can be asked for at any time.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, seed: int, node: int, batch: int) -> None:
        if not len(inputs):
            raise ValueError(f"node {node} has no examples; use fewer nodes or a larger alpha")
        self.inputs = inputs
        self.targets = targets
        self.seed = seed
        self.node = node
        self.batch = min(batch, len(inputs))
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def steps_per_epoch(self) -> int:
        """Count the whole batches of an epoch; what is left over waits for another order."""
        return len(self) // self.batch

    def __getitem__(self, step: int) -> Batch:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            rng = generator(self.seed, "order", self.node, epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self), generator=rng)
        chosen = self._order[position * self.batch : (position + 1) * self.batch]
        return self.inputs[chosen], self.targets[chosen]


@dataclass(frozen=True)
class Classification:
    """Learn classes of vectors or images by cross entropy."""

    train: Batch
    held_out: Batch
    model: Callable[[], nn.Module]
    metric: str = "accuracy"
    higher_is_better: bool = True

    def make_model(self) -> nn.Module:
        """Build a new model with freshly drawn weights."""
        return self.model()

    def shards(self, config: Config) -> list[Shard]:
        """Divide the training data among the nodes."""
        inputs, targets = self.train
        parts = split(targets, config.nodes, config.split, config.alpha, config.seed)
        return [
            Shard(inputs[part], targets[part], config.seed, node, config.batch)
            for node, part in enumerate(parts)
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a batch."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return cross entropy and accuracy (in percent) on the held-out part."""
        inputs, targets = self.held_out
        total, right = 0.0, 0
        for begin in range(0, len(inputs), 500):
            scores = model(inputs[begin : begin + 500])
            wanted = targets[begin : begin + 500]
            total += float(F.cross_entropy(scores, wanted, reduction="sum"))
            right += int((scores.argmax(1) == wanted).sum())
        return {"loss": total / len(inputs), "accuracy": 100.0 * right / len(inputs)}


@cache
def digits(part: Part) -> Classification:
    """Scikit-learn's 1,797 handwritten digits, 8 x 8: two hidden layers, 26,122 parameters."""
    from sklearn.datasets import load_digits

    data = load_digits()
    inputs = torch.from_numpy(data.data.astype(np.float32) / 16.0)
    targets = torch.from_numpy(data.target.astype(np.int64))
    train, held_out = hold_out((inputs, targets), part)
    return Classification(train, held_out, lambda: mlp(64, (128, 128), 10))


def wide_digits(hidden: int) -> Callable[[Part], Classification]:
    """Make the same task for a network of two hidden layers of this width: to measure traffic, not learning."""
    return lambda part: dataclasses.replace(digits(part), model=lambda: mlp(64, (hidden, hidden), 10))


def hold_out(examples: Batch, part: Part) -> tuple[Batch, Batch]:
    """Divide examples into train and held-out: a quarter is the test set, a fifth of the rest validation."""
    inputs, targets = examples
    order = torch.randperm(len(inputs), generator=generator("hold out"))
    test = len(inputs) // 4
    validation = (len(inputs) - test) // 5
    held_out, train = (
        (order[:test], order[test:])
        if part == "test"
        else (order[test : test + validation], order[test + validation :])
    )
    return (inputs[train], targets[train]), (inputs[held_out], targets[held_out])


TASKS: dict[str, Callable[[Part], Task]] = {
    "digits": digits,
    "digits-1m": wide_digits(968),  # 1,010,602 parameters
    "digits-11m": wide_digits(3290),  # 11,074,150 parameters
}


def load(config: Config) -> Task:
    """Return the task of a configuration."""
    if config.task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {config.task!r}")
    return TASKS[config.task](config.part)
