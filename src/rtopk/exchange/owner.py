"""A node's share of the entries: average what arrives for it, pass on the largest, keep the rest."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rtopk.aggregate import average, average_sparse
from rtopk.codec import Codec
from rtopk.exchange.shares import PartsCodec, Shares
from rtopk.exchange.vector import Spans, Vector
from rtopk.layout import Layout
from rtopk.memory import ErrorFeedback, NoMemory, give_back, restore, snapshot_of
from rtopk.schedule import Schedule
from rtopk.seed import derive
from rtopk.select import Rule, TopK
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier


class Received(Rule):
    """Every entry that any node sent: the whole union is passed on."""

    sends_k = False

    def __init__(self) -> None:
        self.positions = torch.zeros(0, dtype=torch.int64)

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return the positions that were received, among those that compete."""
        return self.positions[self.positions < vector.numel()]


class Owner:
    """A node's share: average what arrives for it, pass on the largest, keep the rest."""

    def __init__(
        self, node: int, shares: Shares, vector: Vector, codec: PartsCodec, density: Schedule | None
    ) -> None:
        self.node, self.shares, self.vector, self.codec = node, shares, vector, codec
        head, tail = shares.heads[node], shares.tails[node]
        self.received = Received() if density is None else None
        self.sparsifier = Sparsifier(
            self.received or TopK(),
            density or 1.0,
            ErrorFeedback() if vector.keeps else NoMemory(),
            owners_codec(codec, tail, fixed=density is not None),
            derive(vector.seed, "owner"),
            node=node,
            layout=Layout(("head", "tail"), ((head,), (tail,)), tail),
        )
        self.sparsifier.memory.add(torch.zeros(head + tail))
        self._mean = None if density is None else torch.zeros(head + tail)  # of one round after the other
        self._before: Mapping[str, Tensor] | None = None

    def reduce(self, parts: Sequence[Tensor], step: int, idle: Spans = ()) -> Tensor:
        """Return what this owner passes on of the parts of all nodes, as a short payload."""
        vectors = [self.codec.decode_part(part, self.node) for part in parts]
        if self.received is not None:
            union = average_sparse(vectors, self.vector.mean, self.vector.weights)
            self.received.positions, mean = union.indices, union.to_dense()
        else:
            mean = average(vectors, self.vector.mean, self.vector.weights, self._mean)
        memory, self._before = self.sparsifier.memory, snapshot_of(self.sparsifier.memory)
        waiting = [self._in(span) for span in idle] if self.vector.keeps else []
        for part in waiting:
            memory.subtract(part)
        payload = self.sparsifier.compress(mean, step)
        for span, part in zip(idle, waiting, strict=False):  # none are waiting without a memory
            memory.subtract(self._in(span))  # few bits have no zero: what they made of it reaches no model
            give_back(memory, part)
        return self.sparsifier.codec.shorten(payload)

    def _in(self, span: tuple[int, int]) -> SparseVector:
        """Return the residual of the own entries in a span of the vector."""
        own = self.shares.everything(self.node)
        begin, end = torch.searchsorted(own, torch.tensor(span)).tolist()
        residual = self.sparsifier.memory.state_dict()["residual"]
        return SparseVector(torch.arange(begin, end), residual[begin:end], own.numel())

    def rollback(self) -> None:
        """Restore the residual to before the last reduction."""
        if self._before is not None:
            restore(self.sparsifier.memory, self._before)
        self._before = None

    def commit(self) -> None:
        """Make the last reduction final."""
        self._before = None

    def residual(self) -> Tensor:
        """Return the residual as of the last final reduction, as a vector of all entries."""
        state = self.sparsifier.memory.state_dict() if self._before is None else self._before
        whole = torch.zeros(self.vector.size)
        whole[self.shares.everything(self.node)] = state["residual"]
        return whole

    def load_(self, whole: Tensor) -> None:
        """Take the residual of the own share out of a vector of all entries."""
        self._before = None
        if self.vector.keeps:
            own = self.shares.everything(self.node)
            self.sparsifier.memory.load_state_dict({"residual": whole[own].to(torch.float32)})
            whole[own] = 0.0


def owners_codec(codec: Codec, dense_size: int, fixed: bool) -> Codec:
    """Return the codec of what an owner passes on."""
    return Codec(
        codec.values, codec.rounding, codec.fingerprint, fixed=fixed, dense_size=dense_size if fixed else 0
    )
