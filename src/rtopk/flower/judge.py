"""Judge the replies of a round, in training and evaluation: which may be used, and which are refused and why.

Whatever a client sends, the round continues for the others.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from flwr.app import Message

from rtopk.flower import metrics
from rtopk.flower import replies as reading
from rtopk.flower.intake import Offer
from rtopk.flower.ledger import ByteLedger
from rtopk.flower.records import content_bytes, data_bytes
from rtopk.flower.refusal import Refusal, RefusedError, reason_of, shown
from rtopk.flower.roster import Roster

log = logging.getLogger("rtopk.flower")
REFUSALS_KEPT = 10_000
Read = Callable[[Message, str, bytes, float], Offer]  # reply, client, digest of its model, weight


@dataclass(frozen=True)
class Expected:
    """What the replies to one exchange must be."""

    number: int  # of the round
    session: int
    digest: bytes  # of the model that was sent
    weight_key: str
    connected: Callable[[], Collection[int]]  # the nodes that Flower lists
    read: Read | None = None  # in training: makes the offer of a reply, or raises


class Judge:
    """Separate the usable replies from the refused ones."""

    def __init__(self, roster: Roster, ledger: ByteLedger, max_weight: float, weight_ratio: float) -> None:
        if not weight_ratio >= 1.0:
            raise ValueError(f"weight_ratio must be at least 1, got {weight_ratio}")
        self.roster, self.ledger = roster, ledger
        self.max_weight, self.weight_ratio = max_weight, weight_ratio
        self.refusals: list[Refusal] = []
        self._shapes: dict[bool, metrics.Shape] = {}  # of the records, in training or not

    def refuse(self, number: int, node: int, reason: str) -> None:
        """Record that a reply is refused."""
        client, reason = self.roster.client(node), shown(reason)
        log.warning("round %d: refused client %r (node %d): %s", number, client, node, reason)
        self.ledger.rounds[number].refused += 1
        if len(self.refusals) < REFUSALS_KEPT:
            self.refusals.append(Refusal(number, client, node, reason))

    def usable(self, replies: Iterable[Message], expected: Expected) -> dict[Message, Offer | None]:
        """Return the valid replies, without our header; in training with their offers."""
        number, training = expected.number, expected.read is not None
        good: dict[Message, Offer | None] = {}
        seen: set[str] = set()
        for message in replies:
            try:
                offer = self._one(message, expected, seen)
            except Exception as error:  # whatever a client sends, the round continues
                self.refuse(number, message.metadata.src_node_id, reason_of(error))
                continue
            reading.strip(message)
            good[message] = offer
        kept, self._shapes[training] = metrics.alike(
            good, lambda node, reason: self.refuse(number, node, reason), self._shapes.get(training, ())
        )
        metrics.cap(kept, expected.weight_key, self.weight_ratio)
        return {message: good[message] for message in kept}

    def _one(self, message: Message, expected: Expected, seen: set[str]) -> Offer | None:
        """Return what a reply offers; raise if it cannot be used."""
        node, number = message.metadata.src_node_id, expected.number
        client, held = reading.identify(message, expected.session, number - 1)
        self.roster.bind(node, client, expected.connected)
        if held is None:
            self.roster.asked(node)
            raise RefusedError("it does not hold the model and asks for a snapshot")
        weight = metrics.check(message.content, expected.weight_key, self.max_weight)
        offer = None if expected.read is None else expected.read(message, client, held, weight)
        if client in seen:
            raise RefusedError("a reply with this client id came already")
        seen.add(client)
        if held == expected.digest:
            self.roster.holds(node, held)
        size = content_bytes(message.content)
        self.ledger.count(number, "up", data_bytes(message.content), size)
        return offer
