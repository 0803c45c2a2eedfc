"""What a node keeps back from one round to the next: the paper's m, or DGC's velocity and accumulation.

A memory serves one vector. `add(gradient)` returns what there is to send from; with a floor, it also returns
the entries at or above it that it met on the way. `subtract(sent)` takes out what the others have really
received, so that whatever rounding or quantisation lost stays here. After every step: sent + residual = what
came in. A gradient that is refused changes nothing, to the bit.
"""

import math
from collections.abc import Mapping
from typing import Protocol, overload

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.headroom import Headroom
from rtopk.kernels import require_finite
from rtopk.kernels.search import Candidates, Scratch, Search
from rtopk.sparse import SparseVector

Accumulated = Tensor | tuple[Tensor, Candidates]


class Memory(Protocol):
    """Accumulate gradients and give up what was sent."""

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
        """Take in a gradient, return the vector to send from: finite, valid until the next call, read only.

        With a floor, return also the entries of that magnitude or more: of the first `size` if given, and if
        `wanted` is given, maybe only the `wanted` largest of them. They too are valid until the next call.
        """

    def subtract(self, sent: SparseVector) -> None:
        """Take out what was sent."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; a state that does not fit is refused and changes nothing."""


class NoMemory:
    """Forget what was not sent."""

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
        """Return the gradient as it is."""
        require_finite(gradient, "gradient")
        search = _search(floor, wanted, size)
        return gradient if search is None else (gradient, kernels.scan(gradient, search))

    def subtract(self, sent: SparseVector) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Accept only an empty state."""
        _fit(state, (), None)


class ErrorFeedback:
    """Keep what was not sent and add it to the next gradient (the paper's Algorithm 1)."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None  # (d,), at least fp32; made by the first gradient
        self._headroom = Headroom()
        self._scratch = Scratch()

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
        """Add the gradient to the residual and return the residual."""
        gradient = gradient.detach()
        residual = _accept(gradient, self.residual)
        search = _search(floor, wanted, size)
        if not self._headroom.suffices(gradient, residual):
            require_finite(residual + gradient, "residual + gradient")
        candidates = kernels.accumulate_(residual, gradient, search, scratch=self._scratch)
        self._headroom.spend(residual)
        self.residual = residual
        return residual if candidates is None else (residual, candidates)

    def adopt(self, total: Tensor, search: Search | None = None) -> tuple[Tensor, Candidates | None]:
        """Take residual + gradient, which the caller has summed, as the residual; the old one is left as it is.

        For a caller that must be able to take a step back and has the room for two residuals: nothing is
        copied, and the look for candidates is also the check.
        """
        _accept(total, self.residual)
        if search is None or not kernels.compilable(total):
            require_finite(total, "residual + gradient")
            candidates = None if search is None else kernels.scan(total, search)
        else:
            candidates = kernels.scan(total, search, self._scratch)
            unsearched = total[total.numel() if search.size is None else search.size :]
            if any(kernels.reaches(v, math.inf) for v in (*(v for _, v in candidates.parts), unsearched)):
                require_finite(total, "residual + gradient")
        self._headroom.forget()
        self.residual = total
        return total, candidates

    def subtract(self, sent: SparseVector) -> None:
        """Take what was sent out of the residual."""
        self._headroom.spend(_take_out(self.residual, sent, self._headroom))

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the residual; empty before the first step."""
        return {} if self.residual is None else {"residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        loaded = _fit(state, ("residual",), self.residual)
        self.residual = loaded.get("residual")


class MomentumCorrection:
    """Accumulate the velocity instead of the gradient (Deep Gradient Compression, sections 3.1 to 3.3).

    Use it with an optimizer that has no momentum of its own. `clip_norm` bounds the norm of each gradient before
    it is accumulated; docs/decisions.md says how a bound on the mean of n nodes becomes one on a node. `masking`
    forgets the velocity of the entries that were sent (DGC's momentum factor masking), so that they do not carry
    stale momentum.
    """

    def __init__(
        self,
        momentum: float = 0.9,
        clip_norm: float | None = None,
        masking: bool = True,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if clip_norm is not None and not 0.0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm must be positive and finite, or None, got {clip_norm}")
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.masking = masking
        self.velocity: Tensor | None = None  # (d,), DGC's u
        self.residual: Tensor | None = None  # (d,), DGC's v
        self._headroom = Headroom()
        self._scratch = Scratch()

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
        """Clip the gradient, add it to the velocity, the velocity to the residual; return the residual."""
        gradient = gradient.detach()
        residual = _accept(gradient, self.residual)
        velocity = kernels.zeros(residual) if self.velocity is None else self.velocity
        search = _search(floor, wanted, size)
        safe = self._headroom.suffices(gradient, residual, velocity)
        scale = self._clip_factor(gradient)
        if not safe:
            moved = residual.clone()
            kernels.accumulate_(moved, gradient, None, velocity.clone(), self.momentum, scale)
            require_finite(moved, "residual + velocity")
        candidates = kernels.accumulate_(
            residual, gradient, search, velocity, self.momentum, scale, self._scratch
        )
        self._headroom.spend(residual, velocity)
        self.residual, self.velocity = residual, velocity
        return residual if candidates is None else (residual, candidates)

    def _clip_factor(self, gradient: Tensor) -> float:
        if self.clip_norm is None:
            return 1.0
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return min(1.0, self.clip_norm / norm) if norm > 0.0 else 1.0

    def subtract(self, sent: SparseVector) -> None:
        """Take what was sent out of the residual, and its positions out of the velocity if masking."""
        residual = _take_out(self.residual, sent, self._headroom)
        assert self.velocity is not None  # made together with the residual
        if self.masking:
            self.velocity[sent.indices] = 0.0
        self._headroom.spend(residual, self.velocity)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of residual and velocity; empty before the first step."""
        if self.residual is None or self.velocity is None:
            return {}
        return {"residual": self.residual.clone(), "velocity": self.velocity.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        loaded = _fit(state, ("residual", "velocity"), self.residual)
        self.residual, self.velocity = loaded.get("residual"), loaded.get("velocity")


def _search(floor: float | None, wanted: int | None, size: int | None) -> Search | None:
    if floor is None:
        return None
    if not floor >= 0.0:
        raise ValueError(f"floor must be a magnitude of at least 0, got {floor}")
    return Search(floor, wanted, size)


def _accept(gradient: Tensor, memory: Tensor | None) -> Tensor:
    """Return the memory, or a new one, if the gradient fits it."""
    if gradient.dim() != 1 or not gradient.is_floating_point():
        raise ValueError(
            f"gradient must be a 1-D floating-point tensor, got {gradient.dim()}-D {gradient.dtype}; "
            "flatten it first"
        )
    if memory is None:
        return kernels.zeros(gradient)
    if gradient.shape != memory.shape:
        raise ValueError(
            f"gradient must have the {memory.numel()} entries of the residual, got {gradient.numel()}"
        )
    return memory


def _take_out(residual: Tensor | None, sent: SparseVector, headroom: Headroom) -> Tensor:
    if residual is None or sent.size != residual.numel():
        held = "nothing yet" if residual is None else f"{residual.numel()} entries"
        raise ValueError(f"cannot subtract a vector of size {sent.size}: the residual holds {held}")
    if kernels.reaches(sent.values, 2.0**100):
        require_finite(sent.values, "sent values")
        require_finite(residual[sent.indices] - sent.values, "residual - sent values")
        headroom.forget()
    kernels.take_out_(residual, sent.indices, sent.values)
    return residual


def _fit(state: Mapping[str, Tensor], names: tuple[str, ...], current: Tensor | None) -> dict[str, Tensor]:
    """Return copies of the named tensors of a state, or nothing for the empty state of a new memory."""
    if set(state) not in (set(), set(names)):
        raise ValueError(f"memory state must hold {list(names)} or nothing, got {sorted(state)}")
    sizes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = tuple(current.shape) if current is not None else next(iter(sizes.values()), None)
    for name, tensor in state.items():
        if tensor.dim() != 1 or sizes[name] != expected:
            raise ValueError(f"{name} must have shape {expected}, got {sizes[name]}")
        require_finite(tensor, name)
    return {name: _copy(tensor) for name, tensor in state.items()}


def _copy(tensor: Tensor) -> Tensor:
    """Copy to memory as `kernels.zeros` gives it, where it gives the same kind of tensor."""
    copy = kernels.zeros(tensor)
    return copy.copy_(tensor) if copy.dtype == tensor.dtype else tensor.clone()


def clip(vector: Tensor, limit: float) -> Tensor:
    """Return the vector, shortened to the limit if it is longer."""
    norm = float(torch.linalg.vector_norm(vector))
    return vector * (limit / norm) if norm > limit else vector
