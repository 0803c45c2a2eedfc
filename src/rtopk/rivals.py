"""Other rules for which entries are sent, beside the paper's; docs/rivals.md compares them at equal bytes.

`Threshold` (Sahu et al., 2021) sends all that reach a fixed magnitude. `RAgeK` sends, of the r largest, those
that have waited longest. `Dealt` deals the positions out among the nodes anew every round, so that no two of
them send the same one. All of them choose from finite vectors, as a memory returns them.

A rule that depends on who chooses, when, or on what was sent before has `seat`: a sparsifier takes one seat of
its own, so the rule itself stays a plain value that many may share.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rtopk import kernels
from rtopk.seed import derive
from rtopk.select import RTopK, Selector

_LOW_63 = (1 << 63) - 1
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


class Seat(Selector, Protocol):
    """A rule in its place at one node: `begin` a round, `select`, and hear at its `end` what was sent."""

    def begin(self, step: int) -> None:
        """Say which round it is."""

    def end(self, sent: Tensor) -> None:
        """Say which positions the others have really received."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all that the next round depends on."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; one that does not fit is refused and changes nothing."""


@runtime_checkable
class Seated(Protocol):
    """A rule that needs a seat."""

    def seat(self, seed: int, node: int) -> Seat:
        """Take the seat of a node; nodes that work together have one seed."""


Rule = Selector | Seated


@dataclass(frozen=True)
class Threshold:
    """Send every entry whose magnitude is at least `limit`: few in one round, many in another.

    The number asked for has no influence, but for one case: all of them (density 1, as in a dense phase at
    the start) means all.
    """

    limit: float

    def __post_init__(self) -> None:
        if not 0.0 < self.limit < math.inf:
            raise ValueError(f"limit must be positive and finite, got {self.limit}")

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return the positions at or above the limit, ascending."""
        if k == vector.numel():
            return torch.arange(k, device=vector.device)
        return (vector.abs() >= self.limit).nonzero()[:, 0]


@dataclass(frozen=True)
class RAgeK:
    """Send, of the r largest entries, the k that this node has not sent for longest.

    Among those that have waited equally long (all, at first) the larger goes first, and of equal ones that of
    lower index. r is as in `RTopK`: `r_over_k` times k, or `nodes` times k.
    """

    r_over_k: float | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        self.considered(1, 1)

    def considered(self, k: int, d: int) -> int:
        """Return r, the number of entries of which the longest waiting are sent."""
        return RTopK(self.r_over_k, self.nodes).considered(k, d)

    def seat(self, seed: int, node: int) -> "Ages":
        """Begin with nothing sent."""
        return Ages(self)


class Ages:
    """When each entry was last sent by one node: the seat of `RAgeK`."""

    def __init__(self, rule: RAgeK) -> None:
        self.rule = rule
        self.step = 0
        self.last: Tensor | None = None  # (d,) int64: round in which it was sent, plus 1; 0 is never

    def begin(self, step: int) -> None:
        """Say which round it is."""
        self.step = step

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        positions = kernels.largest(vector, self.rule.considered(k, vector.numel()))  # (r,)
        by_size = vector[positions].abs().argsort(descending=True, stable=True)
        if self.last is None:
            self.last = torch.zeros(vector.numel(), dtype=torch.int64, device=vector.device)
        by_age = self.last[positions[by_size]].argsort(stable=True)
        return positions[by_size[by_age[:k]]].sort().values

    def end(self, sent: Tensor) -> None:
        """Note what was sent; the dense tail, which does not wait, is left out."""
        if self.last is not None:
            self.last[sent[sent < self.last.numel()]] = self.step + 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the rounds; empty before the first."""
        return {} if self.last is None else {"last": self.last.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        if set(state) not in (set(), {"last"}):
            raise ValueError(f"the state of rage-k must hold 'last' or nothing, got {sorted(state)}")
        last = state.get("last")
        if last is not None:
            expected = last.shape if self.last is None else self.last.shape
            if last.dtype != torch.int64 or last.dim() != 1 or last.shape != expected:
                raise ValueError(
                    f"last must be int64 of shape {tuple(expected)}, got {last.dtype} {tuple(last.shape)}"
                )
        self.last = None if last is None else last.clone()


@dataclass(frozen=True)
class Dealt:
    """Send the k largest of the entries that this node was dealt.

    In round t entry j belongs to node hash(seed, t, j) mod n, which every node works out for itself. So the n
    nodes together send n times k different entries, where top-k of similar gradients sends the same k again
    and again, and the positions cost no bit more. A node whose share is smaller than k (densities above 1/n)
    goes on with the largest of the others' entries.
    """

    nodes: int

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {self.nodes}")

    def owner(self, positions: Tensor, seed: int, step: int) -> Tensor:
        """Return the node to which each position belongs in a round."""
        return _hash(positions, derive(seed, "deal", step)) % self.nodes

    def seat(self, seed: int, node: int) -> "Hand":
        """Take the seat of a node."""
        if not 0 <= node < self.nodes:
            raise ValueError(f"node must be in [0, {self.nodes}), got {node}; nodes is how many there are")
        return Hand(self, seed, node)


class Hand:
    """What one node holds of each round's deal: the seat of `Dealt`."""

    def __init__(self, rule: Dealt, seed: int, node: int) -> None:
        self.rule = rule
        self.seed = seed
        self.node = node
        self.step = 0

    def begin(self, step: int) -> None:
        """Say which round it is."""
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

    def end(self, sent: Tensor) -> None:
        """Do nothing: the deal depends on the round alone."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Accept only an empty state."""
        if state:
            raise ValueError(f"dealt-k keeps no state, got {sorted(state)}")


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
