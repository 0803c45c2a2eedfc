"""Read clients' replies: everything is checked, and what does not fit is refused with the reason."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np
from flwr.app import Array, Message, RecordDict

from rtopk.flower.intake import Offer
from rtopk.flower.records import HEADER, PAYLOAD, Model, payload_bytes, the_arrays
from rtopk.flower.refusal import RefusedError

CLIENT_LIMIT = 128  # characters of a client id


def identify(message: Message, session: int, round_: int) -> tuple[str, bytes | None]:
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


def read(
    message: Message, client: str, digest: bytes, weight: float, model: Model, raw: Mapping[str, Array]
) -> Offer:
    """Return the offer of a training reply; its raw arrays must be of the kind of `raw`."""
    _, arrays = the_arrays(message.content)
    payloads = payload_bytes(arrays)
    if len(payloads) != 1:
        raise RefusedError(f"it holds {len(payloads)} payloads, expected one")
    expected = {f"{PAYLOAD}0", *model.raw}
    if set(arrays) != expected:
        raise RefusedError(f"its arrays must be {sorted(expected)}, got {sorted(arrays)[:9]}")
    beside = math.hypot(*(_distance(name, arrays[name], raw[name]) for name in model.raw))
    return Offer(client, message.metadata.src_node_id, digest, payloads[0], weight, beside)


def strip(message: Message) -> None:
    """Remove our header, so that the inner strategy sees an ordinary reply."""
    message.content = RecordDict({n: r for n, r in message.content.items() if n != HEADER})


def raw_mean(model: Model, contents: Sequence[RecordDict], weights: Sequence[float]) -> dict[str, Array]:
    """Return the raw arrays of a round: the weighted mean of floats, the middle one of everything else."""
    raw: dict[str, Array] = {}
    types = dict(zip(model.names, model.dtypes, strict=True))
    for name in model.raw:
        arrays = [the_arrays(content)[1][name] for content in contents]
        if np.issubdtype(np.dtype(types[name]), np.floating):
            total = sum(w * array.numpy() for w, array in zip(weights, arrays, strict=True))
            raw[name] = Array(np.asarray(total / sum(weights), dtype=types[name]))
        elif all(array.data == arrays[0].data for array in arrays):
            raw[name] = arrays[0]
        else:  # no client alone decides a counter
            middle = np.sort(np.stack([array.numpy() for array in arrays]), axis=0)[(len(arrays) - 1) // 2]
            raw[name] = Array(np.asarray(middle))
    return raw


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
