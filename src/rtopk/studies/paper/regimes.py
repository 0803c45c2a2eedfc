"""The map of regimes: a factorial design that says which rule to take for which job.

Every cell is a job: with or without memory, one mean or the other, small or large batches (which decide how far the
nodes' largest entries overlap), few or many nodes, a short or a long run. In each, rTop-k is compared with top-k.
"""

import dataclasses
from itertools import product
from typing import Any

from rtopk.studies.config import Config
from rtopk.studies.paper import TABLES, Scale, Setup, Table, TableRow

# Factor -> option of `Config`, its lower and upper level, and how rows call them. The mean is a field of a row.
Levels = tuple[str, tuple[Any, Any], tuple[str, str]]
_MEMORY: Levels = ("memory", ("none", "error-feedback"), ("no memory", "error feedback"))


@dataclasses.dataclass(frozen=True)
class Design:
    """A task, the levels of its factors, and the rules that are compared with top-k: r / k, 0 for r = n k."""

    config: Config
    rates: tuple[float, ...]
    batch: tuple[int, int]
    nodes: tuple[int, int]
    rounds: tuple[int, int]
    among: tuple[float, ...]

    @property
    def levels(self) -> tuple[Levels, ...]:
        """Return all factors but the mean."""
        sizes = [
            (name, pair, (f"{words}{pair[0]}{unit}", f"{words}{pair[1]}{unit}"))
            for name, pair, words, unit in (
                ("batch", self.batch, "batch ", ""), ("nodes", self.nodes, "", " nodes"),
                ("rounds", self.rounds, "", " rounds"),
            )
        ]  # fmt: skip
        return (_MEMORY, *sizes)

    def rows(self) -> list[TableRow]:
        """Return every cell's rows: top-k, then the rules beside it."""
        found = []
        for mean, picks in product(("nodes", "received"), product((0, 1), repeat=len(self.levels))):
            own = {name: levels[at] for (name, levels, _), at in zip(self.levels, picks, strict=True)}
            note = ", ".join(words[at] for (_, _, words), at in zip(self.levels, picks, strict=True))
            for factor in (1.0, *self.among):
                told = "" if factor == 1.0 else f", r = {f'{factor:g}' if factor else 'n'} k"
                more = {} if factor == 1.0 else {"r_over_k": factor or float(own["nodes"])}
                method = "rtop-k" if more else "top-k"
                options = tuple(sorted({**own, **more}.items()))
                found.append(TableRow(method, 0.01, None, mean, note + told, options))  # type: ignore[arg-type]
        return found

    def table(self, name: str, title: str) -> Table:
        """Return the design as a study."""
        smoke = dataclasses.replace(self.config, rounds=4, evaluate_every=2)
        setups: dict[Scale, Setup] = {
            "smoke": Setup(smoke, self.rates[:1], 2, beyond=0),
            "small": Setup(self.config, self.rates, self.config.rounds, tuning_seeds=2),
        }
        return Table(f"study-{name}", title, None, tuple(self.rows()), setups)


_CIFAR = dataclasses.replace(TABLES[1].setups["small"].config, warm_up=0, rounds=400, evaluate_every=100)
DESIGNS = {
    "map-digits": Design(
        Config(rounds=600, evaluate_every=150), (0.005, 0.02, 0.08), (4, 64), (4, 10), (150, 600), (2.0, 0.0)
    ),
    "map-cifar10": Design(_CIFAR, (0.005, 0.015, 0.045), (4, 32), (4, 10), (100, 400), (2.0, 0.0)),
}


def _studies(designs: dict[str, Design]) -> dict[str, Table]:
    told = "memory x mean x batch x nodes x rounds, 99 %"
    return {
        name: design.table(name, f"The map on {design.config.task}: {told}")
        for name, design in designs.items()
    }


MAPS = _studies(DESIGNS)
