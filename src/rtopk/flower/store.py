"""Where a client keeps its state between messages: a file that survives the client, or Flower's context.

A state is a dict of tensors and plain values. A file is written to a temporary name, synced and renamed, so a
crash leaves the old or the new one intact; a checksum detects other damage. The file name is derived from the
client id and the model, never from Flower's node id, which changes when a SuperNode restarts.
"""

import fcntl
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, Context

from rtopk.flower.intake import tag
from rtopk.flower.records import HEADER
from rtopk.state_file import Format, StateError, write_atomically

FILE = Format(struct.pack("<4sI", b"rTst", 1), 16, "delete it to start over")


class Store(Protocol):
    """Keep one client's state."""

    def load(self) -> dict[str, Any] | None:
        """Return the state, None if there is none; StateError if it is damaged."""

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state as a whole."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold a lock: one process at a time works on this state."""


class FileStore:
    """Keep the state of a client in a folder."""

    def __init__(self, folder: Path, client: str, fingerprint: int) -> None:
        self.path = Path(folder) / f"client-{tag(client).hex()}-{fingerprint:016x}.state"

    def load(self) -> dict[str, Any] | None:
        """Return the state, None if there is no file; StateError if it is damaged."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return FILE.unpack(data, str(self.path))

    def save(self, state: dict[str, Any]) -> None:
        """Write beside, sync, rename."""
        write_atomically(self.path, FILE.pack(state))

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
            yield  # closing the file lets go of the lock


class ContextStore:
    """Keep the state of a client in Flower's context: for small models, and lost when a SuperNode restarts."""

    LIMIT = 4_000_000  # entries; Flower copies the whole context for every message

    def __init__(self, context: Context) -> None:
        self.context = context

    def load(self) -> dict[str, Any] | None:
        """Return the state, None if there is none."""
        record = self.context.state.get(HEADER)
        return FILE.unpack(record["state"].data, "context") if isinstance(record, ArrayRecord) else None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        data = FILE.pack(state)
        array = Array(dtype="uint8", shape=(len(data),), stype="rtopk.state", data=data)
        self.context.state[HEADER] = ArrayRecord({"state": array})

    def locked(self) -> AbstractContextManager[None]:
        """Do nothing: Flower gives a context to one process at a time."""
        return nullcontext()
