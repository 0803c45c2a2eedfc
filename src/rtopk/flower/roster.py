"""What the server knows about its nodes: which client each one is, and which model it holds.

Flower guarantees the node id of a reply; the client id is only what the client claims. So an id belongs to the
first node that uses it, and a node may use one id: no node can reply for another. A node reports which model it
holds; until then the server assumes none, or the first model if clients create it themselves.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

from rtopk.flower.refusal import RefusedError

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
