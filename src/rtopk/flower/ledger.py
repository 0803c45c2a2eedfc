"""Count the bytes: payload and framing both ways, per round, as the server sees them.

Payload is the `numel()` of our payloads (and raw arrays), framing what Flower's records add around them. What
the engine adds on the wire (gRPC, polling, heartbeats) is visible only to a `CountingProxy`.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects


@dataclass
class RoundBytes:
    """The bytes of one round, all clients together."""

    down_payload: int = 0
    down_framing: int = 0
    up_payload: int = 0
    up_framing: int = 0
    messages: int = 0
    snapshots: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        """Both ways."""
        return self.down_payload + self.down_framing + self.up_payload + self.up_framing


class ByteLedger:
    """The rounds of a run."""

    def __init__(self) -> None:
        self.rounds: dict[int, RoundBytes] = defaultdict(RoundBytes)

    def count(self, round_: int, way: Literal["down", "up"], content: RecordDict) -> None:
        """Add the content of one message: its payloads, and the framing around them."""
        entry, payload = self.rounds[round_], data_bytes(content)
        framing = content_bytes(content) - payload
        if way == "down":
            entry.down_payload += payload
            entry.down_framing += framing
            entry.messages += 1
        else:
            entry.up_payload += payload
            entry.up_framing += framing

    def to_dict(self) -> dict[str, Any]:
        """Return the rounds as plain values."""
        return {str(number): asdict(entry) for number, entry in sorted(self.rounds.items())}


def content_bytes(content: RecordDict) -> int:
    """Count the bytes of a content as Flower serialises its objects."""
    return sum(len(found.deflate()) for found in get_all_nested_objects(content).values())


def data_bytes(content: RecordDict) -> int:
    """Count the bytes of the arrays in a content: payloads and unchanged arrays."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
