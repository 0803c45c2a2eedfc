"""How well a job's own gradients arrive under each rule and mean: which to take, from a few steps of that job.

Beside a run that moves no differently for it, every choice compresses the same gradients. After some steps, the sum
of what arrived is held against the sum of what was due: the cosine between the two. A learning rate that is tuned
makes up for length, so only the direction counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtopk.aggregate import Mean, average
from rtopk.memory import ErrorFeedback, NoMemory
from rtopk.select import RTopK
from rtopk.sparsifier import Sparsifier


@dataclass(frozen=True)
class Choice:
    """A rule and a mean; r / k is 1 for top-k."""

    r_over_k: float
    mean: Mean

    @property
    def label(self) -> str:
        """Name both, as a user would choose them."""
        rule = "TopK()" if self.r_over_k == 1 else f"RTopK(r_over_k={self.r_over_k:g})"
        return f'selector={rule}, mean="{self.mean}"'


class Arrival:
    """Watch the gradients of n nodes, with a memory or without."""

    def __init__(self, nodes: int, d: int, density: float, memory: bool, seed: int = 0) -> None:
        factors = sorted({1.0, min(2.0, 1 / density), min(float(nodes), 1 / density)})
        self.memory = memory
        self._nodes = {
            factor: [
                Sparsifier(
                    RTopK(r_over_k=factor),
                    density,
                    ErrorFeedback() if memory else NoMemory(),
                    seed=seed,
                    node=i,
                )
                for i in range(nodes)
            ]
            for factor in factors
        }
        means: tuple[Mean, ...] = ("nodes", "received")
        self._arrived = {Choice(factor, mean): torch.zeros(d) for factor in factors for mean in means}
        self._due, self._step = torch.zeros(d), 0

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Compress one step's gradients, one of each node, under every choice."""
        self._due += torch.stack(list(gradients)).mean(0)
        for factor, nodes in self._nodes.items():
            vectors = [
                node.codec.decode(node.compress(gradient, self._step))
                for node, gradient in zip(nodes, gradients, strict=True)
            ]
            for choice, arrived in self._arrived.items():
                if choice.r_over_k == factor:
                    arrived += average(vectors, choice.mean)
        self._step += 1

    def cosines(self) -> dict[Choice, float]:
        """Return the cosine between what arrived and what was due, under every choice."""
        return {
            choice: float(torch.nn.functional.cosine_similarity(arrived, self._due, dim=0))
            for choice, arrived in self._arrived.items()
        }
