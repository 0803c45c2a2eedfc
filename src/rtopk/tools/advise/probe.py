"""Bandwidth and latency between two hosts, measured over one TCP connection.

One host listens, the other connects: bytes back and forth for the latency, then as much as the link carries
in a second or so, there and back. The listener serves one prober and ends.
"""

import socket
import statistics
import struct
import time
from dataclasses import dataclass

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
    with socket.create_server((address, port)) as server:
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
    with socket.create_connection((host, port), timeout=TIMEOUT) as connection:
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
    while size > 0:
        connection.sendall(chunk[: min(CHUNK, size)])
        size -= CHUNK


def _discard(connection: socket.socket, size: int) -> None:
    buffer = bytearray(CHUNK)
    while size > 0:
        got = connection.recv_into(buffer, min(CHUNK, size))
        if not got:
            raise ConnectionError("the other side has closed the connection")
        size -= got


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        data += part
    return data
