"""One node's way from gradient to payload: the only place that writes the order of the stages.

Algorithm 1 of the paper, "On Nodes": add to memory, select, encode, subtract what was decoded.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rtopk.candidates import Candidates, Search
from rtopk.codec import Codec
from rtopk.layout import Layout
from rtopk.memory import ErrorFeedback, Memory
from rtopk.rivals import Rule, Seat, Seated
from rtopk.schedule import Schedule, as_schedule
from rtopk.seed import generator
from rtopk.select import Selector, Tracker
from rtopk.sparse import SparseVector


class Sparsifier:
    """Turn a node's gradients into payloads, and keep what was not sent.

    `density` is a number or a schedule (step -> density) and counts the entries that compete; with a
    `layout`, its dense tail is sent whole beside them. Draws depend on (seed, node, step) alone, so nodes
    draw independently and a repeated step draws the same.

    >>> from rtopk import RTopK
    >>> node = Sparsifier(RTopK(nodes=5), density=0.01)
    >>> payload = node.compress(torch.arange(1000.0), step=0)
    >>> node.codec.decode(payload).indices.numel()
    10
    """

    def __init__(
        self,
        selector: Rule,
        density: float | Schedule,
        memory: Memory | None = None,
        codec: Codec | None = None,
        seed: int = 0,
        *,
        node: int = 0,
        layout: Layout | None = None,
    ) -> None:
        self.selector = selector
        self.seat: Seat | None = selector.seat(seed, node) if isinstance(selector, Seated) else None
        self.tracker = Tracker(self.seat or cast(Selector, selector))
        self.density = as_schedule(density)
        self.memory = ErrorFeedback() if memory is None else memory
        self.codec = Codec(fingerprint=layout.fingerprint if layout else 0) if codec is None else codec
        self.seed = seed
        self.node = node
        self.layout = layout
        self.watch: Callable[[SparseVector], None] | None = (
            None  # is told what a step takes out of the memory
        )

    def compress(self, gradient: Tensor, step: int) -> Tensor:
        """Return the payload of this step; a gradient that is refused leaves all state as it was."""

        def add(search: Search | None) -> tuple[Tensor, Candidates | None]:
            return (self.memory.add(gradient), None) if search is None else self.memory.add(gradient, *search)

        return self._compress(add, gradient.numel(), step)

    def compress_sum(self, total: Tensor, step: int) -> Tensor:
        """Return the payload of this step, where the caller has summed residual + gradient in `total`.

        For a memory with `adopt`: `total` becomes its residual, the old one is the caller's, as it was.
        """
        adopt = cast(ErrorFeedback, self.memory).adopt
        return self._compress(lambda search: adopt(total, search), total.numel(), step)

    def _compress(
        self, accumulate: Callable[[Search | None], tuple[Tensor, Candidates | None]], size: int, step: int
    ) -> Tensor:
        if self.layout is not None and size != self.layout.size:
            raise ValueError(f"gradient must have {self.layout.size} entries, got {size}")
        rng = generator(self.seed, self.node, step)
        sparse_size, k = self._split(size, self.density(step))
        accumulated, candidates = accumulate(self.tracker.search(k, sparse_size))  # (d,)
        if self.seat is not None:
            self.seat.begin(step)
        chosen = self._choose(accumulated, sparse_size, k, rng, candidates)
        payload, sent = self.codec.encode_with_decoded(chosen, rng)
        self.memory.subtract(sent)
        if self.watch is not None:
            self.watch(sent)
        if self.seat is not None:
            self.seat.end(sent.indices)
        return payload

    def _choose(
        self,
        vector: Tensor,
        sparse_size: int,
        k: int,
        rng: torch.Generator,
        candidates: Candidates | None,
    ) -> SparseVector:
        """Select from the part that competes, and add the dense tail whole."""
        if sparse_size == vector.numel():
            return self.tracker.select(vector, k, rng, candidates)
        tail = torch.arange(sparse_size, vector.numel(), device=vector.device)
        if not sparse_size:
            return SparseVector.gather(vector, tail)
        head = self.tracker.select(vector[:sparse_size], k, rng, candidates)
        return SparseVector(
            torch.cat([head.indices, tail]),
            torch.cat([head.values, vector[sparse_size:]]),
            vector.numel(),
        )

    def entries(self, size: int, step: int) -> int:
        """Return how many entries of a vector of this size the payload of this step holds."""
        sparse_size, k = self._split(size, self.density(step))
        return k + size - sparse_size

    def _split(self, size: int, density: float) -> tuple[int, int]:
        """Return how many entries compete, and for how many places."""
        sparse_size = size - (self.layout.dense_size if self.layout else 0)
        return sparse_size, max(1, round(density * sparse_size)) if sparse_size else 0

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on: numbers and tensors only."""
        state = {"seed": self.seed, "node": self.node, "memory": self.memory.state_dict()}
        return state if self.seat is None else {**state, "seat": self.seat.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; one of another seed or node is refused and changes nothing."""
        for name, own in (("seed", self.seed), ("node", self.node)):
            if state[name] != own:
                raise ValueError(f"state is of {name} {state[name]}, this sparsifier has {name} {own}")
        if ("seat" in state) != (self.seat is not None):
            raise ValueError(
                "state is of a selector of another kind (one of them keeps a seat); use the same"
            )
        if self.seat is None:
            self.memory.load_state_dict(state["memory"])
            return
        before = self.seat.state_dict()
        self.seat.load_state_dict(state["seat"])
        try:
            self.memory.load_state_dict(state["memory"])
        except Exception:
            self.seat.load_state_dict(before)
            raise
