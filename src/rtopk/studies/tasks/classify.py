"""Learn classes of vectors or images by cross entropy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rtopk.studies.tasks.shards import Batch, Examples, Prepare
from rtopk.studies.tasks.split import split
from rtopk.studies.train.config import Config

CHUNK = 500  # examples evaluated at a time


@dataclass(frozen=True)
class Classification:
    """A data set with classes and a model for it."""

    train: tuple[Any, Tensor]  # inputs (anything that is indexed as a tensor) and classes
    held_out: tuple[Any, Tensor]
    model: Callable[[], nn.Module]
    augment: Prepare | None = None  # training inputs, when served
    view: Callable[[Any], Tensor] | None = None  # held-out inputs, when evaluated
    metric: str = "accuracy"
    higher_is_better: bool = True

    def make_model(self) -> nn.Module:
        """Build a new model with freshly drawn weights."""
        return self.model()

    def shards(self, config: Config) -> Sequence[Examples]:
        """Divide the training data among the nodes."""
        inputs, targets = self.train
        parts = split(targets, config.nodes, config.split, config.alpha, config.seed)
        return [
            Examples(inputs[part], targets[part], config.seed, node, config.batch, self.augment)
            for node, part in enumerate(parts)
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a batch."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return cross entropy and accuracy (in percent) on the held-out part."""
        inputs, targets = self.held_out
        device = next(model.parameters()).device
        total, right = 0.0, 0
        for begin in range(0, len(inputs), CHUNK):
            chunk = inputs[begin : begin + CHUNK]
            scores = model((chunk if self.view is None else self.view(chunk)).to(device))
            wanted = targets[begin : begin + CHUNK].to(device)
            total += float(F.cross_entropy(scores, wanted, reduction="sum"))
            right += int((scores.argmax(1) == wanted).sum())
        return {"loss": total / len(inputs), "accuracy": 100.0 * right / len(inputs)}

    def chunks(self, shard: Examples, size: int) -> Sequence[tuple[int, Batch]]:
        """Return all of a node's examples as they are without augmentation, with their number, part by part."""
        parts = torch.split(torch.arange(len(shard)), size)
        return [
            (len(p), (shard.inputs[p] if self.view is None else self.view(shard.inputs[p]), shard.targets[p]))
            for p in parts
        ]
