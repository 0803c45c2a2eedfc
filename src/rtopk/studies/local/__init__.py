"""Local steps on a small GPT: which methods meet, how their rates are found, and which runs are missing.

Every method is a preset of `rtopk.local`, as published or changed, or dense DDP. `ranks.py` runs them on real
ranks, `page.py` says what they reached. All runs of a task are lines of one file. Rates are tuned on validation
data: AdamW's on each preset as published, for all rows that change it; then the outer rate of every row, on a grid
of the same steps around the published one. A best rate at the edge of a grid leads further out.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtopk.studies.config import Part, name_of
from rtopk.studies.paper import TUNING_SEED
from rtopk.studies.paper.reproduce import Tuning, search
from rtopk.studies.train.records import Record, SeedRuns

TASKS = {
    "shakespeare": "tiny Shakespeare, characters",
    "ptb-gpt": "Penn Treebank, the 1,000 most frequent words",
}
RATES, OUTER_STEP, BEYOND = (0.003, 0.006, 0.012), 2**0.5, 4


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """All that decides a run. What is empty or 0 is as in the preset."""

    task: str
    preset: str  # diloco, streaming or sparseloco, as in rtopk.local.PRESETS; or ddp
    local_steps: int = 15
    density: float = 0.0
    selector: str = ""  # the name of a rule
    r_over_k: float = 0.0
    values: str = ""
    decay: float = 0.95  # of the residual, where the preset has one that decays
    rate: float = RATES[1]  # AdamW's, at its highest
    outer_rate: float = 0.0  # 0: as published
    seed: int = TUNING_SEED
    part: Part = "validation"
    nodes: int = 4
    batch: int = 4
    steps: int = 750
    evaluate_every: int = 750

    @property
    def key(self) -> str:
        """Name this run, seed included, in 16 hexadecimal digits."""
        return name_of(dataclasses.asdict(self))


@dataclass(frozen=True)
class Row:
    """A row of the tables."""

    label: str
    run: LocalRun  # what all its runs share, but for the task


_TOP = {"preset": "sparseloco", "selector": "top-k"}
METHODS: dict[str, dict[str, Any]] = {
    "DDP": {"preset": "ddp", "local_steps": 1},
    "DiLoCo": {"preset": "diloco"},
    "Streaming DiLoCo": {"preset": "streaming"},
    "SparseLoCo": {"preset": "sparseloco"},
    "top-k": _TOP,
    "top-k, no decay": {**_TOP, "decay": 1.0},
    "top-k, Nesterov": {"preset": "diloco", "selector": "top-k", "density": 1 / 64, "values": "2bit"},
    "rTop-k": {"preset": "sparseloco", "selector": "rtop-k", "r_over_k": 2.0},
    "rTop-k in chunks": {"preset": "sparseloco", "selector": "chunked-k", "r_over_k": 2.0},
    "top-k, half, 4 bits": {**_TOP, "density": 1 / 128, "values": "4bit"},
    "top-k, SparseLoCo's bytes": {**_TOP, "density": 1 / 41},
}
OURS = tuple(METHODS)[4:]
# Of ours, two with a good loss for their bytes on validation data at H = 15, chosen before any result on test data.
AT_50 = ("DiLoCo", "Streaming DiLoCo", "SparseLoCo", "top-k", "top-k, half, 4 bits")
ROWS = (
    *(Row(label, LocalRun(task="", **options)) for label, options in METHODS.items()),
    *(Row(label, LocalRun(task="", local_steps=50, **METHODS[label])) for label in AT_50),
)
# On the second task: the rivals at both H, and of ours those that the first one left in question.
_ON_PTB = ("DDP", "DiLoCo", "SparseLoCo", "top-k", "rTop-k", "top-k, half, 4 bits")
_SMALL: dict[str, Any] = {"nodes": 2, "batch": 2, "steps": 8, "evaluate_every": 8}
SMOKE = tuple(
    Row(row.label, dataclasses.replace(row.run, local_steps=min(4, row.run.local_steps), **_SMALL))
    for row in ROWS[:5]
)
PUBLISHED = {"diloco": 0.7, "streaming": 0.7, "sparseloco": 1.0, "ddp": 0.0}  # outer rates


def rows_of(task: str) -> tuple[Row, ...]:
    """Return the rows that run on a task."""
    return tuple(row for row in ROWS if task != "ptb-gpt" or row.label in _ON_PTB)


@dataclass(frozen=True)
class LocalResult(SeedRuns):
    """What the records say of a row."""

    row: Row
    inner: Tuning  # of AdamW's rate, on the preset as published
    outer: Tuning | None  # None: there is no outer step, or the inner rate is not known yet
    final: LocalRun | None  # what its results run, but for the seed; None while rates are missing
    records: tuple[Record, ...] = ()  # results, by seed, from seed 0 without a gap

    @property
    def missing(self) -> tuple[LocalRun, ...]:
        """Return the runs that its rates lack."""
        return (*self.inner.missing, *(self.outer.missing if self.outer else ()))


def find(task: str, row: Row, records: Mapping[str, Record]) -> LocalResult:
    """Say what records, by key, have of a row: its rates, or what they lack; and its results."""
    run = dataclasses.replace(row.run, task=task, outer_rate=PUBLISHED[row.run.preset])
    plain = dataclasses.replace(
        run,
        local_steps=min(15, run.local_steps),
        density=0.0,
        selector="",
        r_over_k=0.0,
        values="",
        decay=0.95,
    )
    inner = search(RATES, BEYOND, lambda rate: [dataclasses.replace(plain, rate=rate)], records)
    if inner.missing:
        return LocalResult(row, inner, None, None)
    run, outer = dataclasses.replace(run, rate=inner.rate), None
    if run.outer_rate:
        grid = [float(f"{run.outer_rate * OUTER_STEP**power:.4g}") for power in (-1, 0, 1)]
        outer = search(grid, BEYOND, lambda rate: [dataclasses.replace(run, outer_rate=rate)], records)
        if outer.missing:
            return LocalResult(row, inner, outer, None)
        run = dataclasses.replace(run, outer_rate=outer.rate)
    final = dataclasses.replace(run, part="test", evaluate_every=max(1, run.steps // 5))
    results: list[Record] = []
    while (key := dataclasses.replace(final, seed=len(results)).key) in records:
        results.append(records[key])
    return LocalResult(row, inner, outer, final, tuple(results))


def find_all(task: str, rows: Sequence[Row], records: Sequence[Record]) -> list[LocalResult]:
    """Say what records have of some rows."""
    by_key = {record["key"]: record for record in records}
    return [find(task, row, by_key) for row in rows]


def missing(found: Sequence[LocalResult], seeds: int) -> Iterator[tuple[str, LocalRun]]:
    """Yield what to run next: what rates lack; when there is nothing, all results, one seed after the other."""
    tuning = {run.key: (one.row.label, run) for one in found for run in one.missing}
    yield from tuning.values()
    for seed in range(0 if tuning else seeds):
        for one in found:
            if one.final is not None and seed >= len(one.records):
                yield one.row.label, dataclasses.replace(one.final, seed=seed)
