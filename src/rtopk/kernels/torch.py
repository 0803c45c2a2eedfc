"""The plain-torch twin of the compiled loops, for every other device and dtype.

The same streaming search in blocks: entries that reach a bound are written down; when there are more than
enough, only the largest are kept and the bound rises. No sort and no topk ever sees more than a block and
twice r entries, and the result is the same set, entry for entry.
"""

import torch
from torch import Tensor

BLOCK = 1 << 20


def reaches(vector: Tensor, limit: float) -> bool:
    """Say whether a magnitude is at least `limit`, or NaN."""
    low, high = torch.aminmax(vector.detach())  # NaN if there is one
    return not (float(high) < limit and float(low) > -limit)


def accumulate_(
    residual: Tensor, gradient: Tensor, velocity: Tensor | None, momentum: float, scale: float
) -> None:
    """Add the gradient, or with a velocity: momentum * velocity + scale * gradient, to the residual."""
    if velocity is None:
        residual.add_(gradient)
        return
    velocity.mul_(momentum)
    if scale == 1.0:
        velocity.add_(gradient)
    else:
        # Multiply, round, add: `add_(alpha=)` may fuse them, on some devices and in some lanes only.
        for begin in range(0, gradient.numel(), BLOCK):
            block = gradient[begin : begin + BLOCK].to(velocity.dtype) * scale
            velocity[begin : begin + BLOCK].add_(block)
    residual.add_(velocity)


def collect(vector: Tensor, floor: float, wanted: int | None) -> tuple[Tensor, Tensor]:
    """Return positions and values of the entries at or above the floor, or the `wanted` largest of them.

    It may return more than `wanted`, never fewer of the largest.
    """
    positions, values, held = [vector.new_empty(0, dtype=torch.int64)], [vector.new_empty(0)], 0
    bound = torch.tensor(floor, dtype=torch.float64, device=vector.device).to(vector.dtype)
    strict = False
    for begin in range(0, vector.numel(), BLOCK):
        block = vector[begin : begin + BLOCK]
        found = (block.abs() > bound if strict else block.abs() >= bound).nonzero()[:, 0]
        positions.append(found + begin)
        values.append(block[found])
        held += found.numel()
        if wanted is not None and held > 2 * wanted + 64:
            at, value = torch.cat(positions), torch.cat(values)
            best = largest_of(value, wanted)
            positions, values, held = [at[best]], [value[best]], wanted
            bound, strict = values[0].abs().min(), True  # a later tie loses against an earlier one
    return torch.cat(positions), torch.cat(values)


def largest_of(values: Tensor, r: int) -> Tensor:
    """Return where the r largest magnitudes are, ascending; among equals the first are the larger."""
    magnitude = values.abs()
    threshold = magnitude.topk(r, sorted=False).values.min()
    chosen = magnitude > threshold
    tied = (magnitude == threshold).nonzero()[:, 0]
    chosen[tied[: r - int(chosen.sum())]] = True
    return chosen.nonzero()[:, 0]
