"""The hot loops: accumulate a gradient, and find the r largest entries on the way. Everything is exact.

"Larger" means larger magnitude; ties go to the lower index. So the r largest entries are one definite set, the same
in every backend and for any number of threads.

A backend serves one kind of tensor: `cpu` has compiled loops for fp32 in host memory, `triton` has programs for
CUDA and ROCm devices, `torch` serves every other device and dtype. (The last two are in `device.py` and `plain.py`,
because files of their names would shadow the packages.) `backend` chooses one, and is the only place that asks what
kind a tensor is; RTOPK_BACKEND=torch makes it always choose that one. All give the same bits.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rtopk.kernels import cpu, device, draws, plain
from rtopk.kernels.host import answer
from rtopk.kernels.search import Candidates, GradientPart, Motion, Pending, Picked, Search

Words = Any  # bits in words of 64, or a function that returns them


class NotFiniteError(ValueError):
    """An entry is NaN or Inf; `index` is the position of the first one."""

    def __init__(self, name: str, value: float, index: int, size: int) -> None:
        super().__init__(
            f"{name} must be finite, got {value} at index {index} of {size}; "
            "skip this step or lower the learning rate (nothing was changed)"
        )
        self.index = index


class Backend(Protocol):
    """The interface of a backend; every function means the same in each."""

    @property
    def serves(self) -> Callable[..., bool]:
        """Return whether it can work on these vectors."""

    @property
    def zeros(self) -> Callable[[int, torch.dtype, torch.device], Tensor]:
        """Make a vector of zeros."""

    @property
    def late(self) -> Callable[[Tensor], bool]:
        """Return whether what is found in a vector is `Pending`: known only when somebody waits for it."""

    @property
    def reaches(self) -> Callable[[Tensor, float], bool]:
        """Return whether any magnitude is at least a limit, or NaN."""

    @property
    def accumulate_(
        self,
    ) -> Callable[[Tensor, Tensor, Search | None, Tensor | None, float, float, float], Candidates | None]:
        """Add a gradient to a residual and note candidates in the same pass."""

    @property
    def batch(self) -> int:
        """Return how many entries of parts `add_to` should get at once."""

    @property
    def add_to(
        self,
    ) -> Callable[[Tensor, Tensor, Sequence[GradientPart], Any, Motion | None], list[GradientPart]]:
        """Write the sums of a residual and parts of a gradient to another vector, and note candidates.

        Return the parts that this backend does not serve.
        """

    @property
    def noting(self) -> Callable[[Tensor, Search], Any]:
        """Return what to note the candidates of a sum in while it is added part by part; None: nothing."""

    @property
    def scan(self) -> Callable[[Tensor, Search], Candidates]:
        """Note the candidates of a vector; NaN and Inf are among them."""

    @property
    def search_largest(self) -> Callable[[Tensor, int], Candidates]:
        """Return candidates that include the r largest entries, without a previous guess."""

    @property
    def pick(self) -> Callable[[Candidates, int, Words, int], Picked]:
        """Return the drawn ones of the r largest candidates."""

    @property
    def subtract_(self) -> Callable[[Tensor, Tensor, Tensor, float], None]:
        """Subtract values, times a factor, at unique indices."""

    @property
    def union(self) -> Callable[[Sequence[Tensor], int], tuple[Tensor, list[Tensor]]]:
        """Join ascending lists of positions."""


BACKENDS: dict[str, Backend] = {
    "cpu": cpu,
    "triton": device,
    "torch": plain,
}  # the first that serves is taken


def forced() -> str | None:
    """Return the backend that RTOPK_BACKEND names; it is preferred wherever it serves."""
    name = os.environ.get("RTOPK_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"RTOPK_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


_order = sorted(BACKENDS.values(), key=lambda backend: backend is not BACKENDS.get(forced() or ""))


STAND_IN = 1 << 24  # entries; with more, steps without compiled loops take longer than compiling
_stand_in = True


def _serving(*vectors: Tensor) -> Backend:
    for found in _order:  # no generator: this is asked at every turn
        if found.serves(*vectors):
            break
    return found


def _at_work(found: Backend, size: int) -> Backend:
    return plain if found is cpu and _stand_in and size <= STAND_IN and not cpu.ready() else found


def backend(*vectors: Tensor) -> Backend:
    """Return the backend for these vectors; while the loops of `cpu` are being compiled, `torch` stands in."""
    return _at_work(_serving(*vectors), vectors[0].numel())


@contextmanager
def preferring(name: str) -> Iterator[None]:
    """Prefer a backend wherever it serves, within a block: for comparisons. All threads are affected."""
    global _order, _stand_in
    before = _order, _stand_in
    _order, _stand_in = sorted(_order, key=lambda found: found is not BACKENDS[name]), False
    try:
        yield
    finally:
        _order, _stand_in = before


def zeros(like: Tensor) -> Tensor:
    """Allocate the memory of a gradient: zeros, at least fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return _serving(like.new_empty(0, dtype=dtype)).zeros(like.numel(), dtype, like.device)


def reaches(vector: Tensor, limit: float) -> bool:
    """Return whether any magnitude is at least `limit`, or NaN."""
    return bool(vector.numel()) and backend(vector).reaches(vector, limit)


def require_finite(vector: Tensor, name: str) -> None:
    """Raise ValueError if an entry is NaN or Inf, naming the first one."""
    if reaches(vector, math.inf):
        bad = int((~vector.isfinite()).nonzero()[0, 0])
        raise NotFiniteError(name, float(vector[bad]), bad, vector.numel())


def late(search: Search | None, *vectors: Tensor) -> bool:
    """Return whether a pass with this search leaves it to the selection to find out what is not finite."""
    return search is not None and backend(*vectors).late(vectors[0])


def refuse_late(search: Search | None, vector: Tensor, name: str) -> None:
    """Let the selection raise ValueError if an entry of a vector that was just searched is not finite."""
    assert search is not None
    assert isinstance(search.found, Pending)
    search.found.refuse = partial(require_finite, vector, name)


def accumulate_(
    residual: Tensor,
    gradient: Tensor,
    search: Search | None = None,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    scale: float = 1.0,
    decay: float = 1.0,
) -> None:
    """Add the gradient to the residual, or to the velocity and that to the residual.

    With a velocity: velocity <- momentum * velocity + scale * gradient. Without one the residual is multiplied by
    `decay` first. Every operation is rounded. Candidates go to `search.found`.
    """
    moved = (residual, gradient) if velocity is None else (residual, gradient, velocity)
    at_work = backend(*moved)
    if search is not None and search.blind and not at_work.late(residual):
        search = None  # whoever is called here has checked already
    found = at_work.accumulate_(residual, gradient, search, velocity, momentum, scale, decay)
    if search is not None:
        search.found = found


def noting(vector: Tensor, search: Search | None) -> Any:
    """Return the notes for `add_to`, for a search of the sum; None where a scan afterwards takes no longer."""
    if search is None or (search.blind and not late(search, vector)):
        return None
    return backend(vector).noting(vector, search)


def batch(vector: Tensor) -> int:
    """Return how many entries of a gradient's parts to collect before they are added to a vector like this."""
    return backend(vector).batch


def add_to(
    out: Tensor,
    residual: Tensor,
    parts: Sequence[GradientPart],
    notes: Any = None,
    motion: Motion | None = None,
) -> None:
    """Write residual + gradient to `out` for parts of a gradient, which have any shape; note what `scan` would.

    With a motion, momentum * velocity + gradient is written too, and added instead. Every operation is rounded.
    """
    rest = backend(out, residual).add_to(out, residual, parts, notes, motion)
    if rest:
        plain.add_to(out, residual, rest, notes, motion)


def scan(vector: Tensor, search: Search, notes: Any = None) -> Candidates:
    """Return the entries at or above a floor, and note them in `search.found`; `notes` may have them already."""
    known = None if notes is None else notes.found(vector, search)
    search.found = found = backend(vector).scan(vector, search) if known is None else known
    return found


def scan_finite(vector: Tensor, search: Search | None, name: str, notes: Any = None) -> None:
    """Scan a vector, or only check it; raise ValueError if an entry is not finite.

    The search checks the part that it covers: NaN and Inf count as the largest entries. Where to know it would be
    to wait for a device, the selection raises instead: it has to wait anyway.
    """
    if search is None or (search.blind and not late(search, vector)):
        require_finite(vector, name)
        return
    candidates = scan(vector, search, notes)
    if late(search, vector):
        refuse_late(search, vector, name)
        return
    unsearched = vector[vector.numel() if search.size is None else search.size :]
    if any(reaches(part, math.inf) for part in (*(values for _, values in candidates.parts), unsearched)):
        require_finite(vector, name)


def search_largest(vector: Tensor, r: int) -> Candidates:
    """Return candidates that include the r largest entries, without a previous guess."""
    return backend(vector).search_largest(vector, r)


def largest(vector: Tensor, r: int) -> Tensor:
    """Return the positions of the r entries of largest magnitude, ascending."""
    if r == vector.numel():
        return torch.arange(r, device=vector.device)
    return pick(search_largest(vector, r), r, draws.every_bit(r), r).positions


def pick(candidates: Candidates, r: int, words: Words, k: int) -> Picked:
    """Return those of the r largest candidates whose rank, in order of position, is a set bit of `words`.

    `words` may be a function, which is called in parallel with the search for the r-th magnitude.
    """
    if not candidates.hold(r):
        raise ValueError(f"need at least r={r} candidates, got {len(candidates)}")
    if isinstance(candidates, Pending):
        return answer([candidates.picking(r, words, k)])[0]
    return backend(candidates.like).pick(candidates, r, words, k)


def subtract_(vector: Tensor, indices: Tensor, values: Tensor, factor: float = 1.0) -> None:
    """Subtract values, times a factor, at unique indices."""
    backend(vector, values).subtract_(vector, indices, values, factor)


def union(lists: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Return the union of ascending positions below `size`, and for each list its places in the union.

    >>> union([torch.tensor([1, 5]), torch.tensor([0, 5])], 8)
    (tensor([0, 1, 5]), [tensor([1, 2]), tensor([0, 2])])
    """
    return _at_work(_order[0], size).union(lists, size)
