"""A client's state in Flower's context: for small models, and lost when a SuperNode restarts."""

from typing import Any

from flwr.app import Array, ArrayRecord, Context

from rtopk.flower.records import HEADER
from rtopk.flower.store import FILE

CONTEXT_LIMIT = 4_000_000  # entries; Flower copies the whole context for every message


class ContextStore:
    """Keep the state in the context."""

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
