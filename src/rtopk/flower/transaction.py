"""A client's error feedback as a transaction: nothing is lost and nothing counted twice.

A reply may be lost after the residual was reduced. So the payload of a round stays *pending* beside the
residual until the server says which round it last accepted from this client; then it is dropped (committed)
or added back. Every message carries (session, clock): the clock grows with every message of a server, the
session with every new training. An older message is stale, an equal one a duplicate.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from rtopk.codec import PayloadError
from rtopk.memory import give_back
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier
from rtopk.state_file import byte_tensor

NOTHING = -1  # "no round accepted"
log = logging.getLogger("rtopk.flower")


class Freshness(Enum):
    """How a message relates to the last one that the client acted on."""

    NEW = "new"
    DUPLICATE = "duplicate"
    STALE = "stale"


@dataclass(frozen=True)
class Acknowledgement:
    """The server's part of every message: its session and clock, and what it accepted from this client."""

    session: int
    clock: int
    accepted: int = NOTHING  # the last round

    def after(self, session: int, clock: int) -> Freshness:
        """Compare with the session and clock of an earlier message."""
        last, this = (session, clock), (self.session, self.clock)
        return Freshness.NEW if this > last else Freshness.DUPLICATE if this == last else Freshness.STALE


@dataclass(frozen=True)
class Pending:
    """A payload that may or may not have been accepted."""

    round: int
    payload: Tensor  # (bytes,) uint8
    reply: bytes  # the whole reply, sent again if the message is repeated
    sent: SparseVector | None = None  # what was taken out of the memory; None in states of older versions


class Transaction:
    """The residual of one client, its pending payload, and the last message it acted on.

    Call `settle` before `produce`. Save the state after `produce` and before the reply is sent: a crash before the
    save leaves the last round pending, a crash after it this one.
    """

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        self.session = 0
        self.clock = NOTHING
        self.committed = NOTHING  # the last round that is known to be accepted
        self.pending: Pending | None = None
        self._sent: SparseVector | None = None  # by the last `produce`
        sparsifier.watch = self._keep

    def settle(self, message: Acknowledgement) -> Freshness:
        """Commit or add back what is pending; duplicate and stale messages change nothing."""
        freshness = message.after(self.session, self.clock)
        if freshness is not Freshness.NEW:
            return freshness
        if message.session != self.session:
            self._start_over(message)
        elif self.pending is not None and message.accepted == self.pending.round:
            self.committed, self.pending = self.pending.round, None
        elif message.accepted > self.committed:
            # The server accepted a later round than we remember: this state is an old copy. What it holds may
            # have been sent since, and sending it again would count it twice.
            log.warning(
                "the server accepted round %d, this client remembers %d: its residual is out of date, dropped",
                message.accepted,
                self.committed,
            )
            self._start_over(message)
        elif self.pending is not None:
            self._give_back(self.pending)
            self.pending = None
        self.session, self.clock = message.session, message.clock
        return freshness

    def produce(self, update: Tensor, round_: int) -> Tensor:
        """Compress this round's update; the payload is pending once `hold` is called with its reply."""
        if self.pending is not None:
            raise ValueError(f"round {self.pending.round} is still pending: settle the next message first")
        return self.sparsifier.compress(update, round_)

    def hold(self, round_: int, payload: Tensor, reply: bytes) -> None:
        """Keep what was produced until the next server message."""
        self.pending = Pending(round_, payload.clone(), reply, self._sent)

    def _keep(self, sent: SparseVector) -> None:
        """Copy what was sent: the next step reuses its buffers."""
        self._sent = SparseVector(sent.indices.clone(), sent.values.clone(), sent.size)

    def _give_back(self, pending: Pending) -> None:
        """Add back exactly what was taken out of the memory, without decoding the payload."""
        try:
            codec = self.sparsifier.codec
            sent = codec.decode(pending.payload) if pending.sent is None else pending.sent
        except PayloadError as error:
            log.error("the payload of round %d cannot be decoded and is lost: %s", pending.round, error)
            return
        give_back(self.sparsifier.memory, sent)

    def _start_over(self, message: Acknowledgement) -> None:
        self.sparsifier.memory.load_state_dict({})
        self.pending, self.committed = None, message.accepted

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next message depends on: tensors and plain values only."""
        pending, kept = self.pending, None
        if pending is not None:
            sent = pending.sent
            kept = {
                "round": pending.round,
                "payload": pending.payload,
                "reply": byte_tensor(pending.reply),
                "sent": None if sent is None else (sent.indices, sent.values, sent.size),
            }
        return {
            "sparsifier": self.sparsifier.state_dict(),
            "session": self.session,
            "clock": self.clock,
            "committed": self.committed,
            "pending": kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.session, self.clock = state["session"], state["clock"]
        self.committed, pending = state["committed"], state["pending"]
        self.pending = pending and Pending(
            pending["round"],
            pending["payload"],
            pending["reply"].numpy().tobytes(),
            SparseVector(*pending["sent"]) if pending.get("sent") else None,
        )
