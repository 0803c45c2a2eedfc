"""One server message at one client: update the model, run the app, compress its reply.

The state is saved before the reply is sent, so a crash leaves either the state before the message or the one
after it (see `transaction`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from torch import Tensor

from rtopk import defaults
from rtopk.codec import Codec
from rtopk.flower.context_store import CONTEXT_LIMIT, ContextStore
from rtopk.flower.downlink import Kind, OutOfStepError, Update, follow
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
from rtopk.flower.store import Store
from rtopk.flower.transaction import Statement, Transaction
from rtopk.memory import ErrorFeedback, Memory
from rtopk.schedule import Schedule
from rtopk.seed import derive
from rtopk.select import Selector
from rtopk.sparsifier import Sparsifier
from rtopk.state_file import StateError, digest_bits

log = logging.getLogger("rtopk.flower")


class StaleMessageError(ValueError):
    """A message older than one that this client has acted on."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How a client compresses: the options of `RTopKMod`."""

    density: float | Schedule = 0.01
    selector: Selector | None = None
    memory: Callable[[], Memory] = ErrorFeedback
    values: str = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    initial: Callable[[Context], ArrayRecord] | None = None


class Visit:
    """One server message at one client."""

    def __init__(
        self,
        how: Compression,
        message: Message,
        context: Context,
        header: ConfigRecord,
        client: str,
        fingerprint: int,
        store: Store,
    ) -> None:
        self.how, self.message, self.context, self.header = how, message, context, header
        self.client, self.fingerprint, self.store = client, fingerprint, store
        accepted = (
            look_up(as_bytes(header["table"]), client) if "table" in header else as_int(header["accepted"])
        )
        self.statement = Statement(as_int(header["session"]), as_int(header["clock"]), accepted)
        self.round = as_int(header["round"])
        self.state = self._load()

    def answer(self, call_next: ClientAppCallable) -> Message:
        """Update the model, run the app, compress its reply."""
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
        """Refuse a stale message; return the earlier reply to a duplicate, None for a new message."""
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
            # Without its residual a client can still take part; it asks the server for the model.
            log.error("client %s starts over: %s", self.client, error)
            return None

    def _held_model(self, held: Tensor | None) -> tuple[Model, Tensor | None]:
        if "model" in self.header:
            model = Model.from_json(str(self.header["model"]))
        elif self.state is not None:
            model = Model.from_json(self.state["model"])
        elif self.how.initial is not None:
            record = self.how.initial(self.context)
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
        if held is not None and digest_bits(held) == as_bytes(header["digest"]):
            return held  # whatever came with the message, this is the model it leads to
        kind = cast(Kind, header["kind"])
        base, version = as_int(header["base"]), as_int(header["version"])
        update = Update(kind, base, version, as_bytes(header["digest"]), payloads)
        return follow(
            held,
            update,
            size=model.layout.size,
            fingerprint=self.fingerprint,
            lossless=bool(header["lossless"]),
        )

    def _transaction(self, model: Model) -> Transaction:
        how, layout = self.how, model.layout
        if isinstance(self.store, ContextStore) and layout.size > CONTEXT_LIMIT:
            log.warning(
                "the state of %d entries is in Flower's context, which is copied for every message: "
                "give RTopKMod a store",
                layout.size,
            )
        sparsifier = Sparsifier(
            how.selector or defaults.selector(as_int(self.header["nodes"])),
            how.density,
            how.memory(),
            Codec(how.values, how.rounding, layout.fingerprint),
            how.seed,
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
                "digest": as_bytes(self.header["digest"]),
                **extra,
            }
        )

    def _reply(self, content: RecordDict, **extra: str) -> Message:
        return Message(with_header(content, self._header(**extra)), reply_to=self.message)


def node_number(client: str) -> int:
    """Return the node number of a client for its draws: the id if it is a number, else a hash of it."""
    return int(client) if client.isascii() and client.isdigit() and len(client) < 19 else derive(client)


def as_int(value: Any) -> int:
    """Return a header's value if it is a whole number."""
    if not isinstance(value, int):
        raise ValueError(f"header holds {type(value).__name__} where a whole number belongs")
    return value


def as_bytes(value: Any) -> bytes:
    """Return a header's value if it is bytes."""
    if not isinstance(value, bytes):
        raise ValueError(f"header holds {type(value).__name__} where bytes belong")
    return value
