"""What a node keeps back from one round to the next: the paper's m, or DGC's velocity and accumulation.

A memory serves one vector. `add(gradient)` returns the vector to select from; if given a search, it also notes
the candidates. `subtract(sent)` removes what the other nodes decode, so that rounding and quantisation errors stay
in the memory. After every step: sent + residual = what came in. A rejected gradient changes nothing, to the bit.

Your own memory needs `add`, `subtract`, `state_dict` and `load_state_dict`; the hook undoes a step through the last
two. Optional, and faster: `snapshot` with `restore`, and `put` with `leave_out`, `bring_back` and `go_back`.
`snapshot_of`, `restore` and `give_back` below work with every memory.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.kernels.search import Search
from rtopk.memory.feedback import DecayedErrorFeedback, ErrorFeedback
from rtopk.memory.momentum import MomentumCorrection
from rtopk.memory.vectors import fit
from rtopk.sparse import SparseVector

__all__ = [
    "MEMORIES",
    "DecayedErrorFeedback",
    "ErrorFeedback",
    "Memory",
    "MomentumCorrection",
    "NoMemory",
    "clip",
    "give_back",
    "restore",
    "snapshot_of",
]


class Memory(Protocol):
    """Accumulate gradients and remove what was sent."""

    def add(self, gradient: Tensor, search: Search | None = None) -> Tensor:
        """Add a gradient; return the vector to select from: finite, read-only, valid until the next call.

        A memory may note candidates in `search.found`. If it does not, selection takes one more pass.
        """

    def subtract(self, sent: SparseVector) -> None:
        """Remove what was sent."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; a state that does not fit is refused and changes nothing."""


class NoMemory:
    """Forget what was not sent."""

    keeps = False  # what is not sent is dropped

    def add(self, gradient: Tensor, search: Search | None = None) -> Tensor:
        """Return the gradient as it is."""
        kernels.scan_finite(gradient, search, "gradient")
        return gradient

    def subtract(self, sent: SparseVector) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Accept only an empty state."""
        fit(state, (), None)


MEMORIES: dict[str, Callable[[], Memory]] = {
    "error-feedback": ErrorFeedback,
    "momentum-correction": MomentumCorrection,
    "none": NoMemory,
}


def give_back(memory: Memory, vector: SparseVector) -> None:
    """Return to a memory what it gave up and nobody used."""
    own = getattr(memory, "give_back", None)
    if own is not None:
        own(vector)
    else:
        here = vector.here and (vector.here[0], -vector.here[1])
        memory.subtract(SparseVector(vector.indices, -vector.values, vector.size, here))


def snapshot_of(memory: Memory) -> Mapping[str, Tensor]:
    """Return what a memory holds, for `restore`; its tensors do not change until the next snapshot."""
    own = getattr(memory, "snapshot", None)
    found: Mapping[str, Tensor] = memory.state_dict() if own is None else own()
    return found


def restore(memory: Memory, snapshot: Mapping[str, Tensor]) -> None:
    """Restore a memory to its last snapshot."""
    own = getattr(memory, "snapshot", None) and getattr(memory, "restore", None)
    (memory.load_state_dict if own is None else own)(snapshot)


def clip(vector: Tensor, limit: float) -> Tensor:
    """Return the vector, scaled down to the limit if its norm is larger."""
    norm = float(torch.linalg.vector_norm(vector))
    if norm == math.inf:  # its square is, at entries of 2e19; they may be finite
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    return vector * (limit / norm) if norm > limit else vector
