"""Which node owns which entry, and payloads that are made of one part for each owner."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rtopk.codec import Codec, PayloadError
from rtopk.kernels.host import fetch, send
from rtopk.kernels.jit import Array, Num, entry, fused, int64, uint64
from rtopk.sparse import SparseVector


@fused
def turn(block: Num, nodes: Num, full: Num) -> Num:
    """Return by how much a block is turned: a hash (SplitMix64); one that is not full, not at all."""
    mixed = uint64(block) * uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> uint64(27))) * uint64(0x94D049BB133111EB)
    mixed ^= mixed >> uint64(31)
    return int64(mixed % uint64(nodes)) if block < full else int64(0)


@entry
def assign(positions: Array, head: Num, heads: Array, owners: Array, numbers: Array) -> None:
    """Fill in the owner of each position, and its number in the owner's share."""
    nodes = len(heads)
    for i in range(len(positions)):
        tail = positions[i] >= head
        at = positions[i] - head if tail else positions[i]
        block = at // nodes
        place = at - block * nodes
        if not tail:
            place += turn(block, nodes, head // nodes)
            place -= nodes if place >= nodes else 0
        owners[i] = place
        numbers[i] = block + heads[place] if tail else block


@entry
def locate(numbers: Array, node: Num, head: Num, heads: Array, positions: Array) -> None:
    """Fill in the positions of entries of a node's share: undo `assign`."""
    nodes = len(heads)
    for i in range(len(numbers)):
        tail = numbers[i] >= heads[node]
        block = numbers[i] - heads[node] if tail else numbers[i]
        place = int64(node)
        if not tail:
            place -= turn(block, nodes, head // nodes)
            place += nodes if place < 0 else 0
        positions[i] = (head if tail else 0) + block * nodes + place


@entry
def by_owner(owners: Array, ends: Array) -> Array:
    """Return the entries in the order of their owners, and fill in where each owner's end."""
    ends[:] = 0
    for owner in owners:
        ends[owner] += 1
    free = np.zeros(len(ends), np.int64)
    for owner in range(1, len(ends)):
        free[owner] = ends[owner - 1]
        ends[owner] += ends[owner - 1]
    order = np.empty(len(owners), np.int64)
    for i in range(len(owners)):
        order[free[owners[i]]] = i
        free[owners[i]] += 1
    return order


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
        self._heads = np.array(self.heads)

    def of(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the owner of each position, and its number in the owner's share."""
        owners, numbers = np.empty(len(positions), np.uint16), np.empty(len(positions), np.int64)
        assign(positions, self.head, self._heads, owners, numbers)
        return owners, numbers

    def positions(self, node: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of entries of a node's share, by their numbers."""
        found = np.empty(len(numbers), np.int64)
        locate(numbers, node, self.head, self._heads, found)
        return found

    def split(self, vector: SparseVector) -> tuple[NDArray[np.int64], list[SparseVector]]:
        """Return the order in which entries go to the shares, and the part of the vector in each share."""
        indices, values = vector.here or fetch(vector.indices, vector.values)
        owners, numbers = self.of(indices.contiguous().numpy())
        ends = np.empty(self.nodes, np.int64)
        order = by_owner(owners, ends)
        values, numbers, cuts = values[torch.from_numpy(order)], numbers[order], [0, *ends.tolist()]
        parts = [
            SparseVector(torch.from_numpy(numbers[begin:end]), values[begin:end], size)
            for begin, end, size in zip(cuts, cuts[1:], self.sizes, strict=False)
        ]
        return order, parts

    def join(self, parts: Sequence[SparseVector]) -> SparseVector:
        """Return the vector whose shares these are."""
        positions = np.concatenate(
            [self.positions(node, part.indices.numpy()) for node, part in enumerate(parts)]
        )
        order = torch.from_numpy(_ascending(positions, self.size))
        values = torch.cat([part.values for part in parts])
        return SparseVector(torch.from_numpy(positions)[order], values[order], self.size)

    def everything(self, node: int) -> Tensor:
        """Return all positions of a node's share, ascending."""
        return torch.from_numpy(self.positions(node, np.arange(self.sizes[node])))


def _share(size: int, node: int, nodes: int) -> int:
    return size // nodes + (node < size % nodes)


def _ascending(positions: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the order in which positions below `size` ascend."""
    bits = len(positions).bit_length()
    if bits + size.bit_length() > 63:
        return np.argsort(positions, kind="stable")
    keys = positions << bits | np.arange(
        len(positions)
    )  # numpy sorts numbers several times as fast as it orders
    keys.sort()
    return keys & (1 << bits) - 1


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
        here = vector.here and (vector.here[0], values)
        sent = SparseVector(vector.indices, send(values, vector.indices.device), vector.size, here)
        return packed(parts), sent

    def parts(self, payload: Tensor) -> list[Tensor]:
        """Return the parts of a payload, one for each owner."""
        return unpacked(payload, self.shares.nodes)

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


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Join parts, after a table of their sizes."""
    return torch.cat([torch.tensor([part.numel() for part in parts]).view(torch.uint8), *parts])


def bundled(parts: Sequence[Tensor]) -> Tensor:
    """Join the parts of several vectors; a single one needs no table."""
    return parts[0] if len(parts) == 1 else packed(parts)


def unbundled(message: Tensor, count: int) -> list[Tensor]:
    """Split what `bundled` has joined."""
    return [message] if count == 1 else unpacked(message, count)


def unpacked(message: Tensor, count: int) -> list[Tensor]:
    """Split a message of so many parts; zero bytes may follow them."""
    sizes = [-1]
    if message.numel() >= 8 * count:
        sizes = message[: 8 * count].cpu().clone().view(torch.int64).tolist()  # aligned
    if min(sizes) < 0 or sum(sizes) > message.numel() - 8 * count:
        raise PayloadError(
            f"{message.numel()} bytes do not hold the {count} parts that they claim, {sizes[:8]}"
        )
    return list(torch.split(message[8 * count : 8 * count + sum(sizes)], sizes))
