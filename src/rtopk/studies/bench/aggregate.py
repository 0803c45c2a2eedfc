"""Time and memory of the server's aggregation: many clients' payloads -> their mean, beside its floor.

The floor is adding the decoded entries, in the same order, into one vector by the fastest loop we have: what
is left if checking, decoding and judging cost nothing. Both take turns; times are the best. Memory is the
growth of the process's peak over what the payloads take, measured by the kernel.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rtopk.codec import Codec
from rtopk.flower.intake import Intake, Offer
from rtopk.kernels import subtract_
from rtopk.seed import generator
from rtopk.select import draw
from rtopk.sparse import SparseVector
from rtopk.studies.bench.codec import RESNET


@dataclass(frozen=True)
class Measured:
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

    @property
    def over_dense(self) -> float:
        """Memory in dense vectors, payloads not counted."""
        return self.peak_bytes / self.dense_bytes


def measure(clients: int = 100, d: int = RESNET, density: float = 0.01, runs: int = 7) -> Measured:
    """Aggregate random payloads; every client's positions are drawn uniformly, so nothing is in cache."""
    codec = Codec(fingerprint=1)
    k = round(density * d)
    offers = []
    for number in range(clients):
        rng = generator(0, "aggregate", number)
        vector = SparseVector(draw(d, k, rng), torch.randn(k, generator=rng), d)
        data = codec.encode(vector).numpy().tobytes()
        offers.append(Offer(str(number), number, b"", data, 1.0 + number % 3))
    model = torch.randn(d, generator=generator(0, "aggregate"))
    peak = _peak(lambda: _intake(d, density, known=clients).average(offers, model))
    vectors = [_intake(d, density, known=clients).decode(offer) for offer in offers]
    times: dict[str, list[float]] = {"floor": [], "torch": [], "decode": [], "average": [], "first": []}
    for _ in range(runs):
        times["floor"].append(
            _timed(lambda: _add(vectors, d, lambda t, v: subtract_(t, v.indices, v.values)))
        )
        times["torch"].append(
            _timed(lambda: _add(vectors, d, lambda t, v: t.index_add_(0, v.indices, v.values)))
        )
        times["average"].append(_timed(lambda: _intake(d, density, known=clients).average(offers, model)))
        times["decode"].append(_timed(lambda: [_intake(d, density, known=clients).decode(o) for o in offers]))
    times["first"].append(_timed(lambda: _intake(d, density, known=0).average(offers, model)))
    best = {name: 1e3 * min(found) for name, found in times.items()}
    return Measured(
        clients, d, density, sum(len(o.payload) for o in offers), best["floor"], best["torch"], best["decode"],
        best["average"], best["first"], best["average"] / best["floor"], 4 * d, peak,
    )  # fmt: skip


def as_json(measured: Measured) -> dict[str, Any]:
    """Return the measurement as plain values."""
    return {**asdict(measured), "over_dense": measured.over_dense}


def _intake(d: int, density: float, known: int) -> Intake:
    intake = Intake(d, 1, max_density=density, max_norm=1e6)
    intake.bound.note([300.0] * known)
    return intake


def _add(vectors: list[SparseVector], d: int, add: Callable[[torch.Tensor, SparseVector], object]) -> None:
    total = torch.zeros(d)
    for vector in vectors:
        add(total, vector)


def _timed(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


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
