"""Plain torch, for every device and dtype: the same search without a wait, as long as the guess is good.

Entries that reach the floor are marked, and as many as there is room for are collected; the host learns only with
the selection itself how many there were. If they were too few, or did not fit, all entries are looked at, block by
block, and the largest so far are kept: one more wait. Where nothing waits (on a CPU), a streaming search collects
what reaches a bound, which rises when there are more than enough. No sort or topk ever sees more than a block plus
twice r entries. The result is exactly the same set.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtopk.kernels import draws
from rtopk.kernels.host import Asking, answer, ask, fetch, send
from rtopk.kernels.search import (
    Candidates,
    GradientPart,
    Motion,
    Pending,
    Picked,
    Search,
    quantiles,
    room_for,
    stride,
)

batch = 0  # parts are added as they come: on a device in the stream of whoever made them
BLOCK = 1 << 20


def serves(*vectors: Tensor) -> bool:
    """Serve everything."""
    return True


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a vector of zeros."""
    return torch.zeros(size, dtype=dtype, device=device)


def late(vector: Tensor) -> bool:
    """Return whether to make room for candidates instead of waiting for their number.

    CUDA has `nonzero_static`, in torch 2.6 perhaps not yet. So has the CPU, but nothing waits there, and the
    streaming search is faster.
    """
    return vector.is_cuda and _has_static()


def reaches(vector: Tensor, limit: float) -> bool:
    """Return whether any magnitude is at least `limit`, or NaN."""
    low, high = fetch(*torch.aminmax(vector.detach()))  # NaN if there is one
    return not (float(high) < limit and float(low) > -limit)  # comparing them as tensors takes longer


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


def add_to(
    out: Tensor, residual: Tensor, parts: Sequence[GradientPart], notes: Any, motion: Motion | None
) -> list[GradientPart]:
    """Write the sums of some parts, which have any shape, to `out`; return none, all are served."""
    for begin, part in parts:
        gradient, end, shape = part.detach(), begin + part.numel(), part.shape
        if motion is not None:
            moved, velocity, momentum = motion
            speed, faster = velocity[begin:end].view(shape), moved[begin:end].view(shape)
            gradient = torch.mul(speed, momentum, out=faster).add_(gradient)
        torch.add(residual[begin:end].view(shape), gradient, out=out[begin:end].view(shape))
        if notes is not None:
            notes.look(out, begin, end)
    return []


def noting(vector: Tensor, search: Search) -> None:
    """Return None: candidates are noted in a pass of its own."""


def scan(vector: Tensor, search: Search) -> Candidates:
    """Return the entries at or above the floor; NaN reaches every floor. On CUDA nothing waits for their number."""
    size = vector.numel() if search.size is None else search.size
    if not late(vector):
        return streamed(vector[:size], search.floor, search.wanted)
    marks = torch.empty(size, dtype=torch.bool, device=vector.device)
    bound = torch.full((), search.floor, dtype=torch.float64, device=vector.device).to(vector.dtype)
    for begin in range(0, size, BLOCK):  # in blocks: magnitudes of all would be one more vector
        here = marks[begin : begin + BLOCK]
        torch.lt(vector[begin : min(begin + BLOCK, size)].abs(), bound, out=here)
        here.logical_not_()
    return Reached(vector, size, search, marks)


class Reached(Pending):
    """Candidates marked by a byte each, on any device."""

    def __init__(self, vector: Tensor, size: int, search: Search, marks: Tensor) -> None:
        super().__init__(search.floor)
        self.vector, self.rest, self.wanted, self.marks = vector[:size], vector[size:], search.wanted, marks

    def count(self) -> int:
        """Wait, and return how many there are."""
        return int(self.marks.sum())

    @property
    def like(self) -> Tensor:
        """The vector."""
        return self.vector

    @property
    def parts(self) -> tuple[tuple[Tensor, Tensor], ...]:  # type: ignore[override]
        """The candidates, or the `wanted` largest if there are far more: waits."""
        return streamed(self.vector, self.floor, self.wanted).parts

    def is_finite(self, largest: Tensor | None = None) -> Tensor:
        """Return whether all entries are finite; of those that compete, the largest are enough."""
        competing = self.vector if largest is None else largest
        return competing.isfinite().all() & self.rest.isfinite().all()

    def picking(self, r: int, words: Any, k: int) -> Asking[Picked]:
        """Select, and ask once if there were not fewer than r candidates, and not far more; else twice."""
        vector, room = self.vector, room_for(r, self.vector.numel())
        places = _places(self.marks, room)
        number = self.marks.sum()
        picked, told = _picked(places, vector[places], number.clamp(max=room), r, words, k)
        count, finite, magnitude, *here = yield from ask(number, self.is_finite(told[0]), told[1], *picked)
        if not r <= int(count) <= room:
            picked, told = _picked(*_best(vector, r), None, r, words, k)
            finite, magnitude, *here = yield from ask(self.is_finite(told[0]), told[1], *picked)
        self.arrive(int(count), bool(finite))
        return Picked(*picked, float(magnitude), (here[0], here[1]))


def streamed(vector: Tensor, floor: float, wanted: int | None) -> Candidates:
    """Return the entries at or above the floor, or the `wanted` largest of them, in bounded memory.

    There may be more than `wanted`, never fewer of the largest. Waits for the device in every block.
    """
    positions, values, held = [vector.new_empty(0, dtype=torch.int64)], [vector.new_empty(0)], 0
    bound = torch.full((), floor, dtype=torch.float64, device=vector.device).to(vector.dtype)
    strict = False
    for begin in range(0, vector.numel(), BLOCK):
        block = vector[begin : begin + BLOCK]
        below = block.abs() <= bound if strict else block.abs() < bound
        found = (~below).nonzero()[:, 0]
        positions.append(found + begin)
        values.append(block[found])
        held += found.numel()
        if wanted is not None and held > 2 * wanted + 64:
            at, value = torch.cat(positions), torch.cat(values)
            best, bound = _largest_of(value, wanted)
            positions, values, held = [at[best]], [value[best]], wanted
            strict = True  # ties go to the earlier entry
    return Candidates(((torch.cat(positions), torch.cat(values)),), floor)


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that include the r largest entries, without a previous guess: a sample guesses."""
    sample = fetch(vector[:: stride(vector.numel())].double())[0].numpy()
    found = scan(vector, Search(quantiles(sample, r, vector.numel())[0], r))
    return found if found.hold(r) else scan(vector, Search(0.0, r))


def pick(candidates: Candidates, r: int, words: Any, k: int) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, is a set bit of `words`."""
    if isinstance(candidates, Pending):
        return answer([candidates.picking(r, words, k)])[0]
    positions, values = (torch.cat(column) for column in zip(*candidates.parts, strict=True))
    picked, told = _picked(positions.to(torch.int64), values, None, r, words, k)
    magnitude, *here = fetch(told[1], *picked)
    return Picked(*picked, float(magnitude), (here[0], here[1]))


def _picked(
    positions: Tensor, values: Tensor, number: Tensor | None, r: int, words: Any, k: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the drawn ones of the r largest of the first `number`; also the r largest, and the r-th magnitude."""
    best, magnitude = _largest_of(values, r, number)
    largest = values[best]
    if k < r:  # drawn while a device is at work
        best = best[send(draws.set_bits(words() if callable(words) else words, k), values.device)]
    return (positions[best], values[best]), (largest, magnitude)


def _best(vector: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return positions and values of the r largest, without a wait: the best so far, a block at a time."""
    positions, values = vector.new_empty(0, dtype=torch.int64), vector.new_empty(0)
    for begin in range(0, vector.numel(), step := max(BLOCK, 2 * r)):
        block = vector[begin : begin + step]
        here = torch.arange(begin, begin + block.numel(), device=vector.device)
        positions, values = torch.cat([positions, here]), torch.cat([values, block])
        if values.numel() > r:
            best, _ = _largest_of(values, r)
            positions, values = positions[best], values[best]
    return positions, values


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


def _largest_of(values: Tensor, r: int, number: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the places of the r largest magnitudes of the first `number`, ascending, and the r-th magnitude.

    Ties go to the earlier.
    """
    magnitude = _magnitude(values)
    if number is not None:
        magnitude.masked_fill_(torch.arange(values.numel(), device=values.device) >= number, -1.0)
    threshold = magnitude.topk(r, sorted=False).values.min()
    above, tied = magnitude > threshold, magnitude == threshold
    chosen = above | (tied & (tied.cumsum(0) <= r - above.sum()))
    return _places(chosen, r), threshold


@functools.cache
def _has_static() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::nonzero_static", "CUDA")


def _places(marks: Tensor, room: int) -> Tensor:
    """Return the places that are marked; where that would be a wait, as many as there is room for."""
    if late(marks):
        return torch.nonzero_static(marks, size=room, fill_value=0)[:, 0]
    return marks.nonzero()[:, 0]


def _magnitude(values: Tensor) -> Tensor:
    """Return comparable magnitudes: NaN counts as Inf."""
    return values.abs().nan_to_num(nan=math.inf, posinf=math.inf)
