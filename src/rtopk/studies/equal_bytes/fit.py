"""Fit an entrant to a number of bytes, tune its learning rate, then run it with every seed.

1. Bytes: the density is fitted in short runs on validation data, to the yardstick's bytes per round. What a
   threshold sends depends on the whole run and on the learning rate, so it is fitted by whole runs at each rate.
2. Rate: from the middle of the grid to the best neighbour, until no neighbour is better, as the tables search
   beyond their grids (`next_rates`); on validation data, by the mean over the panel's seeds for that.
3. Result: with the bytes and the rate found, on test data, one run a seed.

An entrant's search is a generator that yields configurations and is sent their records; `run_together` runs many
searches side by side, and keeps all that was run in one file of records.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rtopk.studies.config import Config
from rtopk.studies.equal_bytes import Budget, Entrant, Panel, retuned
from rtopk.studies.paper import TUNING_SEED
from rtopk.studies.paper.reproduce import next_rates, note_choice
from rtopk.studies.train.records import Record, SeedRuns, read, score
from rtopk.studies.train.runner import key_of, run_all

HEADER = 40  # bytes of a payload that hold no entry
CLOSE = 0.03  # how far from the yardstick's bytes a fitted density may be, as a part of them
FITS = 4  # runs that a fit may take
STEEP = 1.5  # first guess: twice the threshold sends 2^-1.5 of the entries


@dataclass(frozen=True)
class EntrantResult(SeedRuns):
    """What an entrant reached with a budget."""

    panel: Panel
    budget: Budget | None  # None: dense
    entrant: Entrant
    target: float  # bytes per node and round
    tried: tuple[tuple[Record, ...], ...]  # the runs of each rate that was tried
    records: tuple[Record, ...]  # one a seed

    @property
    def rate(self) -> float:
        """The learning rate that was chosen."""
        return float(self.records[0]["config"]["learning_rate"])

    @property
    def at_edge(self) -> bool:
        """Tell whether the rate is the grid's smallest or largest."""
        return self.rate in (self.panel.rates[0], self.panel.rates[-1])


def entrant_runs(
    panel: Panel, budget: Budget | None, entrant: Entrant, seeds: int
) -> Generator[Config, Record, EntrantResult]:
    """Yield every run of an entrant, one after the other; return where it stands."""
    base = dataclasses.replace(
        panel.config, method=entrant.method, mean=entrant.mean, values=entrant.values,
        r_over_k=entrant.r_over_k, memory=entrant.memory or panel.config.memory,
        threshold=panel.threshold if entrant.method == "threshold" else 0.0,
        matrix_rank=budget.matrix_rank if budget and entrant.method == "powersgd" else 0,
        part="validation", seed=TUNING_SEED, evaluate_every=panel.config.rounds,
    )  # fmt: skip
    target = math.nan
    if budget is not None:
        target = yield from _measure(panel, budget)
        if entrant.method not in ("powersgd", "threshold"):
            base = yield from _fit_density(panel, base, target)
    rates, tried = panel.rates, dict[float, list[Record]]()

    def neighbour(rate: float, up: bool) -> float | None:
        at = rates.index(rate) + (1 if up else -1)
        return rates[at] if 0 <= at < len(rates) else None

    middle = rates[len(rates) // 2]
    wanted = [
        rate for rate in (middle, neighbour(middle, False), neighbour(middle, True)) if rate is not None
    ]
    while wanted:
        for rate in wanted:
            trial = dataclasses.replace(base, learning_rate=rate)
            if entrant.method == "threshold":
                first = yield from _fit_threshold(trial, target)
                base = dataclasses.replace(base, threshold=first["config"]["threshold"])
            else:
                first = yield trial
            tried[rate] = [first]
            while len(tried[rate]) < panel.tuning_seeds:
                again = Config(**{**first["config"], "seed": TUNING_SEED + len(tried[rate])})
                tried[rate].append((yield again))
        wanted = next_rates(max(tried, key=lambda rate: _merit(tried[rate])), tried, neighbour)
    chosen = max(tried.values(), key=_merit)[0]
    final = Config(**{**chosen["config"], "part": "test", "evaluate_every": panel.config.evaluate_every})
    records: list[Record] = []
    while len(records) < seeds:
        records.append((yield dataclasses.replace(final, seed=len(records))))
    return EntrantResult(
        panel, budget, entrant, target, tuple(tuple(tried[rate]) for rate in sorted(tried)), tuple(records)
    )


def _merit(runs: Sequence[Record]) -> tuple[float, float]:
    """Order the rates from worse to better: by the metric, then by the loss, means over seeds."""
    losses = [run["final"]["loss"] for run in runs]
    return mean(map(score, runs)), -math.inf if any(map(math.isnan, losses)) else -mean(losses)


def _measure(panel: Panel, budget: Budget) -> Generator[Config, Record, float]:
    """Measure what the yardstick sends."""
    method = "powersgd" if budget.matrix_rank else "top-k"
    yardstick = dataclasses.replace(
        panel.config, method=method, matrix_rank=budget.matrix_rank, density=budget.density or 0.01
    )
    record = yield _pilot(panel, yardstick)
    return float(record["sent_bytes_per_round"])


def _pilot(panel: Panel, config: Config) -> Config:
    return dataclasses.replace(
        config,
        rounds=panel.pilot_rounds,
        evaluate_every=panel.pilot_rounds,
        warm_up=0,
        learning_rate=panel.rates[len(panel.rates) // 2],
        part="validation",
        seed=TUNING_SEED,
    )


def _fit_density(panel: Panel, config: Config, target: float) -> Generator[Config, Record, Config]:
    """Return the configuration with the density that sends the target's bytes."""
    best, off = config, math.inf
    for _ in range(FITS):
        record = yield _pilot(panel, config)
        sent = record["sent_bytes_per_round"]
        if abs(sent / target - 1.0) < off:
            best, off = config, abs(sent / target - 1.0)
        if off <= CLOSE / 10:
            break
        density = config.density * (target - HEADER) / (sent - HEADER)
        config = dataclasses.replace(config, density=min(1.0, float(f"{density:.4g}")))
    return best


def _fit_threshold(config: Config, target: float) -> Generator[Config, Record, Record]:
    """Return the run whose threshold sent nearest to the target's bytes."""
    runs: list[Record] = []
    for _ in range(FITS + 2):
        runs.append((yield config))
        sent = [max(run["sent_bytes_per_round"] - HEADER, 1.0) for run in runs]
        if abs(runs[-1]["sent_bytes_per_round"] / target - 1.0) <= CLOSE:
            return runs[-1]
        steep = STEEP
        if len(runs) > 1:  # as the last two runs say, within reason
            limits = [run["config"]["threshold"] for run in runs[-2:]]
            slope = -math.log(sent[-1] / sent[-2]) / math.log(limits[1] / limits[0])
            steep = min(4.0, max(0.7, slope))
        factor = (sent[-1] / (target - HEADER)) ** (1.0 / steep)
        limit = config.threshold * min(20.0, max(0.05, factor))
        config = dataclasses.replace(config, threshold=float(f"{limit:.4g}"))
    return min(runs, key=lambda run: abs(math.log(run["sent_bytes_per_round"] / target)))


Runner = Callable[[Sequence[Config]], Sequence[Record | None]]
OnRun = Callable[[Config], None]  # when it has finished


def side_by_side(panels: Sequence[Panel]) -> list[list[tuple[Panel, Budget | None, Entrant]]]:
    """Return the groups that run side by side: dense and each panel's first budget, then all second ones, ..."""
    depth = max(len(panel.budgets) for panel in panels)
    found: list[list[tuple[Panel, Budget | None, Entrant]]] = []
    for number in range(depth):
        for panel in (panel for panel in panels if number < len(panel.budgets)):
            budget, entrants = panel.budgets[number]
            dense = [] if number else [(panel, None, Entrant("dense"))]
            found.append([*dense, *((panel, budget, entrant) for entrant in entrants)])
    return found


class Runs:
    """Run configurations, or find them among the records; `recorded` runs nothing and answers None instead."""

    def __init__(
        self,
        file: Path,
        work: Path,
        jobs: int = 1,
        recorded: bool = False,
        on_run: OnRun = lambda config: None,
    ) -> None:
        self.file, self.work, self.jobs, self.recorded, self.on_run = file, work, jobs, recorded, on_run
        self._done = {key_of(record): record for record in read(file)}

    def __call__(self, configs: Sequence[Config]) -> list[Record | None]:
        """Return the records of the configurations, in order."""
        missing = {config.key: config for config in configs if config.key not in self._done}

        told = set()

        def on_progress(key: str, rounds: int) -> None:
            if rounds == missing[key].rounds and key not in told:
                told.add(key)
                self.on_run(missing[key])

        if missing and not self.recorded:
            records = run_all(list(missing.values()), self.file, self.work, self.jobs, on_progress)
            self._done |= dict(zip(missing, records, strict=True))
        return [self._done.get(config.key) for config in configs]


def run_together(
    steps: Iterable[Generator[Config, Record, EntrantResult]], run: Runner
) -> list[EntrantResult]:
    """Run searches side by side, one run each at a time; one whose next run is refused (None) is dropped."""
    results: list[EntrantResult] = []
    wanted = [(entrant, next(entrant)) for entrant in steps]
    while wanted:
        records = run([config for _, config in wanted])
        following = []
        for (entrant, _), record in zip(wanted, records, strict=True):
            if record is None:
                continue
            try:
                following.append((entrant, entrant.send(record)))
            except StopIteration as end:
                results.append(end.value)
        wanted = following
    return results


def expected_runs(panels: Sequence[Panel], seeds: int) -> list[int]:
    """Return about how many runs each group takes; a search knows at its end: say three rates, and two fits."""
    return [len(group) * (2 + 3 * group[0][0].tuning_seeds + seeds) for group in side_by_side(panels)]


def run_panels(
    panels: Sequence[Panel], seeds: int, run: Runner, file: Path, on_group: Callable[[int], None]
) -> list[EntrantResult]:
    """Run what is missing of some panels; a group is noted before the next one, which may take hours."""
    results: list[EntrantResult] = []
    for number, group in enumerate(side_by_side(panels)):
        here = run_together([entrant_runs(*entrant, seeds) for entrant in group], run)
        for result in here:
            note(file, result)
        results += here
        on_group(number)
    return results


def recorded_results(panel: Panel, file: Path, seeds: int) -> list[EntrantResult]:
    """Return what is recorded of a panel, with all its seeds, at least so many.

    Rates that were tuned again count once every entrant has them.
    """
    ledger = Runs(file, Path(), recorded=True)
    first, second = (
        [
            _all_seeds(result, ledger)
            for group in side_by_side([one])
            for result in run_together([entrant_runs(*entrant, seeds) for entrant in group], ledger)
        ]
        for one in (panel, retuned(panel))
    )
    again = {(s.budget, s.entrant) for s in second}
    return second if all((s.budget, s.entrant) in again for s in first) else first


def _all_seeds(result: EntrantResult, ledger: Runs) -> EntrantResult:
    records = list(result.records)
    while (record := ledger([Config(**{**records[0]["config"], "seed": len(records)})])[0]) is not None:
        records.append(record)
    return dataclasses.replace(result, records=tuple(records))


def note(file: Path, result: EntrantResult) -> None:
    """Write an entrant's grid, scores and choice into the records, once."""
    budget = result.budget.label if result.budget else "dense"
    of = {"panel": result.panel.name, "budget": budget, "row": result.entrant.label}
    note_choice(file, of, result.tried, result.rate)
