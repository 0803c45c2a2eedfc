"""Exchange payloads: a process puts in those of its own nodes and gets those of all nodes, in node order."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Transport(Protocol):
    """Carry payloads between nodes."""

    nodes: int  # all of them
    local: range  # those of this process

    def exchange(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Send the payloads of the local nodes, return those of all nodes in node order."""


class InProcess:
    """All nodes live in this process."""

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        self.nodes = nodes
        self.local = range(nodes)

    def exchange(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Return the payloads, one a node."""
        if len(payloads) != self.nodes:
            raise ValueError(f"expected one payload from each of {self.nodes} nodes, got {len(payloads)}")
        return list(payloads)
