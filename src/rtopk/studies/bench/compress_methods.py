"""The methods of `rtopk bench compress`: one compress step each, on a residual of its own.

The floor only accumulates; ours is memory and selector of this library; the rivals are what others do: a full
`abs().topk`, and DGC's sampled threshold. All draw k of the r largest with the same generator.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rtopk.memory import ErrorFeedback
from rtopk.seed import generator
from rtopk.select import RTopK, Tracker, draw
from rtopk.sparse import SparseVector

FACTOR = 5  # r / k


class Method(Protocol):
    """One step of a compressor that keeps its own residual."""

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""


class Floor:
    """Only accumulate."""

    def __init__(self, d: int, k: int) -> None:
        self.residual = torch.zeros(d)

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate."""
        self.residual.add_(gradient)


class Fused:
    """This library: memory and selector."""

    def __init__(self, d: int, k: int) -> None:
        self.k = k
        self.memory = ErrorFeedback()
        self.tracker = Tracker(RTopK(r_over_k=FACTOR))

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        search = self.tracker.search(self.k, gradient.numel())
        if search is None:
            vector, candidates = self.memory.add(gradient), None
        else:
            vector, candidates = self.memory.add(gradient, *search)
        self.memory.subtract(self.tracker.select(vector, self.k, generator(step), candidates))


class FullTopK:
    """The usual way: abs().topk over the whole vector."""

    def __init__(self, d: int, k: int) -> None:
        self.k, self.residual = k, torch.zeros(d)

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        self.residual.add_(gradient)
        best = self.residual.abs().topk(FACTOR * self.k, sorted=False).indices
        _send(self.residual, best, self.k, step)


class SampledThreshold:
    """DGC: the threshold of a sample of 1 %, corrected until it fits roughly (as in the GRACE library)."""

    def __init__(self, d: int, k: int) -> None:
        self.k, self.residual = k, torch.zeros(d)

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        self.residual.add_(gradient)
        d, r = self.residual.numel(), FACTOR * self.k
        magnitude = self.residual.abs()
        sample = magnitude[torch.randint(d, (max(1, d // 100),), generator=generator(step, "sample"))]
        threshold = float(sample.topk(max(1, r * sample.numel() // d), sorted=False).values.min())
        mask = magnitude >= threshold
        for _ in range(10):
            found = int(mask.sum())
            if 0.7 * r <= found <= 1.3 * r:
                break
            threshold *= 1.3 if found > r else 0.7
            mask = magnitude >= threshold
        best = mask.nonzero()[:, 0]
        _send(self.residual, best, min(self.k, best.numel()), step)


def _send(residual: Tensor, best: Tensor, k: int, step: int) -> None:
    sent = SparseVector.gather(residual, best[draw(best.numel(), k, generator(step))])
    residual[sent.indices] -= sent.values


METHODS: dict[str, Callable[[int, int], Method]] = {
    "floor": Floor,
    "rtopk": Fused,
    "topk": FullTopK,
    "dgc": SampledThreshold,
}
