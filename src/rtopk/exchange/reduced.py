"""exchange="all-reduce": every node averages its share of the entries, and passes on the largest."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rtopk.aggregate import Decoded
from rtopk.codec import HEADER, SHORT, Codec
from rtopk.exchange.owner import Owner, owners_codec
from rtopk.exchange.shares import PartsCodec, Shares, bundled, unbundled
from rtopk.exchange.vector import OWNER, Spans, Traffic, Vector, distributed, returned
from rtopk.schedule import Schedule, as_schedule, check_density
from rtopk.sparse import SparseVector
from rtopk.sparsifier import entries_sent
from rtopk.state_file import byte_tensor
from rtopk.transport import Swap, Transport

OwnerDensity = float | Schedule | Literal["all"]
DIGEST = 8  # bytes
NOTE_BYTES = 8 + DIGEST  # size and digest, to every node before the parts


class AllReduced:
    """Every node owns a share. `owner_density` is the part of all entries that the owners pass on together."""

    def __init__(
        self,
        transport: Transport,
        vector: Vector,
        codec: Codec,
        density: Schedule,
        owner_density: OwnerDensity | None = None,
    ) -> None:
        self.transport, self.vector = transport, vector
        self.shares = Shares(vector.size, vector.dense_size, transport.nodes)
        self.codec = PartsCodec(codec, self.shares)
        self.density: Schedule | None = None  # None: the owners pass on all that they receive
        if owner_density != "all":
            given = density if owner_density is None else as_schedule(owner_density)
            self.density = lambda step: check_density(given(step), "owner_density")
        self.owners = [Owner(n, self.shares, vector, self.codec, self.density) for n in transport.local]
        self._readers = [owners_codec(codec, tail, self.density is not None) for tail in self.shares.tails]

    def most(self, entries: int) -> int:
        """Return how many entries a mean has at most if every node sends so many."""
        return self.transport.nodes * entries

    def mean(self, payloads: Sequence[Tensor], step: int) -> tuple[Tensor, Traffic]:
        """Exchange the payloads of the local nodes; return what the owners pass on, and what it cost."""
        parts = [self.codec.parts(payload) for payload in payloads]
        arrived = self.transport.swap(parts)
        owned = [owner.reduce(found, step) for owner, found in zip(self.owners, arrived, strict=True)]
        everyone = self.transport.exchange(owned)
        traffic, total = Traffic(), _bytes(everyone)
        for node, sent, got, own in zip(self.transport.local, parts, arrived, owned, strict=True):
            traffic.sent += (_bytes(sent) - sent[node].numel() + own.numel()) / len(owned)
            traffic.received += (_bytes(got) - got[node].numel() + total - own.numel()) / len(owned)
        mean = self.join(everyone, step).to_dense()
        self.commit()
        return mean, traffic

    def join(self, owned: Sequence[Tensor], step: int) -> SparseVector:
        """Decode what the owners pass on; zero bytes may follow each payload."""
        rooms = self.rooms(step) or [payload.numel() for payload in owned]
        owners = zip(self._readers, owned, rooms, self.shares.sizes, strict=True)
        return self.shares.join(
            [
                reader.decode(reader.lengthen(whole[:room], size), size=size)
                for reader, whole, room, size in owners
            ]
        )

    def rooms(self, step: int) -> list[int] | None:
        """Return the bytes of what each owner passes on in a step; None if only the owner knows."""
        if self.density is None:
            return None
        density = self.density(step)
        return [
            reader.capacity(head + tail, entries_sent(head, density) + tail) - HEADER.size + SHORT.size
            for reader, head, tail in zip(self._readers, self.shares.heads, self.shares.tails, strict=True)
        ]

    def rollback(self) -> None:
        """Undo the last reduction."""
        for owner in self.owners:
            owner.rollback()

    def commit(self) -> None:
        """Make the last reduction final."""
        for owner in self.owners:
            owner.commit()

    def state(self) -> dict[str, Tensor]:
        """Return the residuals of the local owners as one vector of all entries, as of the last final reduction."""
        if not self.vector.keeps:
            return {}
        return {OWNER: torch.stack([owner.residual() for owner in self.owners]).sum(0)}

    def load(self, state: Mapping[str, Tensor]) -> SparseVector | None:
        """Continue from a state; return what other nodes own now, in the units of one node's gradient."""
        whole = state[OWNER].cpu().clone() if OWNER in state else torch.zeros(self.vector.size)
        for owner in self.owners:
            owner.load_(whole)
        return returned(whole, self.vector, self.transport)


class Reducing:
    """Three collectives: sizes and digests, parts to their owners, and what the owners pass on.

    Ranks send a digest of their header. Only if digests differ, which ends the round, the headers follow.
    """

    def __init__(
        self,
        exchanges: Sequence[AllReduced],
        header: Tensor,
        flags: Tensor,
        payloads: Sequence[Tensor],
        step: int,
    ) -> None:
        self._exchanges, self._step = exchanges, step
        self._transport = transport = distributed(exchanges[0].transport)
        parts = [exchange.codec.parts(payload) for exchange, payload in zip(exchanges, payloads, strict=True)]
        digest = hashlib.blake2b(bytes(header.numpy()), digest_size=DIGEST).digest()
        note = torch.cat([byte_tensor(digest), flags.cpu()])
        bundles = [bundled(to_rank) for to_rank in zip(*parts, strict=True)]
        self._swap = Swap(transport, bundles, note, _agree)
        self.sent, self.received = self._swap.sent, self._swap.received
        self._headers = [header] * transport.nodes
        if not _agree(self._swap.notes):
            self._headers = transport.exchange([header])
            self._count(header.numel())
        self.waited = 0.0
        self._failure: Exception | None = None
        self._owned: Callable[[], list[Tensor]] = list

    def _after(self, wait: Callable[[], list[Tensor]]) -> list[Tensor]:
        started = time.perf_counter()
        try:
            return wait()
        finally:
            self.waited += time.perf_counter() - started

    def _count(self, size: int) -> None:
        self.sent += size
        self.received += (self._transport.nodes - 1) * size

    def headers(self) -> list[Tensor]:
        """Return the headers of all ranks."""
        return self._headers

    def flags(self) -> list[Tensor]:
        """Return the flags of all ranks."""
        return [note[DIGEST:] for note in self._swap.notes]

    def reduce(self, idle: Sequence[Spans]) -> None:
        """Reduce the own share and start to pass it on; a failure is told to all ranks."""
        rooms = [exchange.rooms(self._step) for exchange in self._exchanges]
        message = torch.zeros(1, dtype=torch.uint8)  # a failure
        try:
            parts = self._after(self._swap.wait)
            arrived = [unbundled(part, len(rooms)) for part in parts]  # [rank][vector]
            owned = [
                exchange.owners[0].reduce([parts[place] for parts in arrived], self._step, idle[place])
                for place, exchange in enumerate(self._exchanges)
            ]
            message = torch.cat([torch.ones(1, dtype=torch.uint8), bundled(owned)])
        except Exception as error:
            self._failure = error
        if None in rooms:
            everyone = self._after(partial(self._transport.exchange_uneven, message))
            self._owned = lambda: everyone
            self._count(max(part.numel() for part in everyone))
        else:
            table = 8 * len(rooms) if len(rooms) > 1 else 0
            size = 1 + table + sum(max(room) for room in rooms if room is not None)
            padded = torch.zeros(size, dtype=torch.uint8)
            padded[: message.numel()] = message
            self._owned = self._transport.start(padded).wait
            self._count(size)

    def means(self, sparse: Sequence[bool]) -> list[Tensor | SparseVector | Decoded]:
        """Wait for what the owners pass on; return the mean of each vector."""
        messages = [message.cpu() for message in self._after(self._owned)]
        if self._failure is not None:
            raise self._failure
        failed = [rank for rank, message in enumerate(messages) if not message[0]]
        if failed:
            raise RuntimeError(
                f"rank {', '.join(map(str, failed))} failed to reduce its share in step {self._step}; see its error"
            )
        owned = [unbundled(message[1:], len(sparse)) for message in messages]  # [rank][vector]
        joint = [
            exchange.join([parts[place] for parts in owned], self._step)
            for place, exchange in enumerate(self._exchanges)
        ]
        return [mean if few else mean.to_dense() for mean, few in zip(joint, sparse, strict=True)]


def _agree(notes: Sequence[Tensor]) -> bool:
    """Return whether all ranks have the same header."""
    return all(torch.equal(note[:DIGEST], notes[0][:DIGEST]) for note in notes)


def _bytes(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)
