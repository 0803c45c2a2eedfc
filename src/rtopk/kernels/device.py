"""Triton programs for fp32 vectors on CUDA and ROCm devices; the gradient may also be fp16 or bf16.

1. One pass (`sweep`) adds the gradient and compares the sums with a bound: a bit for each entry, a count for each
   block. A prefix sum of the counts says where each block's candidates go, and `gather` stores them in order.
2. The r-th magnitude is found exactly: the keys are counted by their high 11 bits, then those of the bin that holds
   the r-th by the next 10, then by the last 10.
3. The r largest, ties to the lower index, are stored in order of position; the drawn ranks are taken from them.
4. The host gets the k entries, the r-th magnitude, the number of candidates and the largest key in one copy.

The device decides by itself whether the candidates are enough. If the guess was too high, or so low that they do
not fit into the room for them, steps 2 and 3 look at the vector. So a selection asks the device once, whatever the
data. Nothing here imports triton before it is needed. With TRITON_INTERPRET=1 and RTOPK_BACKEND=triton the programs
run on the CPU, slowly.
"""

import functools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels import draws, plain
from rtopk.kernels.host import Asking, ask, fetch, send
from rtopk.kernels.search import Candidates, GradientPart, Motion, Pending, Picked, Search, room_for

BLOCK = 4096  # entries of a program
# The shift and the number of the bits of a key that are counted, highest first.
LEVELS = ((20, 11), (10, 10), (0, 10))
BINS = 1 << 11
# No fused multiply-add: the CPU rounds every operation. From triton 3.10 on this is the default.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
# The one program that gets positions from outside: its assertion is compiled in, without checks of arithmetic.
ASSERTS = {"subtract": {"debug": True, "sanitize_overflow": False}}
OLDEST = (3, 5)  # triton; 3.9 is what the tests run with
GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)
INFINITE = 0x7F800000  # the key of Inf; those of NaN are above it

batch = plain.batch
zeros = plain.zeros
reaches = plain.reaches
union = plain.union
pick = plain.pick


def serves(*vectors: Tensor) -> bool:
    """Serve contiguous fp32 vectors of one device, if triton is there; with a first one in fp32, also half ones."""
    if not vectors or not (vectors[0].is_cuda or (vectors[0].is_cpu and _interpreted())):
        return False
    return (
        vectors[0].dtype == torch.float32
        and all(v.dtype in GRADIENTS and v.is_contiguous() and v.dim() == 1 for v in vectors)
        and all(v.device == vectors[0].device for v in vectors)
        and _has_triton()
    )


def late(vector: Tensor) -> bool:
    """Return True: the device alone knows what it has found."""
    return True


def accumulate_(
    residual: Tensor,
    gradient: Tensor,
    search: Search | None,
    velocity: Tensor | None,
    momentum: float,
    scale: float,
    decay: float,
) -> Candidates | None:
    """Add the gradient to the residual, or to the velocity and that to the residual; note the candidates."""
    notes = Notes(residual, search)
    keep = decay if velocity is None else momentum
    speeds = None if velocity is None else (velocity, velocity)
    notes.sweep(residual, residual, gradient, speeds=speeds, keep=keep, scale=scale)
    return None if search is None else notes.found(residual, search)


def add_to(
    out: Tensor,
    residual: Tensor,
    parts: Sequence[GradientPart],
    notes: "Notes | None",
    motion: Motion | None,
) -> list[GradientPart]:
    """Write the sums of some parts to `out`, with notes in the same pass; return those that are not served."""
    if notes is None:
        return list(parts)
    options: dict[str, Any] = {} if motion is None else {"speeds": motion[:2], "keep": motion[2]}
    rest = []
    for begin, part in parts:
        if part.is_contiguous() and serves(out, part.detach().view(-1)):
            notes.sweep(out, residual, part.detach().view(-1), begin, begin + part.numel(), **options)
        else:
            rest.append((begin, part))
    return rest


def scan(vector: Tensor, search: Search) -> Candidates:
    """Note the entries at or above a floor; NaN and Inf are the largest of all."""
    notes = Notes(vector, search)
    notes.sweep(vector, vector)
    found = notes.found(vector, search)
    assert found is not None
    return found


def noting(vector: Tensor, search: Search) -> "Notes":
    """Return what `add_to` notes in while it adds a gradient part by part, so that no pass follows."""
    return Notes(vector, search)


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that include the r largest entries: those of the whole vector, looked at in `pick`."""
    return Marked(vector, 0.0, r)


def subtract_(vector: Tensor, indices: Tensor, values: Tensor, factor: float) -> None:
    """Subtract values, times a factor, at unique indices.

    Indices in host memory are checked here. On a device an assertion of the program refuses them, as torch's own
    indexing does: nothing is written there, and the next wait raises. To raise here would be to wait.
    """
    if not indices.numel():
        return
    if indices.is_cpu and (int(indices.min()) < 0 or int(indices.max()) >= vector.numel()):
        low, high = int(indices.min()), int(indices.max())
        raise IndexError(f"indices must lie in [0, {vector.numel()}), got {low} to {high}")
    moved = send(indices.contiguous(), vector.device), send(values.contiguous(), vector.device)
    numbers = indices.numel(), vector.numel(), factor
    _launch("subtract", vector, _blocks(indices.numel()), vector, *moved, *numbers, SCALES=factor != 1.0)


class Marked(Pending):
    """Candidates of which the device has noted a bit each, and their number block by block.

    Without marks there are none, and the whole vector is looked at.
    """

    def __init__(
        self,
        vector: Tensor,  # the entries that compete
        floor: float,
        wanted: int | None,
        marks: tuple[Tensor, Tensor, Tensor] | None = None,  # bits, candidates up to each block, state
    ) -> None:
        super().__init__(floor)
        self.vector, self.wanted = vector, wanted
        self.bits: Tensor | None
        self.bits, self.upto, self._state = marks or (
            None,
            _words(vector, 1),
            _words(vector, _programs().STATE),
        )

    def count(self) -> int:
        """Wait, and return how many there are."""
        return int(fetch(self.upto[-1])[0])

    @property
    def like(self) -> Tensor:
        """The vector."""
        return self.vector

    @property
    def parts(self) -> tuple[tuple[Tensor, Tensor], ...]:  # type: ignore[override]
        """The candidates, or the `wanted` largest if there are far more: waits for their number."""
        if self.wanted is not None and len(self) > room_for(self.wanted, self.vector.numel()):
            return (self.largest(self.wanted)[:2],)
        return (self._gathered(len(self)),)

    def is_finite(self) -> Tensor:
        """Return whether the largest key seen is that of a finite entry."""
        return self._state[_programs().PEAK.value] < INFINITE

    def picking(self, r: int, words: Any, k: int) -> Asking[Picked]:
        """Select, and ask once."""
        positions, values, state = self.largest(r)
        if k < r:  # the ranks are drawn while the device works
            ranks = send(draws.set_bits(words() if callable(words) else words, k), positions.device)
            positions, values = positions[ranks], values[ranks]
        told, number, *here = yield from ask(state, self.upto[-1], positions, values)
        peak, key, _ = told.tolist()
        self.arrive(int(number), finite=peak < INFINITE)
        return Picked(positions, values, float(np.int32(key).view(np.float32)), (here[0], here[1]))

    def largest(self, r: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the r largest in order of position, and the state: the largest key, the r-th key, its ties."""
        vector, size, programs = self.vector, self.vector.numel(), _programs()
        room = room_for(r, size)
        places, candidates = self._gathered(room)
        state = self._state.clone()
        state[programs.LEFT.value :].fill_(r)
        histograms = _words(vector, len(LEVELS) * BINS)
        source, numbers = (candidates, vector, self.upto[-1:], state), (size, r, room)
        blocks = _blocks(size)
        for level, (shift, bits) in enumerate(LEVELS):
            histogram, digits = histograms[level * BINS :], {"SHIFT": shift, "BITS": bits}
            _launch("tally", vector, blocks, *source, histogram, *numbers, **digits)
            _launch("narrow", vector, 1, state, histogram, **digits)
        counts = vector.new_empty((2, blocks), dtype=torch.int64)  # all written by `count`
        _launch("count", vector, blocks, *source, counts, *numbers, blocks)
        upto = counts.cumsum(1)
        out = vector.new_empty(r, dtype=torch.int64), vector.new_empty(r)
        _launch("rank", vector, blocks, candidates, places, *source[1:], upto, *out, *numbers, blocks)
        return *out, state

    def _gathered(self, room: int) -> tuple[Tensor, Tensor]:
        """Return the positions and values of the candidates, in arrays with this much room."""
        vector = self.vector
        place = torch.int32 if vector.numel() < 2**31 else torch.int64
        out = vector.new_empty(room, dtype=place), vector.new_empty(room)
        if self.bits is not None:
            _launch("gather", vector, self.upto.numel(), vector, self.bits, self.upto, *out, room)
        return out


class Notes:
    """What the pass notes of a vector for a search, at once or part by part: a bit for each entry that reaches the
    floor, their number in each block, and the largest key.
    """

    def __init__(self, vector: Tensor, search: Search | None) -> None:
        self.floor, self.size = (-1.0, 0) if search is None else (search.floor, search.size or vector.numel())
        self.left = vector.numel()  # entries that have not been looked at
        blocks = 0 if search is None else _blocks(vector.numel())
        sizes = [blocks * BLOCK // 64, blocks, _programs().STATE]
        bits, *rest = torch.split(_words(vector, sum(sizes)), sizes)
        self.words = bits.view(torch.int32), *rest  # bits, counts, state

    def sweep(
        self,
        sums: Tensor,
        vector: Tensor,
        gradient: Tensor | None = None,
        begin: int = 0,
        end: int | None = None,
        speeds: tuple[Tensor, Tensor] | None = None,
        keep: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        """Run the pass over a part of a vector; every part of it is looked at once.

        `speeds` are where the next velocity goes, and the velocity.
        """
        end = vector.numel() if end is None else end
        options = {
            "ADDS": gradient is not None,
            "MOVES": speeds is not None,
            "DECAYS": speeds is None and keep != 1.0,
            "SEARCHES": self.floor >= 0.0,
        }
        tensors = [vector if gradient is None else gradient, *(speeds or (vector, vector))]
        first = begin // BLOCK
        numbers = first, begin, end, self.size, _key(max(0.0, self.floor)), keep, scale
        _launch(
            "sweep", vector, _blocks(end) - first, sums, vector, *tensors, *self.words, *numbers, **options
        )
        self.left -= end - begin

    def look(self, sums: Tensor, begin: int, end: int) -> None:
        """Note a part that was added elsewhere."""
        self.sweep(sums, sums, None, begin, end)

    def found(self, vector: Tensor, search: Search) -> Marked | None:
        """Return the candidates in the vector; None if they are another search's, or parts are missing."""
        if self.left or (self.floor, self.size) != (search.floor, search.size or vector.numel()):
            return None
        bits, counts, state = self.words
        return Marked(vector[: self.size], search.floor, search.wanted, (bits, counts.cumsum(0), state))


def _launch(name: str, like: Tensor, programs: int, *arguments: Any, **options: Any) -> None:
    """Start so many programs on the device of a tensor; nothing waits for them."""
    if not programs:
        return
    if name != "narrow":  # the only one that has no blocks
        options["BLOCK"] = BLOCK
    here: AbstractContextManager[Any] = torch.cuda.device(like.device) if like.is_cuda else nullcontext()
    with here:
        getattr(_programs(), name)[(programs,)](*arguments, **options, **OPTIONS, **ASSERTS.get(name, {}))


def _blocks(size: int) -> int:
    return max(1, -(-size // BLOCK))


def _words(like: Tensor, number: int) -> Tensor:
    """Return integers on the device of a tensor, all zero."""
    return torch.zeros(number, dtype=torch.int64, device=like.device)


@functools.lru_cache(1024)  # mostly the same few limits
def _key(magnitude: float) -> int:
    """Return the key of a magnitude; beyond the largest float it is that of Inf, which no finite entry reaches."""
    with np.errstate(over="ignore"):
        return int(np.float32(magnitude).view(np.int32))


@functools.cache
def _has_triton() -> bool:
    """Return whether triton is there, and as new as the oldest that the programs have been compiled with.

    It is imported, which only tensors on a card cause: on ROCm the package has another name than the module.
    """
    try:
        import triton
    except ImportError:
        return False
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= OLDEST


def _interpreted() -> bool:
    """Return whether triton runs its programs on the CPU, and was chosen to."""
    return os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("RTOPK_BACKEND") == "triton"


@functools.cache
def _programs() -> Any:
    from rtopk.kernels import programs

    return programs
