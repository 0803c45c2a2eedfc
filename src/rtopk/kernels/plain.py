"""Plain torch, for every device and dtype: the same streaming search in blocks.

Entries that reach a bound are collected; when there are more than enough, only the largest are kept and the bound
rises. No sort or topk ever sees more than a block plus twice r entries. The result is exactly the same set.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtopk.kernels import draws
from rtopk.kernels.search import Candidates, Picked, Search, search_sampled

BLOCK = 1 << 20


def serves(*vectors: Tensor) -> bool:
    """Serve everything."""
    return True


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a vector of zeros."""
    return torch.zeros(size, dtype=dtype, device=device)


def reaches(vector: Tensor, limit: float) -> bool:
    """Return whether any magnitude is at least `limit`, or NaN."""
    low, high = torch.aminmax(vector.detach())  # NaN if there is one
    return not bool((high < limit) & (low > -limit))


def accumulate_(  # the signature is that of every backend
    residual: Tensor,
    gradient: Tensor,
    search: Search | None,
    velocity: Tensor | None,
    momentum: float,
    scale: float,
    decay: float,
) -> Candidates | None:
    """Add the gradient, or with a velocity: momentum * velocity + scale * gradient, to the residual."""
    if velocity is None:
        (residual if decay == 1.0 else residual.mul_(decay)).add_(gradient)
    else:
        velocity.mul_(momentum)
        if scale == 1.0:
            velocity.add_(gradient)
        else:
            # Multiply, round, add: `add_(alpha=)` may fuse them, on some devices and in some lanes only.
            for begin in range(0, gradient.numel(), BLOCK):
                block = gradient[begin : begin + BLOCK].to(velocity.dtype) * scale
                velocity[begin : begin + BLOCK].add_(block)
        residual.add_(velocity)
    return None if search is None else scan(residual, search)


def scan(vector: Tensor, search: Search) -> Candidates:
    """Return the entries at or above the floor, or the `wanted` largest of them.

    There may be more than `wanted`, never fewer of the largest. NaN counts as reaching every floor.
    """
    vector = vector if search.size is None else vector[: search.size]
    positions, values, held = [vector.new_empty(0, dtype=torch.int64)], [vector.new_empty(0)], 0
    bound = torch.tensor(search.floor, dtype=torch.float64, device=vector.device).to(vector.dtype)
    strict = False
    for begin in range(0, vector.numel(), BLOCK):
        block = vector[begin : begin + BLOCK]
        below = block.abs() <= bound if strict else block.abs() < bound
        found = (~below).nonzero()[:, 0]
        positions.append(found + begin)
        values.append(block[found])
        held += found.numel()
        if search.wanted is not None and held > 2 * search.wanted + 64:
            at, value = torch.cat(positions), torch.cat(values)
            best = _largest_of(value, search.wanted)
            positions, values, held = [at[best]], [value[best]], search.wanted
            bound, strict = _magnitude(values[0]).min(), True  # ties go to the earlier entry
    return Candidates(((torch.cat(positions), torch.cat(values)),), search.floor)


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that include the r largest entries, without a previous guess."""
    return search_sampled(_sample, scan, vector, r)


def _sample(vector: Tensor, every: slice) -> Any:
    return vector.detach()[every].to("cpu", torch.float64).numpy()


def pick(candidates: Candidates, r: int, words: Any, k: int) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, is a set bit of `words`."""
    positions, values = (torch.cat(column) for column in zip(*candidates.parts, strict=True))
    best = _largest_of(values, r)
    ranks = draws.set_bits(words() if callable(words) else words, k).to(values.device)
    chosen = best[ranks]
    return Picked(positions[chosen].to(torch.int64), values[chosen], float(values[best].abs().min()))


def subtract_(vector: Tensor, indices: Tensor, values: Tensor, factor: float) -> None:
    """Subtract values, times a factor, at unique indices."""
    values = values.to(vector.dtype)
    vector[indices] -= values if factor == 1.0 else values * factor


def union(lists: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Join ascending lists of positions by sorting."""
    joint = torch.unique(torch.cat(list(lists)))
    if joint.numel() and not (int(joint[0]) >= 0 and int(joint[-1]) < size):
        raise ValueError(f"positions must lie in [0, {size}), got {int(joint[0])} to {int(joint[-1])}")
    return joint, [torch.searchsorted(joint, positions) for positions in lists]


def _largest_of(values: Tensor, r: int) -> Tensor:
    """Return the places of the r largest magnitudes, ascending; ties go to the earlier."""
    magnitude = _magnitude(values)
    threshold = magnitude.topk(r, sorted=False).values.min()
    chosen = magnitude > threshold
    tied = (magnitude == threshold).nonzero()[:, 0]
    chosen[tied[: r - int(chosen.sum())]] = True
    return chosen.nonzero()[:, 0]


def _magnitude(values: Tensor) -> Tensor:
    """Return comparable magnitudes: NaN counts as Inf."""
    return values.abs().nan_to_num(nan=math.inf, posinf=math.inf)
