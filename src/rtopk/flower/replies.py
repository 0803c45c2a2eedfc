"""Reading what clients answer: nothing is believed, and what does not fit is refused with the reason."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO

import numpy as np
from flwr.app import Array, Message, RecordDict

from rtopk.flower.intake import Offer, RefusedError
from rtopk.flower.records import HEADER, PAYLOAD, Model, payload_bytes, the_arrays

Refuse = Callable[[str, int, str], None]


def identify(message: Message, session: int) -> tuple[str, bytes | None]:
    """Return who a reply says it is from and the digest of the model it holds, None if it needs one."""
    if message.has_error():
        raise RefusedError(f"the client failed: {message.error.reason}")
    header = message.content.config_records.get(HEADER)
    if header is None:
        raise RefusedError("its reply is not compressed: add RTopKMod to its ClientApp")
    client, digest = header.get("client"), header.get("digest")
    if not isinstance(client, str) or not isinstance(digest, bytes):
        raise RefusedError("its header names no client or no model")
    if not 0 < len(client) <= 128 or not client.isprintable():
        raise RefusedError("its client id must be 1 to 128 printable characters")
    if header.get("session") != session:
        raise RefusedError(f"it is of session {header.get('session')!r}, this is {session}")
    return client, None if "need" in header else digest


def read(message: Message, model: Model, client: str, weight_key: str, raw: Mapping[str, Array]) -> Offer:
    """Return the offer of a training reply; its raw arrays must be of the kind of `raw`."""
    header = message.content.config_records[HEADER]
    _, arrays = the_arrays(message.content)
    payloads = payload_bytes(arrays)
    if len(payloads) != 1:
        raise RefusedError(f"it holds {len(payloads)} payloads, expected one")
    expected = {f"{PAYLOAD}0", *model.raw}
    if set(arrays) != expected:
        raise RefusedError(f"its arrays must be {sorted(expected)}, got {sorted(arrays)[:9]}")
    for name in model.raw:
        _check_raw(name, arrays[name], raw[name])
    session, round_, digest = header.get("session"), header.get("round"), header.get("digest")
    if not isinstance(session, int) or not isinstance(round_, int) or not isinstance(digest, bytes):
        raise RefusedError("its header is not one of ours")
    weight = _weight(message.content, weight_key)
    return Offer(client, message.metadata.src_node_id, session, round_, digest, payloads[0], weight)


def strip(message: Message) -> None:
    """Take our header out, so that the inner strategy sees what it knows."""
    message.content = RecordDict({n: r for n, r in message.content.items() if n != HEADER})


def alike(offers: Mapping[Offer, Message], weight_key: str, refuse: Refuse) -> list[Offer]:
    """Keep the offers whose metrics look like those of most: one odd reply would stop the inner strategy."""
    kept = {id(m) for m in alike_metrics(offers.values(), weight_key, refuse)}
    return [offer for offer, message in offers.items() if id(message) in kept]


def alike_metrics(messages: Iterable[Message], weight_key: str, refuse: Refuse) -> list[Message]:
    """Keep the replies whose metrics have the names and lengths that most have."""
    messages = list(messages)
    shapes = [_shape(message.content) for message in messages]
    if not shapes:
        return messages
    usual = Counter(shapes).most_common(1)[0][0]
    kept = []
    for message, shape in zip(messages, shapes, strict=True):
        if shape == usual:
            kept.append(message)
        else:
            refuse("", message.metadata.src_node_id, f"its metrics {shape} are not those of the others")
    return kept


def raw_mean(model: Model, contents: Sequence[RecordDict], weights: Sequence[float]) -> dict[str, Array]:
    """Return the raw arrays of a round: the weighted mean of floats, the first client's integers."""
    raw: dict[str, Array] = {}
    types = dict(zip(model.names, model.dtypes, strict=True))
    for name in model.raw:
        arrays = [the_arrays(content)[1][name] for content in contents]
        if np.issubdtype(np.dtype(types[name]), np.floating):
            total = sum(w * array.numpy() for w, array in zip(weights, arrays, strict=True))
            raw[name] = Array(np.asarray(total / sum(weights), dtype=types[name]))
        else:
            raw[name] = arrays[0]
    return raw


def _check_raw(name: str, array: Array, known: Array) -> None:
    """Refuse an array that is not of the server's type and shape, before numpy makes room for it."""
    if array.dtype != known.dtype or tuple(array.shape) != tuple(known.shape) or array.stype != known.stype:
        raise RefusedError(
            f"its array {name} must be {known.dtype} of shape {tuple(known.shape)}, "
            f"got {array.dtype} of shape {tuple(array.shape)[:9]}"
        )
    if len(array.data) > len(known.data) + 128 or _npy_head(array.data) != _npy_head(known.data):
        raise RefusedError(f"the bytes of its array {name} are not {known.dtype} of that shape")
    values = array.numpy()
    if np.issubdtype(values.dtype, np.inexact) and not bool(np.isfinite(values).all()):
        raise RefusedError(f"its array {name} holds NaN or Inf")


def _npy_head(data: bytes) -> tuple[object, ...]:
    """Return shape and type that the bytes themselves claim: numpy believes those."""
    file = BytesIO(data)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype


def _weight(content: RecordDict, key: str) -> float:
    if len(content.metric_records) != 1:
        raise RefusedError(f"a reply must hold one MetricRecord, got {len(content.metric_records)}")
    value = next(iter(content.metric_records.values())).get(key)
    if not isinstance(value, int | float):
        raise RefusedError(f"its metrics have no number {key!r}")
    return float(value)


def _shape(content: RecordDict) -> tuple[object, ...]:
    return tuple(
        (name, *sorted((key, len(v) if isinstance(v, list) else 0) for key, v in record.items()))
        for name, record in sorted(content.metric_records.items())
    )
