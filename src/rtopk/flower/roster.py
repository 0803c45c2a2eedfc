"""What the server knows about its nodes (which client each one is, which model it holds), and what it sends them.

Flower guarantees the node id of a reply; the client id is only what the client claims. So an id belongs to the
first node that uses it, and a node may use one id: no node can reply for another. A node reports which model it
holds; until then the server assumes none, or the first model if clients create it themselves.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from torch import Tensor

from rtopk.flower.downlink import Kind, Versions
from rtopk.flower.intake import RefusedError, pack_table
from rtopk.flower.records import PAYLOAD, Model, payload_array, the_arrays, with_header
from rtopk.flower.transaction import NOTHING

Rebind = Literal["gone", "always", "never"]


class Roster:
    """The nodes and their clients.

    `rebind` says when an id may move to another node. A SuperNode that restarts without a key returns with a
    new node id: "gone" gives it its client id back once Flower no longer lists the old node. "never" is for
    nodes with keys, whose ids stay the same; "always" checks nothing. `clients` (node id -> client id) are
    bound in advance.
    """

    def __init__(
        self,
        initial_known: bool = False,
        rebind: Rebind = "gone",
        clients: Mapping[int, str] | None = None,
    ) -> None:
        if rebind not in get_args(Rebind):
            raise ValueError(f"rebind must be one of {get_args(Rebind)}, got {rebind!r}")
        self.initial_known = initial_known
        self.rebind = rebind
        self.clients: dict[int, str] = dict(clients or {})  # node -> client id
        self._nodes = {client: node for node, client in self.clients.items()}
        if len(self._nodes) < len(self.clients):
            raise ValueError(f"clients must give each node a client id of its own, got {self.clients}")
        self._holds: dict[int, bytes] = {}  # node -> digest of its model
        self._asked: set[int] = set()  # nodes that did not hold what was assumed
        self._numbers: dict[bytes, int] = {}  # digest -> version

    def client(self, node: int) -> str:
        """Return a name for a node."""
        return self.clients.get(node, f"node-{node}")

    def bind(self, node: int, client: str, connected: Callable[[], Collection[int]]) -> None:
        """Bind a node to the client id it claims; RefusedError if the id or the node is bound already."""
        owner, known = self._nodes.get(client), self.clients.get(node)
        if owner == node:
            return
        if self.rebind != "always":
            if known is not None:
                raise RefusedError(f"node {node} is client {known!r} and answers as {client!r}")
            if owner is not None and (self.rebind == "never" or owner in connected()):
                raise RefusedError(
                    f"client {client!r} is node {owner}, not {node}; rebind={self.rebind!r} keeps it there"
                )
        if owner is not None:
            del self.clients[owner]
            self._holds.pop(owner, None)
        if known is not None:
            del self._nodes[known]
        self.clients[node], self._nodes[client] = client, node

    def holds(self, node: int, digest: bytes) -> None:
        """Record which model a node reports."""
        self._holds[node] = digest

    def asked(self, node: int) -> None:
        """Record that a node asked for a snapshot."""
        self._holds.pop(node, None)
        self._asked.add(node)

    def named(self, digest: bytes, version: int) -> None:
        """Record the version of a digest."""
        self._numbers[digest] = version

    def is_new(self, node: int) -> bool:
        """Return whether a node has not reported its model yet."""
        return node not in self._holds

    def version_of(self, node: int, latest: int) -> int | None:
        """Return the version that a node holds, None if that is not known."""
        if node in self._holds:
            return self._numbers.get(self._holds[node])
        believed = self.initial_known and node not in self._asked and latest == 0
        return 0 if believed else None

    def state_dict(self) -> dict[str, Any]:
        """Return which node is which client; nodes report their models again."""
        return {"clients": dict(self.clients)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; clients bound in advance keep their nodes."""
        given = self.clients
        saved = {n: c for n, c in state["clients"].items() if n not in given and c not in given.values()}
        self.clients = saved | given
        self._nodes = {client: node for node, client in self.clients.items()}


class Sender:
    """Compress the messages of one exchange: the model in each becomes a `downlink` update and our header."""

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
        self._wrapped: dict[int, Array] = {}  # payloads for many clients are wrapped once

    def encode(self, message: Message, stamp: Mapping[str, int]) -> Kind:
        """Replace the model in a message by what its node needs; return what that was."""
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
        payloads = {f"{PAYLOAD}{n}": self._array(payload) for n, payload in enumerate(update.payloads)}
        name, _ = the_arrays(message.content)
        arrays = ArrayRecord({**payloads, **self.raw})
        message.content = with_header(message.content, header, **{name: arrays})
        return update.kind

    def _array(self, payload: Tensor) -> Array:
        if id(payload) not in self._wrapped:
            self._wrapped[id(payload)] = payload_array(payload)
        return self._wrapped[id(payload)]
