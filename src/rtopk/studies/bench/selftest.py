"""What whoever has a card runs for us: the laws on the device against the CPU, to the bit, and what a step takes.

Every check says what it compared and whether it held; a check that raises has failed, and the others still run.
The reference is the compiled loops on the CPU, and for selection a stable sort. Without a card the device is the
CPU: the checks are the same, and RTOPK_BACKEND chooses what is compared with the loops.
"""

import itertools
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rtopk
from rtopk import kernels
from rtopk.codec import Codec
from rtopk.kernels import draws
from rtopk.kernels.search import Search
from rtopk.layout import Layout
from rtopk.memory import DecayedErrorFeedback, ErrorFeedback, Memory, MomentumCorrection, NoMemory
from rtopk.seed import generator
from rtopk.select import RTopK
from rtopk.sparsifier import Sparsifier, entries_sent
from rtopk.studies.bench.compress import METHODS
from rtopk.studies.bench.selftest_ranks import two_ranks
from rtopk.studies.train.records import installed

Tell = Callable[[str], None]
MEMORIES: dict[str, Callable[[], Memory]] = {
    "none": NoMemory,
    "error feedback": ErrorFeedback,
    "error feedback, in parts": ErrorFeedback,
    "momentum correction": MomentumCorrection,
    "decay": DecayedErrorFeedback,
}
FORMS = ("fp32", "fp16", "int8", "4bit")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SelftestPlan:
    """How much to check and measure."""

    sizes: tuple[int, ...] = (
        1,
        63,
        4095,
        4096,
        4097,
        100_000,
        3_000_000,
    )  # of vectors that are selected from
    steps: int = 8  # of a node
    entries: int = 300_000  # of its gradient
    ranks: int = 2
    timed: tuple[int, ...] = (1_000_000, 11_200_000, 66_000_000)
    repetitions: int = 10


ON_CPU = SelftestPlan(sizes=(1, 63, 4097, 100_000), entries=50_000, timed=(1_000_000,), repetitions=5)
SMALL = SelftestPlan(sizes=(1, 65, 300), steps=4, entries=300, timed=(2000,), repetitions=1)


@dataclass
class Check:
    """One thing that must hold."""

    name: str
    passed: bool = False
    detail: str = ""
    seconds: float = 0.0


@dataclass
class SelftestReport:
    """What was found on one device."""

    machine: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check held."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return the report as one object."""
        return {"passed": self.passed, **asdict(self)}


def run(
    device: torch.device, plan: SelftestPlan | None = None, tell: Tell = lambda text: None
) -> SelftestReport:
    """Check everything on a device and measure a step."""
    plan = plan or (ON_CPU if device.type == "cpu" else SelftestPlan())
    report = SelftestReport(machine_of(device))
    checks: dict[str, Callable[[], str]] = {
        "selection": partial(select_exactly, device, plan),
        "accumulation": partial(accumulate_alike, device),
        "payloads and memories": partial(step_alike, device, plan),
        "refusals": partial(refuse, device),
        "waits for the device": partial(count_waits, device, plan),
        f"{plan.ranks} ranks": partial(two_ranks, device, plan.ranks),
    }
    for name, check in checks.items():
        tell(f"checking {name}")
        begin, made = time.perf_counter(), Check(name)
        try:
            made.detail = check()
            made.passed = True
        except Exception as error:
            made.detail = f"{type(error).__name__}: {error}"
        made.seconds = time.perf_counter() - begin
        report.checks.append(made)
    for d in plan.timed:
        tell(f"measuring a step of {d:,} entries")
        try:
            report.times += measure(device, d, plan.repetitions)
        except Exception as error:  # out of memory, for one: the rest is worth sending
            report.times.append({"entries": d, "method": f"{type(error).__name__}: {error}"})
    return report


def machine_of(device: torch.device) -> dict[str, str]:
    """Say what this ran on, and which backend serves the device."""
    found = {
        "rtopk": rtopk.__version__,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": f"{os.cpu_count()}, load {os.getloadavg()[0]:.1f}",
        "device": str(device),
        "backend": _backend(device),
    }
    if device.type == "cuda":
        of_card = torch.cuda.get_device_properties(device)
        found |= {
            "card": of_card.name,
            "memory": f"{of_card.total_memory / 2**30:.1f} GiB",
            "capability": f"{of_card.major}.{of_card.minor}",
            "cuda": torch.version.cuda or f"rocm {torch.version.hip}",
            "cards": str(torch.cuda.device_count()),
        }
    return found


def _backend(device: torch.device) -> str:
    chosen = kernels.backend(torch.zeros(1, device=device))
    return next(name for name, found in kernels.BACKENDS.items() if found is chosen)


def vectors(d: int) -> Iterator[tuple[str, Tensor]]:
    """Yield vectors with structure: ties, zeros of both signs, subnormals, units of the last place, sorted runs."""
    rng = np.random.default_rng(d)
    keys = {
        "heavy tails": np.abs(rng.standard_normal(d) ** 3).astype(np.float32).view(np.int32),
        "constant": np.full(d, 0x3F000000),
        "zeros": np.zeros(d),
        "few values": rng.choice(rng.integers(0, 0x7F000000, 4), d),
        "units of the last place": 0x3F000000 + rng.integers(0, 513, d),
        "subnormal": rng.integers(0, 1 << 23, d),
        "powers of two": rng.integers(1, 254, d) << 23,
        "descending": np.sort(rng.integers(0, 0x7F000000, d))[::-1],
    }
    signs = rng.integers(0, 2, d).astype(np.uint32) << np.uint32(31)
    for name, made in keys.items():
        yield name, torch.from_numpy((made.astype(np.uint32) | signs).view(np.float32))


def select_exactly(device: torch.device, plan: SelftestPlan) -> str:
    """Hold the r largest, with every kind of guess, to a stable sort."""
    compared = 0
    for d in plan.sizes:
        for name, vector in vectors(d):
            there = vector.to(device)
            order = np.argsort(-vector.abs().numpy(), kind="stable")
            for r in sorted({1, max(1, d // 50), max(1, d // 3), d}):
                expected = torch.from_numpy(np.sort(order[:r]))
                _same(kernels.largest(there, r), expected, f"{name}, d = {d}, r = {r}")
                rth = float(vector[expected].abs().min())
                for floor in (rth, rth * 0.9, 0.0, rth * 1.5):
                    found = kernels.scan(there, Search(floor, r))
                    if found.hold(r):
                        picked = kernels.pick(found, r, draws.every_bit(r), r)
                        _same(picked.positions, expected, f"{name}, d = {d}, r = {r}, floor {floor:g}")
                        _same(picked.values, vector[expected], f"values of {name}, d = {d}, r = {r}")
                        compared += 1
    return (
        f"{compared} selections of up to {max(plan.sizes):,} entries are those of a stable sort, to the bit"
    )


def accumulate_alike(device: torch.device, d: int = 9001) -> str:
    """Compare sums and velocities with the CPU's, in every dtype that a gradient has."""
    compared = 0
    for dtype in DTYPES:
        for way in ({}, {"momentum": 0.9}, {"momentum": 0.7, "scale": 1 / 3}, {"decay": 0.95}):
            outcomes = []
            for place, chosen in ((torch.device("cpu"), kernels.preferring("cpu")), (device, nullcontext())):
                rng = generator("accumulate")
                residual, velocity, gradient = torch.randn(3, d, generator=rng).to(place)
                gradient[:100] = torch.tensor([1e-40, -0.0, 0.0, 1e-45]).to(place).repeat(25)
                moved = velocity if "momentum" in way else None
                with chosen:
                    kernels.accumulate_(residual, gradient.to(dtype), None, moved, **way)
                outcomes.append((residual.cpu(), velocity.cpu()))
            for expected, got in zip(*outcomes, strict=True):
                _same(got, expected, f"{dtype}, {way}")
            compared += 1
    return f"{compared} ways to accumulate {d:,} entries have the CPU's bits"


def step_alike(device: torch.device, plan: SelftestPlan) -> str:
    """Compare payloads and memories of whole steps with the CPU's, while the scale of the gradients jumps."""
    compared = 0
    for name, make in MEMORIES.items():
        for form in FORMS if name == "error feedback" else FORMS[:1]:
            nodes = [_node(plan.entries, make(), form) for _ in range(2)]
            for step in range(plan.steps):
                rng = generator("step", step)
                gradient = torch.randn(plan.entries, generator=rng) ** 3 * 10.0 ** (step % 4)
                with kernels.preferring("cpu"):
                    expected = nodes[0].compress(gradient, step)
                got = _step(nodes[1], gradient.to(device), step, "parts" in name)
                _same(got, expected, f"payload of {name}, {form}, step {step}")
                compared += 1
            kept = [node.memory.state_dict() for node in nodes]
            for kind in kept[0]:
                _same(kept[1][kind].cpu(), kept[0][kind], f"{kind} of {name}, {form}")
    return (
        f"{compared} payloads of {plan.entries:,} entries, and the memories after them, have the CPU's bits"
    )


def _node(d: int, memory: Memory, form: str = "fp32") -> Sparsifier:
    layout = Layout(("gradient",), ((d,),), dense_size=0)
    return Sparsifier(RTopK(r_over_k=5), 0.02, memory, Codec(form), layout=layout)


def _step(node: Sparsifier, gradient: Tensor, step: int, in_parts: bool) -> Tensor:
    """Return the payload of a gradient, given whole or, from the second on, as the hook does: part by part."""
    if not in_parts or step == 0:
        return node.compress(gradient, step)
    node.memory.snapshot()  # type: ignore[attr-defined]
    node.expect(step)
    cuts = 0, gradient.numel() // 7, gradient.numel() // 2, gradient.numel()
    for begin, end in reversed([*itertools.pairwise(cuts)]):
        node.memory.put(begin, gradient[begin:end])  # type: ignore[attr-defined]
    return node.compress(None, step)


def refuse(device: torch.device) -> str:
    """See NaN and Inf refused, with nothing changed."""
    seen = 0
    for name, make in MEMORIES.items():
        node = Sparsifier(RTopK(r_over_k=2), 0.02, make())
        for step in range(2):
            node.compress(torch.randn(5000, generator=generator(step)).to(device), step)
        before = node.memory.state_dict()
        for bad in (math.nan, math.inf, -math.inf):
            gradient = torch.ones(5000, device=device)
            gradient[4321] = bad
            try:
                node.compress(gradient, 2)
            except kernels.NotFiniteError as error:
                if error.index != 4321:
                    raise AssertionError(f"{name}: index {error.index} is named, 4321 is {bad}") from error
            else:
                raise AssertionError(f"{name}: {bad} was not refused")
            for kind, tensor in node.memory.state_dict().items():
                _same(tensor, before[kind], f"{kind} of {name} after {bad}")
            seen += 1
    return f"{seen} gradients with NaN or Inf are refused, and nothing changes"


def count_waits(device: torch.device, plan: SelftestPlan) -> str:
    """Count what torch calls synchronising in a step: one, and one more to check a whole gradient first."""
    if device.type != "cuda":
        return "only a card is waited for"
    said = []
    for most, in_parts in ((1, True), (2, False)):
        node, seen = _node(plan.entries, ErrorFeedback()), []
        for step in range(plan.steps):
            gradient = torch.randn(plan.entries, generator=generator("waits", step)).to(device)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    _step(node, gradient, step, in_parts)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            seen.append(sum("synchroniz" in str(one.message) for one in caught))
        said.append(f"{seen} times with a gradient {'in parts' if in_parts else 'as a whole'}")
        if max(seen[2:]) > most:
            raise AssertionError(f"steps wait {said[-1]}; from the third on, at most {most} expected")
    return f"steps wait {', '.join(said)}"


def measure(device: torch.device, d: int, repetitions: int, density: float = 0.001) -> list[dict[str, Any]]:
    """Measure a step of each method: ours, `add_`, `torch.topk`, DGC's threshold; milliseconds, medians."""
    k = entries_sent(d, density)
    with device:
        methods = {name: make(d, k, k) for name, make in METHODS.items()}
    gradients = [(torch.randn(d, generator=generator("timed", i)) ** 3).to(device) for i in range(3)]
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for step in range(3 + repetitions):
        for name, method in methods.items():
            _finish(device)
            begin = time.perf_counter()
            method.step(gradients[step % 3], step)
            _finish(device)
            if step >= 3:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    median = {name: statistics.median(times) for name, times in taken.items()}
    return [
        {"entries": d, "density": density, "method": name, "ms": ms, "over_floor": ms / median["floor"]}
        for name, ms in median.items()
    ]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _same(got: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError unless two tensors have the same bits."""
    got, expected = got.cpu(), expected.cpu()
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise AssertionError(
            f"{what}: {got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    differ = (got.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
    if differ.numel():
        first = int(differ[0, -1]) // got.element_size()
        raise AssertionError(
            f"{what}: entry {first} is {got[first].item()!r}, not {expected[first].item()!r}"
        )


def markdown(report: SelftestReport) -> str:
    """Return the report as a page."""
    lines = [f"# rtopk selftest: {'passed' if report.passed else 'FAILED'}", ""]
    lines += [f"- {key}: {value}" for key, value in report.machine.items()]
    lines += ["", "| check | | seconds | |", "| --- | --- | ---: | --- |"]
    lines += [
        f"| {check.name} | {'passed' if check.passed else 'FAILED'} | {check.seconds:.1f} | {_cell(check.detail)} |"
        for check in report.checks
    ]
    lines += ["", "| entries | method | ms | of `add_` |", "| ---: | --- | ---: | ---: |"]
    for row in report.times:
        ms, over = (f"{row[key]:.3f}" if key in row else "" for key in ("ms", "over_floor"))
        lines.append(f"| {row['entries']:,} | {_cell(row['method'])} | {ms} | {over} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return a text that fits into a table: an error may have many lines; all are in the JSON."""
    return " ".join(text.split()).replace("|", "/")[:400]
