"""Does it pay? The step time and bytes of every method on shaped links between hosts on this machine.

Ranks are real processes under DDP on Gloo; computation is replaced by waiting for as long as a real step of
this model takes on one core (see `StandIn`), because several ranks on few cores would hide the link.
Methods are visited in turn, several times, so that other load on the machine meets all of them alike.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rtopk.studies.bench.hosts import Hosts
from rtopk.studies.bench.ranks import Ranks
from rtopk.tools.show.palette import rate, with_density

METHODS: tuple[tuple[str, float | None, str | None], ...] = (
    ("dense", None, None),
    ("fp16", None, None),
    ("powersgd-1", None, None),
    ("powersgd-2", None, None),
    ("topk-allgather", 0.01, None),
    ("topk-allgather", 0.001, None),
    ("rtopk", 0.01, "fp16"),
    ("rtopk", 0.01, "4bit"),
    ("rtopk", 0.001, "fp16"),
    ("rtopk", 0.001, "4bit"),
    ("rtopk-allreduce", 0.01, "fp16"),
    ("rtopk-allreduce", 0.01, "4bit"),
    ("rtopk-allreduce", 0.001, "fp16"),
    ("rtopk-allreduce", 0.001, "4bit"),
)
SHARDED: tuple[tuple[str, float | None, str | None], ...] = (
    ("hsdp", None, None),
    *(key for key in METHODS if key[0] == "rtopk"),
)
REPLICAS: tuple[tuple[str, float | None, str | None], ...] = (
    ("diloco", None, None),
    *(key for key in METHODS if key[0] == "rtopk"),
)
ORDER = list(dict.fromkeys((SHARDED[0], REPLICAS[0], *METHODS)))  # of the rows of a table
ENGINES = {"ddp": METHODS, "fsdp": SHARDED, "torchft": REPLICAS}
OFF = ("off", None, None)
WARM = 2  # steps until residuals, thresholds and connections are in their usual state
SLOW = 10.0  # seconds; steps longer than this are taken once, they need no median


@dataclass(frozen=True)
class LinkPlan:
    """What to measure."""

    models: tuple[str, ...] = ("resnet18", "lstm1500")
    mbits: tuple[float | None, ...] = (None, 1000.0, 100.0, 10.0)  # None is unshaped
    nodes: tuple[int, ...] = (4,)
    rounds: int = 3  # visits to each method
    steps: int = 3  # of each visit
    compute_ms: float | None = None  # None: measured
    loopback: bool = False  # no hosts, no shaping
    methods: tuple[tuple[str, float | None, str | None], ...] = METHODS
    engine: str = "ddp"  # or "torchft"; or "fsdp": nodes are then sites of two ranks each

    @property
    def per_host(self) -> int:
        """Ranks on each host."""
        return 2 if self.engine == "fsdp" else 1


QUICK = LinkPlan(models=("resnet18",), mbits=(100.0,), rounds=2, steps=2)


@dataclass(frozen=True)
class LinkRow:
    """One method in one cell: medians over steps of the slowest rank's time; bytes per rank and step."""

    model: str
    size: int  # d
    mbit: float | None  # None is unshaped
    nodes: int
    method: str
    density: float | None
    values: str | None
    step_ms: float
    step_low_ms: float  # quartiles
    step_high_ms: float
    off_ms: float  # the same step with communication switched off
    compute_ms: float  # waited for in place of computing
    select_ms: float
    codec_ms: float  # the two that follow
    encode_ms: float
    average_ms: float  # decoding and averaging
    exchange_ms: float  # waiting for the others; where a method does not tell, what is left of the step
    wire_bytes: float  # received at the interface, headers and acknowledgements too
    payload_bytes: int  # that the rank put in
    cpu_ms: float = 0.0  # that one rank's threads worked in a step, in the kernel too
    per_host: int = (
        1  # ranks on each of the nodes, which share its link; the bytes at the interface are theirs
    )

    @property
    def label(self) -> str:
        """Name the method with its density and values."""
        return with_density(self.method, self.density, self.values)

    @property
    def key(self) -> tuple[str, float | None, int, int, str, float | None, str | None]:
        """What tells rows apart."""
        return self.model, self.mbit, self.nodes, self.per_host, self.method, self.density, self.values


def measure(
    plan: LinkPlan, tell: Callable[[str], None] = lambda text: None, done: Sequence[LinkRow] = ()
) -> Iterator[list[LinkRow]]:
    """Measure cell by cell, leaving out what is done; a cell is a model at a rate with a number of nodes."""
    have = {row.key for row in done}
    if plan.loopback:
        plan = replace(plan, mbits=(None,))

    def missing(model: str, mbit: float | None, nodes: int) -> LinkPlan:
        left = tuple(key for key in plan.methods if (model, mbit, nodes, plan.per_host, *key) not in have)
        return replace(plan, methods=left)

    for nodes in plan.nodes:
        todo = [
            model for model in plan.models if any(missing(model, mbit, nodes).methods for mbit in plan.mbits)
        ]
        if not todo:
            continue
        with ExitStack() as stack:
            count = nodes * plan.per_host
            tell(f"starting {count} ranks")
            hosts = None if plan.loopback else stack.enter_context(Hosts(nodes))
            ranks = stack.enter_context(Ranks(count, hosts, plan.engine, plan.per_host))
            for model in todo:
                if hosts is not None:
                    hosts.shape(None)
                tell(f"loading {model} on {count} ranks")
                size = ranks.order("load", model=model)[0]["size"]
                compute = plan.compute_ms or ranks.order_first("compute")["compute_ms"]
                for mbit in plan.mbits:
                    left = missing(model, mbit, nodes)
                    if not left.methods:
                        continue
                    if hosts is not None:
                        hosts.shape(mbit)
                    yield measure_cell(left, ranks, Cell(model, size, mbit, nodes, compute), tell)


@dataclass(frozen=True)
class Cell:
    """A model at a rate with a number of nodes."""

    model: str
    size: int
    mbit: float | None
    nodes: int
    compute_ms: float

    def seconds(self, method: str, density: float | None) -> float:
        """Return about how long the wire takes in a step of the large methods, to know how often to take it."""
        if self.mbit is None:
            return 0.0
        share = 2 / self.nodes
        bytes_each = {
            "dense": 4 * share,
            "hsdp": 4 * share,
            "diloco": 4 * share,
            "fp16": 2 * share,
            "topk-allgather": 12 * (density or 0.0),
        }
        received = bytes_each.get(method, 0.0)
        return (self.nodes - 1) * received * self.size * 8 / (self.mbit * 1e6)


def measure_cell(plan: LinkPlan, ranks: Ranks, cell: Cell, tell: Callable[[str], None]) -> list[LinkRow]:
    """Visit every method in turn, on ranks that have loaded the model."""
    barrier = statistics.mean(answer["bytes"] for answer in ranks.order("barriers"))
    visits: dict[Any, list[list[dict[str, Any]]]] = {}
    for turn in range(plan.rounds):
        for number, key in enumerate((OFF, *plan.methods)):
            method, density, values = key
            slow = cell.seconds(method, density) > SLOW
            if slow and turn:
                continue
            number += turn * (len(plan.methods) + 1) + 1
            tell(
                f"{cell.model}, {cell.nodes} nodes, {rate(cell.mbit)}: {method} {density or ''} {values or ''} "
                f"({number} of {plan.rounds * (len(plan.methods) + 1)})"
            )
            visit = {"method": method, "density": density, "values": values, "compute_ms": cell.compute_ms}
            warm = 0 if slow else 1 if method in ("off", "dense", "fp16", "hsdp", "diloco") else WARM
            keep = cell.size < 20_000_000 and turn + 1 < plan.rounds  # residuals of large models fill memory
            answers = ranks.order("visit", **visit, steps=1 if slow else plan.steps, warm=warm, keep=keep)
            visits.setdefault(key, []).append(answers)
    off = _times(visits[OFF])
    return [_row(plan, cell, key, visits[key], statistics.median(off), barrier) for key in plan.methods]


def _times(visits: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Return the milliseconds of each step: those of its slowest rank."""
    return [
        1e3 * max(step["step"] for step in ranks)
        for answers in visits
        for ranks in zip(*(answer["steps"] for answer in answers), strict=True)
    ]


def _row(
    plan: LinkPlan,
    cell: Cell,
    key: tuple[str, float | None, str | None],
    visits: Sequence[Sequence[dict[str, Any]]],
    off_ms: float,
    barrier: float,
) -> LinkRow:
    steps = [step for answers in visits for answer in answers for step in answer["steps"]]
    times = _times(visits)
    step_ms = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [step_ms] * 3
    part = {name: 1e3 * statistics.median(s[name] for s in steps) for name in ("select", "encode", "average")}
    codec_ms = part["encode"] + part["average"]
    told = [step["exchange"] for step in steps if step["exchange"] is not None]
    left = max(0.0, step_ms - off_ms - part["select"] - codec_ms)
    wire = statistics.mean(
        (answer["received"] - barrier) / len(answer["steps"]) for answers in visits for answer in answers
    )
    method, density, values = key
    if plan.loopback:
        wire /= cell.nodes * plan.per_host  # lo counts the traffic of all ranks, and of others
    return LinkRow(
        cell.model, cell.size, cell.mbit, cell.nodes, method, density, values,
        step_ms=step_ms, step_low_ms=low, step_high_ms=high, off_ms=off_ms, compute_ms=cell.compute_ms,
        select_ms=part["select"], codec_ms=codec_ms, encode_ms=part["encode"], average_ms=part["average"],
        exchange_ms=1e3 * statistics.median(told) if told else left, wire_bytes=wire,
        payload_bytes=round(statistics.mean(step["payload"] for step in steps)),
        cpu_ms=1e3 * statistics.median(step["cpu"] for step in steps), per_host=plan.per_host,
    )  # fmt: skip


def from_json(data: Mapping[str, Any]) -> list[LinkRow]:
    """Read what `as_json` returned."""
    return [LinkRow(**row) for row in data["rows"]]
