"""What an exchange averages, what it costs, and a message in flight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rtopk.aggregate import Decoded, Mean
from rtopk.sparse import SparseVector
from rtopk.transport import AllGather, Transport

Spans = Sequence[tuple[int, int]]  # begin and end of parts of a vector
OWNER = "owner_residual"  # the name of an owner's residual in a state


@dataclass(frozen=True)
class Vector:
    """What is averaged: a vector of `size` entries, the last `dense_size` of which are always sent."""

    size: int
    dense_size: int
    mean: Mean
    weights: Sequence[float] | None
    keeps: bool  # nodes have a memory for what they do not send
    seed: int


@dataclass
class Traffic:
    """Bytes that one node sent to, and received from, the others; the mean over the nodes of this process."""

    sent: float = 0.0
    received: float = 0.0


class Message(Protocol):
    """Payloads of some vectors in flight, with a header of every rank."""

    sent: int  # bytes
    received: int
    waited: float  # seconds, inside `reduce` and `means`

    def headers(self) -> list[Tensor]:
        """Wait for the headers of all ranks; if they differ, the payloads may not have been sent."""

    def flags(self) -> list[Tensor]:
        """Return the flags of all ranks."""

    def reduce(self, idle: Sequence[Spans]) -> None:
        """Do what comes before the means; call it on all ranks or on none.

        `idle` are the parts of each vector in which no rank takes part in this round: nothing is passed on there.
        """

    def means(self, sparse: Sequence[bool]) -> list[Tensor | SparseVector | Decoded]:
        """Wait for the rest; return the mean of each vector, or what it is made of if that is little."""


def returned(whole: Tensor, vector: Vector, transport: Transport) -> SparseVector | None:
    """Return an owner's residual as a part of its node's own, so that the mean over the nodes is the same."""
    places = whole.nonzero()[:, 0]
    if not places.numel():
        return None
    node, weights, factor = transport.local[0], vector.weights, float(transport.nodes)
    if vector.mean == "received":
        factor = 1.0  # if no other node sends the entry
    elif weights is not None:
        if not weights[node]:
            raise ValueError(
                f"node {node} has weight 0 and cannot take over what it kept for all; give it a weight"
            )
        factor = sum(weights) / weights[node]
    return SparseVector(places, whole[places] * factor, vector.size)


def distributed(transport: Transport) -> AllGather:
    """Return the transport of a message in flight, which is one between processes."""
    assert isinstance(transport, AllGather)  # messages in flight are for processes
    return transport
