"""The map of regimes: a factorial design that says which rule and which mean to take for which job.

Every cell is a job: with a memory or without, nodes whose largest entries overlap less or more, few or many nodes,
a short or a long run. In each, rTop-k and top-k run with both means. Overlap is set by what decides it in a job:
small batches of other classes at every node, or larger batches of all classes.
"""

import dataclasses
from itertools import product
from typing import Any

from rtopk.aggregate import Mean
from rtopk.studies.config import Config
from rtopk.studies.paper import TABLES, Table, TableRow, row_with, study_of

DENSITY = 0.01
MEANS: tuple[Mean, ...] = ("nodes", "received")
RULES = {"top-k": 1.0, "r = 2 k": 2.0, "r = n k": 0.0}  # r / k; 0 is the number of nodes
DRAWS = ("r = 2 k", "r = n k")  # the rules that are compared with top-k
Level = tuple[str, dict[str, Any]]  # what rows call it, and the options of `Config` that make it


@dataclasses.dataclass(frozen=True)
class Design:
    """A task and the two levels of its factors."""

    config: Config
    rates: tuple[float, ...]
    batches: tuple[int, int]  # with little overlap, and with more
    nodes: tuple[int, int]
    rounds: tuple[int, int]
    tuning_seeds: int

    @property
    def factors(self) -> dict[str, tuple[Level, Level]]:
        """Return what sets a job apart, but for the mean."""
        low, high = self.batches
        few, many = self.nodes
        short, long = self.rounds
        return {
            "memory": (("no memory", {"memory": "none"}), ("error feedback", {"memory": "error-feedback"})),
            "overlap": (
                (f"batch {low} by class", {"batch": low, "split": "class"}),
                (f"batch {high}", {"batch": high, "split": "iid"}),
            ),
            "nodes": ((f"{few} nodes", {"nodes": few}), (f"{many} nodes", {"nodes": many})),
            "rounds": ((f"{short} rounds", {"rounds": short}), (f"{long} rounds", {"rounds": long})),
        }

    def row(self, at: tuple[int, ...], rule: str, mean: Mean) -> TableRow:
        """Return the row of a job, given by its levels, with a rule and a mean."""
        levels = [pair[level] for pair, level in zip(self.factors.values(), at, strict=True)]
        options = {name: value for _, own in levels for name, value in own.items()}
        note = ", ".join(words for words, _ in levels)
        if rule == "top-k":
            return row_with("top-k", note, DENSITY, mean, **options)
        options["r_over_k"] = RULES[rule] or float(options["nodes"])
        return row_with("rtop-k", f"{note}, {rule}", DENSITY, mean, **options)

    @property
    def jobs(self) -> list[tuple[int, ...]]:
        """Return the levels of every job."""
        return list(product((0, 1), repeat=len(self.factors)))

    def table(self, name: str) -> Table:
        """Return the design as a study."""
        rows = [self.row(*cell) for cell in product(self.jobs, RULES, MEANS)]
        title = f"The map on {self.config.task}: memory x mean x overlap x nodes x rounds, 99 %"
        return study_of(f"study-{name}", title, self.config, self.rates, rows, tuning_seeds=self.tuning_seeds)


_CIFAR = dataclasses.replace(TABLES[1].setups["small"].config, warm_up=0, rounds=300, evaluate_every=75)
DESIGNS = {  # digits has 269 images to tune with, CIFAR-10 5,000
    "map-digits": Design(
        Config(rounds=600, evaluate_every=150), (0.005, 0.02, 0.08), (2, 32), (4, 10), (150, 600), 2
    ),
    "map-cifar10": Design(_CIFAR, (0.005, 0.015, 0.045), (2, 32), (4, 10), (75, 300), 1),
}
MAPS = {name: design.table(name) for name, design in DESIGNS.items()}
