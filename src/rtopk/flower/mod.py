"""The client side: a mod that decodes the server's messages and compresses the client's replies.

The ClientApp sees ordinary messages with the whole model, and replies with its trained weights. On the wire is a
payload of common - trained weights, with error feedback that survives lost replies, exceptions and restarts (see
`visit` and `transaction`).
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from rtopk.codec import Codec
from rtopk.flower.context_store import ContextStore
from rtopk.flower.records import HEADER
from rtopk.flower.store import FileStore, Store
from rtopk.flower.visit import Compression, Visit, as_bytes
from rtopk.memory import ErrorFeedback, Memory
from rtopk.schedule import Schedule
from rtopk.select import Selector

log = logging.getLogger("rtopk.flower")


class RTopKMod:
    """Compress the updates of a client; pass it to `ClientApp(mods=[...])`.

    `density` is a number or a schedule of the round; `selector` None is rTop-k with r = 2 k; `memory`
    makes the memory of a new client (`NoMemory` for none); `values` and `rounding` are the codec's. `store` is
    the folder of the client's state; without it the state is in Flower's context and does not survive a
    restart. `client_id` is a name that stays the same over restarts, or a function of the context; without
    it the node config's `client-id`, then `partition-id`. `initial` returns the server's first model, if the client
    can create it; then it need not be sent (`RTopKStrategy(initial_known=True)`).
    """

    def __init__(
        self,
        density: float | Schedule = 0.01,
        *,
        selector: Selector | None = None,
        memory: Callable[[], Memory] = ErrorFeedback,
        values: str = "fp32",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        store: str | Path | None = None,
        client_id: str | Callable[[Context], str] | None = None,
        initial: Callable[[Context], ArrayRecord] | None = None,
    ) -> None:
        self.how = Compression(
            density=density, selector=selector, memory=memory, values=values, rounding=rounding, seed=seed,
            initial=initial,
        )  # fmt: skip
        self.store = None if store is None else Path(store)
        self.client_id = client_id
        Codec(values, rounding)  # raise now, not in the first round

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle a message of RTopKStrategy; pass others through."""
        header = message.content.config_records.get(HEADER) if message.has_content() else None
        if header is None:
            return call_next(message, context)
        _refuse_clipping(message)
        client = self._client(context)
        fingerprint = int.from_bytes(as_bytes(header["fingerprint"]), "little")
        store: Store = ContextStore(context)
        lock: Any = nullcontext()
        if self.store is not None:
            store = file = FileStore(self.store, client, fingerprint)
            lock = file.locked()
            context.state[HEADER] = ConfigRecord({"client": client, "path": str(file.path)})
        with lock:
            return Visit(self.how, message, context, header, client, fingerprint, store).answer(call_next)

    def _client(self, context: Context) -> str:
        if callable(self.client_id):
            return str(self.client_id(context))
        if self.client_id is not None:
            return self.client_id
        for key in ("client-id", "partition-id"):
            if key in context.node_config:
                return str(context.node_config[key])
        log.warning("no client-id in the node config: using the node id, which changes at every restart")
        return f"node-{context.node_id}"


def _refuse_clipping(message: Message) -> None:
    """Raise if the server expects clipped updates: the residual would be added to them afterwards."""
    if any(KEY_CLIPPING_NORM in record for record in message.content.config_records.values()):
        raise ValueError(
            "the server's strategy needs updates that clients clip, and error feedback adds to them what was kept "
            "back: their norm is not bounded. Clip at the server: DifferentialPrivacyServerSideFixedClipping"
        )
