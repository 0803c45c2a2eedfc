"""Predicted step time of every method, from measured parts: selection, codec, software, wire.

A step is the computation, the buckets that DDP sends while backward goes on, and what waits for its end. The
wire is a ring: an all-reduce passes 2 (n - 1) / n of its bytes over every link in 2 (n - 1) messages, an
all-gather n - 1 payloads in n - 1 messages. Sizes of our payloads are those of the codec itself.
Users name a model by its number of entries or as `module:factory`.
"""

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rtopk.codec import HEADER, SHORT, Codec
from rtopk.exchange import NOTE_BYTES
from rtopk.replicas.control import SIZE as CONTROL_BYTES
from rtopk.sparsifier import entries_sent
from rtopk.studies.bench import FORWARD
from rtopk.studies.bench.link import METHODS
from rtopk.tools.advise.machine import Machine
from rtopk.tools.show.palette import with_density

HEADERS = (1514 + 66 / 2) / 1448  # Ethernet, IP and TCP, and an acknowledgement for every other segment
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes; DDP's defaults
PART_MS = 0.4  # to encode, shorten, restore and decode a part of few entries, both ways
TENSORS = 60  # assumed where only the number of entries is known


@dataclass(frozen=True)
class Workload:
    """A model and what a step of it takes without communication."""

    shapes: tuple[tuple[int, ...], ...]
    step_ms: float

    @classmethod
    def of_size(cls, size: int, step_ms: float) -> "Workload":
        """Assume square weights of equal size where only the number of entries is known."""
        if size < TENSORS:
            raise ValueError(f"a model must have at least {TENSORS} entries to be worth advice, got {size}")
        side = max(1, round((size / TENSORS) ** 0.5))
        return cls(((side, size // TENSORS // side or 1),) * TENSORS, step_ms)

    @property
    def size(self) -> int:
        """The number of entries, d."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def dense_size(self) -> int:
        """The entries of one dimension, which ours sends whole."""
        return sum(math.prod(shape) for shape in self.shapes if len(shape) <= 1)


@dataclass(frozen=True)
class Link:
    """What joins the nodes."""

    nodes: int
    mbit: float | None  # of each node's link, per direction; None is as fast as the software
    latency_ms: float = 0.0  # one way
    burst: float = 0.0  # bytes that a shaped link lets through at once
    sharing: float = 1.0  # ranks that share a core

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(f"nodes must be at least 2, got {self.nodes}")
        if self.mbit is not None and not self.mbit > 0:
            raise ValueError(f"mbit must be positive, got {self.mbit}")
        if not math.isfinite(self.mbit or 0.0) or not math.isfinite(self.latency_ms):
            raise ValueError(f"mbit and latency_ms must be finite, got {self.mbit} and {self.latency_ms}")
        if self.latency_ms < 0:
            raise ValueError(f"latency_ms must not be negative, got {self.latency_ms}")


@dataclass(frozen=True)
class Prediction:
    """What a method is expected to take and to send."""

    method: str
    density: float | None
    values: str | None
    step_ms: float
    local_ms: float  # selection, codec, averaging
    wire_ms: float  # on the link, hidden behind backward or not
    payload_bytes: float
    received_bytes: float = 0.0  # per node and step, without headers

    @property
    def label(self) -> str:
        """Name the method with its density and values."""
        return with_density(self.method, self.density, self.values)


def predict(machine: Machine, work: Workload, link: Link) -> list[Prediction]:
    """Predict every method of `rtopk bench link` for which there are parts."""
    return [_predict(machine, work, link, *key) for key in METHODS if key[0] in {*machine.select, *OURS}]


def _predict(
    machine: Machine, work: Workload, link: Link, method: str, density: float | None, values: str | None
) -> Prediction:
    n, size = link.nodes, work.size
    if method in OURS and density is not None and values is not None:
        return OURS[method](machine, work, link, density, values)
    gather = method == "topk-allgather"
    entries = _payload_entries(work, method, density)
    payload = entries * (12 if gather else 2 if method == "fp16" else 4)
    received = payload * (n - 1) if gather else payload * 2 * (n - 1) / n
    sent = entries if gather else 0.0
    local = machine.select[method].seconds(size, sent) * link.sharing
    buckets = _buckets(work.shapes)
    collectives = 3 if method.startswith("powersgd") else 2 if gather else 1
    rounds = (n - 1) if gather else 2 * (n - 1)
    free = busy = 0.0  # when the link is free again, and how long it works in all
    backward = 1e-3 * work.step_ms * (1 - FORWARD)
    done = 0.0  # local work so far: it holds backward up
    for share, ready in buckets:
        done += local * share
        time = _wire(machine, link, received * share, collectives * rounds)
        free = max(free, 1e-3 * work.step_ms * FORWARD + backward * ready + done) + time
        busy += time
    step = max(free, 1e-3 * work.step_ms + local)
    return Prediction(method, density, values, 1e3 * step, 1e3 * local, 1e3 * busy, payload, received)


def _predict_ours(machine: Machine, work: Workload, link: Link, density: float, values: str) -> Prediction:
    n, size, tail = link.nodes, work.size, work.dense_size
    entries = entries_sent(size - tail, density) + tail
    payload = CONTROL_BYTES + Codec(values=values, fixed=True, dense_size=tail).capacity(size, entries)
    received = payload * (n - 1)
    local = (
        machine.select["rtopk"].seconds(size, entries)
        + machine.encode[values].seconds(size, entries)
        + machine.average[values].seconds(size, n * entries)
    ) * link.sharing
    wire = _wire(machine, link, received, n - 1)
    return _after_backward("rtopk", work, density, values, local, wire, payload, received)


def _predict_all_reduce(
    machine: Machine, work: Workload, link: Link, density: float, values: str
) -> Prediction:
    """A node encodes n parts, averages its share of the entries, passes 1/n on, and decodes n payloads."""
    n, size, tail = link.nodes, work.size, work.dense_size
    entries = entries_sent(size - tail, density) + tail
    parts = Codec(values=values, dense_size=tail // n, fixed=True).capacity(size // n, entries // n)
    parts += SHORT.size - HEADER.size
    host = machine.host or machine
    received = (n - 1) * (2 * parts + NOTE_BYTES)
    local = (
        machine.select["rtopk"].seconds(size, entries)
        + host.select["rtopk"].seconds(size / n)
        + machine.encode[values].seconds(size, entries * (1 + 1 / n))
        + host.average[values].seconds(size, 2 * entries)
        + 1e-3 * PART_MS * n
    ) * link.sharing
    wire = _wire(machine, link, received, n + 1)
    return _after_backward("rtopk-allreduce", work, density, values, local, wire, received, received)


def _after_backward(
    method: str, work: Workload, density: float, values: str, local: float, wire: float, payload: float,
    received: float,
) -> Prediction:  # fmt: skip
    """Return the prediction of a method that begins at the end of backward."""
    step = 1e-3 * work.step_ms + local + wire
    return Prediction(method, density, values, 1e3 * step, 1e3 * local, 1e3 * wire, payload, received)


OURS = {"rtopk": _predict_ours, "rtopk-allreduce": _predict_all_reduce}


def transfer_seconds(machine: Machine, link: Link, payload: float, dense: bool) -> float:
    """Return how long a round's payloads, of a measured size, take: all-reduced if dense, else all-gathered."""
    n = link.nodes
    received = payload * (2 * (n - 1) / n if dense else n - 1)
    return _wire(machine, link, received, (2 if dense else 1) * (n - 1))


def _wire(machine: Machine, link: Link, received: float, messages: int) -> float:
    """Return the seconds of a collective: the slower of link and software, and a delay for each message."""
    software = 1e-9 * machine.byte_ns * received * link.sharing
    beyond = max(0.0, received * HEADERS - link.burst)
    carried = 0.0 if link.mbit is None else beyond * 8 / (link.mbit * 1e6)
    return max(software, carried) + messages * 1e-3 * (machine.message_ms * link.sharing + link.latency_ms)


def _payload_entries(work: Workload, method: str, density: float | None) -> float:
    if density is not None:
        return entries_sent(work.size, density)
    if not method.startswith("powersgd"):
        return work.size
    rank, total = int(method[-1]), 0
    for shape in work.shapes:
        rows = shape[0]
        columns = math.prod(shape) // rows
        low = (rows + columns) * rank
        total += low if low * 2 < rows * columns else rows * columns  # PyTorch's rule
    return total


def _buckets(shapes: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
    """Return DDP's buckets: their share of the entries, and how far backward is when they are full."""
    total = sum(math.prod(shape) for shape in shapes)
    weights = sum(len(shape) > 1 for shape in shapes) or 1
    found, held, passed, limit = [], 0, 0, FIRST_BUCKET
    for shape in reversed(shapes):
        held += math.prod(shape)
        passed += len(shape) > 1
        if 4 * held >= limit:
            found.append((held / total, min(1.0, passed / weights)))
            held, limit = 0, BUCKET
    if held:
        found.append((held / total, 1.0))
    return found


UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


def workload(model: str, step_ms: float) -> Workload:
    """Read a model: 11200000, 11.2M, 7B, or the importable factory of a torch module.

    >>> workload("7B", 100.0).size
    6999696060
    """
    if not 0.0 <= step_ms < math.inf:
        raise ValueError(f"step_ms must be finite and not negative, got {step_ms}")
    if ":" in model:
        return Workload(_shapes(model), step_ms)
    number, unit = (model[:-1], model[-1].lower()) if model[-1:].lower() in UNITS else (model, "")
    try:
        size = round(float(number) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise ValueError(
            f"model must be a number of entries (11200000, 11.2M, 7B) or module:factory, got {model!r}"
        ) from None
    return Workload.of_size(size, step_ms)


def _shapes(model: str) -> tuple[tuple[int, ...], ...]:
    import torch

    module, _, factory = model.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {model}: {error}") from error
    with torch.device("meta"):  # shapes only: a large model need not fit here
        made = make()
    if not isinstance(made, torch.nn.Module):
        raise ValueError(f"{model} must return a torch.nn.Module, got {type(made).__name__}")
    return tuple(tuple(p.shape) for p in made.parameters() if p.requires_grad)
