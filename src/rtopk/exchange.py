"""How the payloads of all nodes become one mean: `exchange="all-gather"` or `"all-reduce"`.

All-gather: every node receives every payload and averages them itself, (n - 1) k entries. All-reduce: every node
owns one n-th of the entries. It receives the others' chosen entries of its share, averages them, and passes on the
largest; the rest stays in its own residual. A node receives about 2 k entries however many nodes there are:

    scatter   part j of every payload goes to node j
    reduce    node j averages the parts in node order, adds its residual, selects, encodes
    gather    what the owners pass on goes to all nodes

Nothing is lost: applied + the nodes' residuals + the owners' residuals = what came in. Replicas stay bit-identical,
because all decode the same payloads of the owners.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rtopk.aggregate import Mean, RunningMean, average, average_sparse
from rtopk.codec import HEADER, SHORT, Codec, PayloadError
from rtopk.layout import Layout
from rtopk.memory import ErrorFeedback, NoMemory, give_back, restore, snapshot_of
from rtopk.schedule import Schedule, as_schedule
from rtopk.seed import derive
from rtopk.select import Rule, TopK
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier, entries_sent
from rtopk.transport import AllGather, Swap, Transport

ExchangeName = Literal["all-gather", "all-reduce"]
OwnerDensity = float | Schedule | Literal["all"]
Spans = Sequence[tuple[int, int]]  # begin and end of parts of a vector
OWNER = "owner_residual"  # the name of an owner's residual in a state
DIGEST = 8  # bytes


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

    def headers(self) -> list[Tensor]:
        """Wait for the headers of all ranks; if they differ, the payloads may not have been sent."""

    def flags(self) -> list[Tensor]:
        """Return the flags of all ranks."""

    def reduce(self, idle: Sequence[Spans]) -> None:
        """Do what comes before the means; call it on all ranks or on none.

        `idle` are the parts of each vector in which no rank takes part in this round: nothing is passed on there.
        """

    def means(self, sparse: Sequence[bool]) -> list[Tensor | SparseVector]:
        """Wait for the rest; return the mean of each vector."""


class AllGathered:
    """Every node receives every payload: nothing is kept between rounds."""

    keeps_for_all = False

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
        return torch.as_tensor(self.average(everyone, sparse=False)), Traffic(own, total - own)

    def average(self, payloads: Sequence[Tensor], sparse: bool) -> Tensor | SparseVector:
        """Decode the nodes' payloads and average them; a dense mean holds one decoded payload at a time."""
        size, weights = self.vector.size, self.vector.weights
        vectors = (self.codec.decode(payload, size=size) for payload in payloads)
        if sparse:
            return average_sparse(list(vectors), self.vector.mean, weights)
        running = RunningMean(size, self.vector.mean, weights is not None)
        for node, vector in enumerate(vectors):
            running.add(vector, 1.0 if weights is None else weights[node])
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
        return None if kept is None else _returned(kept, self.vector, self.transport)


class _Gathering:
    """One collective: header, payloads and flags of every rank."""

    def __init__(
        self, exchanges: Sequence[AllGathered], header: Tensor, flags: Tensor, payloads: Sequence[Tensor]
    ) -> None:
        transport = _distributed(exchanges[0].transport)
        self._exchanges = exchanges
        self._sizes = [part.numel() for part in (header, flags, *payloads)]
        message = torch.cat([part.to(payloads[0].device) for part in (header, flags, *payloads)])
        self._work = transport.start(message)
        self.sent = message.numel()
        self.received = (transport.nodes - 1) * message.numel()

    @cached_property
    def _parts(self) -> list[tuple[Tensor, ...]]:
        return [torch.split(message, self._sizes) for message in self._work.wait()]  # [rank][part]

    def headers(self) -> list[Tensor]:
        return [parts[0] for parts in self._parts]

    def flags(self) -> list[Tensor]:
        return [parts[1] for parts in self._parts]

    def reduce(self, idle: Sequence[Spans]) -> None:
        pass

    def means(self, sparse: Sequence[bool]) -> list[Tensor | SparseVector]:
        return [
            exchange.average([parts[2 + place] for parts in self._parts], few)
            for place, (exchange, few) in enumerate(zip(self._exchanges, sparse, strict=True))
        ]


class Shares:
    """Which node owns which entry.

    Of every n consecutive entries each node owns one, in an order that a hash draws for each such block. So every
    share is an even sample of every tensor, row and column: as many of the large entries fall to one node as to
    another, however they are spread, and the map depends on nothing but the sizes. Within a share, entries are
    numbered by block; the always-sent tail of the vector is the tail of every share.
    """

    def __init__(self, size: int, dense_size: int, nodes: int) -> None:
        self.size, self.nodes = size, nodes
        self.head = size - dense_size
        self.heads = [_share(self.head, node, nodes) for node in range(nodes)]
        self.tails = [_share(dense_size, node, nodes) for node in range(nodes)]
        self.sizes = [head + tail for head, tail in zip(self.heads, self.tails, strict=True)]

    def of(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the owner of each position, and its number in the owner's share."""
        tail = positions >= self.head
        block, place = np.divmod(np.where(tail, positions - self.head, positions), self.nodes)
        owner = np.where(tail, place, (place + self._turn(block)) % self.nodes)
        number = np.where(tail, block + np.asarray(self.heads)[owner], block)
        return owner.astype(np.uint16), number

    def positions(self, node: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of entries of a node's share, by their numbers."""
        tail = numbers >= self.heads[node]
        block = np.where(tail, numbers - self.heads[node], numbers)
        place = np.where(tail, node, (node - self._turn(block)) % self.nodes)
        found: NDArray[np.int64] = np.where(tail, self.head, 0) + block * self.nodes + place
        return found

    def _turn(self, block: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return by how much a block is turned; the last one, if it is not full, not at all."""
        mixed = (block.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        turned = (mixed % np.uint64(self.nodes)).astype(np.int64)
        return np.where(block < self.head // self.nodes, turned, 0)

    def split(self, vector: SparseVector) -> tuple[NDArray[np.int64], list[SparseVector]]:
        """Return the order in which entries go to the shares, and the part of the vector in each share."""
        owner, number = self.of(vector.indices.cpu().numpy())
        order = np.argsort(owner, kind="stable")
        cuts = np.cumsum(np.bincount(owner, minlength=self.nodes))[:-1]
        numbers, values = number[order], vector.values.detach().cpu()[torch.from_numpy(order)]
        parts = zip(
            np.split(numbers, cuts), values.tensor_split(torch.from_numpy(cuts)), self.sizes, strict=True
        )
        return order, [SparseVector(torch.from_numpy(part), kept, size) for part, kept, size in parts]

    def join(self, parts: Sequence[SparseVector]) -> SparseVector:
        """Return the vector whose shares these are."""
        positions = [self.positions(node, part.indices.numpy()) for node, part in enumerate(parts)]
        order = np.argsort(joint := np.concatenate(positions))
        values = torch.cat([part.values for part in parts])
        return SparseVector(torch.from_numpy(joint[order]), values[torch.from_numpy(order)], self.size)

    def everything(self, node: int) -> Tensor:
        """Return all positions of a node's share, ascending."""
        return torch.from_numpy(self.positions(node, np.arange(self.sizes[node])))


def _share(size: int, node: int, nodes: int) -> int:
    return size // nodes + (node < size % nodes)


class PartsCodec(Codec):
    """Encode the part of each share by itself: a payload is n sizes of 8 bytes, then the n short parts."""

    def __init__(self, codec: Codec, shares: Shares) -> None:
        super().__init__(codec.values, codec.rounding, codec.fingerprint)
        self.shares = shares

    def blank(self, size: int, entries: int) -> Tensor:
        """Return a payload without entries."""
        return torch.zeros(8 * self.shares.nodes, dtype=torch.uint8)

    def encode_with_decoded(
        self, vector: SparseVector, rng: torch.Generator | None = None
    ) -> tuple[Tensor, SparseVector]:
        """Return the payload, and the vector that the owners decode together."""
        order, shares = self.shares.split(vector)
        encoded = [super(PartsCodec, self).encode_with_decoded(share, rng) for share in shares]
        parts = [self.shorten(payload) if len(sent) else payload[:0] for payload, sent in encoded]
        values = torch.empty(len(vector))
        values[torch.from_numpy(order)] = torch.cat([sent.values for _, sent in encoded])
        sent = SparseVector(vector.indices, values.to(vector.indices.device), vector.size)
        return _packed(parts), sent

    def parts(self, payload: Tensor) -> list[Tensor]:
        """Return the parts of a payload, one for each owner."""
        return _unpacked(payload, self.shares.nodes)

    def decode_part(self, part: Tensor, node: int) -> SparseVector:
        """Return the entries of a node's share that a part holds."""
        size = self.shares.sizes[node]
        if not part.numel():
            return SparseVector(torch.zeros(0, dtype=torch.int64), torch.zeros(0), size)
        return super().decode(self.lengthen(part, size), size=size)

    def decode(self, payload: Tensor, *, size: int | None = None, entries: int | None = None) -> SparseVector:
        """Return the whole vector of a payload."""
        parts = [self.decode_part(part, node) for node, part in enumerate(self.parts(payload))]
        return self.shares.join(parts)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Join parts, after a table of their sizes."""
    return torch.cat([torch.tensor([part.numel() for part in parts]).view(torch.uint8), *parts])


def _bundled(parts: Sequence[Tensor]) -> Tensor:
    """Join the parts of several vectors; a single one needs no table."""
    return parts[0] if len(parts) == 1 else _packed(parts)


def _unbundled(message: Tensor, count: int) -> list[Tensor]:
    return [message] if count == 1 else _unpacked(message, count)


def _unpacked(message: Tensor, count: int) -> list[Tensor]:
    """Split a message of so many parts; zero bytes may follow them."""
    sizes = [-1]
    if message.numel() >= 8 * count:
        sizes = message[: 8 * count].cpu().clone().view(torch.int64).tolist()  # aligned
    if min(sizes) < 0 or sum(sizes) > message.numel() - 8 * count:
        raise PayloadError(
            f"{message.numel()} bytes do not hold the {count} parts that they claim, {sizes[:8]}"
        )
    return list(torch.split(message[8 * count : 8 * count + sum(sizes)], sizes))


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
        self._before: Mapping[str, Tensor] | None = None

    def reduce(self, parts: Sequence[Tensor], step: int, idle: Spans = ()) -> Tensor:
        """Return what this owner passes on of the parts of all nodes, as a short payload."""
        vectors = [self.codec.decode_part(part, self.node) for part in parts]
        if self.received is not None:
            union = average_sparse(vectors, self.vector.mean, self.vector.weights)
            self.received.positions, mean = union.indices, union.to_dense()
        else:
            mean = average(vectors, self.vector.mean, self.vector.weights)
        memory, self._before = self.sparsifier.memory, snapshot_of(self.sparsifier.memory)
        waiting = [self._in(span) for span in idle] if self.vector.keeps else []
        for part in waiting:
            memory.subtract(part)
        payload = self.sparsifier.compress(mean, step)
        for part in waiting:
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


class AllReduced:
    """Every node owns a share. `owner_density` is the part of all entries that the owners pass on together."""

    keeps_for_all = True  # a rank may pass on entries that no rank sent in this round

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
            self.density = density if owner_density is None else as_schedule(owner_density)
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
        return _returned(whole, self.vector, self.transport)


class _Reducing:
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
        self._transport = transport = _distributed(exchanges[0].transport)
        parts = [exchange.codec.parts(payload) for exchange, payload in zip(exchanges, payloads, strict=True)]
        digest = hashlib.blake2b(bytes(header.numpy()), digest_size=DIGEST).digest()
        note = torch.cat([torch.frombuffer(bytearray(digest), dtype=torch.uint8), flags.cpu()])
        bundles = [_bundled(to_rank) for to_rank in zip(*parts, strict=True)]
        self._swap = Swap(transport, bundles, note, _agree)
        self.sent, self.received = self._swap.sent, self._swap.received
        self._headers = [header] * transport.nodes
        if not _agree(self._swap.notes):
            self._headers = transport.exchange([header])
            self._count(header.numel())
        self._failure: Exception | None = None
        self._owned: Callable[[], list[Tensor]] = list

    def _count(self, size: int) -> None:
        self.sent += size
        self.received += (self._transport.nodes - 1) * size

    def headers(self) -> list[Tensor]:
        return self._headers

    def flags(self) -> list[Tensor]:
        return [note[DIGEST:] for note in self._swap.notes]

    def reduce(self, idle: Sequence[Spans]) -> None:
        """Reduce the own share and start to pass it on; a failure is told to all ranks."""
        rooms = [exchange.rooms(self._step) for exchange in self._exchanges]
        message = torch.zeros(1, dtype=torch.uint8)  # a failure
        try:
            arrived = [_unbundled(part, len(rooms)) for part in self._swap.wait()]  # [rank][vector]
            owned = [
                exchange.owners[0].reduce([parts[place] for parts in arrived], self._step, idle[place])
                for place, exchange in enumerate(self._exchanges)
            ]
            message = torch.cat([torch.ones(1, dtype=torch.uint8), _bundled(owned)])
        except Exception as error:
            self._failure = error
        if None in rooms:
            everyone = self._transport.exchange_uneven(message)
            self._owned = lambda: everyone
            self._count(max(part.numel() for part in everyone))
        else:
            table = 8 * len(rooms) if len(rooms) > 1 else 0
            size = 1 + table + sum(max(room) for room in rooms if room is not None)
            padded = torch.zeros(size, dtype=torch.uint8)
            padded[: message.numel()] = message
            self._owned = self._transport.start(padded).wait
            self._count(size)

    def means(self, sparse: Sequence[bool]) -> list[Tensor | SparseVector]:
        messages = [message.cpu() for message in self._owned()]
        if self._failure is not None:
            raise self._failure
        failed = [rank for rank, message in enumerate(messages) if not message[0]]
        if failed:
            raise RuntimeError(
                f"rank {', '.join(map(str, failed))} failed to reduce its share in step {self._step}; see its error"
            )
        owned = [_unbundled(message[1:], len(sparse)) for message in messages]  # [rank][vector]
        joint = [
            exchange.join([parts[place] for parts in owned], self._step)
            for place, exchange in enumerate(self._exchanges)
        ]
        return [mean if few else mean.to_dense() for mean, few in zip(joint, sparse, strict=True)]


Exchange = AllGathered | AllReduced


def check_exchange(name: str, owner_density: OwnerDensity | None) -> None:
    """Raise ValueError for options of an exchange that make no sense."""
    if owner_density is None:
        return
    if name == "all-gather":
        raise ValueError(
            f"owner_density is for exchange='all-reduce', got {owner_density!r} with 'all-gather'"
        )
    if isinstance(owner_density, str) and owner_density != "all":
        raise ValueError(f"owner_density must be in (0, 1], a schedule or 'all', got {owner_density!r}")
    if not isinstance(owner_density, str):
        as_schedule(owner_density)


def make_exchange(
    name: str,
    transport: Transport,
    vector: Vector,
    codec: Codec,
    density: Schedule,
    owner_density: OwnerDensity | None = None,
) -> Exchange:
    """Make the exchange of one vector, by the name of its kind."""
    check_exchange(name, owner_density)
    if name == "all-reduce":
        return AllReduced(transport, vector, codec, density, owner_density)
    return AllGathered(transport, vector, codec)


def send(
    exchanges: Sequence[Exchange], header: Tensor, flags: Tensor, payloads: Sequence[Tensor], step: int
) -> Message:
    """Send the payloads of some vectors, whose exchanges are of one kind, in one message."""
    gathered = [exchange for exchange in exchanges if isinstance(exchange, AllGathered)]
    reduced = [exchange for exchange in exchanges if isinstance(exchange, AllReduced)]
    if gathered:
        return _Gathering(gathered, header, flags, payloads)
    return _Reducing(reduced, header, flags, payloads, step)


def _agree(notes: Sequence[Tensor]) -> bool:
    """Return whether all ranks have the same header."""
    return all(torch.equal(note[:DIGEST], notes[0][:DIGEST]) for note in notes)


def _returned(whole: Tensor, vector: Vector, transport: Transport) -> SparseVector | None:
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


def _distributed(transport: Transport) -> AllGather:
    assert isinstance(transport, AllGather)  # messages in flight are for processes
    return transport


def _bytes(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)
