"""Run the entrants of a comparison side by side, and keep all that was run in one file of records."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from statistics import mean

from rtopk.experiments.config import Config
from rtopk.experiments.equal_bytes import Standing
from rtopk.experiments.execute import execute
from rtopk.experiments.records import Record, append, read
from rtopk.experiments.rivals import Budget, Entrant, Panel
from rtopk.experiments.runner import run_all

Runner = Callable[[Sequence[Config]], Sequence[Record | None]]
OnRun = Callable[[Record], None]


def heats(panels: Sequence[Panel]) -> list[list[tuple[Panel, Budget | None, Entrant]]]:
    """Return who goes side by side: dense and the first group of each panel, then all second groups, ..."""
    depth = max(len(panel.budgets) for panel in panels)
    found: list[list[tuple[Panel, Budget | None, Entrant]]] = []
    for number in range(depth):
        for panel in (panel for panel in panels if number < len(panel.budgets)):
            budget, entrants = panel.budgets[number]
            dense = [] if number else [(panel, None, Entrant("dense"))]
            found.append([*dense, *((panel, budget, entrant) for entrant in entrants)])
    return found


class Ledger:
    """Run configurations, or find them among the records; `recorded` runs nothing and answers None instead.

    One at a time they run in this process: a pool takes longer to start than a short run takes.
    """

    def __init__(
        self,
        file: Path,
        work: Path,
        jobs: int = 1,
        recorded: bool = False,
        on_run: OnRun = lambda record: None,
    ) -> None:
        self.file = file
        self.work = work
        self.jobs = jobs
        self.recorded = recorded
        self.on_run = on_run
        self._done = {record["key"]: record for record in read(file)}

    def __call__(self, configs: Sequence[Config]) -> list[Record | None]:
        """Return the records of the configurations, in order."""
        missing = {config.key: config for config in configs if config.key not in self._done}
        if not self.recorded and self.jobs == 1:
            for key, config in missing.items():
                self._done[key] = execute(config, self.work / key, resume=True)
                append(self.file, self._done[key])
                self.on_run(self._done[key])
        elif not self.recorded and missing:
            records = run_all(
                list(missing.values()), self.file, self.work, self.jobs, lambda key, rounds: None
            )
            for record in records:
                self._done[record["key"]] = record
                self.on_run(record)
        return [self._done.get(config.key) for config in configs]


def play(steps: Iterable[Generator[Config, Record, Standing]], run: Runner) -> list[Standing]:
    """Let entrants go side by side, a run each at a time; those whose next run is refused (None) drop out."""
    standings: list[Standing] = []
    wishes = [(entrant, next(entrant)) for entrant in steps]
    while wishes:
        records = run([config for _, config in wishes])
        following = []
        for (entrant, _), record in zip(wishes, records, strict=True):
            if record is None:
                continue
            try:
                following.append((entrant, entrant.send(record)))
            except StopIteration as end:
                standings.append(end.value)
        wishes = following
    return standings


def note(file: Path, standing: Standing) -> None:
    """Write an entrant's grid, scores and choice into the records, once."""
    metric = standing.records[0]["metric"]
    runs = [run for group in standing.tried for run in group]
    row = standing.entrant.label
    budget = standing.budget.label if standing.budget else "dense"
    name = f"choice {standing.panel.name} {budget} {row} {[run['key'] for run in runs]}"
    key = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    if any(record["key"] == key for record in read(file)):
        return
    append(
        file,
        {
            "kind": "choice",
            "key": key,
            "panel": standing.panel.name,
            "budget": budget,
            "row": row,
            "metric": metric,
            "grid": [group[0]["config"]["learning_rate"] for group in standing.tried],
            "scores": [mean(run["final"][metric] for run in group) for group in standing.tried],
            "chosen": standing.rate,
        },
    )
