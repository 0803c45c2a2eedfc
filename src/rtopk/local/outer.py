"""The outer optimizer: what the centre does with the averaged update of a round.

`sgd` with rate 1 is the paper (the centre follows by the mean); `nesterov` is DiLoCo's (Douillard et al.,
2023); SparseLoCo (Sarfi et al., 2025) is `sgd` with rate 1 at the centre and `DecayedErrorFeedback` at the
nodes: `sparseloco` is that pair. An update is common - own weights, so the centre moves by its negative.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rtopk.memory import DecayedErrorFeedback, Memory

State = Mapping[str, Tensor]


class Outer(Protocol):
    """Turn the mean update into a step; a pure function, so a round that fails changes nothing."""

    def step(self, update: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what to subtract from the weights, and the next state (empty before the first step)."""


@dataclass(frozen=True)
class SGD:
    """Follow by the mean update, times a rate."""

    rate: float = 1.0

    def step(self, update: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rate x update."""
        return (update if self.rate == 1.0 else update * self.rate), {}


@dataclass(frozen=True)
class Nesterov:
    """Nesterov momentum as torch.optim.SGD writes it; rate and momentum are DiLoCo's."""

    rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.momentum < 1.0:
            raise ValueError(f"momentum must be in (0, 1), got {self.momentum}")

    def step(self, update: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rate x (update + momentum x velocity)."""
        velocity = update.clone()
        if "velocity" in state:
            if state["velocity"].shape != update.shape:
                raise ValueError(
                    f"velocity has {state['velocity'].numel()} entries, the update {update.numel()}"
                )
            velocity.add_(state["velocity"], alpha=self.momentum)
        return torch.add(update, velocity, alpha=self.momentum).mul_(self.rate), {"velocity": velocity}


@dataclass(frozen=True)
class Pair:
    """An outer optimizer, and the memory that belongs to it; None: any."""

    outer: Outer
    memory: Callable[[], Memory] | None = None


OUTERS: dict[str, Pair] = {
    "sgd": Pair(SGD()),
    "nesterov": Pair(Nesterov()),
    "sparseloco": Pair(SGD(), DecayedErrorFeedback),
}


def by_name(outer: str | Outer) -> Pair:
    """Return the optimizer and memory of a name, or of an optimizer of one's own."""
    if isinstance(outer, str) and outer in OUTERS:
        return OUTERS[outer]
    if isinstance(outer, str) or not hasattr(outer, "step"):
        raise ValueError(f"outer must be one of {', '.join(OUTERS)}, or an object like them, got {outer!r}")
    return Pair(outer)
