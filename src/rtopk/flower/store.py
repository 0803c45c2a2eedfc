"""Where a client keeps its state between messages: a file that survives the client, or Flower's context.

A state is a dict of tensors and plain values. A file is written to a temporary name, synced and renamed, so a
crash leaves the old or the new one intact; a checksum detects other damage. The file name is derived from the
client id and the model, never from Flower's node id, which changes when a SuperNode restarts.
"""

import fcntl
import hashlib
import io
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

HEAD = struct.Struct("<4sI16s")  # magic, version, checksum of the body
MAGIC, VERSION = b"rTst", 1


class StateError(ValueError):
    """A stored state that cannot be used."""


class Store(Protocol):
    """Keep one client's state."""

    def load(self) -> dict[str, Any] | None:
        """Return the state, None if there is none; StateError if it is damaged."""

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state as a whole."""


def pack(state: dict[str, Any]) -> bytes:
    """Write a state as bytes, preceded by their checksum."""
    buffer = io.BytesIO()
    buffer.write(bytes(HEAD.size))
    torch.save(state, buffer)
    view = buffer.getbuffer()
    HEAD.pack_into(view, 0, MAGIC, VERSION, _checksum(view[HEAD.size :]))
    return bytes(view)


def unpack(data: bytes, source: str) -> dict[str, Any]:
    """Read what `pack` wrote."""
    if len(data) < HEAD.size:
        raise StateError(f"{source} has {len(data)} bytes, too few for a state; delete it to start over")
    magic, version, checksum = HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise StateError(f"{source} is not a state of version {VERSION}: {magic!r}, version {version}")
    body = memoryview(data)[HEAD.size :]
    if _checksum(body) != checksum:
        raise StateError(f"{source} is damaged: its checksum is wrong; delete it to start over")
    state: dict[str, Any] = torch.load(io.BytesIO(body), weights_only=True)
    return state


class FileStore:
    """Keep the state of a client in a folder."""

    def __init__(self, folder: Path, client: str, fingerprint: int) -> None:
        name = hashlib.blake2b(client.encode(), digest_size=8).hexdigest()
        self.path = Path(folder) / f"client-{name}-{fingerprint:016x}.state"

    def load(self) -> dict[str, Any] | None:
        """Return the state, None if there is no file; StateError if it is damaged."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return unpack(data, str(self.path))

    def save(self, state: dict[str, Any]) -> None:
        """Write a temporary file, sync it, and rename it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(f".{os.getpid()}")
        try:
            with draft.open("wb") as file:
                file.write(pack(state))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)

    @contextmanager
    def locked(self, seconds: float = 600.0) -> Iterator[None]:
        """Hold a lock: one process at a time works on this state."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as file:
            deadline = time.monotonic() + seconds
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StateError(
                            f"{self.path} is in use by another process: two clients must not share an id"
                        ) from None
                    time.sleep(0.05)
            yield  # closing the file releases the lock


def _checksum(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
