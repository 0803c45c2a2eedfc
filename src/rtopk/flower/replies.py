"""Check the replies of a round, in training and evaluation: which may be used, and which are refused and why.

Whatever a client sends, the round continues for the others. One odd metric would stop the inner strategy, and one
large weight would decide the round: metrics must be finite and of the same form for all, and weights are bounded.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from flwr.app import Array, Message, MetricRecord, RecordDict

from rtopk.flower.intake import Offer, RefusedError, median
from rtopk.flower.records import HEADER, PAYLOAD, ByteLedger, Model, payload_bytes, the_arrays
from rtopk.flower.roster import Roster

CLIENT_LIMIT = 128  # characters of a client id
NAME_LIMIT = 200  # characters of the name of a record or metric
WEIGHT_LIMIT = 2.0**40  # examples
WEIGHT_LEAST = 2.0**-40  # much less would vanish in float32
REFUSALS_KEPT = 10_000
HEAD, TAIL = 60, 140  # characters shown of a text from a client: a traceback says most in its last line
Read = Callable[[Message, str, float], Offer]  # reply, client, weight
Shape = tuple[object, ...]  # names and lengths of the records of a reply
log = logging.getLogger("rtopk.flower")


@dataclass(frozen=True)
class Refusal:
    """Who was refused when, and why."""

    round: int
    client: str
    node: int
    reason: str


@dataclass(frozen=True)
class Expected:
    """What the replies to one exchange must be."""

    number: int  # of the round
    session: int
    digest: bytes  # of the model that was sent
    weight_key: str
    connected: Callable[[], Collection[int]]  # the nodes that Flower lists
    read: Read | None = None  # in training: makes the offer of a reply, or raises


class ReplyCheck:
    """Separate the usable replies from the refused ones."""

    def __init__(self, roster: Roster, ledger: ByteLedger, max_weight: float, weight_ratio: float) -> None:
        if not weight_ratio >= 1.0:
            raise ValueError(f"weight_ratio must be at least 1, got {weight_ratio}")
        if not max_weight >= WEIGHT_LEAST:
            raise ValueError(f"max_weight must be at least {WEIGHT_LEAST:g}, got {max_weight}")
        self.roster, self.ledger = roster, ledger
        self.max_weight, self.weight_ratio = max_weight, weight_ratio
        self.refusals: list[Refusal] = []
        self.shapes: dict[bool, Shape] = {}  # the usual one, in training or not

    def refuse(self, number: int, node: int, reason: str) -> None:
        """Record that a reply is refused."""
        client, reason = self.roster.client(node), shown(reason)
        log.warning("round %d: refused client %r (node %d): %s", number, client, node, reason)
        self.ledger.rounds[number].refused += 1
        if len(self.refusals) < REFUSALS_KEPT:
            self.refusals.append(Refusal(number, client, node, reason))

    def usable(self, replies: Iterable[Message], expected: Expected) -> dict[Message, Offer | None]:
        """Return the valid replies, without our header; in training with their offers."""
        good: dict[Message, Offer | None] = {}
        seen: set[str] = set()
        for message in replies:
            try:
                offer = self._one(message, expected, seen)
            except Exception as error:  # whatever a client sends, the round continues
                self.refuse(expected.number, message.metadata.src_node_id, reason_of(error))
                continue
            message.content = RecordDict({n: r for n, r in message.content.items() if n != HEADER})
            good[message] = offer
        kept = self._alike(good, expected)
        _cap_weights(kept, expected.weight_key, self.weight_ratio)
        return {message: good[message] for message in kept}

    def _one(self, message: Message, expected: Expected, seen: set[str]) -> Offer | None:
        """Return what a reply offers; raise if it cannot be used."""
        node = message.metadata.src_node_id
        client, held = _identify(message, expected.session, expected.number - 1)
        self.roster.bind(node, client, expected.connected)
        if held is None:
            self.roster.asked(node)
            raise RefusedError("it does not hold the model and asks for a snapshot")
        if held != expected.digest:
            raise RefusedError("it is of another model than the one that was sent")
        weight = _check_metrics(message.content, expected.weight_key, self.max_weight)
        offer = None if expected.read is None else expected.read(message, client, weight)
        if client in seen:
            raise RefusedError("a reply with this client id came already")
        seen.add(client)
        self.roster.holds(node, held)
        self.ledger.count(expected.number, "up", message.content)
        return offer

    def _alike(self, messages: Iterable[Message], expected: Expected) -> list[Message]:
        """Keep the replies whose records have the most common names and lengths; a tie goes to the last round's."""
        shapes = {message: _shape(message.content) for message in messages}
        if not shapes:
            return []
        counts, training = Counter(shapes.values()), expected.read is not None
        last = self.shapes.get(training, ())
        usual = self.shapes[training] = max(counts, key=lambda shape: (counts[shape], shape == last))
        for message, shape in shapes.items():
            if shape != usual:
                reason = f"its metrics {shape} are not those of the others"
                self.refuse(expected.number, message.metadata.src_node_id, reason)
        return [message for message, shape in shapes.items() if shape == usual]


def read_offer(message: Message, client: str, weight: float, model: Model, raw: Mapping[str, Array]) -> Offer:
    """Return the offer of a training reply; its raw arrays must be of the kind of `raw`."""
    _, arrays = the_arrays(message.content)
    payloads = payload_bytes(arrays)
    if len(payloads) != 1:
        raise RefusedError(f"it holds {len(payloads)} payloads, expected one")
    expected = {f"{PAYLOAD}0", *model.raw}
    if set(arrays) != expected:
        raise RefusedError(f"its arrays must be {sorted(expected)}, got {sorted(arrays)[:9]}")
    beside = math.hypot(*(_distance(name, arrays[name], raw[name]) for name in model.raw))
    return Offer(client, message.metadata.src_node_id, payloads[0], weight, beside)


def weight_of(content: RecordDict, key: str) -> float:
    """Return the weight of a checked reply."""
    return float(next(iter(content.metric_records.values()))[key])  # type: ignore[arg-type]


def shown(text: str) -> str:
    """Return a text that is safe to log: short, without escape codes or line breaks.

    >>> shown("red: \\x1b[31m" + 5_000_000 * "!")[:16]
    'red: \\\\x1b[31m!!!'
    """
    short = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} ... {text[-TAIL:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def reason_of(error: Exception) -> str:
    """Return what is wrong with a reply, from the exception raised while reading it."""
    return shown(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")


def _identify(message: Message, session: int, round_: int) -> tuple[str, bytes | None]:
    """Return the client id that a reply claims and the digest of its model, None if it needs one."""
    if message.has_error():
        raise RefusedError(f"the client failed: {message.error.reason}")
    header = message.content.config_records.get(HEADER)
    if header is None:
        raise RefusedError("its reply is not compressed: add RTopKMod to its ClientApp")
    client, digest = header.get("client"), header.get("digest")
    if not isinstance(client, str) or not isinstance(digest, bytes):
        raise RefusedError("its header names no client or no model")
    if not 0 < len(client) <= CLIENT_LIMIT or not client.isprintable():
        raise RefusedError(f"its client id must be 1 to {CLIENT_LIMIT} printable characters")
    if header.get("session") != session:
        raise RefusedError(f"it is of session {header.get('session')!r}, this is {session}")
    if header.get("round") != round_:
        raise RefusedError(f"it is of round {header.get('round')!r}, this is round {round_}")
    return client, None if "need" in header else digest


def _check_metrics(content: RecordDict, key: str, limit: float) -> float:
    """Return the weight of a reply; RefusedError unless its metrics are finite and the weight is within bounds."""
    if len(content.metric_records) != 1:
        raise RefusedError(f"a reply must hold one MetricRecord, got {len(content.metric_records)}")
    record = next(iter(content.metric_records.values()))
    for name in (*content, *record):  # Flower logs them
        if len(name) > NAME_LIMIT or not name.isprintable():
            raise RefusedError(f"names must be at most {NAME_LIMIT} printable characters, got {name!r}")
    for name, value in record.items():
        if not all(math.isfinite(number) for number in (value if isinstance(value, list) else [value])):
            raise RefusedError(f"its metric {name!r} is not finite")
    own = record.get(key)
    if not isinstance(own, int | float):
        raise RefusedError(f"its metrics have no number {key!r}")
    if not WEIGHT_LEAST <= own <= limit:
        raise RefusedError(f"its weight must be in [{WEIGHT_LEAST:g}, {limit:g}], got {own}")
    return float(own)


def _cap_weights(messages: Iterable[Message], key: str, ratio: float) -> None:
    """Cap weights at `ratio` times the median of these replies, in the replies."""
    weights = {message: weight_of(message.content, key) for message in messages}
    limit = ratio * median(list(weights.values()))
    for message, own in weights.items():
        if own > limit:
            node = message.metadata.src_node_id
            log.warning("node %d: weight %g counts as %g, %g times the median", node, own, limit, ratio)
            name, record = next(iter(message.content.metric_records.items()))
            message.content[name] = MetricRecord({**dict(record), key: limit})


def _shape(content: RecordDict) -> Shape:
    metrics = [
        (name, *sorted((key, len(v) if isinstance(v, list) else "number") for key, v in record.items()))
        for name, record in content.metric_records.items()
    ]
    return (*sorted(content.array_records), *metrics)


def _distance(name: str, array: Array, known: Array) -> float:
    """Return how far an uncompressed array moves, 0 if it does not hold floats.

    RefusedError if it does not have the server's type and shape, before numpy allocates it.
    """
    if array.dtype != known.dtype or tuple(array.shape) != tuple(known.shape) or array.stype != known.stype:
        raise RefusedError(
            f"its array {name} must be {known.dtype} of shape {tuple(known.shape)}, "
            f"got {array.dtype} of shape {tuple(array.shape)[:9]}"
        )
    if len(array.data) > len(known.data) + 128 or _npy_head(array.data) != _npy_head(known.data):
        raise RefusedError(f"the bytes of its array {name} are not {known.dtype} of that shape")
    values = array.numpy()
    if not np.issubdtype(values.dtype, np.inexact):
        return 0.0
    if not bool(np.isfinite(values).all()):
        raise RefusedError(f"its array {name} holds NaN or Inf")
    with np.errstate(over="ignore"):  # inf is the right answer: no bound lets it in
        return float(np.linalg.norm((values - known.numpy()).ravel()))


def _npy_head(data: bytes) -> tuple[object, ...]:
    """Return the shape and type that the bytes claim: numpy trusts those."""
    file = BytesIO(data)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype
