"""States on disk: checksummed, replaced in one stroke, no pickle. The only file format for state.

A file is a prefix that names its kind, the checksum of the body, and the body: `torch.save` of tensors and plain
values, which `torch.load(weights_only=True)` reads back.
"""

import hashlib
import io
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class StateError(ValueError):
    """A saved state cannot be used here; the message says why."""


@dataclass(frozen=True)
class Format:
    """One kind of state file."""

    prefix: bytes
    checksum: int  # bytes
    advice: str  # what to do with a file that is damaged

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """Write a state as bytes."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        return self.prefix + self._checksum(buffer.getbuffer()) + buffer.getbuffer()

    def unpack(self, raw: bytes, source: str = "") -> dict[str, Any]:
        """Read what `pack` wrote; StateError, which names the source, if it is anything else."""
        start, where = len(self.prefix) + self.checksum, f"{source}: " if source else ""
        if not raw.startswith(self.prefix):
            raise StateError(
                f"{where}not a state written by rtopk (it starts with {raw[:14]!r}); {self.advice}"
            )
        if self._checksum(memoryview(raw)[start:]) != raw[len(self.prefix) : start]:
            raise StateError(
                f"{where}truncated or damaged ({len(raw)} bytes): checksum is wrong; {self.advice}"
            )
        state: dict[str, Any] = torch.load(io.BytesIO(raw[start:]), weights_only=True, map_location="cpu")
        return state

    def _checksum(self, body: memoryview) -> bytes:
        return hashlib.blake2b(body, digest_size=self.checksum).digest()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole, so that a reader or a crash never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # nobody asked for the draft
        raise
    finally:
        with suppress(OSError):
            draft.unlink()  # of a write that failed


def digest(value: object) -> bytes:
    """Name the exact content of tensors and plain values, in any nest of dictionaries."""
    hashed = hashlib.blake2b(digest_size=32)

    def feed(value: object) -> None:
        if isinstance(value, Mapping):
            for name in sorted(value):
                hashed.update(repr(name).encode())
                feed(value[name])
        elif isinstance(value, Tensor):
            hashed.update(f"{value.dtype} {tuple(value.shape)}".encode())
            hashed.update(bits(value))
        else:
            hashed.update(repr(value).encode())

    feed(value)
    return hashed.digest()


def digest_bits(*tensors: Tensor, size: int = 16) -> bytes:
    """Name the exact bits of tensors, one after the other; equal weights have equal digests on every machine."""
    hashed = hashlib.blake2b(digest_size=size)
    for tensor in tensors:
        hashed.update(bits(tensor))
    return hashed.digest()


def byte_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor of uint8."""
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def bits(tensor: Tensor) -> Any:
    """Return the bytes of a tensor in the order of its elements."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
