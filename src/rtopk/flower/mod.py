"""The client's line: a mod that unpacks what the server sends and compresses what the client answers.

The ClientApp inside sees ordinary messages with the whole model, and answers with its trained weights. What
goes over the wire is a payload of common - trained weights, with error feedback that survives lost replies,
exceptions and restarts (see `transaction`).
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from torch import Tensor

from rtopk.codec import Codec
from rtopk.flower.downlink import Kind, OutOfStepError, Update, digest, follow
from rtopk.flower.intake import look_up
from rtopk.flower.records import (
    HEADER,
    PAYLOAD,
    Model,
    as_tensor,
    payload_array,
    payload_bytes,
    the_arrays,
    with_header,
)
from rtopk.flower.store import FileStore, StateError, Store, pack, unpack
from rtopk.flower.transaction import Statement, Transaction
from rtopk.memory import ErrorFeedback, Memory
from rtopk.schedule import Schedule
from rtopk.seed import derive
from rtopk.select import RTopK, Selector
from rtopk.sparsifier import Sparsifier

log = logging.getLogger("rtopk.flower")
CONTEXT_LIMIT = 4_000_000  # entries; Flower copies the whole context for every message


class StaleMessageError(ValueError):
    """A message from before one that this client has acted on."""


class ContextStore:
    """Keep the state in Flower's context: for small models; it is lost when a SuperNode restarts."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def load(self) -> dict[str, Any] | None:
        """Return the state, None if there is none."""
        record = self.context.state.get(HEADER)
        return unpack(record["state"].data, "context") if isinstance(record, ArrayRecord) else None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        data = pack(state)
        array = Array(dtype="uint8", shape=(len(data),), stype="rtopk.state", data=data)
        self.context.state[HEADER] = ArrayRecord({"state": array})


class RTopKMod:
    """Compress the updates of a client; give it to `ClientApp(mods=[...])`.

    `density` is a number or a schedule of the round; `selector` None is rTop-k with r = nodes x k; `memory`
    makes the memory of a new client (`NoMemory` for none); `values` and `rounding` are the codec's. `store` is
    the folder of the client's state; without it the state is in Flower's context and does not survive a
    restart. `client_id` is a name that stays the same over restarts, or a function of the context; without
    it the node config's `client-id`, then `partition-id`. `initial` returns the model that the server starts
    from, if the client can make it itself; then it need not be sent (`RTopKStrategy(initial_known=True)`).
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
        self.density = density
        self.selector = selector
        self.memory = memory
        self.values = values
        self.rounding: Literal["nearest", "stochastic"] = rounding
        self.seed = seed
        self.store = None if store is None else Path(store)
        self.client_id = client_id
        self.initial = initial
        Codec(values, rounding)  # refuse what it refuses now, not in the first round

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle a message of RTopKStrategy; others pass untouched."""
        header = message.content.config_records.get(HEADER) if message.has_content() else None
        if header is None:
            return call_next(message, context)
        client = self._client(context)
        fingerprint = int.from_bytes(_bytes(header["fingerprint"]), "little")
        store: Store = ContextStore(context)
        lock: Any = nullcontext()
        if self.store is not None:
            store = file = FileStore(self.store, client, fingerprint)
            lock = file.locked()
            context.state[HEADER] = ConfigRecord({"client": client, "path": str(file.path)})
        with lock:
            return _Visit(self, message, context, header, client, fingerprint, store).answer(call_next)

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


class _Visit:
    """One message of the server at one client."""

    def __init__(
        self,
        mod: RTopKMod,
        message: Message,
        context: Context,
        header: ConfigRecord,
        client: str,
        fingerprint: int,
        store: Store,
    ) -> None:
        self.mod, self.message, self.context, self.header = mod, message, context, header
        self.client, self.fingerprint, self.store = client, fingerprint, store
        accepted = look_up(_bytes(header["table"]), client) if "table" in header else _int(header["accepted"])
        self.statement = Statement(_int(header["session"]), _int(header["clock"]), accepted)
        self.round = _int(header["round"])
        self.state = self._load()

    def answer(self, call_next: ClientAppCallable) -> Message:
        """Bring the model up to date, let the app work, compress its answer."""
        training = self.message.metadata.message_type == MessageType.TRAIN
        repeated = self._recall() if self.state else None
        if repeated is not None and training:
            return Message(repeated, reply_to=self.message)
        try:
            model, held = self._held_model(self.state["vector"] if self.state else None)
            vector = self._follow(model, held)
        except OutOfStepError as error:
            log.warning("client %s: %s; asking for a snapshot", self.client, error)
            return self._reply(RecordDict(), need="snapshot")
        transaction = self._transaction(model)
        transaction.hear(self.statement)
        reply = self._run(model, vector, call_next)
        if reply.has_error():
            return reply
        if training:
            content = self._compress(transaction, model, vector, reply)
        else:
            content = with_header(reply.content, self._header())
        self.store.save({"transaction": transaction.state_dict(), "vector": vector, "model": model.to_json()})
        return Message(content, reply_to=self.message)

    def _recall(self) -> RecordDict | None:
        """Refuse a stale message; return the reply to one that was answered before, None for a new one."""
        remembered = self.state["transaction"] if self.state else {}
        last = (remembered["session"], remembered["clock"])
        this = (self.statement.session, self.statement.clock)
        if this < last:
            raise StaleMessageError(f"client {self.client} has acted on message {last}, this one is {this}")
        if this > last:
            return None
        pending = remembered["pending"]
        reply = b"" if pending is None else pending["reply"].numpy().tobytes()
        return recorddict_from_proto(ProtoRecordDict.FromString(reply))

    def _load(self) -> dict[str, Any] | None:
        try:
            return self.store.load()
        except StateError as error:
            # Without its residual a client can still take part; the server is asked for the model.
            log.error("client %s starts over: %s", self.client, error)
            return None

    def _held_model(self, held: Tensor | None) -> tuple[Model, Tensor | None]:
        if "model" in self.header:
            model = Model.from_json(str(self.header["model"]))
        elif self.state is not None:
            model = Model.from_json(self.state["model"])
        elif self.mod.initial is not None:
            record = self.mod.initial(self.context)
            dense = set(str(self.header["dense"]).split("\n")) if "dense" in self.header else set()
            model = Model.of(record, lambda name, shape: name in dense)
            held = model.flatten(record)[0]
        else:
            raise OutOfStepError("this client holds no model")
        if model.layout.fingerprint != self.fingerprint:
            raise OutOfStepError(
                f"the server's model is {self.fingerprint:016x}, this client's {model.layout.fingerprint:016x}"
            )
        return model, held

    def _follow(self, model: Model, held: Tensor | None) -> Tensor:
        header = self.header
        payloads = tuple(as_tensor(data) for data in payload_bytes(the_arrays(self.message.content)[1]))
        if held is not None and digest(held) == _bytes(header["digest"]):
            return held  # whatever came with the message, this is the model it leads to
        kind = cast(Kind, header["kind"])
        base, version = _int(header["base"]), _int(header["version"])
        update = Update(kind, base, version, _bytes(header["digest"]), payloads)
        return follow(
            held,
            update,
            size=model.layout.size,
            fingerprint=self.fingerprint,
            lossless=bool(header["lossless"]),
        )

    def _transaction(self, model: Model) -> Transaction:
        mod, layout = self.mod, model.layout
        if isinstance(self.store, ContextStore) and layout.size > CONTEXT_LIMIT:
            log.warning(
                "the state of %d entries is in Flower's context, which is copied for every message: "
                "give RTopKMod a store",
                layout.size,
            )
        sparsifier = Sparsifier(
            mod.selector or RTopK(nodes=_int(self.header["nodes"])),
            mod.density,
            mod.memory(),
            Codec(mod.values, mod.rounding, layout.fingerprint),
            mod.seed,
            node=node_number(self.client),
            layout=layout,
        )
        transaction = Transaction(sparsifier)
        if self.state is not None:
            transaction.load_state_dict(self.state["transaction"])
        return transaction

    def _run(self, model: Model, vector: Tensor, call_next: ClientAppCallable) -> Message:
        name, arrays = the_arrays(self.message.content)
        raw = {n: arrays[n] for n in model.raw}
        content = RecordDict({n: r for n, r in self.message.content.items() if n not in (name, HEADER)})
        content[name] = model.record(vector, raw)
        wire = self.message.content
        self.message.content = content
        try:
            return call_next(self.message, self.context)
        finally:
            self.message.content = wire

    def _compress(self, transaction: Transaction, model: Model, vector: Tensor, reply: Message) -> RecordDict:
        name, trained = the_arrays(reply.content)
        own, raw = model.flatten(trained)
        payload = transaction.produce(model.rounded(vector) - own, self.round)
        arrays = ArrayRecord({f"{PAYLOAD}0": payload_array(payload), **raw})
        content = with_header(reply.content, self._header(), **{name: arrays})
        transaction.hold(self.round, payload, recorddict_to_proto(content).SerializeToString())
        return content

    def _header(self, **extra: str) -> ConfigRecord:
        return ConfigRecord(
            {
                "client": self.client,
                "session": self.statement.session,
                "round": self.round,
                "digest": _bytes(self.header["digest"]),
                **extra,
            }
        )

    def _reply(self, content: RecordDict, **extra: str) -> Message:
        return Message(with_header(content, self._header(**extra)), reply_to=self.message)


def node_number(client: str) -> int:
    """Return the number of a client for its draws: the id if it is a number, else a hash of it."""
    return int(client) if client.isascii() and client.isdigit() and len(client) < 19 else derive(client)


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"header holds {type(value).__name__} where a whole number belongs")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"header holds {type(value).__name__} where bytes belong")
    return value
