"""SparseVector <-> payload: the uint8 bytes that one node sends in one round, format version 1.

A payload is a header of 40 bytes, the values of the chosen entries, those of the dense tail, and the
positions of the chosen entries; `docs/wire-format.md` specifies every byte. The tail is the run of entries at
the end of the vector that a layout always sends: its positions cost nothing. A vector that is all tail
(density 1) is the plain dense form.
"""

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rtopk.kernels.host import fetch, send
from rtopk.kernels.threads import ranges, together
from rtopk.seed import derive, generator
from rtopk.sparse import SparseVector
from rtopk.state_file import byte_tensor
from rtopk.wire import PayloadError, positions
from rtopk.wire.bits import payload_checksum, xxh64
from rtopk.wire.positions import position_bytes
from rtopk.wire.values import BY_NAME, FORMS, NO_DRAWS, finite

__all__ = ["Codec", "PayloadError"]

MAGIC = b"rTpk"
VERSION = 1
PADDED = 1  # flag: zero bytes may follow
# magic, version, flags, index form, value form, d, head entries, tail entries, fingerprint, checksum
HEADER = struct.Struct("<4sBBBBQIIQQ")
# What a receiver who knows the codec and d cannot know: index form, head entries, tail entries, checksum
SHORT = struct.Struct("<BIIQ")
SIZE_LIMIT = 1 << 40  # entries of a vector
COUNT_LIMIT = 1 << 32  # entries of a payload
RUN = 1 << 16  # positions that are written at once where all are sent


class Codec:
    """Encode the entries of a vector in few bits, and decode them with every claim checked.

    `values` is the form of the values: fp32 (lossless), fp16, bf16, int8, 4bit or 2bit; `rounding` is
    nearest or stochastic (drawn from the generator passed to encode). The rounding error stays in the
    memory of the sparsifier. A receiver reads every form, and refuses a different `fingerprint`.

    `fixed` makes every payload exactly `capacity(d, k)` bytes, so that ranks can exchange payloads of equal
    size without negotiating it. `dense_size` is then the length of the tail that every vector has. If positions
    do not fit into the capacity, randomly drawn entries of the head are left out (they
    stay in the residual); `overflows` counts how often.

    >>> codec = Codec(values="4bit")
    >>> vector = SparseVector(torch.arange(0, 10**6, 1000), torch.randn(1000), size=10**6)
    >>> payload = codec.encode(vector)
    >>> torch.equal(codec.decode(payload, size=10**6, entries=1000).indices, vector.indices)
    True
    """

    def __init__(
        self,
        values: str = "fp32",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        fingerprint: int = 0,
        fixed: bool = False,
        dense_size: int = 0,
    ) -> None:
        if values not in BY_NAME:
            raise ValueError(f"values must be one of {', '.join(BY_NAME)}, got {values!r}")
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be nearest or stochastic, got {rounding!r}")
        if not 0 <= fingerprint < 1 << 64:
            raise ValueError(f"fingerprint must be in [0, 2**64), got {fingerprint}")
        if dense_size < 0:
            raise ValueError(f"dense_size must be at least 0, got {dense_size}")
        self.values = values
        self.rounding = rounding
        self.fingerprint = fingerprint
        self.fixed = fixed
        self.dense_size = dense_size
        self.overflows = 0  # payloads of fixed size that had to leave entries out
        self._form = FORMS[BY_NAME[values]]

    def capacity(self, size: int, entries: int) -> int:
        """Return the bytes of a payload of fixed size, for `entries` of `size`, including the dense tail."""
        _check_sizes(size, entries)
        if entries == size:
            return HEADER.size + self._form.size(size)
        if entries < self.dense_size:
            raise ValueError(f"{entries} entries do not hold the dense tail of {self.dense_size}")
        head = entries - self.dense_size
        room = position_bytes(head, size - self.dense_size)
        return HEADER.size + self._form.size(head) + self._form.size(self.dense_size) + room

    def blank(self, size: int, entries: int) -> Tensor:
        """Return a payload of fixed size that holds nothing, for a node that has nothing to say."""
        return torch.zeros(self.capacity(size, entries), dtype=torch.uint8)

    def shorten(self, payload: Tensor) -> Tensor:
        """Return a payload without the part of its header that a receiver with the same codec and d knows."""
        _, _, _, form, _, _, head, tail, _, checksum = HEADER.unpack(bytes(payload[: HEADER.size].numpy()))
        short = byte_tensor(SHORT.pack(form, head, tail, checksum))
        return torch.cat([short, payload[HEADER.size :]])

    def lengthen(self, short: Tensor, size: int) -> Tensor:
        """Return the payload of d = `size` entries that was shortened; `decode` checks it as any other."""
        if short.numel() < SHORT.size:
            raise PayloadError(f"a short payload must have at least {SHORT.size} bytes, got {short.numel()}")
        form, head, tail, checksum = SHORT.unpack(bytes(short[: SHORT.size].cpu().numpy()))
        flags, number = PADDED if self.fixed else 0, BY_NAME[self.values]
        raw = HEADER.pack(MAGIC, VERSION, flags, form, number, size, head, tail, self.fingerprint, checksum)
        return torch.cat([byte_tensor(raw), short[SHORT.size :].cpu()])

    def encode(self, vector: SparseVector, rng: torch.Generator | None = None) -> Tensor:
        """Return the payload of a vector: 1-D uint8, always on the CPU."""
        return self.encode_with_decoded(vector, rng)[0]

    def encode_with_decoded(
        self, vector: SparseVector, rng: torch.Generator | None = None
    ) -> tuple[Tensor, SparseVector]:
        """Return the payload and the vector that every receiver will decode from it, bit for bit.

        That vector is on the device of the input; its values are float32.
        """
        k, d = len(vector), vector.size
        _check_sizes(d, k)
        rounds = self.rounding == "stochastic" and not self._form.exact
        if rounds and rng is None:
            raise ValueError("stochastic rounding needs a generator: encode(vector, rng)")
        here = vector.here or fetch(vector.indices, vector.values)
        indices, values = (tensor.contiguous().numpy() for tensor in (here[0], _as_float32(here[1])))  # (k,)
        tail = self._tail(indices, d)
        limit = self.capacity(d, k) if self.fixed else None
        if self.fixed or rounds:  # before an overflow is counted or a generator used
            _check_finite(values)
        kept, size = None, HEADER.size + self._form.size(k - tail) + self._form.size(tail)
        if limit is not None:
            data, form, kept = self._fitted(indices[: k - tail], d - tail, tail, limit, rng)
        if kept is not None:
            keep = np.concatenate([kept, np.arange(k - tail, k)])
            indices, values = indices[keep], values[keep]
        head = len(values) - tail
        draws = torch.rand(len(values), generator=rng).numpy() if rounds else NO_DRAWS
        decoded = values if self._form.exact else np.empty_like(values)
        writers = list(self._writers(values, draws, decoded, head))
        if limit is None:
            form, data, end = positions.write(indices[:head], d - tail, size, absent=True, beside=writers)
            data = data[:end]
        else:
            together([partial(writer, data) for writer in writers], len(values))
        flags, number = PADDED if self.fixed else 0, BY_NAME[self.values]
        HEADER.pack_into(
            data.data, 0, MAGIC, VERSION, flags, form, number, d, head, tail, self.fingerprint, 0
        )
        struct.pack_into("<Q", data.data, HEADER.size - 8, payload_checksum(data, HEADER.size, len(data)))
        sent = torch.from_numpy(indices), torch.from_numpy(decoded)
        if kept is None and self._form.exact and vector.values.dtype == torch.float32:
            return torch.from_numpy(data), SparseVector(
                vector.indices, vector.values.detach(), d, vector.here
            )
        moved = [send(tensor, vector.indices.device) for tensor in sent]
        return torch.from_numpy(data), SparseVector(moved[0], moved[1], d, vector.here and sent)

    def decode(self, payload: Tensor, *, size: int | None = None, entries: int | None = None) -> SparseVector:
        """Return the vector of a payload; PayloadError on anything malformed or not expected.

        `size` is the d that the receiver expects, `entries` the largest k that it accepts; pass both for
        untrusted payloads. Every claimed size is checked before memory is allocated for it: 12 bytes per
        entry (20 at densities above a half), and an entry takes at least 2 bits of payload.
        """
        data = _as_bytes(payload)
        if len(data) < HEADER.size:
            raise PayloadError(f"payload must have at least {HEADER.size} bytes, got {len(data)}")
        fields = HEADER.unpack_from(data.data)
        magic, version, flags, form, number, d, head, tail, fingerprint, checksum = fields
        if magic != MAGIC or version != VERSION:
            raise PayloadError(f"not a payload of version {VERSION}: {magic!r}, version {version}")
        if flags & ~PADDED or number >= len(FORMS):
            raise PayloadError(f"unknown flags {flags:#x} or value form {number}")
        if fingerprint != self.fingerprint:
            raise PayloadError(f"payload is of model {fingerprint:#x}, expected {self.fingerprint:#x}")
        if d > SIZE_LIMIT or head + tail > d or (size is not None and d != size):
            expected = f"at most {SIZE_LIMIT}" if size is None else size
            raise PayloadError(f"payload claims {head + tail} of {d} entries, expected size {expected}")
        if entries is not None and head + tail > entries:
            raise PayloadError(f"payload claims {head + tail} entries, expected at most {entries}")
        values = FORMS[number]
        middle = HEADER.size + values.size(head)
        end = middle + values.size(tail)
        if end > len(data):
            raise PayloadError(f"{head + tail} {values.name} values end at byte {end}, got {len(data)} bytes")
        indices, decoded = np.empty(head + tail, np.int64), np.empty(head + tail, np.float32)

        def read_values() -> PayloadError | None:
            if payload_checksum(data, HEADER.size, len(data)) != checksum:
                return PayloadError(f"checksum of {len(data)} bytes is not {checksum:#018x}: damaged payload")
            if values.read(data, HEADER.size, decoded[:head]) and values.read(data, middle, decoded[head:]):
                return None
            return PayloadError(f"values of form {values.name} are not finite or their scales are wrong")

        def read_positions() -> PayloadError | None:
            last = indices[head:]
            for at in range(0, tail, RUN):
                last[at : at + RUN] = np.arange(d - tail + at, min(d - tail + at + RUN, d))
            try:
                positions.read(form, data, end, d - tail, indices[:head], padded=bool(flags & PADDED))
            except PayloadError as error:
                return error
            return None

        for refusal in together([read_values, read_positions], head + tail):
            if refusal is not None:
                raise refusal
        return SparseVector(torch.from_numpy(indices), torch.from_numpy(decoded), d)

    def _tail(self, indices: NDArray[np.int64], d: int) -> int:
        """Return how many entries at the end are sent without positions."""
        k = len(indices)
        tail = self.dense_size if self.fixed and k < d else _trailing_run(indices, d)
        if not positions.ascends(indices[k - tail :], d - tail, d):
            expected = f"end in positions {d - tail} to {d - 1}" if self.fixed else "be ascending and unique"
            raise ValueError(f"indices of {k} of {d} entries must {expected}")
        return tail

    def _writers(
        self, values: NDArray[np.float32], draws: NDArray[np.float32], decoded: NDArray[np.float32], head: int
    ) -> Iterator[Callable[[NDArray[np.uint8]], None]]:
        """Yield functions that write the sections of values into a payload, and what a reader gets to decoded."""
        form = self._form
        for begin, end, at in ((0, head, HEADER.size), (head, len(values), HEADER.size + form.size(head))):
            for first, last in ranges(end - begin, form.block, form.divisible_from):
                if first < last:
                    part = slice(begin + first, begin + last)
                    sections = values[part], draws[part], decoded[part], at + form.size(first)
                    yield partial(self._write_finite, *sections)

    def _write_finite(self, values: NDArray[np.float32], *place: Any) -> None:
        """Write a part of the values; ValueError if one is NaN or Inf."""
        _check_finite(values)
        self._form.write(values, *place)

    def _fitted(
        self,
        indices: NDArray[np.int64],
        d: int,
        tail: int,
        limit: int,
        rng: torch.Generator | None,
    ) -> tuple[NDArray[np.uint8], int, NDArray[np.int64] | None]:
        """Return a payload of `limit` bytes with its positions, their form, and the entries kept if not all."""
        kept, head = None, indices
        while True:
            prefix = HEADER.size + self._form.size(len(head)) + self._form.size(tail)
            form, data, end = positions.write(head, d, prefix, absent=False)
            if end <= limit:
                padded = np.zeros(limit, np.uint8)
                padded[prefix:end] = data[prefix:end]
                return padded, form, kept
            if kept is None:
                self.overflows += 1
                if rng is None:  # any draw will do that does not depend on the order of the entries
                    rng = generator(derive(int(xxh64(indices.view(np.uint8), 0, indices.nbytes, 0))))
            surplus = 1 + round(1.05 * (end - limit) / (end - HEADER.size) * len(head))
            wanted = max(0, len(head) - surplus)
            kept = torch.randperm(len(indices), generator=rng)[:wanted].sort().values.numpy()
            head = indices[kept]


def _trailing_run(indices: NDArray[np.int64], d: int) -> int:
    """Return the length of the run of consecutive indices that ends at d - 1, by bisection."""
    low, high = 0, len(indices)  # a run of low is one; of more than high is not
    while low < high:
        middle = (low + high + 1) // 2
        if indices[-middle] == d - middle:
            low = middle
        else:
            high = middle - 1
    return low


def _as_float32(values: Tensor) -> Tensor:
    """Return values as float32, those beyond its range saturated, NaN and Inf left as they are."""
    values = values.detach()
    if values.dtype == torch.float64:
        largest = torch.finfo(torch.float32).max
        values = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
    return values.to(torch.float32)


def _check_finite(values: NDArray[np.float32]) -> None:
    if not finite(values.view(np.uint32)):
        raise ValueError("values to encode must be finite, got NaN or Inf")


def _as_bytes(payload: Tensor) -> NDArray[np.uint8]:
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8 or payload.dim() != 1:
        kind = f"{payload.dim()}-D {payload.dtype}" if isinstance(payload, Tensor) else type(payload).__name__
        raise PayloadError(f"payload must be a 1-D uint8 tensor, got {kind}")
    array: NDArray[np.uint8] = payload.detach().cpu().contiguous().numpy()
    return array


def _check_sizes(size: int, entries: int) -> None:
    if not 0 <= entries <= size or size > SIZE_LIMIT or entries >= COUNT_LIMIT:
        raise ValueError(
            f"need 0 <= entries <= size <= 2**40 and entries < 2**32, got {entries} entries of {size}"
        )
