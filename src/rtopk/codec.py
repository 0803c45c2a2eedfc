"""SparseVector <-> payload: the uint8 bytes that one node sends in one round.

Version 0: a header of 32 bytes, then k int64 indices, then k fp32 values, all little-endian.
"""

import struct

import torch
from torch import Tensor

from rtopk.sparse import SparseVector

MAGIC = b"rTpk"
VERSION = 0
HEADER = struct.Struct("<4sHHQQQ")  # magic, version, flags, d, k, fingerprint


class PayloadError(ValueError):
    """A payload is not one that the receiver can accept; the message says why."""


class Codec:
    """Write indices and fp32 values, and read them back with every claim checked."""

    def __init__(self, fingerprint: int = 0) -> None:
        self.fingerprint = fingerprint

    def encode(self, vector: SparseVector, rng: torch.Generator | None = None) -> Tensor:
        """Return the payload of a vector, 1-D uint8."""
        return self.encode_with_decoded(vector, rng)[0]

    def encode_with_decoded(
        self, vector: SparseVector, rng: torch.Generator | None = None
    ) -> tuple[Tensor, SparseVector]:
        """Return the payload and the vector that every receiver will decode from it, bit for bit."""
        indices, values = vector.indices.cpu(), vector.values.to("cpu", torch.float32)
        header = HEADER.pack(MAGIC, VERSION, 0, vector.size, len(vector), self.fingerprint)
        payload = torch.cat(
            [
                torch.frombuffer(bytearray(header), dtype=torch.uint8),
                indices.view(torch.uint8),
                values.view(torch.uint8),
            ]
        )
        return payload, SparseVector(vector.indices, vector.values.to(torch.float32), vector.size)

    def decode(self, payload: Tensor, *, size: int | None = None) -> SparseVector:
        """Return the vector of a payload; PayloadError on anything malformed or not of the expected size."""
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < HEADER.size:
            raise PayloadError(
                f"payload must be a 1-D uint8 tensor of at least {HEADER.size} bytes, "
                f"got {payload.dim()}-D {payload.dtype} of {payload.numel()}"
            )
        magic, version, flags, d, k, fingerprint = HEADER.unpack(bytes(payload[: HEADER.size].tolist()))
        if (magic, version, flags) != (MAGIC, VERSION, 0):
            raise PayloadError(f"not a payload of version {VERSION}: {magic!r}, version {version}")
        if fingerprint != self.fingerprint:
            raise PayloadError(f"payload is of model {fingerprint:#x}, expected {self.fingerprint:#x}")
        if k > d or (size is not None and d != size):
            raise PayloadError(f"payload claims {k} of {d} entries, expected a vector of size {size}")
        if payload.numel() != HEADER.size + 12 * k:
            raise PayloadError(
                f"payload of {k} entries must have {HEADER.size + 12 * k} bytes, got {payload.numel()}"
            )
        body = payload[HEADER.size :].clone()  # a fresh buffer is aligned
        indices, values = body[: 8 * k].view(torch.int64), body[8 * k :].clone().view(torch.float32)
        if not bool(values.isfinite().all()):
            raise PayloadError("payload holds values that are not finite")
        try:
            return SparseVector(indices, values, d).check()
        except ValueError as error:
            raise PayloadError(str(error)) from error
