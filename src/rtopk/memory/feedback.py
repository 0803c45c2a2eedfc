"""Error feedback: what was not sent is added to the next gradient (the paper's Algorithm 1)."""

from torch import Tensor

from rtopk import kernels
from rtopk.kernels import require_finite
from rtopk.kernels.search import Search
from rtopk.memory.vectors import Undoable, accept, held, take_out
from rtopk.sparse import SparseVector


class ErrorFeedback(Undoable):
    """Keep what was not sent and add it to the next gradient (the paper's Algorithm 1)."""

    in_parts = True
    decay = 1.0  # the residual is multiplied by it before a gradient is added

    def add(self, gradient: Tensor | None, search: Search | None = None) -> Tensor:
        """Add the gradient to the residual and return the residual; None if it has been `put` already."""
        if gradient is None:
            return self._adopt(search, "residual + gradient")
        gradient = gradient.detach()
        residual = accept(gradient, self.residual)
        late = self._undoable and kernels.late(search, residual, gradient)
        self._undoable = False
        if not late and not self._headroom.suffices(gradient, residual):
            require_finite(residual * self.decay + gradient, "residual + gradient")
        residual = self._own("residual", residual)
        kernels.accumulate_(residual, gradient, search, decay=self.decay)
        self._headroom.spend(residual)
        if late:
            kernels.refuse_late(search, residual, "residual + gradient")
            self._headroom.forget()
        self.residual = residual
        return residual

    def subtract(self, sent: SparseVector) -> None:
        """Subtract what was sent from the residual."""
        residual = self.residual = self._own("residual", held(self.residual, sent))
        take_out(residual, sent, self._headroom)
        self._headroom.spend(residual)


class DecayedErrorFeedback(ErrorFeedback):
    """Error feedback with decay: the residual is multiplied by `decay` before each gradient is added."""

    in_parts = False

    def __init__(self, decay: float = 0.95) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        super().__init__()
        self.decay = decay
