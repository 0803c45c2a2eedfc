"""Momentum correction: a node accumulates its velocity instead of its gradient (Deep Gradient Compression)."""

import math

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.kernels import require_finite
from rtopk.kernels.search import GradientPart, Search
from rtopk.memory.vectors import Undoable, accept, held, take_out
from rtopk.sparse import SparseVector


class MomentumCorrection(Undoable):
    """Accumulate the velocity instead of the gradient (Deep Gradient Compression, sections 3.1 to 3.3).

    Use it with an optimizer that has no momentum of its own. `clip_norm` bounds the norm of each gradient before
    it is accumulated; docs/decisions.md says how a bound on the mean of n nodes becomes one on a node. `masking`
    forgets the velocity of the entries that were sent (DGC's momentum factor masking), so that they do not carry
    stale momentum. `nesterov` accumulates gradient + momentum * velocity, as torch's SGD does.
    """

    in_parts = True
    carries_momentum = True  # the optimizer must have none
    _names = ("residual", "velocity")

    def __init__(
        self,
        momentum: float = 0.9,
        clip_norm: float | None = None,
        masking: bool = True,
        nesterov: bool = False,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if clip_norm is not None and not 0.0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm must be positive and finite, or None, got {clip_norm}")
        super().__init__()
        if clip_norm is not None:
            self.in_parts = False  # a norm is of a whole gradient
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.masking = masking
        self.nesterov = nesterov
        self.velocity: Tensor | None = None  # (d,), DGC's u; the residual is DGC's v

    def add(self, gradient: Tensor | None, search: Search | None = None) -> Tensor:
        """Clip the gradient, add it to the velocity, the velocity to the residual; return the residual.

        None if the gradient has been `put` already.
        """
        if gradient is None:
            return self._adopt(search, "residual + velocity")
        gradient = gradient.detach()
        residual = accept(gradient, self.residual)
        velocity = kernels.zeros(residual) if self.velocity is None else self.velocity
        late = self._undoable and kernels.late(search, residual, gradient, velocity)
        self._undoable = False
        safe = late or self._headroom.suffices(gradient, residual, velocity)
        scale = self._clip_factor(gradient)
        if self.nesterov:
            velocity = velocity * self.momentum + (gradient.to(velocity.dtype) * scale)
            gradient = velocity * self.momentum + (gradient.to(velocity.dtype) * scale)
            if not safe:
                require_finite(residual + gradient, "residual + gradient + velocity")
            residual = self._own("residual", residual)
            kernels.accumulate_(residual, gradient, search)
        else:
            if not safe:
                moved = residual.clone()
                kernels.accumulate_(moved, gradient, None, velocity.clone(), self.momentum, scale)
                require_finite(moved, "residual + velocity")
            residual, velocity = self._own("residual", residual), self._own("velocity", velocity)
            kernels.accumulate_(residual, gradient, search, velocity, self.momentum, scale)
        self._headroom.spend(residual, velocity)
        if late:
            kernels.refuse_late(search, residual, "residual + velocity")
            self._headroom.forget()
        self.residual, self.velocity = residual, velocity
        return residual

    def _put(self, parts: list[GradientPart]) -> None:
        assert self.residual is not None
        assert self.velocity is not None  # made together with the residual
        moved, sums = self._next["velocity"], self._next["residual"]
        if not self.nesterov:
            motion = moved, self.velocity, self.momentum
            kernels.add_to(sums, self.residual, parts, self._notes, motion)
            return
        ahead = []
        for begin, part in parts:
            here, flat = slice(begin, begin + part.numel()), part.detach().reshape(-1)
            faster = torch.mul(self.velocity[here], self.momentum, out=moved[here]).add_(flat)
            ahead.append((begin, (faster * self.momentum).add_(flat)))
        kernels.add_to(sums, self.residual, ahead, self._notes)

    def _clip_factor(self, gradient: Tensor) -> float:
        if self.clip_norm is None:
            return 1.0
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return min(1.0, self.clip_norm / norm) if norm > 0.0 else 1.0

    def subtract(self, sent: SparseVector) -> None:
        """Subtract what was sent from the residual; with masking, also clear its velocity."""
        residual = self.residual = self._own("residual", held(self.residual, sent))
        assert self.velocity is not None  # made together with the residual
        take_out(residual, sent, self._headroom)
        if self.masking:
            self.velocity = self._own("velocity", self.velocity)
            self.velocity.index_fill_(0, sent.indices, 0.0)
        self._headroom.spend(residual, self.velocity)

    def give_back(self, vector: SparseVector) -> None:
        """Add what did not arrive back to the residual; the velocity stays as it is."""
        self.residual = self._own("residual", held(self.residual, vector))
        kernels.subtract_(self.residual, vector.indices, vector.values, -1.0)
        self._headroom.forget()
