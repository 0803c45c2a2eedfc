"""Why the paper saw what it saw: one candidate explanation a study.

Each runs rows of one of the paper's tables with one thing changed; rates are tuned as in that table. Those that the
paper may have used without saying so come first: one rate for all rows, and a mean of its own for rTop-k.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rtopk.aggregate import Mean
from rtopk.studies.config import Config
from rtopk.studies.paper import TABLES, Scale, Setup, Table, TableRow, row_with, study_of

_LENGTH = ("rounds", "batch", "examples", "local_steps", "evaluate_every")  # smoke runs keep their own


def _changed(
    name: str,
    number: int,
    title: str,
    rows: Sequence[TableRow],
    pairs: Sequence[tuple[TableRow, TableRow]] = (),
    rates: tuple[float, ...] = (),
    tuned: bool = True,
    **changes: Any,
) -> Table:
    """Make a study from a table; with `tuned` off, all rows run at the one rate that is given."""
    of = TABLES[number]
    setups: dict[Scale, Setup] = {}
    scales: tuple[Scale, ...] = ("smoke", "small")
    for scale in scales:
        setup = of.setups[scale]
        own = changes if scale == "small" else {n: v for n, v in changes.items() if n not in _LENGTH}
        config = dataclasses.replace(setup.config, **own)
        grid = rates or setup.rates
        setups[scale] = Setup(
            config,
            grid if scale == "small" else grid[:1],
            config.rounds // 2 if tuned else config.rounds,
            beyond=3 if tuned and scale == "small" else 0,
            tuning_seeds=int(tuned),
        )
    labels = tuple((one.label, other.label) for one, other in pairs)
    return Table(f"study-{name}", f"{title}: {of.title}", None, tuple(rows), setups, of.small, labels)


def _shared_rate(number: int, rate: float, density: float) -> Table:
    """The paper's rows at one small rate, the mean of received for rTop-k alone; then each with the other mean."""
    ours, top = TableRow("rtop-k", density, mean="received"), TableRow("top-k", density)
    same_ours = TableRow("rtop-k", density, note="over all nodes")
    same_top = TableRow("top-k", density, mean="received", note="too")
    return _changed(
        f"shared-rate-{number}", number,
        f"One rate for all rows, {rate:g}, the mean of received for rTop-k alone",
        [TableRow("dense", 1.0), ours, top, TableRow("random-k", density), same_ours, same_top],
        [(same_ours, top), (ours, same_top)], (rate,), tuned=False,
    )  # fmt: skip


_BOTH = ("rtop-k", "top-k")


def _memory(number: int, memory: str, density: float = 0.01) -> Table:
    """Rows with the memory that the table does not have."""
    means: tuple[Mean, ...] = ("received", "nodes")
    rows = [row_with(method, density=density, mean=mean) for method in _BOTH for mean in means]
    told = "No memory" if memory == "none" else "With error feedback"
    return _changed(
        f"why-memory-{number}", number, told, [*rows, row_with("random-k", density=density)], memory=memory
    )


def _versus(
    name: str,
    number: int,
    title: str,
    notes: tuple[str, str],
    options: tuple[dict[str, Any], dict[str, Any]],
    density: float = 0.01,
) -> Table:
    """Run rTop-k and top-k one way and another, and compare the two ways as well as the two methods."""
    one, other = [
        [row_with(method, note, density, **own) for method in _BOTH]
        for note, own in zip(notes, options, strict=True)
    ]
    return _changed(f"why-{name}", number, title, [*one, *other], list(zip(one, other, strict=True)))


def _draws() -> Table:
    means: tuple[Mean, ...] = ("nodes", "received")
    rows = [
        row_with("rtop-k", note, mean=mean, **own)
        for mean in means
        for note, own in (("nodes draw alike", {"same_draws": True}), ("each for itself", {}))
    ]
    return _changed(
        "why-draws-2", 2, "The same draws on all nodes", rows, [(rows[0], rows[1]), (rows[2], rows[3])]
    )


def _sum(number: int, density: float) -> Table:
    """The commented-out algorithm: rTop-k scaled by r / (n k), with r = n k a sum, beside the mean."""
    summed: dict[str, Any] = {"centre_rate": 5.0}
    rows = [
        row_with("rtop-k", "summed", density, **summed), row_with("top-k", "summed", density, **summed),
        row_with("rtop-k", "averaged", density), row_with("top-k", "averaged", density),
    ]  # fmt: skip
    return _changed(
        f"why-sum-{number}", number, "The sum of the nodes' updates (a centre's rate of 5) against their mean",
        rows, [(rows[0], rows[2]), (rows[1], rows[3]), (rows[0], rows[3])],
    )  # fmt: skip


def _long(name: str, examples: int, rounds: int) -> Table:
    """Many epochs: does generalisation separate the methods?"""
    rows = [TableRow("dense", 1.0)]
    for density in (0.01, 0.001):
        rows += [
            row_with("rtop-k", density=density), row_with("top-k", density=density),
            row_with("rtop-k", "r = 2 k", density, r_over_k=2.0),
        ]  # fmt: skip
    return _changed(
        name, 2, f"{rounds} rounds of a local epoch on {examples or 50_000:,} images, error feedback", rows,
        rates=(0.005, 0.015, 0.045), examples=examples, local_steps=0, rounds=rounds, warm_up=0, evaluate_every=5,
    )  # fmt: skip


def _agree(
    name: str, task: Config, rates: tuple[float, ...], sizes: Sequence[tuple[int, Sequence[int]]]
) -> Table:
    """How far the nodes' largest entries agree: fewer in small batches."""
    rows = [
        row_with(method, f"{nodes} nodes, batch {batch}", nodes=nodes, batch=batch)
        for nodes, batches in sizes
        for batch in batches
        for method in _BOTH
    ]
    title = "Batch and nodes, which decide how far nodes agree, error feedback, 99 %"
    return study_of(f"study-{name}", title, task, rates, rows, task.rounds // 2)


_CIFAR = TABLES[1].setups["small"].config

EXPLANATIONS = {
    "shared-rate-1": _shared_rate(1, 0.005, 0.01),
    "shared-rate-2": _shared_rate(2, 0.015, 0.01),
    "shared-rate-3": _shared_rate(3, 0.015, 0.01),
    "shared-rate-4": _shared_rate(4, 3.0, 0.01),
    "shared-rate-5": _shared_rate(5, 9.0, 0.05),
    "why-sum-2": _sum(2, 0.01),
    "why-sum-5": _sum(5, 0.05),
    "why-memory-2": _memory(2, "none"),
    "why-memory-3": _memory(3, "none"),
    "why-memory-5": _memory(5, "error-feedback", 0.05),
    "why-warm-up-1": _versus(
        "warm-up-1", 1, "Warm-up at 99.9 %", ("no warm-up", "warm-up"), ({"warm_up": 0}, {}), 0.001
    ),
    "why-warm-up-4": _versus(
        "warm-up-4", 4, "Warm-up at 99.9 %", ("no warm-up", "warm-up"), ({"warm_up": 0}, {}), 0.001
    ),
    "why-draws-2": _draws(),
    "why-tensor-2": _versus(
        "tensor-2", 2, "Selection per tensor", ("per tensor", "over all"), ({"per_tensor": True}, {})
    ),
    "why-tensor-4": _versus(
        "tensor-4", 4, "Selection per tensor", ("per tensor", "over all"), ({"per_tensor": True}, {})
    ),
    "why-correction-1": _versus(
        "correction-1", 1, "DGC's momentum correction", ("corrected", "at the centre"),
        ({"memory": "momentum-correction"}, {}),
    ),
    "why-decay-1": _versus(
        "decay-1", 1, "Weight decay", ("decay 0.0005", "none"), ({"weight_decay": 5e-4}, {})
    ),
    "why-batch-norm-1": dataclasses.replace(
        _changed(
            "why-batch-norm-1", 1, "BatchNorm, 600 rounds", [row_with(m) for m in _BOTH],
            task="cifar10-narrow", rounds=600, warm_up=0,
        ),
        small="a ResNet-8 with BatchNorm, CIFAR-10 at 32 x 32",
    ),
    "why-long": _long("why-long", 5000, 100),
    "why-long-all": _long("why-long-all", 0, 20),
    "why-long-few": _long("why-long-few", 1000, 250),
    "why-agree": _agree(
        "why-agree", Config(rounds=600, evaluate_every=100), (0.005, 0.02, 0.08),
        ((5, (4, 16, 64, 256)), (20, (4, 16, 64))),
    ),
    "why-agree-cifar10": _agree(
        "why-agree-cifar10", dataclasses.replace(_CIFAR, warm_up=0, rounds=600), (0.005, 0.015, 0.045),
        ((5, (4, 16, 64)),),
    ),
}  # fmt: skip
