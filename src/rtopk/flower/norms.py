"""How large an update may be, compared with what all clients offered recently.

The limit is `outlier` times the median norm of the updates offered in the last rounds, whether they were used
or not. So it follows the clients: one reply cannot set it, and if it is wrong for most of them it is right
again after at most half of the remembered rounds. An update no larger than the model is never an outlier.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rtopk.flower.refusal import RefusedError

ROUNDS = 5  # whose norms are remembered
LARGEST = 2.0**60  # of any update: beyond it, squares and weighted sums leave float32


class NormBound:
    """The limit on the norm of an update, and the offered norms that it comes from."""

    def __init__(self, outlier: float = 1000.0, max_norm: float | None = None) -> None:
        if max_norm is not None and not 0.0 < max_norm < math.inf:
            raise ValueError(f"max_norm must be positive and finite, or None, got {max_norm}")
        if not outlier > 1.0:
            raise ValueError(f"outlier must be greater than 1, got {outlier}")
        self.outlier, self.max_norm = outlier, max_norm
        self.offered: deque[list[float]] = deque(maxlen=ROUNDS)

    def limit(self, count: int, model: float, look: Callable[[], Sequence[float]]) -> float:
        """Return the largest norm that this round may use.

        `count` updates are offered, `model` is the norm of the model. `look` returns the norms of this round;
        it is called only while fewer than that are remembered.
        """
        most = LARGEST if self.max_norm is None else min(self.max_norm, LARGEST)
        if math.isinf(self.outlier):
            return most
        known = [norm for norms in self.offered for norm in norms]
        if len(known) < count:
            known += [norm for norm in look() if norm > 0.0]
        if len(known) < 2:  # a norm cannot vouch for itself
            return min(self.outlier * model or LARGEST, most)
        return min(max(self.outlier * median(known), model), most)

    def check(self, norm: float, limit: float) -> None:
        """Raise RefusedError if a norm is too large."""
        if not norm <= limit:
            why = (
                ""
                if limit == self.max_norm
                else f", {self.outlier:g} times the usual or the model's own norm"
            )
            raise RefusedError(f"its norm {norm:g} is above the limit {limit:g}{why}")

    def note(self, norms: Sequence[float]) -> None:
        """Record the norms offered in a round, except zeros, which carry no scale."""
        kept = [norm for norm in norms if 0.0 < norm <= LARGEST]
        if kept:
            self.offered.append(kept)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next limit depends on."""
        return {"offered": [list(norms) for norms in self.offered]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.offered = deque((list(norms) for norms in state["offered"]), maxlen=ROUNDS)


def median(numbers: Sequence[float]) -> float:
    """Return the lower median: of two the smaller, so that one absurd number cannot set it."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0
