"""exchange="all-gather": every node receives the payloads of all nodes and averages them itself."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from rtopk.aggregate import Decoded, RunningMean
from rtopk.codec import Codec
from rtopk.exchange.vector import OWNER, Spans, Traffic, Vector, distributed, returned
from rtopk.sparse import SparseVector
from rtopk.transport import Transport


class AllGathered:
    """Every node receives every payload: nothing is kept between rounds."""

    def __init__(self, transport: Transport, vector: Vector, codec: Codec) -> None:
        self.transport, self.vector, self.codec = transport, vector, codec

    def most(self, entries: int) -> int:
        """Return how many entries a mean has at most if every node sends so many."""
        return self.transport.nodes * entries

    def mean(self, payloads: Sequence[Tensor], step: int) -> tuple[Tensor, Traffic]:
        """Exchange the payloads of the local nodes; return the mean of all nodes, and what it cost."""
        everyone = self.transport.exchange(payloads)
        own = sum(payload.numel() for payload in payloads) / len(payloads)
        total = sum(payload.numel() for payload in everyone)
        return self.average(everyone), Traffic(own, total - own)

    def decoded(self, payloads: Sequence[Tensor]) -> Decoded:
        """Decode the nodes' payloads; the mean is up to who writes it."""
        vectors = [self.codec.decode(payload, size=self.vector.size) for payload in payloads]
        return Decoded(vectors, self.vector.mean, self.vector.weights)

    def average(self, payloads: Sequence[Tensor]) -> Tensor:
        """Decode the nodes' payloads and average them, one at a time."""
        size, weights = self.vector.size, self.vector.weights
        running = RunningMean(size, self.vector.mean, weights is not None)
        for node, payload in enumerate(
            payloads
        ):  # a vector has no name: it is gone when the next one is decoded
            running.add(self.codec.decode(payload, size=size), 1.0 if weights is None else weights[node])
        return running.result()

    def rollback(self) -> None:
        """Undo the last reduction."""

    def commit(self) -> None:
        """Make the last reduction final."""

    def state(self) -> dict[str, Tensor]:
        """Return what is kept between rounds, as vectors of `size` entries."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> SparseVector | None:
        """Continue from a state; return what cannot be kept here, in the units of one node's gradient."""
        kept = state.get(OWNER)
        return None if kept is None else returned(kept, self.vector, self.transport)


class Gathering:
    """One collective: header, payloads and flags of every rank."""

    waited = 0.0  # all waiting is for the headers

    def __init__(
        self, exchanges: Sequence[AllGathered], header: Tensor, flags: Tensor, payloads: Sequence[Tensor]
    ) -> None:
        transport = distributed(exchanges[0].transport)
        self._exchanges = exchanges
        self._sizes = [part.numel() for part in (header, flags, *payloads)]
        message = torch.cat([part.to(payloads[0].device) for part in (header, flags, *payloads)])
        self.work = transport.start(message)
        self.sent = message.numel()
        self.received = (transport.nodes - 1) * message.numel()

    @cached_property
    def _parts(self) -> list[tuple[Tensor, ...]]:
        return [torch.split(message, self._sizes) for message in self.work.wait()]  # [rank][part]

    def headers(self) -> list[Tensor]:
        """Wait for the message of every rank; return the headers."""
        return [parts[0] for parts in self._parts]

    def flags(self) -> list[Tensor]:
        """Return the flags of all ranks."""
        return [parts[1] for parts in self._parts]

    def reduce(self, idle: Sequence[Spans]) -> None:
        """Do nothing: every rank has all payloads."""

    def means(self, sparse: Sequence[bool]) -> list[Tensor | SparseVector | Decoded]:
        """Return the mean of each vector, or what it is made of if that is little."""
        return [
            (exchange.decoded if few else exchange.average)([parts[2 + place] for parts in self._parts])
            for place, (exchange, few) in enumerate(zip(self._exchanges, sparse, strict=True))
        ]
