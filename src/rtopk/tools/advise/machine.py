"""What is measured for predictions: this machine's time for each part of a method, and the link to another host.

`measure` runs the real methods between two ranks on loopback (the code of `rtopk bench link`, computation switched
off) at two densities, and splits what they took: part per entry of the model, part per entry sent.

`listen` and `probe` measure bandwidth and latency over one TCP connection: bytes back and forth for the latency,
then as much as the link carries in a second or so, there and back. The listener serves one prober and ends.
"""

import json
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtopk.studies.bench.link import LinkRow

NODES = 2  # of the measurement


@dataclass(frozen=True)
class Line:
    """A cost in nanoseconds: so much per entry of the model, so much per entry sent (or received), and at all."""

    entry: float
    sent: float = 0.0
    fixed: float = 0.0

    def seconds(self, size: float, sent: float = 0.0) -> float:
        """Return the cost of `size` entries of which `sent` are sent."""
        return 1e-9 * (self.entry * size + self.sent * sent + self.fixed)


@dataclass(frozen=True)
class Machine:
    """Costs of one rank that has a core to itself."""

    name: str
    select: Mapping[str, Line]  # method -> selection or compression, and all passes over the gradient
    encode: Mapping[str, Line]  # values -> encoding
    average: Mapping[str, Line]  # values -> decoding and averaging; `sent` is per entry received
    byte_ns: float  # of the software between a rank and its link, per byte of a collective
    message_ms: float  # of a collective's step from one rank to the next, without the link's latency
    host: "Machine | None" = None  # in whose memory owners work, if not in this one's

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {name: part for name, part in asdict(self).items() if name != "host"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Machine":
        """Read what `as_json` returned."""
        select, encode, average = (
            {name: Line(**line) for name, line in data[part].items()}
            for part in ("select", "encode", "average")
        )
        return cls(data["name"], select, encode, average, data["byte_ns"], data["message_ms"])


def reference() -> Machine:
    """Return the machine that was measured for the documentation."""
    text = resources.files("rtopk.tools.advise").joinpath("reference.json").read_text()
    return Machine.from_json(json.loads(text))


def measure(tell: Callable[[str], None] = lambda text: None, model: str = "resnet18") -> Machine:
    """Measure this machine, in about a minute."""
    from rtopk.studies.bench.link import Cell, LinkPlan, measure_cell
    from rtopk.studies.bench.ranks import Ranks
    from rtopk.studies.train.records import processor

    plan = LinkPlan(loopback=True, rounds=2, steps=3)
    tell(f"starting {NODES} ranks")
    with Ranks(NODES, None) as ranks:
        size = ranks.order("load", model=model)[0]["size"]
        rows = measure_cell(plan, ranks, Cell(model, size, None, NODES, compute_ms=0.0), tell)
        message = min(answer["seconds"] for answer in ranks.order("barriers"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return fit(rows, message, f"{processor() or 'unknown CPU'}, {cores} cores")


def fit(rows: Sequence["LinkRow"], message_seconds: float, name: str) -> Machine:
    """Split the parts of measured rows by entry and by entry sent."""
    size, nodes = rows[0].size, rows[0].nodes
    found: dict[tuple[str, float | None, str | None], LinkRow] = {
        (r.method, r.density, r.values): r for r in rows
    }
    dense = found["dense", None, None]
    traffic = dense.payload_bytes * 2 * (nodes - 1) / nodes
    byte_ns = 1e6 * max(0.0, dense.step_ms - dense.off_ms) / traffic
    select: dict[str, Line] = {"dense": Line(0.0)}
    for method in ("fp16", "powersgd-1", "powersgd-2"):
        row = found[method, None, None]
        software = 1e-6 * byte_ns * row.payload_bytes * 2 * (nodes - 1) / nodes
        select[method] = Line(1e6 * max(0.0, row.step_ms - row.off_ms - software) / size)
    coarse, fine = (found["topk-allgather", density, None] for density in (0.01, 0.001))
    select["topk-allgather"] = _line(
        [(row.payload_bytes / 12, row.step_ms - row.off_ms) for row in (coarse, fine)], size
    )
    encode, average, overheads = {}, {}, []
    for values in ("fp16", "4bit"):
        pair = [(density * size, found["rtopk", density, values]) for density in (0.01, 0.001)]
        encode[values] = _line([(k, row.encode_ms) for k, row in pair], size)
        average[values] = _line([(nodes * k, row.average_ms) for k, row in pair], size)
        left = [(k, row.step_ms - row.off_ms - row.codec_ms - row.exchange_ms) for k, row in pair]
        overheads.append(_line(left, size))
    select["rtopk"] = Line(sum(one.entry for one in overheads) / 2, sum(one.sent for one in overheads) / 2)
    return Machine(name, select, encode, average, byte_ns, 1e3 * message_seconds)


def _line(points: Sequence[tuple[float, float]], size: int) -> Line:
    """Draw the line through two points (entries sent, milliseconds), neither part below zero."""
    (more, slow), (less, fast) = points
    sent = max(0.0, (slow - fast) / (more - less))
    return Line(1e6 * max(0.0, min(fast, slow) - sent * less) / size, 1e6 * sent)


GREETING = b"rtopk-probe-1\n"
TURNS = 20
CHUNK = 1 << 16
TIMEOUT = 30.0
HEADER = struct.Struct("<Q")
LIMIT = 1 << 36  # bytes in one direction


@dataclass(frozen=True)
class Probe:
    """What was measured."""

    mbit: float  # of the slower direction
    latency_ms: float  # one way: half of the median round trip


def listen(port: int, address: str = "") -> None:
    """Serve one prober."""
    try:
        server = socket.create_server((address, port))
    except OSError as error:
        raise OSError(f"cannot listen on port {port}: {error.strerror}; choose another") from error
    with server:
        connection, _ = server.accept()
    with connection:
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _receive(connection, len(GREETING)) != GREETING:
            raise ConnectionError("the other side is not `rtopk advise --probe`")
        connection.sendall(GREETING)
        for _ in range(TURNS):
            connection.sendall(_receive(connection, 1))
        while size := HEADER.unpack(_receive(connection, HEADER.size))[0]:
            if size > LIMIT:
                raise ConnectionError(f"the prober announced {size} bytes, at most {LIMIT} are taken")
            _discard(connection, size)
            connection.sendall(b"+")
            _send(connection, size)


def probe(host: str, port: int, seconds: float = 1.0) -> Probe:
    """Measure the link to a host that listens."""
    try:
        connection = socket.create_connection((host, port), timeout=TIMEOUT)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(
            f"cannot reach {host}:{port}: {why}; run `rtopk advise --listen {port}` there"
        ) from error
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(GREETING)
        if _receive(connection, len(GREETING)) != GREETING:
            raise ConnectionError(f"{host}:{port} is not `rtopk advise --listen`")
        turns = []
        for _ in range(TURNS):
            started = time.perf_counter()
            connection.sendall(b".")
            _receive(connection, 1)
            turns.append(time.perf_counter() - started)
        size, rate = 1 << 18, 0.0
        while True:
            there, back = _transfer(connection, size)
            rate = size / max(there, back)  # bytes per second
            if max(there, back) >= seconds / 2 or 2 * size > LIMIT:
                break
            # Long enough that queues and buffers on the way no longer flatter the link.
            size = min(LIMIT, max(2 * size, round(rate * seconds)))
        connection.sendall(HEADER.pack(0))
    return Probe(mbit=rate * 8 / 1e6, latency_ms=1e3 * statistics.median(turns) / 2)


def _transfer(connection: socket.socket, size: int) -> tuple[float, float]:
    """Return the seconds of `size` bytes there and back."""
    started = time.perf_counter()
    connection.sendall(HEADER.pack(size))
    _send(connection, size)
    _receive(connection, 1)
    there = time.perf_counter() - started
    _discard(connection, size)
    return there, time.perf_counter() - started - there


def _send(connection: socket.socket, size: int) -> None:
    chunk = bytes(CHUNK)
    for begin in range(0, size, CHUNK):
        connection.sendall(chunk[: size - begin])


def _discard(connection: socket.socket, size: int) -> None:
    buffer = bytearray(CHUNK)
    while size > 0:
        size -= _some(connection.recv_into(buffer, min(CHUNK, size)))


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    got = 0
    while got < size:
        got += _some(connection.recv_into(memoryview(data)[got:]))
    return bytes(data)


def _some(got: int) -> int:
    if not got:
        raise ConnectionError("the other side has closed the connection")
    return got
