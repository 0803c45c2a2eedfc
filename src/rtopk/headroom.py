"""How far sums are from overflow, so that a memory need not look at all of them in every step."""

from torch import Tensor

from rtopk import kernels
from rtopk.kernels import require_finite


class Headroom:
    """Prove that sums stay finite, mostly without looking at them.

    If every entry of a gradient is below 2 ** 100, residual below 2 ** 120 and velocity below 2 ** 100, then
    no sum of the next `STEPS` steps reaches 2 ** 127, where fp32 ends (with momentum below 1, the velocity
    grows by a gradient a step and the residual by a velocity). Whatever else writes to them raises torch's
    version counter, and they are looked at again.
    """

    STEPS = 1024

    def __init__(self) -> None:
        self._left = 0
        self._seen: tuple[tuple[int, int], ...] | None = None

    def suffices(self, gradient: Tensor, residual: Tensor, velocity: Tensor | None = None) -> bool:
        """Say whether the next sums are finite for sure; raise ValueError if the gradient is not."""
        if kernels.reaches(gradient, 2.0**100):
            require_finite(gradient, "gradient")
            self.forget()
            return False
        if self._left <= 0 or self._seen is None or self._seen != _versions(residual, velocity):
            low = not kernels.reaches(residual, 2.0**120)
            low = low and (velocity is None or not kernels.reaches(velocity, 2.0**100))
            self._left = self.STEPS if low else 0
        return self._left > 0

    def spend(self, residual: Tensor, velocity: Tensor | None = None) -> None:
        """Note that we have changed them ourselves, by less than a gradient."""
        self._left -= 1
        self._seen = _versions(residual, velocity)

    def forget(self) -> None:
        """Look at them again before the next step."""
        self._left = 0


def _versions(*tensors: Tensor | None) -> tuple[tuple[int, int], ...] | None:
    present = [t for t in tensors if t is not None]
    if any(t.is_inference() for t in present):  # these do not count their changes
        return None
    return tuple((t.data_ptr(), t._version) for t in present)
