"""Which node owns which entry, and payloads that are made of one part for each owner."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rtopk.codec import Codec, PayloadError
from rtopk.kernels.host import fetch, send
from rtopk.sparse import SparseVector


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
        block, place = _divided(np.where(tail, positions - self.head, positions), self.nodes)
        turned = place + self._turn(block)
        owner = np.where(tail, place, turned - self.nodes * (turned >= self.nodes))
        number = np.where(tail, block + np.asarray(self.heads)[owner], block)
        return owner.astype(np.uint16), number

    def positions(self, node: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of entries of a node's share, by their numbers."""
        tail = numbers >= self.heads[node]
        block = np.where(tail, numbers - self.heads[node], numbers)
        turned = node - self._turn(block)
        place = np.where(tail, node, turned + self.nodes * (turned < 0))
        found: NDArray[np.int64] = np.where(tail, self.head, 0) + block * self.nodes + place
        return found

    def _turn(self, block: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return by how much a block is turned; the last one, if it is not full, not at all."""
        mixed = block.astype(np.uint64)  # SplitMix64
        for factor, shift in ((0x9E3779B97F4A7C15, 30), (0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
            mixed = mixed * np.uint64(factor)
            mixed ^= mixed >> np.uint64(shift)
        turned = _divided(mixed, np.uint64(self.nodes))[1].astype(np.int64)
        return np.where(block < self.head // self.nodes, turned, 0)

    def split(self, vector: SparseVector) -> tuple[NDArray[np.int64], list[SparseVector]]:
        """Return the order in which entries go to the shares, and the part of the vector in each share."""
        indices, values = vector.here or fetch(vector.indices, vector.values)
        owner, number = self.of(indices.numpy())
        order = np.argsort(owner, kind="stable")
        cuts = np.cumsum(np.bincount(owner, minlength=self.nodes))[:-1]
        numbers, values = number[order], values[torch.from_numpy(order)]
        parts = zip(
            np.split(numbers, cuts), values.tensor_split(torch.from_numpy(cuts)), self.sizes, strict=True
        )
        return order, [SparseVector(torch.from_numpy(part), kept, size) for part, kept, size in parts]

    def join(self, parts: Sequence[SparseVector]) -> SparseVector:
        """Return the vector whose shares these are."""
        positions = [self.positions(node, part.indices.numpy()) for node, part in enumerate(parts)]
        order = np.argsort(
            joint := np.concatenate(positions), kind="stable"
        )  # merges what is in order already
        values = torch.cat([part.values for part in parts])
        return SparseVector(torch.from_numpy(joint[order]), values[torch.from_numpy(order)], self.size)

    def everything(self, node: int) -> Tensor:
        """Return all positions of a node's share, ascending."""
        return torch.from_numpy(self.positions(node, np.arange(self.sizes[node])))


def _share(size: int, node: int, nodes: int) -> int:
    return size // nodes + (node < size % nodes)


def _divided(numbers: NDArray[Any], by: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return quotients and remainders; numpy divides by a scalar fast in `//` alone."""
    quotient = numbers // by
    return quotient, numbers - quotient * by


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
