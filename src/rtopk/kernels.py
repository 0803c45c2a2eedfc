"""The hot loops: find the largest entries of a vector, and look for entries that are not finite.

Everything here is exact. "Larger" means larger magnitude; among equal magnitudes the lower index is the
larger, so the r largest entries are one definite set.
"""

import torch
from torch import Tensor


def largest(vector: Tensor, r: int) -> Tensor:
    """Return the positions of the r entries of largest magnitude, ascending."""
    if r == vector.numel():
        return torch.arange(r, device=vector.device)
    magnitude = vector.abs()
    threshold = magnitude.topk(r, sorted=False).values.min()
    chosen = magnitude > threshold
    tied = (magnitude == threshold).nonzero()[:, 0]
    chosen[tied[: r - int(chosen.sum())]] = True
    return chosen.nonzero()[:, 0]


def require_finite(vector: Tensor, name: str) -> None:
    """Raise ValueError if an entry is NaN or Inf, naming the first one."""
    # The maximum magnitude is NaN or Inf if any entry is: one read, no mask of d booleans.
    if vector.numel() and not bool(torch.linalg.vector_norm(vector, ord=float("inf")).isfinite()):
        bad = int((~vector.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"{name} must be finite, got {float(vector[bad])} at index {bad} of {vector.numel()}; "
            "skip this step or lower the learning rate (nothing was changed)"
        )
