"""Deal the positions to the nodes anew in every round, so that no two nodes send the same one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.seed import derive
from rtopk.select.rule import Rule

_LOW_63 = (1 << 63) - 1
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


@dataclass(frozen=True)
class Dealt(Rule, method="dealt-k"):
    """Send the k largest of the entries that this node was dealt.

    In round t entry j belongs to node hash(seed, t, j) mod n, which every node computes by itself. So n nodes
    send n times k different entries, where top-k of similar gradients sends the same k from every node. Positions
    cost no more bits. A node whose share is smaller than k (densities above 1/n) fills up with the largest of the
    other nodes' entries.
    """

    nodes: int
    needs_all_nodes = True

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {self.nodes}")

    @classmethod
    def for_run(cls, nodes: int, r_over_k: float = 0.0, threshold: float = 0.0) -> "Dealt":
        """Make the rule for a run."""
        return cls(nodes)

    def owner(self, positions: Tensor, seed: int, step: int) -> Tensor:
        """Return the node to which each position belongs in a round."""
        return _hash(positions, derive(seed, "deal", step)) % self.nodes

    def require(self, nodes: int) -> None:
        """Raise ValueError unless the positions are dealt to this number of nodes."""
        if nodes != self.nodes:
            raise ValueError(f"Dealt must have nodes={nodes}, one a rank, got {self.nodes}")

    def at_node(self, seed: int, node: int) -> "Share":
        """Return the share of a node."""
        if not 0 <= node < self.nodes:
            raise ValueError(f"node must be in [0, {self.nodes}), got {node}; nodes is how many there are")
        return Share(self, seed, node)


class Share(Rule):
    """`Dealt` at one node: its share in each round."""

    def __init__(self, rule: Dealt, seed: int, node: int) -> None:
        self.rule = rule
        self.seed = seed
        self.node = node
        self.step = 0

    def begin(self, step: int) -> None:
        """Set the round."""
        self.step = step

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        d, expected = vector.numel(), k * self.rule.nodes
        # The k largest of the share are among the r largest of all as soon as those hold k of the share.
        r = min(d, expected + 4 * math.isqrt(expected))
        while True:
            positions = kernels.largest(vector, r)  # (r,)
            mine = self.rule.owner(positions, self.seed, self.step) == self.node
            own = positions[mine]
            if len(own) >= k:
                return own[kernels.largest(vector[own], k)]
            if r == d:
                break
            r = min(d, 2 * r)
        others = positions[~mine]
        more = others[kernels.largest(vector[others], k - len(own))]
        return torch.cat([own, more]).sort().values


def _hash(positions: Tensor, key: int) -> Tensor:
    """Return the splitmix64 hash of key + position, its upper 63 bits: int64, not negative."""
    mixed = (positions + _wrap(key)) * _wrap(_MIX[0])  # int64 products keep the lower 64 bits
    mixed = (mixed ^ _shift(mixed, 30)) * _wrap(_MIX[1])
    mixed = (mixed ^ _shift(mixed, 27)) * _wrap(_MIX[2])
    return _shift(mixed ^ _shift(mixed, 31), 1)


def _wrap(number: int) -> int:
    """Return the signed number with the same 64 bits."""
    return (number & _LOW_63) - (number & (1 << 63))


def _shift(numbers: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned: torch repeats the sign."""
    return (numbers >> bits) & (_LOW_63 >> (bits - 1))
