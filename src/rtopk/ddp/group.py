"""The tensors that compete for one selection: all of a model, or one parameter.

A group takes the gradients of its tensors, makes the payload, and can take the whole step back: what its
memory held before is kept until the exchange has succeeded on every rank.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rtopk.aggregate import Mean, average, average_sparse
from rtopk.layout import Layout
from rtopk.memory import clip
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
        zeros = torch.zeros(layout.size, dtype=dtype, device=device)
        sparsifier.memory.add(zeros)  # makes the memory, so that a state is complete from the start
        # One tensor's gradient is used where it lies; several are copied side by side.
        self._joint = zeros if len(layout.names) > 1 else None
        self._gradient = zeros
        self._before: dict[str, Any] | None = None  # the memory before this step
        self._kept: dict[str, Tensor] = {}  # its tensors' buffers, made once

    def put(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a tensor; it must stay as it is until `compress`."""
        if self._joint is None:
            self._gradient = gradient.reshape(-1).to(self.dtype)
            return
        begin, end = self.bounds[name]
        self._joint[begin:end].view(gradient.shape).copy_(gradient)
        self._gradient = self._joint

    def compress(
        self, step: int, scale: float, idle: Collection[str], clip_norm: float | None = None
    ) -> Tensor:
        """Return the payload of the gradients, divided by `scale` and clipped.

        The memory of `idle` tensors, which took no part in this step, is neither sent nor changed.
        """
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
        for vector in (self._gradient, *self._tensors().values()):
            for name, (begin, end) in self.bounds.items():
                if not bool(vector[begin:end].isfinite().all()):
                    return name
        return None

    def mean(
        self, payloads: Sequence[Tensor], mean: Mean, weights: Sequence[float] | None = None
    ) -> Tensor | SparseVector:
        """Decode the ranks' payloads and return their mean, sparse where that is cheaper."""
        vectors = [self.sparsifier.codec.decode(payload, size=self.layout.size) for payload in payloads]
        total = sum(len(vector) for vector in vectors)
        if total < SPARSE_BELOW * self.layout.size:
            return average_sparse(vectors, mean, weights)
        return average(vectors, mean, weights)

    def write(self, mean: Tensor | SparseVector, scale: float, gradients: Mapping[str, Tensor]) -> None:
        """Put the mean, times `scale`, in the place of the gradients."""
        if isinstance(mean, Tensor):
            if scale != 1.0:
                mean = mean * scale
            for name, (begin, end) in self.bounds.items():
                gradients[name].copy_(mean[begin:end].view(gradients[name].shape))
            return
        values = mean.values if scale == 1.0 else mean.values * scale
        cuts = torch.searchsorted(mean.indices, self._offsets.to(mean.indices.device)).tolist()
        for number, (name, (begin, end)) in enumerate(self.bounds.items()):
            gradient = gradients[name]
            here = slice(cuts[number], cuts[number + 1])
            flat = (
                gradient.new_zeros(end - begin) if not gradient.is_contiguous() else gradient.view(-1).zero_()
            )
            places = (mean.indices[here] - begin).to(flat.device)
            flat[places] = values[here].to(flat)
            if not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))

    def rollback(self) -> None:
        """Put the memory back to what it was before `compress`."""
        if self._before is None:
            return
        held = vars(self.sparsifier.memory)
        held.update(self._before)
        for name, tensor in self._tensors().items():
            tensor.copy_(self._kept[name])
        self._before = None

    def commit(self) -> None:
        """Make this step final."""
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
            held.update({**self._before, **self._kept})
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
