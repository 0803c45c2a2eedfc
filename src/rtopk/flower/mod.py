"""The client side: a mod that decodes the server's messages and compresses the client's replies.

The ClientApp sees ordinary messages with the whole model, and replies with its trained weights. On the wire is a
payload of common - trained weights, with error feedback that survives lost replies, exceptions and restarts: the
state is saved before the reply is sent, so a crash leaves the state before the message or the one after it (see
`transaction`).
"""

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM
from torch import Tensor

from rtopk import defaults
from rtopk.codec import Codec
from rtopk.flower.downlink import Kind, OutOfStepError, Update, follow
from rtopk.flower.intake import look_up
from rtopk.flower.records import HEADER, PAYLOAD, Model, payload_array, payload_bytes, the_arrays, with_header
from rtopk.flower.store import ContextStore, FileStore, Store
from rtopk.flower.transaction import Acknowledgement, Freshness, Transaction
from rtopk.memory import ErrorFeedback, Memory
from rtopk.schedule import Schedule, as_schedule
from rtopk.seed import derive
from rtopk.select import Selector
from rtopk.sparsifier import Sparsifier
from rtopk.state_file import StateError, byte_tensor, digest_bits

log = logging.getLogger("rtopk.flower")
Value = TypeVar("Value", int, bytes)


class StaleMessageError(ValueError):
    """A message older than one that this client has acted on."""


@dataclass(eq=False)
class RTopKMod:
    """Compress the updates of a client; pass it to `ClientApp(mods=[...])`.

    `density` is a number or a schedule of the round; `selector` None is top-k, or k of the 2 k largest without a
    memory; `memory` makes the memory of a new client (`NoMemory` for none); `values`, `rounding` are the codec's.
    `store` is the folder of the client's state; without it the state is in Flower's context and does not survive a
    restart. `client_id` is a name that stays the same over restarts, or a function of the context; without
    it the node config's `client-id`, then `partition-id`. `initial` returns the server's first model, if the client
    can create it; then it need not be sent (`RTopKStrategy(initial_known=True)`).
    """

    density: float | Schedule = 0.01
    _: KW_ONLY
    selector: Selector | str | None = None
    memory: Callable[[], Memory] = ErrorFeedback
    values: str = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    store: str | Path | None = None
    client_id: str | Callable[[Context], str] | None = None
    initial: Callable[[Context], ArrayRecord] | None = None

    def __post_init__(self) -> None:
        as_schedule(self.density)  # raise now, not in the first round
        Codec(self.values, self.rounding)
        defaults.selector(1, self.memory(), self.selector)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle a message of RTopKStrategy; pass others through."""
        header = message.content.config_records.get(HEADER) if message.has_content() else None
        if header is None:
            return call_next(message, context)
        if any(KEY_CLIPPING_NORM in record for record in message.content.config_records.values()):
            raise ValueError(
                "the server's strategy needs updates that clients clip, and error feedback adds to them what was "
                "kept back: their norm is not bounded. Clip at the server: "
                "DifferentialPrivacyServerSideFixedClipping"
            )
        client, fingerprint = self._client(context), _fingerprint(header)
        store: Store = ContextStore(context)
        if self.store is not None:
            store = file = FileStore(Path(self.store), client, fingerprint)
            context.state[HEADER] = ConfigRecord({"client": client, "path": str(file.path)})
        with store.locked():
            return _Exchange(self, message, context, header, client, store).answer(call_next)

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


class _Exchange:
    """One server message at one client: update the model, run the app, compress its reply."""

    def __init__(
        self,
        options: RTopKMod,
        message: Message,
        context: Context,
        header: ConfigRecord,
        client: str,
        store: Store,
    ) -> None:
        self.options, self.message, self.context = options, message, context
        self.header, self.client, self.store = header, client, store
        self.fingerprint = _fingerprint(header)
        self.digest = _typed(header, "digest", bytes)
        accepted = (
            look_up(_typed(header, "table", bytes), client)
            if "table" in header
            else _typed(header, "accepted", int)
        )
        self.acknowledgement = Acknowledgement(
            _typed(header, "session", int), _typed(header, "clock", int), accepted
        )
        self.round = _typed(header, "round", int)
        try:
            self.state = store.load()
        except StateError as error:
            # Without its residual a client can still take part; it asks the server for the model.
            log.error("client %s starts over: %s", client, error)
            self.state = None

    def answer(self, call_next: ClientAppCallable) -> Message:
        """Update the model, run the app, compress its reply."""
        category, *_ = self.message.metadata.message_type.split(".")  # an action may follow: train.fast
        training = category == MessageType.TRAIN
        repeated = self._earlier_reply(self.state["transaction"]) if self.state else None
        if repeated is not None and training:
            return Message(repeated, reply_to=self.message)
        if self.state and self.state["transaction"]["session"] != self.acknowledgement.session:
            self.state = None  # of an earlier training, perhaps with other options and another first model
        try:
            model, held = self._held_model()
            vector = self._follow(model, held)
        except OutOfStepError as error:
            log.warning("client %s: %s; asking for a snapshot", self.client, error)
            return Message(with_header(RecordDict(), self._header(need="snapshot")), reply_to=self.message)
        transaction = self._transaction(model)
        transaction.settle(self.acknowledgement)
        reply = self._run(model, vector, call_next)
        if reply.has_error():
            return reply
        if training:
            content = self._compress(transaction, model, vector, reply)
        else:
            content = with_header(reply.content, self._header())
        self.store.save({"transaction": transaction.state_dict(), "vector": vector, "model": model.to_json()})
        return Message(content, reply_to=self.message)

    def _earlier_reply(self, saved: dict[str, Any]) -> RecordDict | None:
        """Refuse a stale message; return the earlier reply to a duplicate, None for a new message."""
        this, last = self.acknowledgement, (saved["session"], saved["clock"])
        freshness = this.after(*last)
        if freshness is Freshness.STALE:
            raise StaleMessageError(
                f"client {self.client} has acted on message {last}, this one is {(this.session, this.clock)}"
            )
        if freshness is Freshness.NEW:
            return None
        reply = b"" if saved["pending"] is None else saved["pending"]["reply"].numpy().tobytes()
        return recorddict_from_proto(ProtoRecordDict.FromString(reply))

    def _held_model(self) -> tuple[Model, Tensor | None]:
        held = self.state["vector"] if self.state else None
        if "model" in self.header:
            model = Model.from_json(str(self.header["model"]))
        elif self.state is not None:
            model = Model.from_json(self.state["model"])
        elif self.options.initial is not None:
            record = self.options.initial(self.context)
            dense = str(self.header.get("dense", "")).split("\n")
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
        payloads = tuple(byte_tensor(data) for data in payload_bytes(the_arrays(self.message.content)[1]))
        if held is not None and digest_bits(held) == self.digest:
            return held  # whatever came with the message, this is the model it leads to
        base, version = _typed(header, "base", int), _typed(header, "version", int)
        update = Update(cast(Kind, header["kind"]), base, version, self.digest, payloads)
        size, lossless = model.layout.size, bool(header["lossless"])
        return follow(held, update, size=size, fingerprint=self.fingerprint, lossless=lossless)

    def _transaction(self, model: Model) -> Transaction:
        options, layout = self.options, model.layout
        if isinstance(self.store, ContextStore) and layout.size > ContextStore.LIMIT:
            log.warning(
                "the state of %d entries is in Flower's context, which is copied for every message: "
                "give RTopKMod a store",
                layout.size,
            )
        memory = options.memory()
        sparsifier = Sparsifier(
            defaults.selector(_typed(self.header, "nodes", int), memory, options.selector),
            options.density,
            memory,
            Codec(options.values, options.rounding, layout.fingerprint),
            options.seed,
            node=node_number(self.client),
            layout=layout,
        )
        transaction = Transaction(sparsifier)
        if self.state is not None:
            transaction.load_state_dict(self.state["transaction"])
        return transaction

    def _run(self, model: Model, vector: Tensor, call_next: ClientAppCallable) -> Message:
        wire = self.message.content
        name, arrays = the_arrays(wire)
        content = RecordDict({n: r for n, r in wire.items() if n not in (name, HEADER)})
        content[name] = model.record(vector, {n: arrays[n] for n in model.raw})
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
        session = self.acknowledgement.session
        return ConfigRecord(
            {"client": self.client, "session": session, "round": self.round, "digest": self.digest, **extra}
        )


def node_number(client: str) -> int:
    """Return the node number of a client for its draws: the id if it is a number, else a hash of it."""
    return int(client) if client.isascii() and client.isdigit() and len(client) < 19 else derive(client)


def _fingerprint(header: ConfigRecord) -> int:
    return int.from_bytes(_typed(header, "fingerprint", bytes), "little")


def _typed(header: ConfigRecord, name: str, kind: type[Value]) -> Value:
    """Return a value of the server's header if it is of this type."""
    value: Any = header[name]
    if not isinstance(value, kind):
        raise ValueError(f"header {name!r} must be {kind.__name__}, got {type(value).__name__}")
    return value
