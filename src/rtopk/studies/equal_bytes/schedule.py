"""Run the entrants of a comparison side by side, and keep all that was run in one file of records."""

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

from rtopk.studies.equal_bytes.fit import Standing
from rtopk.studies.equal_bytes.panels import Budget, Entrant, Panel
from rtopk.studies.paper.tuning import note_choice
from rtopk.studies.train.config import Config
from rtopk.studies.train.records import Record, read
from rtopk.studies.train.runner import key_of, run_all

Runner = Callable[[Sequence[Config]], Sequence[Record | None]]
OnRun = Callable[[Config], None]  # when it has finished


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
    """Run configurations, or find them among the records; `recorded` runs nothing and answers None instead."""

    def __init__(
        self,
        file: Path,
        work: Path,
        jobs: int = 1,
        recorded: bool = False,
        on_run: OnRun = lambda config: None,
    ) -> None:
        self.file = file
        self.work = work
        self.jobs = jobs
        self.recorded = recorded
        self.on_run = on_run
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
    budget = standing.budget.label if standing.budget else "dense"
    of = {"panel": standing.panel.name, "budget": budget, "row": standing.entrant.label}
    note_choice(file, of, standing.tried, standing.rate)
