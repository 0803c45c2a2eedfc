"""How near the compress step (accumulate, select, take out what was sent) comes to its floor.

The floor is `residual.add_(gradient)`: two reads and one write of every entry, which no scheme with error
compensation avoids. All methods run interleaved in one process, each on its own residual that it carries from
step to step; `over_floor` is the median of the ratios within a repetition, so what disturbs the machine
disturbs both sides. Before every timed step a buffer larger than the cache is read: all start cold.

Ours is memory and selector of this library; the rivals are what others do: a full `abs().topk`, and DGC's sampled
threshold. All draw k of the r largest with the same generator; r = k, the default, is top-k.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rtopk.codec import Codec
from rtopk.layout import Layout
from rtopk.memory import ErrorFeedback, MomentumCorrection
from rtopk.seed import generator
from rtopk.select import RTopK, draw
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier, entries_sent
from rtopk.studies.bench import Gradients, real, synthetic
from rtopk.studies.bench.traffic import TENSORS

SIZES = (1_000_000, 11_200_000, 66_000_000)
DENSITIES = (0.01, 0.001)
WARM = 12  # steps before the first measured one: the residual grows fast at first
LARGE = 11_000_000  # below it the interpreter takes most of a step
NOTHING = torch.zeros(0, dtype=torch.uint8)


class Method(Protocol):
    """One step of a compressor that keeps its own residual."""

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""


class Floor:
    """Only accumulate."""

    def __init__(self, d: int, k: int, r: int) -> None:
        self.residual = torch.zeros(d)

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate."""
        self.residual.add_(gradient)


class Uncoded(Codec):
    """No payload: what is measured here is the way to the vector that is sent."""

    def encode_with_decoded(
        self, vector: SparseVector, rng: torch.Generator | None = None
    ) -> tuple[Tensor, SparseVector]:
        """Return nothing, and the vector as it is."""
        return NOTHING, vector


class Fused:
    """This library: memory and selector."""

    def __init__(self, d: int, k: int, r: int) -> None:
        self.memory: ErrorFeedback | MomentumCorrection = ErrorFeedback()
        rule = RTopK(r_over_k=r / k)
        self.node = Sparsifier(rule, k / d if d else 1.0, self.memory, Uncoded())

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        self.node.compress(gradient, step)


class Hook(Fused):
    """This library as its DDP hook runs it: sums go to a second residual, so that a step can be undone.

    The gradient comes in the parts of a model whose tensors grow with depth.
    """

    def __init__(self, d: int, k: int, r: int) -> None:
        super().__init__(d, k, r)
        self.node.layout = Layout(("gradient",), ((d,),), dense_size=0)
        self.cuts = list(pairwise(round(d * (i / TENSORS) ** 2) for i in range(TENSORS + 1)))

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        self.memory.snapshot()
        if self.memory.residual is None:
            self.node.compress(gradient, step)
        else:
            self.node.expect(step)
            for begin, end in self.cuts:
                self.memory.put(begin, gradient[begin:end])
            self.node.compress(None, step)


class MomentumHook(Hook):
    """The same with SGD's momentum in the memory, as README's line has it: two reads and a write more per entry."""

    def __init__(self, d: int, k: int, r: int) -> None:
        super().__init__(d, k, r)
        self.node.memory = self.memory = MomentumCorrection(0.9)


class FullTopK:
    """The usual way: abs().topk over the whole vector."""

    def __init__(self, d: int, k: int, r: int) -> None:
        self.k, self.r, self.residual = k, r, torch.zeros(d)

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        self.residual.add_(gradient)
        best = self.residual.abs().topk(self.r, sorted=False).indices
        _send(self.residual, best, self.k, step)


class SampledThreshold:
    """DGC: the threshold of a sample of 1 %, corrected until it fits roughly (as in the GRACE library)."""

    def __init__(self, d: int, k: int, r: int) -> None:
        self.k, self.r, self.residual = k, r, torch.zeros(d)

    def step(self, gradient: Tensor, step: int) -> None:
        """Accumulate, select, take out."""
        self.residual.add_(gradient)
        d, r = self.residual.numel(), self.r
        magnitude = self.residual.abs()
        sample = magnitude[torch.randint(d, (max(1, d // 100),), generator=generator(step, "sample"))]
        threshold = float(sample.topk(max(1, r * sample.numel() // d), sorted=False).values.min())
        mask = magnitude >= threshold
        for _ in range(10):
            found = int(mask.sum())
            if 0.7 * r <= found <= 1.3 * r:
                break
            threshold *= 1.3 if found > r else 0.7
            mask = magnitude >= threshold
        best = mask.nonzero()[:, 0]
        _send(self.residual, best, min(self.k, best.numel()), step)


def _send(residual: Tensor, best: Tensor, k: int, step: int) -> None:
    sent = SparseVector.gather(residual, best[draw(best.numel(), k, generator(step))])
    residual[sent.indices] -= sent.values


METHODS: dict[str, Callable[[int, int, int], Method]] = {
    "floor": Floor,
    "rtopk": Fused,
    "hook": Hook,
    "momentum": MomentumHook,
    "topk": FullTopK,
    "dgc": SampledThreshold,
}


@dataclass(frozen=True)
class CompressRow:
    """One method on one kind of data."""

    d: int
    density: float
    threads: int
    data: str  # synthetic or real
    method: str  # a name in METHODS
    ms: float
    over_floor: float


@dataclass(frozen=True)
class CompressPlan:
    """What to measure."""

    sizes: tuple[int, ...] = SIZES
    densities: tuple[float, ...] = DENSITIES
    threads: tuple[int, ...] = (1, 2)
    repetitions: int = 25
    r_over_k: int = 1  # all draw k of so many times k
    rivals_every: int = 10  # rivals take long: they run in every n-th repetition
    data_dir: Path | None = None


QUICK = CompressPlan(sizes=(11_200_000,), repetitions=9, rivals_every=9)


def measure(
    plan: CompressPlan, say: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[str, list[CompressRow]]]:
    """Yield, for each size and kind of data, what the gradients are and the rows."""
    before = torch.get_num_threads()
    try:
        for size in plan.sizes:
            for kind in ("synthetic", "real"):
                say(f"{kind} gradients, d = {size:,}")
                torch.set_num_threads(before)
                gradients = synthetic(size, 3) if kind == "synthetic" else real(size, 3, plan.data_dir)
                rows = []
                for threads in plan.threads:
                    torch.set_num_threads(threads)
                    for density in plan.densities:
                        what = f"{gradients.source}, d = {gradients.size:,}"
                        say(f"{what}, density {density:g}, {threads} threads")
                        rows += compare(gradients, kind, density, threads, plan)
                yield gradients.source, rows
    finally:
        torch.set_num_threads(before)


def compare(
    gradients: Gradients, kind: str, density: float, threads: int, plan: CompressPlan
) -> list[CompressRow]:
    """Run all methods interleaved on one kind of data."""
    d = gradients.size
    k = entries_sent(d, density)
    methods = {name: make(d, k, min(d, plan.r_over_k * k)) for name, make in METHODS.items()}
    flush = torch.zeros(32_000_000)  # 128 MB
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for step in range(-WARM, plan.repetitions):
        gradient = gradients.at(step + WARM)
        once: dict[str, float] = {}
        for name, method in methods.items():
            rival = name in ("topk", "dgc")
            if rival and (step < 0 or step % plan.rivals_every):
                continue
            flush.sum()
            begin = time.perf_counter()
            method.step(gradient, step + WARM)
            once[name] = time.perf_counter() - begin
        if step >= 0:
            for name, taken in once.items():
                seconds[name].append(taken)
                ratios[name].append(taken / once["floor"])
    median = statistics.median
    return [
        CompressRow(d, density, threads, kind, name, 1e3 * median(taken), median(ratios[name]))
        for name, taken in seconds.items()
    ]


def beside_neighbour(gradients: Gradients, density: float, repetitions: int) -> tuple[float, float]:
    """Return the milliseconds of a step with one and with two threads, beside a process that spins."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    before, taken = torch.get_num_threads(), ([], [])  # type: tuple[int, tuple[list[float], list[float]]]
    try:
        k = entries_sent(gradients.size, density)
        methods = [Hook(gradients.size, k, k) for _ in taken]
        for step in range(repetitions):
            for threads, method in enumerate(methods, 1):
                torch.set_num_threads(threads)
                begin = time.perf_counter()
                method.step(gradients.at(step), step)
                taken[threads - 1].append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
        spinning.kill()
        spinning.wait()
    one, two = (1e3 * statistics.mean(times[WARM:]) for times in taken)
    return one, two


@dataclass(frozen=True)
class Bar:
    """A requirement, and whether it is met."""

    text: str
    measured: float
    limit: float
    met: bool


def bars(rows: list[CompressRow]) -> list[Bar]:
    """Check the rows against what the pass must reach."""
    table = {(r.d, r.density, r.threads, r.data, r.method): r for r in rows}
    found = []
    for row in rows:
        where = f"{row.data}, {row.d / 1e6:.1f} M, {100 * row.density:g} %, threads {row.threads}"
        if row.method in ("rtopk", "hook"):
            limit = 2.5 if row.d < LARGE else 1.7 if row.density <= 0.001 else 2.3
            text = f"over the floor: {row.method}, {where}"
            found.append(Bar(text, row.over_floor, limit, row.over_floor <= limit))
        if row.method != "rtopk" or row.d < LARGE:
            continue
        for rival, least in (("topk", 15.0), ("dgc", 3.0)):
            other = table[(row.d, row.density, row.threads, row.data, rival)]
            times = other.over_floor / row.over_floor
            found.append(Bar(f"faster than {rival}: {where}", times, least, times >= least))
        for larger in rows:
            same = (larger.density, larger.threads, larger.data, larger.method)
            if larger.d > 3 * row.d and same == (row.density, row.threads, row.data, row.method):
                growth = (larger.ms / larger.d) / (row.ms / row.d)
                text = f"time per entry at {larger.d / 1e6:.0f} M: {where}"
                found.append(Bar(text, growth, 1.3, growth <= 1.3))
    return found
