"""What a node keeps back from one round to the next: the paper's m, or DGC's velocity and accumulation.

A memory serves one vector. `add(gradient)` returns the vector to select from; if given a search, it also notes
the candidates. `subtract(sent)` removes what the other nodes decode, so that rounding and quantisation errors stay
in the memory. After every step: sent + residual = what came in. A rejected gradient changes nothing, to the bit.

Your own memory needs `add`, `subtract`, `state_dict` and `load_state_dict`; the hook undoes a step through the last
two. Optional, and faster: `snapshot` with `restore`, and `put` with `leave_out`, `bring_back` and `go_back`.
`snapshot_of`, `restore` and `give_back` below work with every memory.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.kernels import require_finite
from rtopk.kernels.search import GradientPart, Search
from rtopk.sparse import SparseVector


class Memory(Protocol):
    """Accumulate gradients and remove what was sent."""

    def add(self, gradient: Tensor, search: Search | None = None) -> Tensor:
        """Add a gradient; return the vector to select from: finite, read-only, valid until the next call.

        A memory may note candidates in `search.found`. If it does not, selection takes one more pass.
        """

    def subtract(self, sent: SparseVector) -> None:
        """Remove what was sent."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; a state that does not fit is refused and changes nothing."""


class NoMemory:
    """Forget what was not sent."""

    keeps = False  # what is not sent is dropped

    def add(self, gradient: Tensor, search: Search | None = None) -> Tensor:
        """Return the gradient as it is."""
        kernels.scan_finite(gradient, search, "gradient")
        return gradient

    def subtract(self, sent: SparseVector) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Accept only an empty state."""
        _fit(state, (), None)


class _Undoable:
    """Vectors that a step can be taken back for without a copy: the next ones are written to other memory.

    A gradient can be `put` part by part as it arrives; candidates are noted on the way.
    """

    in_parts = False  # whether a gradient can be `put`
    _names: tuple[str, ...] = ("residual",)

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        if "add" in vars(cls) and "in_parts" not in vars(cls):  # yours may do something else with a gradient
            cls.in_parts = False
        if "state_dict" in vars(cls) and "snapshot" not in vars(cls):  # it keeps more than these vectors
            cls.snapshot = None  # type: ignore[assignment,method-assign]

    def __init__(self) -> None:
        self.residual: Tensor | None = None  # (d,), at least fp32; made by the first gradient
        self._headroom = _Headroom()
        self._kept: dict[str, Tensor] = {}  # what the last snapshot holds: never written to
        self._spare: dict[str, Tensor] = {}  # second vectors, for those who take snapshots
        self._next: dict[str, Tensor] = {}  # what the step will hold, as far as it has been put
        self._waiting: list[GradientPart] = []  # put, and not added yet
        self._entries = 0  # of those
        self._batch = 0  # when there are so many, they are added
        self._size = 0  # of the residual
        self._notes: Any = None  # of the sums, if a search was expected
        self._undoable = False  # a snapshot was taken, and nothing has been added since

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all vectors; empty before the first step."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        self._set(_fit(state, self._names, self.residual))
        self._kept, self._spare = {}, {}
        self._forget_parts()
        self._undoable = False

    def snapshot(self) -> dict[str, Tensor]:
        """Return what `restore` needs; its tensors do not change until the next snapshot.

        On a device the next `add` leaves it to selection to refuse what is not finite: restore if that raises.
        """
        self._undoable = True
        own = self._tensors()
        self._spare |= {name: old for name, old in self._kept.items() if old is not own.get(name)}
        self._kept = own
        self._drop()
        return dict(own)

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Go back to the last snapshot."""
        self._spare |= {name: new for name, new in self._tensors().items() if new is not self._kept.get(name)}
        self._set(snapshot)
        self._undoable = False
        self._drop()
        self._headroom.forget()

    def expect(self, search: Search | None) -> None:
        """Look for the candidates of a search in what is `put` from now on, where that spares a pass."""
        self._notes = None if self.residual is None else kernels.noting(self.residual, search)

    def put(self, begin: int, part: Tensor) -> None:
        """Add the part of a gradient that starts at `begin`. After a snapshot: put all parts, then `add(None)`.

        A part must not change until then: where that is faster, several are added together.
        """
        if not self._next:
            self._prepare()
        end = begin + part.numel()
        if not 0 <= begin <= end <= self._size:
            raise ValueError(f"a part must lie in [0, {self._size}), got {begin} to {end}")
        self._waiting.append((begin, part))
        self._entries += end - begin
        if self._entries >= self._batch:
            self._put_waiting()

    def leave_out(self, begin: int, end: int) -> None:
        """Put nothing in [begin, end): these entries are zero in this step, and `bring_back` returns them."""
        self._prepare()
        self._put_waiting()  # something may have been put here
        for tensor in self._next.values():
            tensor[begin:end] = 0.0
        if self._notes is not None:
            self._notes.look(self._next["residual"], begin, end)

    def bring_back(self, begin: int, end: int) -> None:
        """Add what the last snapshot has in [begin, end), which this step left out."""
        for name, tensor in self._tensors().items():
            tensor[begin:end] += self._kept[name][begin:end]
        self._headroom.forget()

    def go_back(self, begin: int, end: int) -> None:
        """Restore [begin, end) alone to the last snapshot."""
        for name, tensor in self._tensors().items():
            tensor[begin:end] = self._kept[name][begin:end]
        self._headroom.forget()

    def _put_waiting(self) -> None:
        parts, self._waiting, self._entries = self._waiting, [], 0
        if parts:
            self._put(parts)

    def _put(self, parts: list[GradientPart]) -> None:
        assert self.residual is not None
        kernels.add_to(self._next["residual"], self.residual, parts, self._notes)

    def _prepare(self) -> None:
        if self.residual is None:
            raise ValueError("put needs a residual: add a first gradient, or load a state")
        if not self._next:
            self._next = {name: self._other(name) for name in self._names}
            self._batch, self._size = kernels.batch(self.residual), self.residual.numel()

    def _adopt(self, search: Search | None, name: str) -> Tensor:
        """Continue with what was put; the search for candidates also checks that the sums are finite.

        On a device, selection finds out (`kernels.scan_finite`): whoever puts parts goes back to the snapshot then.
        """
        if not self._next:
            raise ValueError("add(None) needs a gradient that was put, got none")
        self._put_waiting()
        moved, notes = self._next, self._notes
        self._next, self._notes = {}, None
        kernels.scan_finite(moved["residual"], search, name, notes)
        self._headroom.forget()
        self._set(moved)
        return moved["residual"]

    def _drop(self) -> None:
        """Forget what was put."""
        self._spare |= self._next
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._next, self._notes = {}, None
        self._waiting, self._entries = [], 0

    def _own(self, name: str, tensor: Tensor) -> Tensor:
        """Return a vector to write to: a copy, if it belongs to a snapshot."""
        return self._other(name).copy_(tensor) if tensor is self._kept.get(name) else tensor

    def _other(self, name: str) -> Tensor:
        assert self.residual is not None
        return self._spare.pop(name) if name in self._spare else kernels.zeros(self.residual)

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in self._names}
        return {} if self.residual is None else found

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self._names:
            setattr(self, name, tensors.get(name))


class ErrorFeedback(_Undoable):
    """Keep what was not sent and add it to the next gradient (the paper's Algorithm 1)."""

    in_parts = True
    decay = 1.0  # the residual is multiplied by it before a gradient is added

    def add(self, gradient: Tensor | None, search: Search | None = None) -> Tensor:
        """Add the gradient to the residual and return the residual; None if it has been `put` already."""
        if gradient is None:
            return self._adopt(search, "residual + gradient")
        gradient = gradient.detach()
        residual = _accept(gradient, self.residual)
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
        residual = self.residual = self._own("residual", _held(self.residual, sent))
        _take_out(residual, sent, self._headroom)
        self._headroom.spend(residual)


class DecayedErrorFeedback(ErrorFeedback):
    """Error feedback with decay: the residual is multiplied by `decay` before each gradient is added."""

    in_parts = False

    def __init__(self, decay: float = 0.95) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        super().__init__()
        self.decay = decay


class MomentumCorrection(_Undoable):
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
        residual = _accept(gradient, self.residual)
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
        residual = self.residual = self._own("residual", _held(self.residual, sent))
        assert self.velocity is not None  # made together with the residual
        _take_out(residual, sent, self._headroom)
        if self.masking:
            self.velocity = self._own("velocity", self.velocity)
            self.velocity.index_fill_(0, sent.indices, 0.0)
        self._headroom.spend(residual, self.velocity)

    def give_back(self, vector: SparseVector) -> None:
        """Add what did not arrive back to the residual; the velocity stays as it is."""
        self.residual = self._own("residual", _held(self.residual, vector))
        kernels.subtract_(self.residual, vector.indices, vector.values, -1.0)
        self._headroom.forget()


MEMORIES: dict[str, Callable[[], Memory]] = {
    "error-feedback": ErrorFeedback,
    "momentum-correction": MomentumCorrection,
    "none": NoMemory,
}


def give_back(memory: Memory, vector: SparseVector) -> None:
    """Return to a memory what it gave up and nobody used."""
    own = getattr(memory, "give_back", None)
    if own is not None:
        own(vector)
    else:
        here = vector.here and (vector.here[0], -vector.here[1])
        memory.subtract(SparseVector(vector.indices, -vector.values, vector.size, here))


def snapshot_of(memory: Memory) -> Mapping[str, Tensor]:
    """Return what a memory holds, for `restore`; its tensors do not change until the next snapshot."""
    own = getattr(memory, "snapshot", None)
    found: Mapping[str, Tensor] = memory.state_dict() if own is None else own()
    return found


def restore(memory: Memory, snapshot: Mapping[str, Tensor]) -> None:
    """Restore a memory to its last snapshot."""
    own = getattr(memory, "snapshot", None) and getattr(memory, "restore", None)
    (memory.load_state_dict if own is None else own)(snapshot)


class _Headroom:
    """Prove that sums stay finite, mostly without reading them.

    If every entry of a gradient is below 2 ** 100, residual below 2 ** 120 and velocity below 2 ** 100, then
    no sum of the next `STEPS` steps reaches 2 ** 127, where fp32 ends (with momentum below 1, the velocity
    grows by a gradient a step and the residual by a velocity). Any other write to them raises torch's version
    counter, and they are checked again.
    """

    STEPS = 1024

    def __init__(self) -> None:
        self._left = 0
        self._seen: tuple[tuple[int, int], ...] | None = None

    def suffices(self, gradient: Tensor, residual: Tensor, velocity: Tensor | None = None) -> bool:
        """Return whether the next sums are certain to be finite; raise ValueError if the gradient is not."""
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
        """Note that we changed them ourselves, by less than a gradient."""
        self._left -= 1
        self._seen = _versions(residual, velocity)

    def forget(self) -> None:
        """Check them again before the next step."""
        self._left = 0


def _versions(*tensors: Tensor | None) -> tuple[tuple[int, int], ...] | None:
    present = [t for t in tensors if t is not None]
    if any(t.is_inference() for t in present):  # these do not count their changes
        return None
    return tuple((t.data_ptr(), t._version) for t in present)


def _accept(gradient: Tensor, memory: Tensor | None) -> Tensor:
    """Return the memory, or a new one, if the gradient fits it."""
    if gradient.dim() != 1 or not gradient.is_floating_point():
        raise ValueError(
            f"gradient must be a 1-D floating-point tensor, got {gradient.dim()}-D {gradient.dtype}; "
            "flatten it first"
        )
    if memory is None:
        return kernels.zeros(gradient)
    if gradient.shape != memory.shape:
        raise ValueError(
            f"gradient must have the {memory.numel()} entries of the residual, got {gradient.numel()}"
        )
    return memory


def _held(residual: Tensor | None, sent: SparseVector) -> Tensor:
    """Return the residual if what was sent can be subtracted from it."""
    if residual is None or sent.size != residual.numel():
        held = "nothing yet" if residual is None else f"{residual.numel()} entries"
        raise ValueError(f"cannot subtract a vector of size {sent.size}: the residual holds {held}")
    return residual


def _take_out(residual: Tensor, sent: SparseVector, headroom: _Headroom) -> None:
    if kernels.reaches(sent.at_hand, 2.0**100):
        require_finite(sent.values, "sent values")
        require_finite(residual[sent.indices] - sent.values, "residual - sent values")
        headroom.forget()
    kernels.subtract_(residual, sent.indices, sent.values)


def _fit(state: Mapping[str, Tensor], names: tuple[str, ...], current: Tensor | None) -> dict[str, Tensor]:
    """Return copies of the named tensors of a state, or nothing for the empty state of a new memory."""
    if set(state) not in (set(), set(names)):
        raise ValueError(
            f"memory state must hold {list(names)} or nothing, got {sorted(state)}: it is of another memory, use "
            "that (memory='error-feedback' has a residual alone, memory='momentum-correction' a velocity too)"
        )
    sizes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = tuple(current.shape) if current is not None else next(iter(sizes.values()), None)
    for name, tensor in state.items():
        if tensor.dim() != 1 or sizes[name] != expected:
            raise ValueError(f"{name} must have shape {expected}, got {sizes[name]}")
        require_finite(tensor, name)
    return {name: _copy(tensor) for name, tensor in state.items()}


def _copy(tensor: Tensor) -> Tensor:
    """Copy to memory as `kernels.zeros` gives it, where it gives the same kind of tensor."""
    copy = kernels.zeros(tensor)
    return copy.copy_(tensor) if copy.dtype == tensor.dtype else tensor.clone()


def clip(vector: Tensor, limit: float) -> Tensor:
    """Return the vector, scaled down to the limit if its norm is larger."""
    norm = float(torch.linalg.vector_norm(vector))
    return vector * (limit / norm) if norm > limit else vector
