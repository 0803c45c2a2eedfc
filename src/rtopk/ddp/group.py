"""The tensors that compete for one selection: all of a model, or one parameter.

A group takes the gradients of its tensors, makes the payload, and can take the whole step back: what its
memory held before is kept until the exchange has succeeded on every rank. With plain error feedback each
gradient is added, as it comes, to the residual in a second buffer, and the two change places in the end. All
else (clipping, loss scaling, momentum correction, tensors without a part) takes copies first.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.aggregate import Mean, RunningMean, average_sparse
from rtopk.layout import Layout
from rtopk.memory import ErrorFeedback, clip
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier

SPARSE_BELOW = 1 / 8  # of d; above it a dense mean is cheaper than the union of the positions


class Group:
    """Named tensors, the sparsifier of their joint vector, and the way back."""

    def __init__(
        self, layout: Layout, sparsifier: Sparsifier, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.sparsifier = sparsifier
        self.dtype = dtype
        self.bounds = dict(
            zip(layout.names, zip(layout.offsets, layout.offsets[1:], strict=False), strict=True)
        )
        self._offsets = torch.tensor(layout.offsets)
        # Makes the memory, so that a state is complete from the start.
        sparsifier.memory.add(torch.zeros(layout.size, dtype=dtype, device=device))
        self._gradient = torch.empty(0)  # several tensors' side by side; one tensor's where it lies
        self._sums = False  # this round adds to the residual at once, in `_spare`
        self._spare: Tensor | None = None  # the second buffer
        self._before: dict[str, Any] | None = None  # the memory before this step
        self._kept: dict[str, Tensor] = {}  # buffers for copies of its tensors, made once

    def begin(self, plain: bool) -> None:
        """Begin a round; `plain`: every tensor takes part, and gradients are used as they come."""
        self.rollback()  # a round that was broken off
        memory = self.sparsifier.memory
        residual = memory.residual if plain and type(memory) is ErrorFeedback else None
        self._sums = residual is not None and residual.dtype == self.dtype and kernels.compilable(residual)
        if residual is not None and self._sums and self._spare is None:
            self._spare = kernels.zeros(residual)

    def put(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a tensor; it must stay as it is until `compress`."""
        begin, end = self.bounds[name]
        if self._sums:
            buffers = self._tensors()["residual"], cast(Tensor, self._spare)
            residual, total = (self._part(buffer, name, gradient) for buffer in buffers)
            torch.add(residual, gradient, out=total)
        elif len(self.bounds) == 1:
            self._gradient = gradient.reshape(-1).to(self.dtype)
        else:
            if not self._gradient.numel():
                self._gradient = torch.zeros(self.layout.size, dtype=self.dtype, device=gradient.device)
            self._gradient[begin:end].view(gradient.shape).copy_(gradient)

    def compress(
        self, step: int, scale: float, idle: Collection[str], clip_norm: float | None = None
    ) -> Tensor:
        """Return the payload of the gradients, divided by `scale` and clipped.

        The memory of `idle` tensors, which took no part in this step, is neither sent nor changed.
        """
        if self._sums:
            self._before = dict(vars(self.sparsifier.memory))
            return self.sparsifier.compress_sum(cast(Tensor, self._spare), step)
        gradient = self._gradient if scale == 1.0 else self._gradient / scale
        if clip_norm is not None:
            gradient = clip(gradient, clip_norm)
        self._remember()
        spans = [self.bounds[name] for name in self.layout.names if name in idle]
        if not spans:
            return self.sparsifier.compress(gradient, step)
        if gradient is self._gradient:
            gradient = gradient.clone()
        for begin, end in spans:
            gradient[begin:end] = 0.0
            for tensor in self._tensors().values():
                tensor[begin:end] = 0.0
        payload = self.sparsifier.compress(gradient, step)
        for name, tensor in self._tensors().items():
            for begin, end in spans:
                tensor[begin:end] = self._kept[name][begin:end]
        return payload

    def blank(self, step: int) -> Tensor:
        """Return a payload of the size that this step's has on every rank, saying nothing."""
        codec, size = self.sparsifier.codec, self.layout.size
        return torch.zeros(codec.capacity(size, self.sparsifier.entries(size, step)), dtype=torch.uint8)

    def culprit(self) -> str | None:
        """Return the first tensor whose gradient, or memory with it, is not finite."""
        taken = cast(Tensor, self._spare) if self._sums else self._gradient
        for vector in (taken, *self._tensors().values()):
            for name, (begin, end) in self.bounds.items():
                if not bool(vector[begin:end].isfinite().all()):
                    return name
        return None

    def is_sparse(self, step: int, ranks: int) -> bool:
        """Say whether the mean of a step is kept sparse, which is cheaper if few entries arrive."""
        size = self.layout.size
        return ranks * self.sparsifier.entries(size, step) < SPARSE_BELOW * size

    def clear(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients to zero, which `write` counts on for a sparse mean."""
        for name in self.bounds:
            gradients[name].zero_()

    def mean(
        self, payloads: Sequence[Tensor], sparse: bool, mean: Mean, weights: Sequence[float] | None = None
    ) -> Tensor | SparseVector:
        """Decode the ranks' payloads and return their mean; a dense one holds one decoded payload at a time."""
        decode = partial(self.sparsifier.codec.decode, size=self.layout.size)
        if sparse:
            return average_sparse([decode(payload) for payload in payloads], mean, weights)
        running = RunningMean(self.layout.size, mean, weights is not None)
        for rank, payload in enumerate(payloads):
            running.add(decode(payload), 1.0 if weights is None else weights[rank])
        return running.result()

    def write(
        self,
        mean: Tensor | SparseVector,
        scale: float,
        gradients: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
    ) -> None:
        """Put the mean, times `scale`, in the place of the gradients; for a sparse one they are `clear`ed.

        `held` is what gradients were before; it is added, to a dense mean.
        """
        if isinstance(mean, Tensor):
            for name in self.bounds.keys() & held.keys():
                self._part(mean, name, held[name]).add_(held[name] / scale)
        self._keep_excess_(mean, scale, gradients)
        if isinstance(mean, Tensor):
            if scale != 1.0:
                mean = mean * scale
            for name, (begin, end) in self.bounds.items():
                gradients[name].copy_(mean[begin:end].view(gradients[name].shape))
            return
        values = mean.values if scale == 1.0 else mean.values * scale
        for (name, (begin, end)), here in zip(self.bounds.items(), self._spans(mean), strict=True):
            gradient = gradients[name]
            flat = gradient.view(-1) if gradient.is_contiguous() else gradient.new_zeros(end - begin)
            places = (mean.indices[here] - begin).to(flat.device)
            flat.scatter_(0, places, values[here].to(flat))
            if not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))

    def _spans(self, mean: SparseVector) -> list[slice]:
        """Return where each tensor's entries lie among those of a sparse mean."""
        cuts = torch.searchsorted(mean.indices, self._offsets.to(mean.indices.device)).tolist()
        return [slice(begin, end) for begin, end in pairwise(cuts)]

    def _keep_excess_(
        self, mean: Tensor | SparseVector, scale: float, gradients: Mapping[str, Tensor]
    ) -> None:
        """Bound the mean by what the gradients' dtypes hold (65,504 in fp16), and keep the rest in the residual.

        Every rank puts the same excess back, and the mean over ranks of that is the excess.
        """
        values = mean if isinstance(mean, Tensor) else mean.values
        limits = {name: torch.finfo(gradients[name].dtype).max for name in self.bounds}
        widest = torch.finfo(values.dtype).max
        if all(limit >= widest for limit in limits.values()):
            return
        spans = (
            [slice(*span) for span in self.bounds.values()] if isinstance(mean, Tensor) else self._spans(mean)
        )
        residual = self._tensors().get("residual")
        for limit, here in zip(limits.values(), spans, strict=True):
            bounded = values[here].clamp(-limit / scale, limit / scale)
            excess = values[here] - bounded
            if not bool(excess.any()):
                continue
            values[here] = bounded
            if residual is not None:
                places = here if isinstance(mean, Tensor) else mean.indices[here]
                residual[places] += excess.to(residual)

    def put_back(self, held: Mapping[str, Tensor], scale: float) -> None:
        """Return means that will not be used to the residual: all ranks do, and the mean over them is the same."""
        residual = self._tensors().get("residual")
        if residual is not None:
            for name in self.bounds.keys() & held.keys():
                self._part(residual, name, held[name]).add_(held[name] / scale)

    def _part(self, vector: Tensor, name: str, like: Tensor) -> Tensor:
        begin, end = self.bounds[name]
        return vector[begin:end].view(like.shape)

    def rollback(self) -> None:
        """Put the memory back to what it was before `compress`."""
        if self._before is None:
            return
        held = vars(self.sparsifier.memory)
        held.update(self._before)
        if not self._sums:
            for name, tensor in self._tensors().items():
                tensor.copy_(self._kept[name])
        self._before = None

    def commit(self) -> None:
        """Make this step final."""
        if self._before is not None and self._sums:
            self._spare = self._before["residual"]
        self._before = None

    def _tensors(self) -> dict[str, Tensor]:
        held = vars(self.sparsifier.memory)
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    def _remember(self) -> None:
        self._before = dict(vars(self.sparsifier.memory))
        for name, tensor in self._tensors().items():
            if name not in self._kept:
                self._kept[name] = torch.empty_like(tensor)
            self._kept[name].copy_(tensor)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the memory as of the last step that is final: kind -> parameter -> tensor."""
        held = vars(self.sparsifier.memory)
        now = dict(held)
        if self._before is not None:  # what this step has sent may never arrive
            held.update(self._before if self._sums else {**self._before, **self._kept})
        memory = self.sparsifier.memory.state_dict()
        held.update(now)
        return {
            kind: {name: part.clone() for name, part in self.layout.unflatten(vector).items()}
            for kind, vector in memory.items()
        }

    def fit(self, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the flat memory of a state, checked; changes nothing."""
        own = self.sparsifier.memory.state_dict()
        if set(state) != set(own):
            raise ValueError(f"state holds {sorted(state)}, this memory needs {sorted(own)}; use its options")
        flat = {kind: self.layout.flatten(tensors).to(own[kind]) for kind, tensors in state.items()}
        for kind, vector in flat.items():
            if not bool(vector.isfinite().all()):
                raise ValueError(f"{kind} of the state is not finite; use an older checkpoint")
        return flat
