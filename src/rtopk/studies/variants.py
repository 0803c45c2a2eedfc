"""Rules and memories that only the studies try: one thing changed, to see what it is worth.

One that wins moves into `select/` or `memory/`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtopk.layout import Layout
from rtopk.memory import MomentumCorrection
from rtopk.select import RTopK, Rule, rtop_k
from rtopk.sparse import SparseVector


@dataclass(frozen=True)
class PerTensor(Rule):
    """Apply a rule to each tensor by itself, as DGC does; tensors get shares of k by their sizes."""

    rule: Rule
    layout: Layout

    def begin(self, step: int) -> None:
        """Start a round."""
        self.rule.begin(step)

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        chosen, begin, before = [], 0, 0
        for shape in self.layout.shapes:
            end = min(begin + math.prod(shape), vector.numel())
            upto = end * k // vector.numel()  # entries of all tensors up to this one
            if upto > before:
                chosen.append(self.rule.select(vector[begin:end], upto - before, rng) + begin)
            begin, before = end, upto
        return torch.cat(chosen)


@dataclass
class MovingR(Rule):
    """rTop-k whose r / k goes from `first` in the first round to `last` in the last, by the same factor a round."""

    first: float
    last: float
    rounds: int
    step: int = 0

    def begin(self, step: int) -> None:
        """Set the round, which sets r."""
        self.step = step

    def considered(self, k: int, d: int) -> int:
        """Return r of this round."""
        done = self.step / max(1, self.rounds - 1)
        factor = max(1.0, self.first * (self.last / self.first) ** done)  # 49 times 1 / 49 is less
        return RTopK(r_over_k=factor).considered(k, d)

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        return rtop_k(vector, k, self.considered(k, vector.numel()), rng)


class DecayedMomentumCorrection(MomentumCorrection):
    """Momentum correction that damps what waits: every round multiplies what was not sent by `decay`."""

    def __init__(self, decay: float, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.decay = decay

    def subtract(self, sent: SparseVector) -> None:
        """Subtract what was sent from the residual, and damp the rest."""
        super().subtract(sent)
        assert self.residual is not None  # something was sent from it
        self.residual.mul_(self.decay)
