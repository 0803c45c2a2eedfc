"""From gradient to payload on one node: the only place that defines the order of the stages.

Algorithm 1 of the paper, "On Nodes": add to memory, select, encode, subtract what was decoded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rtopk.codec import Codec
from rtopk.kernels.host import Asking, answer, begin_fetch
from rtopk.kernels.search import Search
from rtopk.layout import Layout
from rtopk.memory import ErrorFeedback, Memory
from rtopk.schedule import Schedule, as_schedule
from rtopk.seed import generator
from rtopk.select import Selector, as_rule, drawing_largest
from rtopk.sparse import SparseVector


def entries_sent(size: int, density: float) -> int:
    """Return k, how many of `size` entries a density sends: at least one, none of an empty vector.

    >>> entries_sent(1000, 0.01), entries_sent(10, 0.01), entries_sent(0, 0.01)
    (10, 1, 0)
    """
    return max(1, round(density * size)) if size else 0


class Sparsifier:
    """Turn a node's gradients into payloads, and keep what was not sent.

    `density` is a number or a schedule (step -> density), as a share of the entries that compete; the dense tail
    of a `layout` is sent in full in addition. Draws depend only on (seed, node, step), so nodes draw independently
    and a repeated step draws the same.

    >>> from rtopk import RTopK
    >>> node = Sparsifier(RTopK(nodes=5), density=0.01)
    >>> payload = node.compress(torch.arange(1000.0), step=0)
    >>> node.codec.decode(payload).indices.numel()
    10
    """

    def __init__(
        self,
        selector: Selector,
        density: float | Schedule,
        memory: Memory | None = None,
        codec: Codec | None = None,
        seed: int = 0,
        *,
        node: int = 0,
        layout: Layout | None = None,
    ) -> None:
        self.selector = selector
        self.rule = as_rule(selector).at_node(seed, node)
        self.search = Search()
        self.density = as_schedule(density)
        self.memory = ErrorFeedback() if memory is None else memory
        self.codec = Codec(fingerprint=layout.fingerprint if layout else 0) if codec is None else codec
        self.seed = seed
        self.node = node
        self.layout = layout
        # Called with what each step takes out of the memory.
        self.watch: Callable[[SparseVector], None] | None = None

    def compress(self, gradient: Tensor | None, step: int) -> Tensor:
        """Return the payload of this step; a rejected gradient leaves all state unchanged.

        Pass None if the memory already has the gradient, part by part (`ErrorFeedback.put`).
        """
        return answer([self.stages(gradient, step)])[0]

    def stages(self, gradient: Tensor | None, step: int) -> Asking[Tensor]:
        """Do what `compress` does, and ask for what was selected on a device: `answer` waits once for several."""
        size = gradient.numel() if gradient is not None else self.layout.size if self.layout else 0
        if self.layout is not None and size != self.layout.size:
            raise ValueError(f"gradient must have {self.layout.size} entries, got {size}")
        rng = generator(self.seed, self.node, step)
        sparse_size, k, r, guess = self._plan(size, step)
        accumulated = self.memory.add(gradient, guess)  # type: ignore[arg-type]  # (d,)
        chosen = yield from self._choose(accumulated, sparse_size, k, r, rng)
        payload, sent = self.codec.encode_with_decoded(chosen, rng)
        self.memory.subtract(sent)
        if self.watch is not None:
            self.watch(sent)
        self.rule.end(sent.indices)
        return payload

    def expect(self, step: int) -> None:
        """Before a memory is given the parts of a gradient: tell it what this step will look for, if it listens."""
        listen = getattr(self.memory, "expect", None)
        if listen is not None and self.layout is not None:
            listen(self._plan(self.layout.size, step)[-1])

    def _plan(self, size: int, step: int) -> tuple[int, int, int | None, Search | None]:
        """Return how many entries compete, k, r, and the search if its candidates, or its check, are of use."""
        self.rule.begin(step)
        sparse_size, k = self._split(size, self.density(step))
        r = self.rule.considered(k, sparse_size)
        searches = r is not None or not sparse_size
        if searches:
            self.search.aim(r or 0, sparse_size)
        return sparse_size, k, r, self.search if searches else None

    def _choose(
        self, vector: Tensor, sparse_size: int, k: int, r: int | None, rng: torch.Generator
    ) -> Asking[SparseVector]:
        """Select from the part that competes, and append the whole dense tail."""
        size = vector.numel()
        if not sparse_size:
            tail = torch.arange(size, device=vector.device)
            values = vector[tail]
            (here,) = yield from self.search.checking(values)
            return SparseVector(tail, values, size, (torch.arange(size), here))
        competing, rest = vector, None
        if sparse_size < size:
            competing, rest = vector[:sparse_size], vector[sparse_size:]
            rest_here = begin_fetch(rest)  # there when selection has waited
        if r is None:
            head = SparseVector.gather(competing, self.rule.select(competing, k, rng))
        else:
            head = yield from drawing_largest(competing, k, r, rng, self.search)
        if rest is None:
            return head
        tail, known = torch.arange(sparse_size, size, device=vector.device), None
        if head.here is not None:
            at = torch.arange(sparse_size, size)
            known = torch.cat([head.here[0], at]), torch.cat([head.here[1], rest_here])
        return SparseVector(torch.cat([head.indices, tail]), torch.cat([head.values, rest]), size, known)

    def entries(self, size: int, step: int) -> int:
        """Return how many entries of a vector of this size the payload of this step holds."""
        sparse_size, k = self._split(size, self.density(step))
        return k + size - sparse_size

    def _split(self, size: int, density: float) -> tuple[int, int]:
        """Return how many entries compete, and how many are sent."""
        sparse_size = size - (self.layout.dense_size if self.layout else 0)
        return sparse_size, entries_sent(sparse_size, density)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on: numbers and tensors only."""
        state = {"seed": self.seed, "node": self.node, "memory": self.memory.state_dict()}
        return {**state, "seat": self.rule.state_dict()} if self.rule.keeps_state else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; one with another seed or node is refused and changes nothing."""
        for name, own in (("seed", self.seed), ("node", self.node)):
            if state[name] != own:
                raise ValueError(f"state is of {name} {state[name]}, this sparsifier has {name} {own}")
        before, kept = self.rule.state_dict(), state.get("seat", {})
        if self.rule.keeps_state and "seat" not in state:
            raise ValueError(
                f"state is of another selector: {self.rule.label} keeps a state, this has none; use the same"
            )
        self.rule.load_state_dict(kept)
        try:
            self.memory.load_state_dict(state["memory"])
        except Exception:
            self.rule.load_state_dict(before)
            raise
