"""Send, of the r largest entries, those that have waited longest (rAge-k)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.select.family import RTopK
from rtopk.select.rule import Rule


@dataclass(frozen=True)
class RAgeK(Rule, method="rage-k"):
    """Send, of the r largest entries, the k that this node has not sent for longest.

    Entries that have waited equally long (all, at first) are ordered by magnitude, then by lower index. r is as
    in `RTopK`: `r_over_k` times k, or `nodes` times k.
    """

    r_over_k: float | None = None
    nodes: int | None = None
    keeps_state = True

    def __post_init__(self) -> None:
        self.among(1, 1)

    @classmethod
    def for_run(cls, nodes: int, r_over_k: float = 0.0, threshold: float = 0.0) -> "RAgeK":
        """Make the rule for a run."""
        return cls(r_over_k=r_over_k) if r_over_k else cls(nodes=nodes)

    def among(self, k: int, d: int) -> int:
        """Return r, the number of entries from which the longest waiting are sent."""
        return RTopK(self.r_over_k, self.nodes).considered(k, d)

    def at_node(self, seed: int, node: int) -> "Ages":
        """Return the rule for one node; nothing has been sent yet."""
        return Ages(self)


class Ages(Rule):
    """`RAgeK` at one node: when each entry was last sent."""

    keeps_state = True

    def __init__(self, rule: RAgeK) -> None:
        self.rule = rule
        self.step = 0
        self.last: Tensor | None = None  # (d,) int64: round in which it was sent, plus 1; 0 is never

    def begin(self, step: int) -> None:
        """Set the round."""
        self.step = step

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        positions = kernels.largest(vector, self.rule.among(k, vector.numel()))  # (r,)
        by_size = vector[positions].abs().argsort(descending=True, stable=True)
        if self.last is None:
            self.last = torch.zeros(vector.numel(), dtype=torch.int64, device=vector.device)
        by_age = self.last[positions[by_size]].argsort(stable=True)
        return positions[by_size[by_age[:k]]].sort().values

    def end(self, sent: Tensor) -> None:
        """Record what was sent, except the dense tail, which never waits."""
        if self.last is not None:
            self.last[sent[sent < self.last.numel()]] = self.step + 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the rounds; empty before the first."""
        return {} if self.last is None else {"last": self.last.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        if set(state) not in (set(), {"last"}):
            raise ValueError(f"the state of rage-k must hold 'last' or nothing, got {sorted(state)}")
        last = state.get("last")
        if last is not None:
            expected = last.shape if self.last is None else self.last.shape
            if last.dtype != torch.int64 or last.dim() != 1 or last.shape != expected:
                raise ValueError(
                    f"last must be int64 of shape {tuple(expected)}, got {last.dtype} {tuple(last.shape)}"
                )
        self.last = None if last is None else last.clone()
