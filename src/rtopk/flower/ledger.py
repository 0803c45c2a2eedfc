"""Count the bytes: payload and framing both ways, per round, as the server sees them.

Payload is the `numel()` of our payloads (and raw arrays), framing what Flower's records add around them. What
the engine adds on the wire (gRPC, polling, heartbeats) is visible only to a `CountingProxy`.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal


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

    def count(self, round_: int, way: Literal["down", "up"], payload: int, content: int) -> None:
        """Add one message: the bytes of its payloads, and of the whole content around and with them."""
        entry = self.rounds[round_]
        if way == "down":
            entry.down_payload += payload
            entry.down_framing += content - payload
            entry.messages += 1
        else:
            entry.up_payload += payload
            entry.up_framing += content - payload

    def to_dict(self) -> dict[str, Any]:
        """Return the rounds as plain values."""
        return {str(number): asdict(entry) for number, entry in sorted(self.rounds.items())}
