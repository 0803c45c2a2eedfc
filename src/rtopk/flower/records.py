"""Flower's ArrayRecord <-> one flat vector, and our payloads as Flower arrays.

Arrays of float32 and float16 are laid out in the vector and compressed; tensors of one dimension (biases,
norms, BatchNorm statistics) form its dense tail. Everything else (integers, float64) is sent unchanged beside the
payload: averaging a counter makes no sense, and float32 would round a float64.

`ByteLedger` counts the bytes of messages, both ways, per round, as the server sees them. Payload is the `numel()`
of our payloads (and raw arrays), framing what Flower's records add around them. What the engine adds on the wire
(gRPC, polling, heartbeats) is visible only to a `CountingProxy`.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from numpy.typing import NDArray
from torch import Tensor

from rtopk.layout import DenseRule, Layout, one_dimensional

HEADER = "rtopk"  # name of our ConfigRecord in every message
STYPE = "rtopk.v1"  # serialisation type of our arrays: stock strategies fail on it instead of averaging bytes
PAYLOAD = "rtopk."  # names of payload arrays: rtopk.0, rtopk.1, ...
COMPRESSED = ("float32", "float16")
HALF_LIMIT = 65504.0  # the largest float16


@dataclass(frozen=True)
class Model:
    """The names, types and order of a model's arrays, and the layout of those that are compressed."""

    names: tuple[str, ...]  # all, in the order of the record
    dtypes: tuple[str, ...]
    layout: Layout

    @classmethod
    def of(cls, record: ArrayRecord, dense: DenseRule = one_dimensional) -> "Model":
        """Describe the arrays of a record."""
        floats = [
            (name, torch.empty(tuple(array.shape), device="meta"))
            for name, array in record.items()
            if array.dtype in COMPRESSED
        ]
        if not floats:
            raise ValueError(f"no array of {' or '.join(COMPRESSED)} to compress among {list(record)}")
        dtypes = tuple(array.dtype for array in record.values())
        return cls(tuple(record), dtypes, Layout.of(floats, dense))

    @property
    def types(self) -> dict[str, str]:
        """Return the type of each array."""
        return dict(zip(self.names, self.dtypes, strict=True))

    @property
    def raw(self) -> tuple[str, ...]:
        """Return the names of the arrays that are sent unchanged."""
        return tuple(name for name, dtype in self.types.items() if dtype not in COMPRESSED)

    @property
    def dense(self) -> tuple[str, ...]:
        """Return the names of the arrays in the dense tail."""
        places = zip(self.layout.names, self.layout.offsets, strict=False)
        return tuple(name for name, start in places if start >= self.layout.sparse_size)

    def flatten(self, record: ArrayRecord) -> tuple[Tensor, dict[str, Array]]:
        """Return the compressed arrays as one float32 vector, and the raw arrays."""
        if set(record) != set(self.names):
            raise ValueError(f"arrays must be {sorted(self.names)}, got {sorted(record)}")
        tensors = {n: _tensor(record[n].numpy()) for n in self.layout.names}
        return self.layout.flatten(tensors), {n: record[n] for n in self.raw}

    def record(self, vector: Tensor, raw: Mapping[str, Array]) -> ArrayRecord:
        """Write a vector and raw arrays as a record of the model's own types and order."""
        types, views = self.types, self.layout.unflatten(vector)
        arrays = {n: raw[n] if n not in views else Array(_typed(views[n], types[n])) for n in self.names}
        return ArrayRecord(arrays)

    def rounded(self, vector: Tensor) -> Tensor:
        """Return the vector as a client sees it: float16 arrays hold float16 numbers."""
        if "float16" not in self.dtypes:
            return vector
        types, views = self.types, self.layout.unflatten(vector)
        return self.layout.flatten(
            {n: torch.from_numpy(_typed(v, types[n])).float() for n, v in views.items()}
        )

    @property
    def ceiling(self) -> Tensor | None:
        """Return the largest magnitude of each entry, None if all are float32."""
        if "float16" not in self.dtypes:
            return None
        types = self.types
        limits = {"float16": HALF_LIMIT, "float32": float(torch.finfo(torch.float32).max)}
        return self.layout.flatten(
            {
                n: torch.full(shape, limits[types[n]])
                for n, shape in zip(self.layout.names, self.layout.shapes, strict=True)
            }
        )

    def to_json(self) -> str:
        """Write the description for the other side."""
        layout = self.layout
        return json.dumps([self.names, self.dtypes, layout.names, layout.shapes, layout.dense_size])

    @classmethod
    def from_json(cls, text: str) -> "Model":
        """Read what `to_json` wrote."""
        names, dtypes, laid, shapes, dense_size = json.loads(text)
        layout = Layout(tuple(laid), tuple(tuple(shape) for shape in shapes), dense_size)
        return cls(tuple(names), tuple(dtypes), layout)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))  # a copy: Flower's buffers are read-only


def _typed(values: Tensor, dtype: str) -> NDArray[Any]:
    """Return values as an array of the model's own type; float16 saturates at its largest number."""
    if dtype == "float16":
        values = values.clamp(-HALF_LIMIT, HALF_LIMIT)
    return values.numpy().astype(np.dtype(dtype), copy=False)


def payload_array(payload: Tensor) -> Array:
    """Wrap a payload as a Flower array."""
    data = payload.numpy().tobytes()
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def payload_bytes(record: ArrayRecord) -> list[bytes]:
    """Return the payloads of a record in order; other arrays are ignored."""
    count = sum(1 for name in record if name.startswith(PAYLOAD))
    found = []
    for number in range(count):
        array = record.get(f"{PAYLOAD}{number}")
        if array is None or array.stype != STYPE or array.dtype != "uint8":
            raise ValueError(f"payload {number} of {count} is missing or not of type {STYPE}")
        found.append(array.data)
    return found


def the_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    """Return the only ArrayRecord of a message and its name."""
    if len(content.array_records) != 1:
        raise ValueError(f"a message must hold one ArrayRecord, got {len(content.array_records)}")
    return next(iter(content.array_records.items()))


def with_header(content: RecordDict, header: ConfigRecord, **replaced: ArrayRecord | None) -> RecordDict:
    """Copy a content with our header, and ArrayRecords replaced (None: left out)."""
    records = {n: r for n, r in content.items() if n not in replaced and n != HEADER}
    records |= {name: record for name, record in replaced.items() if record is not None}
    return RecordDict({**records, HEADER: header})


@dataclass
class RoundBytes:
    """The bytes of one round, all clients together."""

    down_payload: int = 0
    down_framing: int = 0
    up_payload: int = 0
    up_framing: int = 0
    messages: int = 0
    snapshots: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        """Both ways."""
        return self.down_payload + self.down_framing + self.up_payload + self.up_framing


class ByteLedger:
    """The rounds of a run."""

    def __init__(self) -> None:
        self.rounds: dict[int, RoundBytes] = defaultdict(RoundBytes)

    def count(self, round_: int, way: Literal["down", "up"], content: RecordDict) -> None:
        """Add the content of one message: its payloads, and the framing around them."""
        entry, payload = self.rounds[round_], data_bytes(content)
        framing = content_bytes(content) - payload
        if way == "down":
            entry.down_payload += payload
            entry.down_framing += framing
            entry.messages += 1
        else:
            entry.up_payload += payload
            entry.up_framing += framing

    def to_dict(self) -> dict[str, Any]:
        """Return the rounds as plain values."""
        return {str(number): asdict(entry) for number, entry in sorted(self.rounds.items())}


def content_bytes(content: RecordDict) -> int:
    """Count the bytes of a content as Flower serialises its objects."""
    return sum(len(found.deflate()) for found in get_all_nested_objects(content).values())


def data_bytes(content: RecordDict) -> int:
    """Count the bytes of the arrays in a content: payloads and unchanged arrays."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
