"""Every method at equal bytes: which entrants meet on which tasks, and with how many bytes a round.

A panel is a task in one setting: all entrants share its data, model, rounds and memory. A budget is a number of
bytes per node and round, given by a yardstick: what top-k sends at a density, or PowerSGD with a rank.
`equal_bytes.py` fits every entrant to the budget and tunes its learning rate.
"""

import dataclasses
from dataclasses import dataclass

from rtopk.aggregate import Mean
from rtopk.experiments.config import Config, MemoryName, Setting, Split
from rtopk.experiments.tables import table


@dataclass(frozen=True)
class Entrant:
    """A method, with the choices that are its own."""

    method: str
    mean: Mean = "nodes"
    values: str = "fp32"

    @property
    def label(self) -> str:
        """Name the entrant in tables and pictures."""
        bits = "" if self.values == "fp32" else f", {self.values}"
        return f"{self.method}{bits}" + (", received" if self.mean == "received" else "")


@dataclass(frozen=True)
class Budget:
    """Bytes per node and round: those of top-k at this density, or of PowerSGD with this rank."""

    density: float = 0.0
    matrix_rank: int = 0

    @property
    def label(self) -> str:
        """Name the budget."""
        return f"PowerSGD rank {self.matrix_rank}" if self.matrix_rank else f"top-k {100 * self.density:g} %"


@dataclass(frozen=True)
class Panel:
    """A task in one setting, and the grid of learning rates that all entrants are tuned on."""

    name: str
    config: Config
    rates: tuple[float, ...]
    pilot_rounds: int  # of the short runs that measure bytes
    threshold: float  # a first guess
    budgets: tuple[tuple[Budget, tuple[Entrant, ...]], ...]


_BOTH: tuple[Mean, ...] = ("nodes", "received")


def _each(methods: tuple[str, ...], means: tuple[Mean, ...], values: str = "fp32") -> tuple[Entrant, ...]:
    return tuple(Entrant(method, mean, values) for mean in means for method in methods)


def _core(means: tuple[Mean, ...]) -> tuple[Entrant, ...]:
    return _each(("top-k", "rtop-k", "dealt-k"), means)


def _rest(means: tuple[Mean, ...]) -> tuple[Entrant, ...]:
    return (*_each(("rage-k", "threshold"), means), *_each(("rtop-k", "dealt-k"), means, "4bit"))


def _digits(setting: Setting, split: Split, memory: MemoryName = "error-feedback") -> Panel:
    far = setting == "federated"
    config = Config(
        task="digits",
        setting=setting,
        split=split,
        memory=memory,
        rounds=60 if far else 600,
        evaluate_every=5 if far else 50,
    )
    some: tuple[Mean, ...] = _BOTH if far else ("nodes",)
    matrices = (Entrant("powersgd"),)
    # What matters most comes first: a study that is stopped has it for all panels.
    budgets = (
        (Budget(density=0.01), _core(_BOTH)),
        (Budget(matrix_rank=1), (*_core(("nodes",)), *matrices)),
        (Budget(density=0.01), _rest(("nodes",))),
        (Budget(density=0.001), _core(_BOTH) if far else ()),
        (Budget(matrix_rank=2), matrices),
        (Budget(matrix_rank=4), (*matrices, *_core(("nodes",)))),
        (Budget(density=0.01), _rest(("received",))),
        (Budget(matrix_rank=1), (*_core(("received",)), *_rest(some))),
    )
    apart = "split by class" if split == "class" else "i.i.d."
    kept = "" if not far else ", error feedback" if memory == "error-feedback" else ", no memory"
    return Panel(
        name=f"digits, {setting}, {apart}{kept}",
        config=config,
        rates=(0.02, 0.05, 0.12, 0.3, 0.8) if far else (0.004, 0.01, 0.025, 0.06, 0.15, 0.4),
        pilot_rounds=10,
        threshold=0.05,
        budgets=budgets,
    )


def _small(number: int, name: str, split: Split, threshold: float) -> Panel:
    """Take a table's set-up at small scale, without its warm-up, whose bytes would differ."""
    setup = table(number).setups["small"]
    matrices = (Entrant("powersgd"),)
    return Panel(
        name=name,
        config=dataclasses.replace(setup.config, warm_up=0, split=split),
        rates=setup.rates,
        pilot_rounds=4,
        threshold=threshold,
        budgets=(
            (Budget(density=0.01), _core(_BOTH)),
            (Budget(matrix_rank=1), (*_core(("nodes",)), *matrices)),
            (Budget(density=0.01), _rest(("nodes",))),
            (Budget(matrix_rank=2), matrices),
            (Budget(matrix_rank=4), matrices),
        ),
    )


PANELS: dict[str, tuple[Panel, ...]] = {
    "digits": (
        _digits("federated", "class", "none"),
        _digits("federated", "class"),
        _digits("distributed", "class"),
        _digits("distributed", "iid"),
        _digits("federated", "iid", "none"),
        _digits("federated", "iid"),
    ),
    "cifar10": (
        _small(1, "CIFAR-10, distributed, i.i.d.", "iid", 0.05),
        _small(1, "CIFAR-10, distributed, split by class", "class", 0.05),
        _small(2, "CIFAR-10, federated, i.i.d.", "iid", 0.02),
        _small(2, "CIFAR-10, federated, split by class", "class", 0.02),
    ),
    "ptb": (
        _small(4, "PTB, distributed", "contiguous", 0.01),
        _small(5, "PTB, federated, no memory", "contiguous", 0.05),
    ),
}


def smoke(panel: Panel) -> Panel:
    """Return a panel of a few rounds and entrants, to see that everything runs."""
    config = dataclasses.replace(panel.config, rounds=4, evaluate_every=2)
    few = (
        (Budget(density=0.01), (Entrant("top-k"), Entrant("dealt-k", "received", "4bit"), Entrant("rage-k"))),
        (Budget(matrix_rank=1), (Entrant("powersgd"), Entrant("threshold"))),
    )
    return dataclasses.replace(panel, config=config, rates=panel.rates[1:3], pilot_rounds=2, budgets=few)
