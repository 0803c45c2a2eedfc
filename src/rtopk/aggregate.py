"""The vectors of all nodes -> one mean.

The paper states two rules. Algorithm 1 divides the sum by n: `mean="nodes"`. Section IV says that the centre
averages, for each component, the updates that it receives for that component: `mean="received"`. A component
that one node sent then moves by that node's whole value. The rules differ by up to a factor n, exactly where
rTop-k differs from top-k.

Nodes are added in the order given, so the result is bit-identical everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.kernels.host import send
from rtopk.sparse import SparseVector

Mean = Literal["nodes", "received"]


def average(
    vectors: Sequence[SparseVector],
    mean: Mean = "nodes",
    weights: Sequence[float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of the nodes' vectors, dense.

    `weights` are the nodes' shares, for instance their numbers of examples; by default all count equally. The mean
    is written to `out` if it is given: memory that is new in every round costs more than the addition.

    >>> a = SparseVector(torch.tensor([0, 1]), torch.tensor([2.0, 4.0]), 3)
    >>> b = SparseVector(torch.tensor([1]), torch.tensor([8.0]), 3)
    >>> average([a, b]), average([a, b], mean="received")
    (tensor([1., 6., 0.]), tensor([2., 6., 0.]))
    """
    size = _check(vectors, mean, weights)
    return _mean([vector.indices for vector in vectors], vectors, size, mean, weights, out)


def average_sparse(
    vectors: Sequence[SparseVector], mean: Mean = "nodes", weights: Sequence[float] | None = None
) -> SparseVector:
    """Return the same mean on the union of the nodes' positions, without allocating d entries."""
    size = _check(vectors, mean, weights)
    joint, slots = kernels.union([vector.indices for vector in vectors], size)
    return SparseVector(joint, _mean(slots, vectors, joint.numel(), mean, weights), size)


@dataclass(frozen=True)
class Decoded:
    """The vectors of all nodes, in host memory, and how to average them; whoever writes the mean says where."""

    vectors: Sequence[SparseVector]
    mean: Mean
    weights: Sequence[float] | None

    def averaged(self) -> SparseVector:
        """Return the mean, in host memory."""
        return average_sparse(self.vectors, self.mean, self.weights)

    def averaged_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return positions and values of the mean, computed on a device; the host does not wait for it.

        Positions ascend. One that several nodes sent is there as often, each time with the same value: how many
        there are is known on the device alone.
        """
        size = _check(self.vectors, self.mean, self.weights)
        numbers = [len(vector) for vector in self.vectors]
        places, values = (
            torch.split(send(torch.cat([getattr(vector, part) for vector in self.vectors]), device), numbers)
            for part in ("indices", "values")
        )
        vectors = [SparseVector(at, value, size) for at, value in zip(places, values, strict=True)]
        joint = torch.cat(places).sort().values
        slots = [torch.searchsorted(joint, at) for at in places]
        mean = _mean(slots, vectors, joint.numel(), self.mean, self.weights)
        return joint, mean[torch.searchsorted(joint, joint)]


def _mean(
    slots: Sequence[Tensor],  # where each node's values go, unique within a node
    vectors: Sequence[SparseVector],
    size: int,
    mean: Mean,
    weights: Sequence[float] | None,
    out: Tensor | None = None,
) -> Tensor:
    first = vectors[0].values
    running = RunningMean(size, mean, weights is not None, dtype=first.dtype, device=first.device, out=out)
    for node, (slot, vector) in enumerate(zip(slots, vectors, strict=True)):
        running.add_at(slot, vector.values, 1.0 if weights is None else float(weights[node]))
    return running.result()


class RunningMean:
    """The same mean, one node at a time: a vector can be dropped as soon as it is added.

    `result` consumes the sum: nothing can be added after it.
    """

    def __init__(
        self,
        size: int,
        mean: Mean = "nodes",
        weighted: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        out: Tensor | None = None,
    ) -> None:
        if mean not in get_args(Mean):
            raise ValueError(f"mean must be one of {get_args(Mean)}, got {mean!r}")
        self.nodes = 0
        self.weighted = weighted
        self._weights: list[float] = []
        self._total = torch.zeros(size, dtype=dtype, device=device) if out is None else out.zero_()
        self._received = torch.zeros_like(self._total) if mean == "received" else None

    def add(self, vector: SparseVector, weight: float = 1.0) -> None:
        """Add a node's vector."""
        if vector.size != self._total.numel():
            raise ValueError(f"vector must have size {self._total.numel()}, got {vector.size}")
        self.add_at(vector.indices, vector.values, weight)

    def add_at(self, slots: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """Add a node's values at these places, unique within a node."""
        # x - (-y) is x + y to the bit.
        kernels.subtract_(self._total, slots, values, -weight if self.weighted else -1.0)
        if self._received is not None:
            self._received[slots] += weight if self.weighted else 1.0
        self._weights.append(weight)
        self.nodes += 1

    def result(self) -> Tensor:
        """Return the mean of what was added."""
        if not self.nodes:
            raise ValueError("there must be at least one vector to average, got none")
        if self._received is None:
            # By a tensor: CUDA multiplies by the inverse of a number, which is rounded twice.
            nodes = float(sum(self._weights)) if self.weighted else float(self.nodes)
            return self._total.div_(torch.full_like(self._total[:1], nodes))
        # Avoid 0 / 0 where no node sent, or only nodes of weight zero.
        return self._total.div_(self._received.masked_fill_(self._received == 0, 1.0))


def _check(vectors: Sequence[SparseVector], mean: str, weights: Sequence[float] | None) -> int:
    if not vectors:
        raise ValueError("there must be at least one vector to average, got none")
    sizes = {vector.size for vector in vectors}
    if len(sizes) > 1:
        raise ValueError(f"vectors must have one size, got {sorted(sizes)}")
    if mean not in get_args(Mean):
        raise ValueError(f"mean must be one of {get_args(Mean)}, got {mean!r}")
    if weights is not None:
        if len(weights) != len(vectors):
            raise ValueError(f"{len(vectors)} vectors need as many weights, got {len(weights)}")
        check_weights(weights)
    return vectors[0].size


def check_weights(weights: Sequence[float]) -> None:
    """Raise ValueError unless these are valid weights of nodes."""
    if not all(0.0 <= w < float("inf") for w in weights) or not sum(weights) > 0.0:
        raise ValueError(f"weights must be finite, not negative and not all zero, got {list(weights)}")
