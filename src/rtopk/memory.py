"""What a node keeps back from one round to the next: the paper's m, or DGC's velocity and accumulation.

A memory serves one vector. `add(gradient)` returns what there is to send from; `subtract(sent)` takes out
what the others have really received, so that whatever rounding or quantisation lost stays here. After every
step: sent + residual = what came in.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from rtopk.kernels import require_finite
from rtopk.sparse import SparseVector


class Memory(Protocol):
    """Accumulate gradients and give up what was sent."""

    def add(self, gradient: Tensor) -> Tensor:
        """Take in a gradient, return the vector to send from: valid until the next call, read only."""

    def subtract(self, sent: SparseVector) -> None:
        """Take out what was sent."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; a state that does not fit is refused and changes nothing."""


class NoMemory:
    """Forget what was not sent."""

    def add(self, gradient: Tensor) -> Tensor:
        """Return the gradient as it is."""
        require_finite(gradient, "gradient")
        return gradient

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

    def add(self, gradient: Tensor) -> Tensor:
        """Add the gradient to the residual and return the residual."""
        _accept(gradient, self.residual)
        if self.residual is None:
            self.residual = _zeros(gradient)
        self.residual.add_(gradient)
        return self.residual

    def subtract(self, sent: SparseVector) -> None:
        """Take what was sent out of the residual."""
        _take_out(self.residual, sent)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the residual; empty before the first step."""
        return {} if self.residual is None else {"residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        loaded = _fit(state, ("residual",), self.residual)
        self.residual = loaded.get("residual")


class MomentumCorrection:
    """Accumulate the velocity instead of the gradient (Deep Gradient Compression, sections 3.1 to 3.3).

    Use it with an optimizer that has no momentum of its own. `clip_norm` is the bound on the norm of the
    averaged gradient; each node clips to clip_norm / sqrt(nodes) before accumulating. `masking` forgets the
    velocity of the entries that were sent (DGC's momentum factor masking), so that they do not carry stale
    momentum.
    """

    def __init__(
        self,
        momentum: float = 0.9,
        clip_norm: float | None = None,
        nodes: int = 1,
        masking: bool = True,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if clip_norm is not None and not 0.0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm must be positive and finite, or None, got {clip_norm}")
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.nodes = nodes
        self.masking = masking
        self.velocity: Tensor | None = None  # (d,), DGC's u
        self.residual: Tensor | None = None  # (d,), DGC's v

    def add(self, gradient: Tensor) -> Tensor:
        """Clip the gradient, add it to the velocity, the velocity to the residual; return the residual."""
        _accept(gradient, self.residual)
        if self.residual is None or self.velocity is None:
            self.residual, self.velocity = _zeros(gradient), _zeros(gradient)
        self.velocity.mul_(self.momentum).add_(gradient, alpha=self._clip_factor(gradient))
        self.residual.add_(self.velocity)
        return self.residual

    def _clip_factor(self, gradient: Tensor) -> float:
        if self.clip_norm is None:
            return 1.0
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        limit = self.clip_norm / math.sqrt(self.nodes)
        return min(1.0, limit / norm) if norm > 0.0 else 1.0

    def subtract(self, sent: SparseVector) -> None:
        """Take what was sent out of the residual, and its positions out of the velocity if masking."""
        _take_out(self.residual, sent)
        if self.masking and self.velocity is not None:
            self.velocity[sent.indices] = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of residual and velocity; empty before the first step."""
        if self.residual is None or self.velocity is None:
            return {}
        return {"residual": self.residual.clone(), "velocity": self.velocity.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        loaded = _fit(state, ("residual", "velocity"), self.residual)
        self.residual, self.velocity = loaded.get("residual"), loaded.get("velocity")


def _zeros(gradient: Tensor) -> Tensor:
    """Make the memory of a gradient: half precision is accumulated in fp32."""
    return torch.zeros_like(
        gradient,
        dtype=torch.promote_types(gradient.dtype, torch.float32),
        memory_format=torch.contiguous_format,
    )


def _accept(gradient: Tensor, memory: Tensor | None) -> None:
    if gradient.dim() != 1 or not gradient.is_floating_point():
        raise ValueError(
            f"gradient must be a 1-D floating-point tensor, got {gradient.dim()}-D {gradient.dtype}; "
            "flatten it first"
        )
    if memory is not None and gradient.shape != memory.shape:
        raise ValueError(
            f"gradient must have the {memory.numel()} entries of the residual, got {gradient.numel()}"
        )
    require_finite(gradient, "gradient")


def _take_out(residual: Tensor | None, sent: SparseVector) -> None:
    if residual is None or sent.size != residual.numel():
        held = "nothing yet" if residual is None else f"{residual.numel()} entries"
        raise ValueError(f"cannot subtract a vector of size {sent.size}: the residual holds {held}")
    residual[sent.indices] -= sent.values.to(residual.dtype)


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
    return {name: tensor.clone() for name, tensor in state.items()}
