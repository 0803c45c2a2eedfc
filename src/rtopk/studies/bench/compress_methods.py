"""The methods of `rtopk bench compress`: one compress step each, on a residual of its own.

The floor only accumulates; ours is memory and selector of this library; the rivals are what others do: a full
`abs().topk`, and DGC's sampled threshold. All draw k of the r largest with the same generator.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rtopk.codec import Codec
from rtopk.memory import ErrorFeedback
from rtopk.seed import generator
from rtopk.select import RTopK, draw
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier

FACTOR = 5  # r / k
NOTHING = torch.zeros(0, dtype=torch.uint8)


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


class Uncoded(Codec):
    """No payload: what is measured here is the way to the vector that is sent."""

    def encode_with_decoded(
        self, vector: SparseVector, rng: torch.Generator | None = None
    ) -> tuple[Tensor, SparseVector]:
        """Return nothing, and the vector as it is."""
        return NOTHING, vector


class Fused:
    """This library: memory and selector."""

    def __init__(self, d: int, k: int) -> None:
        self.k = k
        self.memory = ErrorFeedback()
        self.node = Sparsifier(RTopK(r_over_k=FACTOR), k / d if d else 1.0, self.memory, Uncoded())

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        self.node.compress(gradient, step)


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
