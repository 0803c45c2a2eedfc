"""Send all entries that reach a fixed magnitude (Sahu et al., 2021)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rtopk.select.rule import Rule


@dataclass(frozen=True)
class Threshold(Rule, method="threshold"):
    """Send every entry whose magnitude is at least `limit`: few in one round, many in another.

    k is ignored, with one exception: at density 1 (as in a dense phase at the start) everything is sent.
    """

    limit: float
    sends_k = False

    def __post_init__(self) -> None:
        if not 0.0 < self.limit < math.inf:
            raise ValueError(f"limit must be positive and finite, got {self.limit}")

    @classmethod
    def for_run(cls, nodes: int, r_over_k: float = 0.0, threshold: float = 0.0) -> "Threshold":
        """Make the rule for a run."""
        return cls(threshold)

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return the positions at or above the limit, ascending."""
        if k == vector.numel():
            return torch.arange(k, device=vector.device)
        return (vector.abs() >= self.limit).nonzero()[:, 0]
