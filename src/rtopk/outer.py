"""The outer optimizer: what the centre does with the averaged update of a round.

`sgd` with rate 1 is the paper (the centre follows by the mean); `nesterov` is DiLoCo's (Douillard et al.,
2023); SparseLoCo (Sarfi et al., 2025) is `sgd` with rate 1 at the centre and `DecayedErrorFeedback` at the
nodes: `sparseloco` is that pair. An update is common - own weights, so the centre moves by its negative.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor

from rtopk.kernels.search import Candidates
from rtopk.memory import Accumulated, ErrorFeedback, Memory

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


class DecayedErrorFeedback(ErrorFeedback):
    """Error feedback that forgets: the residual is multiplied by `decay` before each update is added."""

    def __init__(self, decay: float = 0.95) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        super().__init__()
        self.decay = decay

    @overload
    def add(self, gradient: Tensor) -> Tensor: ...
    @overload
    def add(
        self, gradient: Tensor, floor: float, wanted: int | None = None, size: int | None = None
    ) -> tuple[Tensor, Candidates]: ...
    def add(
        self,
        gradient: Tensor,
        floor: float | None = None,
        wanted: int | None = None,
        size: int | None = None,
    ) -> Accumulated:
        """Decay the residual, add the gradient, return the residual."""
        before = self.residual
        if before is not None:
            self.residual = before * self.decay
        try:
            if floor is None:
                return super().add(gradient)
            return super().add(gradient, floor, wanted, size)
        except ValueError:
            self.residual = before
            raise


@dataclass(frozen=True)
class Pair:
    """An outer optimizer and the memory that belongs to it."""

    outer: Outer
    memory: Callable[[], Memory]


OUTERS: dict[str, Pair] = {
    "sgd": Pair(SGD(), ErrorFeedback),
    "nesterov": Pair(Nesterov(), ErrorFeedback),
    "sparseloco": Pair(SGD(), DecayedErrorFeedback),
}


def by_name(name: str) -> Pair:
    """Return the optimizer and memory of a name."""
    if name not in OUTERS:
        raise ValueError(f"outer must be one of {', '.join(OUTERS)}, got {name!r}")
    return OUTERS[name]
