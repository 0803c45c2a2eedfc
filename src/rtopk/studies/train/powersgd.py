"""PowerSGD (Vogels, Karimireddy, Jaggi, 2019): a gradient as products of thin matrices, in two messages.

For each tensor seen as a matrix M (rows, columns): every node sends P = M Q; with the mean of these, made
orthonormal, it sends Q = M^T P; the mean gradient is P times the mean Q transposed, and that Q begins the next
round (warm start). Tensors whose factors would not be smaller (biases, norms) are sent whole. What a node's
own factors do not say stays in its memory. Messages are payloads of `Codec` in its dense form.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rtopk.aggregate import average
from rtopk.codec import Codec
from rtopk.layout import Layout
from rtopk.memory import Memory
from rtopk.seed import generator
from rtopk.sparse import SparseVector

Matrices = dict[str, Tensor]


class LowRank:
    """What all nodes share: which tensors are matrices, and the right factors of the last round.

    >>> shared = LowRank(Layout(("weight", "bias"), ((6, 8), (6,)), 0), matrix_rank=2, codec=Codec())
    >>> shared.sizes
    ({'weight': (6, 8)}, ('bias',))
    """

    def __init__(self, layout: Layout, matrix_rank: int, codec: Codec, seed: int = 0) -> None:
        if matrix_rank < 1:
            raise ValueError(f"matrix_rank must be at least 1, got {matrix_rank}")
        self.layout = layout
        self.codec = codec
        self.matrix_rank = matrix_rank
        shapes = {
            name: (shape[0], math.prod(shape[1:]))
            for name, shape in zip(layout.names, layout.shapes, strict=True)
            if len(shape) > 1
        }
        self.matrices = {n: (a, b) for n, (a, b) in shapes.items() if matrix_rank * (a + b) < a * b}
        self.whole = tuple(name for name in layout.names if name not in self.matrices)
        self.right: Matrices = {
            name: torch.randn(columns, matrix_rank, generator=generator(seed, "powersgd", name))
            for name, (_, columns) in self.matrices.items()
        }

    @property
    def sizes(self) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
        """Return rows and columns of the matrices, and the names of what is sent whole."""
        return self.matrices, self.whole

    def agree(self, payloads: Sequence[Tensor], weights: Sequence[float] | None = None) -> Matrices:
        """Return orthonormal left factors from the first messages of all nodes."""
        shapes = {name: (rows, self.matrix_rank) for name, (rows, _) in self.matrices.items()}
        left = self._mean(payloads, shapes, weights)
        return {name: torch.linalg.qr(factor).Q for name, factor in left.items()}

    def finish(
        self, left: Matrices, payloads: Sequence[Tensor], weights: Sequence[float] | None = None
    ) -> Tensor:
        """Return the mean gradient from the second messages, and keep the right factors for the next round."""
        shapes = self.second_shapes()
        mean = self._mean(payloads, shapes, weights)
        self.right = {name: mean[name] for name in self.matrices}
        whole = {name: mean[name] for name in self.whole}
        return self.product(left, self.right, whole)

    def second_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return what the second message holds: right factors, then whole tensors."""
        own = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        factors = {name: (columns, self.matrix_rank) for name, (_, columns) in self.matrices.items()}
        return {**factors, **{name: own[name] for name in self.whole}}

    def product(self, left: Matrices, right: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Tensor:
        """Return the flat vector of these factors and whole tensors."""
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        products = {name: (left[name] @ right[name].T).view(shapes[name]) for name in self.matrices}
        return self.layout.flatten({**products, **whole})

    def _mean(
        self,
        payloads: Sequence[Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        weights: Sequence[float] | None,
    ) -> Matrices:
        size = sum(math.prod(shape) for shape in shapes.values())
        vectors = [self.codec.decode(payload, size=size, entries=size) for payload in payloads]
        return split(average(vectors, "nodes", weights), shapes)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the right factors."""
        return {name: factor.clone() for name, factor in self.right.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`; one of other shapes is refused and changes nothing."""
        own = {name: tuple(factor.shape) for name, factor in self.right.items()}
        other = {name: tuple(factor.shape) for name, factor in state.items()}
        if own != other:
            raise ValueError(f"right factors must have shapes {own}, got {other}")
        self.right = {name: factor.clone() for name, factor in state.items()}


class LowRankNode:
    """One node's way from gradient to its two messages; its memory keeps what they do not say."""

    def __init__(self, shared: LowRank, memory: Memory) -> None:
        self.shared = shared
        self.memory = memory
        self._vector: Tensor | None = None  # what is being sent from, between the messages

    def compress(self, gradient: Tensor, step: int) -> Tensor:
        """Return the first message: the left factors."""
        self._vector = self.memory.add(gradient)
        matrices = self._matrices(self._vector)
        left = [matrices[name] @ self.shared.right[name] for name in self.shared.matrices]
        return self.shared.codec.encode(_dense(left))

    def answer(self, left: Matrices) -> Tensor:
        """Return the second message, given the left factors that all agreed on."""
        if self._vector is None:
            raise RuntimeError("answer needs the vector of this round; call compress first")
        matrices = self._matrices(self._vector)
        tensors = self.shared.layout.unflatten(self._vector)
        right = [matrices[name].T @ left[name] for name in self.shared.matrices]
        whole = [tensors[name] for name in self.shared.whole]
        payload, decoded = self.shared.codec.encode_with_decoded(_dense([*right, *whole]))
        parts = split(decoded.values, self.shared.second_shapes())
        sent = self.shared.product(left, parts, {name: parts[name] for name in self.shared.whole})
        self.memory.subtract(_dense([sent]))
        self._vector = None
        return payload

    def density(self, step: int) -> float:
        """Return the share of the vector's size that the messages hold."""
        second = sum(math.prod(shape) for shape in self.shared.second_shapes().values())
        first = sum(rows * self.shared.matrix_rank for rows, _ in self.shared.matrices.values())
        return (first + second) / self.shared.layout.size

    def _matrices(self, vector: Tensor) -> Matrices:
        tensors = self.shared.layout.unflatten(vector)
        return {name: tensors[name].reshape(shape) for name, shape in self.shared.matrices.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on: the memory, and the right factors that all share."""
        return {"memory": self.memory.state_dict(), "right": self.shared.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.shared.load_state_dict(state["right"])
        self.memory.load_state_dict(state["memory"])


def split(vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Matrices:
    """Divide a vector into named tensors that follow one another."""
    tensors, begin = {}, 0
    for name, shape in shapes.items():
        tensors[name] = vector[begin : begin + math.prod(shape)].view(shape)
        begin += math.prod(shape)
    return tensors


def _dense(tensors: Sequence[Tensor]) -> SparseVector:
    """Join tensors into a vector of which every entry is sent."""
    values = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
    return SparseVector(torch.arange(values.numel()), values, values.numel())
