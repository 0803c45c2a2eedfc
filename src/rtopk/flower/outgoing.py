"""What the server knows of its nodes, and the message that each of them needs.

A node says who it is and which model it holds; until then the server believes nothing of it, or, if clients make
the first model themselves, that. The model in a message is replaced by an update of `downlink` and our header.
"""

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from rtopk.flower.downlink import Kind, Versions
from rtopk.flower.intake import pack_table
from rtopk.flower.records import PAYLOAD, Model, payload_array, the_arrays, with_header
from rtopk.flower.transaction import NOTHING


class Roster:
    """The nodes: who they are and what they hold, by their own words."""

    def __init__(self, initial_known: bool = False) -> None:
        self.initial_known = initial_known
        self.clients: dict[int, str] = {}  # node -> client id
        self._holds: dict[int, bytes] = {}  # node -> digest of its model
        self._asked: set[int] = set()  # nodes that did not hold what they were believed to
        self._numbers: dict[bytes, int] = {}  # digest -> version

    def client(self, node: int) -> str:
        """Return a name for a node."""
        return self.clients.get(node, f"node-{node}")

    def met(self, node: int, client: str) -> None:
        """Remember who a node says it is."""
        self.clients[node] = client

    def holds(self, node: int, digest: bytes) -> None:
        """Remember which model a node says it holds."""
        self._holds[node] = digest

    def asked(self, node: int) -> None:
        """Remember that a node asked for a snapshot."""
        self._holds.pop(node, None)
        self._asked.add(node)

    def named(self, digest: bytes, version: int) -> None:
        """Remember the version of a digest."""
        self._numbers[digest] = version

    def is_new(self, node: int) -> bool:
        """Say whether a node has not told what it holds."""
        return node not in self._holds

    def version_of(self, node: int, latest: int) -> int | None:
        """Return the version that a node holds, None if that is not known."""
        if node in self._holds:
            return self._numbers.get(self._holds[node])
        believed = self.initial_known and node not in self._asked and latest == 0
        return 0 if believed else None


class Sender:
    """Write the messages of one exchange."""

    def __init__(
        self,
        model: Model,
        versions: Versions,
        roster: Roster,
        accepted: Mapping[str, int],
        raw: Mapping[str, Array],
    ) -> None:
        self.model, self.versions, self.roster = model, versions, roster
        self.accepted, self.raw = accepted, raw
        self._table = pack_table(accepted)
        self._wrapped: dict[int, Array] = {}  # payloads that go to many clients are wrapped once

    def dress(self, message: Message, stamp: Mapping[str, int]) -> Kind:
        """Replace the model in a message by what its node needs, and say what that was."""
        node = message.metadata.dst_node_id
        update = self.versions.since(self.roster.version_of(node, self.versions.version))
        header = ConfigRecord(
            {
                **stamp,
                "kind": update.kind,
                "base": update.base,
                "version": update.version,
                "digest": update.digest,
                "lossless": self.versions.lossless,
                "fingerprint": self.model.layout.fingerprint.to_bytes(8, "little"),
            }
        )
        if node in self.roster.clients:
            header["accepted"] = self.accepted.get(self.roster.clients[node], NOTHING)
        else:
            header["table"] = self._table
        if update.kind == "snapshot":
            header["model"] = self.model.to_json()
        elif self.roster.is_new(node):
            header["dense"] = "\n".join(self.model.dense)
        payloads = {}
        for number, payload in enumerate(update.payloads):
            if id(payload) not in self._wrapped:
                self._wrapped[id(payload)] = payload_array(payload)
            payloads[f"{PAYLOAD}{number}"] = self._wrapped[id(payload)]
        name, _ = the_arrays(message.content)
        arrays = ArrayRecord({**payloads, **self.raw})
        message.content = with_header(message.content, header, **{name: arrays})
        return update.kind
