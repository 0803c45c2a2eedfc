"""The tensors that compete for one selection: all of a model, or one parameter.

A group collects the gradients of its tensors, makes the payload, and can undo the whole step: the previous state
of its memory is kept until the exchange has succeeded on every rank. A memory that accepts gradients in parts gets
each tensor's as it arrives. Otherwise (clipping, loss scaling, other memories) they are joined first.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise

import torch
from torch import Tensor

from rtopk.aggregate import Decoded
from rtopk.exchange import OWNER, Exchange
from rtopk.kernels import NotFiniteError
from rtopk.kernels.host import Asking, send
from rtopk.layout import Layout
from rtopk.memory import clip, give_back, restore, snapshot_of
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier

SPARSE_BELOW = 1 / 8  # of d; above it a dense mean is cheaper than the union of the positions


class TensorNotFiniteError(ValueError):
    """A gradient, or its sum with the memory, is not finite; `name` is the first such tensor."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not finite")
        self.name = name


class Group:
    """Named tensors, the sparsifier and the exchange of their joint vector, and how to undo a step."""

    def __init__(
        self,
        layout: Layout,
        sparsifier: Sparsifier,
        exchange: Exchange,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.sparsifier = sparsifier
        self.exchange = exchange
        self.dtype = dtype
        self._device = device
        self.bounds = dict(
            zip(layout.names, zip(layout.offsets, layout.offsets[1:], strict=False), strict=True)
        )
        self._offsets = torch.tensor(layout.offsets)
        starts = self._offsets[:-1]
        self._starts = send(starts, device)  # of the tensors, where the gradients are
        self._away = self._starts is not starts  # not in host memory
        # Allocates the memory, so that a state is complete from the start.
        sparsifier.memory.add(torch.zeros(layout.size, dtype=dtype, device=device))
        self._gradient = torch.empty(0)  # of several tensors, joined; of one tensor, in place
        self._in_parts = False  # in this round the memory gets each gradient as it arrives
        self._before: Mapping[str, Tensor] | None = None  # the memory before this step

    def begin(self, plain: bool) -> None:
        """Begin a round; `plain`: gradients are used unchanged."""
        self.rollback()  # a round that was interrupted
        self._in_parts = plain and getattr(self.sparsifier.memory, "in_parts", False)
        if self._in_parts:
            self._before = snapshot_of(self.sparsifier.memory)

    def expect(self, step: int) -> None:
        """Tell a memory that gets each gradient as it arrives what this step looks for; the density is known."""
        if self._in_parts:
            self.sparsifier.expect(step)

    def put(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a tensor; it must not change until `stages`."""
        begin, end = self.bounds[name]
        if self._in_parts:
            self.sparsifier.memory.put(begin, gradient)  # type: ignore[attr-defined]
        elif len(self.bounds) == 1:
            self._gradient = gradient.reshape(-1).to(self.dtype)
        else:
            if not self._gradient.numel():
                self._gradient = torch.zeros(self.layout.size, dtype=self.dtype, device=gradient.device)
            self._gradient[begin:end].view(gradient.shape).copy_(gradient)

    def stages(
        self, step: int, scale: float, idle: AbstractSet[str], clip_norm: float | None = None
    ) -> Asking[Tensor]:
        """Return the payload of the gradients, divided by `scale` and clipped; ask for what a device has found.

        The memory of `idle` tensors, which took no part in this step, is neither sent nor changed.
        """
        spans = [self.bounds[name] for name in self.layout.names if name in idle]
        try:
            if self._in_parts:
                return (yield from self._stages_of_parts(spans, step))
            for idle_name in idle & self.bounds.keys():
                shape = self.layout.shapes[self.layout.names.index(idle_name)]
                self.put(idle_name, torch.zeros(shape, dtype=self.dtype, device=self._device))
            gradient = self._gradient
            if scale != 1.0:  # by a tensor: CUDA multiplies by the inverse of a number
                gradient = gradient / torch.full_like(gradient[:1], scale)
            if clip_norm is not None:
                gradient = clip(gradient, clip_norm)
            self._before = snapshot_of(self.sparsifier.memory)
            without = self._stages_without(spans, gradient, step) if spans else None
            return (yield from without or self.sparsifier.stages(gradient, step))
        except ValueError as error:
            name = self._not_finite(error)
            if name is None:
                raise
            raise TensorNotFiniteError(name) from error

    def _not_finite(self, error: ValueError) -> str | None:
        """Return the tensor that an error is about; a memory from elsewhere may not say that it is about one."""
        if isinstance(error, NotFiniteError):
            index = error.index
        else:
            bad = (~self._gradient.isfinite()).nonzero()
            if not bad.numel():
                return None
            index = int(bad[0, 0])
        return next(name for name, (_, end) in self.bounds.items() if index < end)

    def _stages_of_parts(self, spans: list[tuple[int, int]], step: int) -> Asking[Tensor]:
        """Compress gradients that the memory has already; what it holds of some spans is set aside."""
        memory = self.sparsifier.memory
        for span in spans:
            memory.leave_out(*span)  # type: ignore[attr-defined]
        payload = yield from self.sparsifier.stages(None, step)
        for span in spans:
            memory.bring_back(*span)  # type: ignore[attr-defined]
        return payload

    def _stages_without(self, spans: list[tuple[int, int]], gradient: Tensor, step: int) -> Asking[Tensor]:
        """Compress while the memory of some spans is set aside."""
        memory = self.sparsifier.memory
        before, without, gradient = memory.state_dict(), memory.state_dict(), gradient.clone()
        for begin, end in spans:
            for tensor in (gradient, *without.values()):
                tensor[begin:end] = 0.0
        memory.load_state_dict(without)
        payload = yield from self.sparsifier.stages(gradient, step)
        after = memory.state_dict()
        for name, tensor in after.items():
            for begin, end in spans:
                tensor[begin:end] += before[name][begin:end]
        memory.load_state_dict(after)
        return payload

    def keep_idle(self, idle: AbstractSet[str]) -> None:
        """Undo this step for tensors that no rank used: with few bits, what was sent for them is not zero."""
        spans = [self.bounds[name] for name in self.layout.names if name in idle]
        go_back = getattr(self.sparsifier.memory, "go_back", None) if self._in_parts else None
        if go_back is not None:
            for span in spans:
                go_back(*span)
        elif spans and self._before:
            state = self.sparsifier.memory.state_dict()
            for name, tensor in state.items():
                for begin, end in spans:
                    tensor[begin:end] = self._before[name][begin:end]
            self.sparsifier.memory.load_state_dict(state)

    def blank(self, step: int) -> Tensor:
        """Return the payload of a rank that cannot send its own."""
        size = self.layout.size
        return self.sparsifier.codec.blank(size, self.sparsifier.entries(size, step))

    def is_sparse(self, step: int) -> bool:
        """Return whether the mean of a step stays sparse, which is cheaper if few entries arrive."""
        size = self.layout.size
        return self.exchange.most(self.sparsifier.entries(size, step)) < SPARSE_BELOW * size

    def clear(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients to zero, as `write` expects for a sparse mean."""
        torch._foreach_zero_([gradients[name] for name in self.bounds])

    def write(
        self,
        mean: Tensor | SparseVector | Decoded,
        scale: float,
        gradients: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
    ) -> None:
        """Write the mean, times `scale`, into the gradients; for a sparse mean they must be `clear`ed.

        `held` is the mean of an earlier exchange; it is added to a dense mean.
        """
        if isinstance(mean, Decoded):
            if self._limits(gradients) or not self._away:
                mean = mean.averaged()
            else:
                cuts = sum(torch.searchsorted(vector.indices, self._offsets) for vector in mean.vectors)
                self._scatter(*mean.averaged_on(self._device), torch.as_tensor(cuts), scale, gradients)
                return
        if isinstance(mean, Tensor) and (names := self.bounds.keys() & held.keys()):
            mean = send(mean, self._device)  # where the held ones are
            for name in names:
                self._part(mean, name, held[name]).add_(held[name] / scale)
        self._keep_excess_(mean, scale, gradients)
        if isinstance(mean, Tensor):
            if scale != 1.0:
                mean = mean * scale
            mean = send(mean, self._device)  # one copy for all tensors
            for name, (begin, end) in self.bounds.items():
                gradients[name].copy_(mean[begin:end].view(gradients[name].shape))
            return
        there = [send(part, self._device) for part in (mean.indices, mean.values)]
        self._scatter(there[0], there[1], self._cuts(mean), scale, gradients)

    def _scatter(
        self, places: Tensor, values: Tensor, cuts: Tensor, scale: float, gradients: Mapping[str, Tensor]
    ) -> None:
        """Write values at ascending places, which `cuts` (in host memory) divides among the tensors."""
        numbers = send(cuts.diff(), self._device)
        within = places - torch.repeat_interleave(self._starts, numbers, output_size=places.numel())
        if scale != 1.0:
            values = values * scale
        for (name, (begin, end)), (first, last) in zip(
            self.bounds.items(), pairwise(cuts.tolist()), strict=True
        ):
            if first == last:
                continue
            gradient = gradients[name]
            flat = gradient.view(-1) if gradient.is_contiguous() else gradient.new_zeros(end - begin)
            flat.scatter_(0, within[first:last], values[first:last].to(flat.dtype))
            if not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))

    def _cuts(self, mean: SparseVector) -> Tensor:
        """Return where each tensor's entries begin among those of a sparse mean."""
        return torch.searchsorted(mean.indices, self._offsets)

    def _limits(self, gradients: Mapping[str, Tensor]) -> list[float]:
        """Return the largest number of each gradient's dtype; nothing if no mean can exceed one."""
        limits = [torch.finfo(gradients[name].dtype).max for name in self.bounds]
        return limits if min(limits) < torch.finfo(torch.float32).max else []

    def _keep_excess_(
        self, mean: Tensor | SparseVector, scale: float, gradients: Mapping[str, Tensor]
    ) -> None:
        """Clamp the mean to the range of the gradients' dtypes (65,504 in fp16); the excess goes to the residual.

        Every rank puts the same excess back, and its mean over the ranks is the excess.
        """
        limits = self._limits(gradients)
        if not limits:
            return
        values = mean if isinstance(mean, Tensor) else mean.values
        cuts = self.layout.offsets if isinstance(mean, Tensor) else self._cuts(mean).tolist()
        for limit, here in zip(limits, (slice(*span) for span in pairwise(cuts)), strict=True):
            bounded = values[here].clamp(-limit / scale, limit / scale)
            excess = values[here] - bounded
            over = excess.nonzero()[:, 0]
            if over.numel():
                values[here] = bounded
                places = over + here.start if isinstance(mean, Tensor) else mean.indices[here][over]
                self._give_back(places, excess[over])

    def put_back(self, held: Mapping[str, Tensor], scale: float) -> None:
        """Return unused means to the residual: all ranks do, and the mean over them is the same."""
        for name in self.bounds.keys() & held.keys():
            flat = (held[name] / scale).reshape(-1)
            self._give_back(torch.arange(flat.numel(), device=flat.device) + self.bounds[name][0], flat)

    def _give_back(self, places: Tensor, values: Tensor) -> None:
        here = places, values.to(self.dtype)
        there = [send(part, self._device) for part in here]
        known = None if there[0] is places else here
        give_back(self.sparsifier.memory, SparseVector(there[0], there[1], self.layout.size, known))

    def _part(self, vector: Tensor, name: str, like: Tensor) -> Tensor:
        begin, end = self.bounds[name]
        return vector[begin:end].view(like.shape)

    def rollback(self) -> None:
        """Restore the memory to what it was before this round."""
        if self._before is not None:
            restore(self.sparsifier.memory, self._before)
        self._before = None
        self.exchange.rollback()

    def commit(self) -> None:
        """Make this step final."""
        self._before = None
        self.exchange.commit()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the memory as of the last step that is final: kind -> parameter -> tensor."""
        # What the current step has sent may never arrive.
        memory = self.sparsifier.memory.state_dict() if self._before is None else self._before
        return {
            kind: {name: part.clone() for name, part in self.layout.unflatten(vector).items()}
            for kind, vector in {**memory, **self.exchange.state()}.items()
        }

    def fit(self, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the flat memory of a state, checked; changes nothing."""
        own = self.sparsifier.memory.state_dict()
        if set(state) - {OWNER} != set(own):
            raise ValueError(f"state holds {sorted(state)}, this memory needs {sorted(own)}; use its options")
        # What an owner kept (exchange="all-reduce") fits every exchange: it goes back to the owner's memory.
        flat = {kind: self.layout.flatten(tensors) for kind, tensors in state.items()}
        flat = {kind: vector.to(own.get(kind, vector)) for kind, vector in flat.items()}
        for kind, vector in flat.items():
            if not bool(vector.isfinite().all()):
                raise ValueError(f"{kind} of the state is not finite; use an older checkpoint")
        return flat

    def load(self, flat: Mapping[str, Tensor]) -> None:
        """Continue from what `fit` returned."""
        self.commit()  # an interrupted round is over
        self.sparsifier.memory.load_state_dict({kind: v for kind, v in flat.items() if kind != OWNER})
        returned = self.exchange.load({kind: v for kind, v in flat.items() if kind == OWNER})
        if returned is not None:
            self._give_back(returned.indices.to(self._device), returned.values.to(self._device))
