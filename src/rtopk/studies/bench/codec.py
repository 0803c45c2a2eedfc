"""Bits and time of the codec, and of the server's aggregation, beside their floors.

Codec: beside the entropy bound, other ways to send the same entries, and one add_. Bits are of whole payloads,
per entry. `index_bits` is what is left when the section of the values is taken away: positions and header (for
general compressors: everything beyond 32 bits of value). Times are the best of runs that take turns: add_ over d,
then every way to encode and decode, and again. The first way after add_ finds nothing in the caches, not even the
interpreter; each run begins with another one.

Aggregation: many clients' payloads -> their mean. The floor is adding the decoded entries, in the same order,
into one vector by the fastest loop we have: what is left if checking, decoding and judging cost nothing. Both
take turns; times are the best. Memory is the growth of the process's peak over what the payloads take, measured
by the kernel.
"""

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rtopk.codec import Codec
from rtopk.flower.intake import Intake, Offer
from rtopk.kernels import subtract_
from rtopk.seed import generator
from rtopk.select import draw, rtop_k
from rtopk.sparse import SparseVector
from rtopk.sparsifier import entries_sent
from rtopk.studies.bench import as_json as rows_as_json
from rtopk.studies.bench import real
from rtopk.wire.values import BY_NAME, FORMS

RESNET = 11_173_962


@dataclass(frozen=True)
class CodecPlan:
    """What is measured."""

    sizes: tuple[int, ...] = (1_000_000, RESNET, 66_000_000)
    densities: tuple[float, ...] = (0.01, 0.001, 0.0001)
    timed: tuple[int, ...] = (1_000_000, RESNET, 66_000_000)  # sizes whose rivals are measured too
    model_size: int = RESNET  # entries of the model whose gradients are taken
    runs: int = 9
    data_dir: Path | None = None


QUICK = CodecPlan(timed=(RESNET,), runs=5)


@dataclass(frozen=True)
class CodecRow:
    """One way to send k of d entries."""

    d: int
    k: int
    density: float
    data: Literal["uniform", "real"]
    values: str
    method: str
    index_bits: float
    bound_bits: float  # log2 C(d, k) / k, for uniform positions
    total_bits: float
    encode_ms: float
    decode_ms: float


@dataclass(frozen=True)
class CodecTimes:
    """Rows, and the time of one add_ over d beside them."""

    rows: list[CodecRow]
    add_ms: dict[int, float]


Way = tuple[str, str, Callable[[], Any], Callable[[Any], Any], Callable[[Any], int], float]


def measure(plan: CodecPlan, progress: Callable[[str], None] = lambda text: None) -> CodecTimes:
    """Measure every way on uniform positions and on positions of real gradients."""
    rows: list[CodecRow] = []
    adds: dict[int, float] = {}
    for d in plan.sizes:
        for density in plan.densities:
            progress(f"uniform positions, d = {d:,}, density {density:.2%}")
            rng = generator("bench codec", d)
            k = entries_sent(d, density)
            vector = SparseVector(draw(d, k, rng), torch.randn(k, generator=rng), d)
            forms = tuple(BY_NAME) if d in plan.timed or density == 0.001 else ("fp32", "4bit")
            rows += _compare(vector, "uniform", forms, d in plan.timed, plan.runs, adds)
    progress("gradients of ResNet-18")
    gradient = real(plan.model_size, 1, plan.data_dir).vectors[0]
    for density in plan.densities:
        k = entries_sent(gradient.numel(), density)
        vector = SparseVector.gather(gradient, rtop_k(gradient, k, 5 * k, generator("bench codec", k)))
        rows += _compare(vector, "real", tuple(BY_NAME), True, plan.runs, adds)
    return CodecTimes(rows, adds)


def bound_bits(d: int, k: int) -> float:
    """Return log2 C(d, k) / k."""
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2.0) / k


def _compare(
    vector: SparseVector,
    data: Literal["uniform", "real"],
    forms: tuple[str, ...],
    rivals: bool,
    runs: int,
    adds: dict[int, float],
) -> Iterator[CodecRow]:
    d, k = vector.size, len(vector)
    ways = [_ours(vector, form) for form in forms] + (list(_rivals(vector)) if rivals else [])
    times: dict[int, list[tuple[float, float]]] = {i: [] for i in range(len(ways))}
    residual, gradient, passes = torch.zeros(d), torch.zeros(d), []
    payloads = [way[2]() for way in ways]  # the first call may compile
    for way, payload in zip(ways, payloads, strict=True):
        way[3](payload)
    for run in range(runs):
        passes.append(_milliseconds(lambda: residual.add_(gradient)))
        for i in (j % len(ways) for j in range(run, run + len(ways))):
            _, _, encode, decode, _, _ = ways[i]
            times[i].append((_milliseconds(encode), _milliseconds(partial(decode, payloads[i]))))
    adds[d] = min(passes)
    for i, (method, values, _, _, size, value_bits) in enumerate(ways):
        total = 8 * size(payloads[i]) / k
        encode_ms, decode_ms = (min(column) for column in zip(*times[i], strict=True))
        bits = total - value_bits, bound_bits(d, k), total
        yield CodecRow(d, k, k / d, data, values, method, *bits, encode_ms, decode_ms)


def _ours(vector: SparseVector, values: str) -> Way:
    codec, k = Codec(values), len(vector)
    value_bits = 8 * FORMS[BY_NAME[values]].size(k) / k
    return "rtopk", values, lambda: codec.encode(vector), codec.decode, lambda p: int(p.numel()), value_bits


def _rivals(vector: SparseVector) -> Iterator[Way]:
    """Yield the usual ways: raw arrays, and general compressors of them."""
    compressors: list[tuple[str, Callable[[bytes], bytes], Callable[[bytes], bytes]]]
    compressors = [("", bytes, bytes), ("+zlib", zlib.compress, zlib.decompress)]
    with contextlib.suppress(ImportError):
        import zstandard

        pack, unpack = zstandard.ZstdCompressor(), zstandard.ZstdDecompressor()
        compressors.append(("+zstd", pack.compress, unpack.decompress))
    for name, dtype in (("raw64", np.dtype(np.int64)), ("raw32", np.dtype(np.int32))):
        for suffix, compress, decompress in compressors:
            encode = partial(_raw, vector, dtype, compress)
            yield name + suffix, "fp32", encode, partial(_parse, len(vector), dtype, decompress), len, 32.0


def _raw(vector: SparseVector, dtype: np.dtype[Any], compress: Callable[[bytes], bytes]) -> bytes:
    return compress(vector.indices.numpy().astype(dtype).tobytes() + vector.values.numpy().tobytes())


def _parse(
    k: int, dtype: np.dtype[Any], decompress: Callable[[bytes], bytes], data: bytes
) -> tuple[NDArray[Any], NDArray[Any]]:
    data = decompress(data)
    values = np.frombuffer(data, np.float32, offset=k * dtype.itemsize)
    return np.frombuffer(data, dtype, k).astype(np.int64), values.copy()


def _milliseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def as_json(measured: CodecTimes) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {**rows_as_json(measured.rows), "add_ms": measured.add_ms}


def show(measured: CodecTimes) -> None:
    """Print a table; time is also given in percent of one add_ over d."""
    from rich.console import Console

    from rtopk.tools.show.terminal import table

    heads = ("d", "density", "method", "values", "index", "bound", "total", "ms", "of add_")
    for data in ("uniform", "real"):
        rows = []
        for row in (row for row in measured.rows if row.data == data):
            spent = row.encode_ms + row.decode_ms
            bits = (f"{x:.2f}" for x in (row.index_bits, row.bound_bits, row.total_bits))
            size, share = f"{row.d / 1e6:.1f} M", f"{spent / measured.add_ms[row.d]:.1%}"
            rows.append([size, f"{row.density:.2%}", row.method, row.values, *bits, f"{spent:.2f}", share])
        Console(width=90).print(table(f"{data} positions", heads, rows, left=0))
    print("Bits per entry of whole payloads; ms: encode + decode.")


@dataclass(frozen=True)
class AggregationTimes:
    """One aggregation."""

    clients: int
    d: int
    density: float
    payload_bytes: int  # of all clients
    floor_ms: float  # adding the decoded entries
    torch_ms: float  # the same with torch's index_add_
    decode_ms: float
    average_ms: float  # all that the server does: check, decode, judge, add
    first_ms: float  # the same in the first round, where norms have nothing to compare with
    over_floor: float
    dense_bytes: int
    peak_bytes: int  # above the payloads
    over_dense: float  # the same in dense vectors


def measure_aggregation(
    clients: int = 100, d: int = RESNET, density: float = 0.01, runs: int = 7
) -> AggregationTimes:
    """Aggregate random payloads; every client's positions are drawn uniformly, so nothing is in cache."""
    codec = Codec(fingerprint=1)
    k = entries_sent(d, density)
    offers = []
    for number in range(clients):
        rng = generator(0, "aggregate", number)
        vector = SparseVector(draw(d, k, rng), torch.randn(k, generator=rng), d)
        data = codec.encode(vector).numpy().tobytes()
        offers.append(Offer(str(number), number, data, 1.0 + number % 3))
    model = torch.randn(d, generator=generator(0, "aggregate"))
    peak = _peak(lambda: _intake(d, density, known=clients).average(offers, model))
    vectors = [_intake(d, density, known=clients).decode(offer) for offer in offers]
    ways: dict[str, Callable[[], object]] = {
        "floor": lambda: _add(vectors, d, lambda t, v: subtract_(t, v.indices, v.values)),
        "torch": lambda: _add(vectors, d, lambda t, v: t.index_add_(0, v.indices, v.values)),
        "average": lambda: _intake(d, density, known=clients).average(offers, model),
        "decode": lambda: [_intake(d, density, known=clients).decode(offer) for offer in offers],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            times[name].append(_milliseconds(way))
    times["first"] = [_milliseconds(lambda: _intake(d, density, known=0).average(offers, model))]
    best = {name: min(found) for name, found in times.items()}
    return AggregationTimes(
        clients, d, density, sum(len(o.payload) for o in offers), best["floor"], best["torch"], best["decode"],
        best["average"], best["first"], best["average"] / best["floor"], 4 * d, peak, peak / (4 * d),
    )  # fmt: skip


def _intake(d: int, density: float, known: int) -> Intake:
    intake = Intake(d, 1, max_density=density, max_norm=1e6)
    intake.bound.note([300.0] * known)
    return intake


def _add(vectors: list[SparseVector], d: int, add: Callable[[torch.Tensor, SparseVector], object]) -> None:
    total = torch.zeros(d)
    for vector in vectors:
        add(total, vector)


def _peak(action: Any) -> int:
    """Return by how much the resident memory grew at most; once before, so that code is compiled and loaded."""
    action()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return 1024 * int(line.split()[1])
