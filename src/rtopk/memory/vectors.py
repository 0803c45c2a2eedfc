"""The vectors of a memory: how a step is taken back without a copy, and how sums are known to be finite."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rtopk import kernels
from rtopk.kernels import require_finite
from rtopk.kernels.search import GradientPart, Search
from rtopk.sparse import SparseVector


class Undoable:
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
        self._headroom = Headroom()
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
        self._set(fit(state, self._names, self.residual))
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


class Headroom:
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


def accept(gradient: Tensor, memory: Tensor | None) -> Tensor:
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


def held(residual: Tensor | None, sent: SparseVector) -> Tensor:
    """Return the residual if what was sent can be subtracted from it."""
    if residual is None or sent.size != residual.numel():
        what = "nothing yet" if residual is None else f"{residual.numel()} entries"
        raise ValueError(f"cannot subtract a vector of size {sent.size}: the residual holds {what}")
    return residual


def take_out(residual: Tensor, sent: SparseVector, headroom: Headroom) -> None:
    """Subtract what was sent from the residual; refuse values that would make it overflow."""
    if kernels.reaches(sent.at_hand, 2.0**100):
        require_finite(sent.values, "sent values")
        require_finite(residual[sent.indices] - sent.values, "residual - sent values")
        headroom.forget()
    kernels.subtract_(residual, sent.indices, sent.values)


def fit(state: Mapping[str, Tensor], names: tuple[str, ...], current: Tensor | None) -> dict[str, Tensor]:
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
