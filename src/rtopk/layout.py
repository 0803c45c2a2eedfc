"""Named parameters <-> one flat vector.

The paper speaks of one vector of d entries; a model is a set of named tensors. A layout fixes the order:
first every tensor that is sparsified, then every tensor that is sent dense (those of one dimension: biases
and norms), each group in the order of the model. So the dense part is the tail of the vector, and "send it in
full" is one rule about positions. The fingerprint identifies the layout; two sides with different fingerprints
must not exchange payloads.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


def one_dimensional(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a bias, a norm or a scalar: a fraction of a percent of a model, sent dense."""
    return len(shape) <= 1


def nothing(name: str, shape: tuple[int, ...]) -> bool:
    """Send no tensor dense: every entry competes for the k places."""
    return False


DenseRule = Callable[[str, tuple[int, ...]], bool]


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in the flat vector.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.size, layout.dense_size, layout.names
    (8, 2, ('weight', 'bias'))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dense_size: int  # entries at the tail that are always sent
    offsets: tuple[int, ...] = field(init=False)  # first position of each tensor, then the size

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"names must be unique, got {self.names}")
        if len(self.names) != len(self.shapes):
            raise ValueError(f"{len(self.names)} names need as many shapes, got {len(self.shapes)}")
        offsets = [0]
        for shape in self.shapes:
            offsets.append(offsets[-1] + math.prod(shape))
        object.__setattr__(self, "offsets", tuple(offsets))
        if not 0 <= self.dense_size <= self.size:
            raise ValueError(f"dense_size must be in [0, {self.size}], got {self.dense_size}")

    @classmethod
    def of(
        cls,
        parameters: nn.Module | Iterable[tuple[str, Tensor]],
        dense: DenseRule = one_dimensional,
    ) -> "Layout":
        """Lay out the trainable parameters of a model, or any named tensors."""
        if isinstance(parameters, nn.Module):
            parameters = ((n, p) for n, p in parameters.named_parameters() if p.requires_grad)
        shapes = {name: tuple(tensor.shape) for name, tensor in parameters}
        tail = [name for name, shape in shapes.items() if dense(name, shape)]
        head = [name for name in shapes if name not in set(tail)]
        names = (*head, *tail)
        dense_size = sum(math.prod(shapes[name]) for name in tail)
        return cls(names, tuple(shapes[name] for name in names), dense_size)

    @property
    def size(self) -> int:
        """The number of entries, d."""
        return self.offsets[-1]

    @property
    def sparse_size(self) -> int:
        """The number of entries at the head, among which the selector chooses."""
        return self.size - self.dense_size

    @property
    def fingerprint(self) -> int:
        """Identify this layout in 64 bits: names, shapes, order and what is dense."""
        text = json.dumps([self.names, self.shapes, self.dense_size]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def flatten(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Join named tensors into one vector, into `out` if given."""
        missing = [name for name in self.names if name not in tensors]
        if missing:
            raise KeyError(f"layout expects {len(self.names)} tensors, missing {missing}")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensors[name].shape)}")
        parts = [tensors[name].reshape(-1) for name in self.names]
        return torch.cat(parts, out=out) if out is not None else torch.cat(parts)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a vector into named views of it."""
        if vector.shape != (self.size,):
            raise ValueError(f"vector must have shape ({self.size},), got {tuple(vector.shape)}")
        return {
            name: vector[begin:end].view(shape)
            for name, shape, begin, end in zip(
                self.names, self.shapes, self.offsets[:-1], self.offsets[1:], strict=True
            )
        }
