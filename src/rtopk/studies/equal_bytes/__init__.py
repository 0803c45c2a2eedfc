"""Every method at equal bytes: which entrants meet on which tasks, and with how many bytes a round.

A panel is a task in one setting: all entrants share its data, model, rounds and memory. A budget is a number of
bytes per node and round, given by a yardstick: what top-k sends at a density, or PowerSGD with a rank.
`fit.py` fits every entrant to the budget and tunes its learning rate.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rtopk.aggregate import Mean
from rtopk.studies.config import Config, MemoryName, Setting, Split
from rtopk.studies.paper import table


@dataclass(frozen=True)
class Entrant:
    """A method, with the choices that are its own."""

    method: str
    mean: Mean = "nodes"
    values: str = "fp32"
    r_over_k: float = 0.0  # rTop-k: 0 is the paper's choice, the number of nodes
    memory: MemoryName | None = None  # None: the panel's

    @property
    def label(self) -> str:
        """Name the entrant in tables and pictures."""
        bits = "" if self.values == "fp32" else f", {self.values}"
        among = f", r = {self.r_over_k:g} k" if self.r_over_k else ""
        return f"{self.method}{among}{bits}" + (", received" if self.mean == "received" else "")


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
    tuning_seeds: int  # runs of each rate
    budgets: tuple[tuple[Budget, tuple[Entrant, ...]], ...]

    @property
    def entrants(self) -> list[Entrant]:
        """All that take part, in the order in which they are shown; dense training not counted."""
        return list(dict.fromkeys(entrant for _, entrants in self.budgets for entrant in entrants))


def suitable_mean(memory: MemoryName) -> Mean:
    """Return the mean that suits draws: over the nodes where a memory brings later what was kept back."""
    return "received" if memory == "none" else "nodes"


def _core(memory: MemoryName) -> tuple[Entrant, ...]:
    """Enter who matters most, with both means where both can win: without memory the draws have one."""
    both: tuple[Mean, ...] = get_args(Mean)
    drawn = (suitable_mean(memory),) if memory == "none" else both
    return (
        *(Entrant("top-k", mean) for mean in both),
        *(Entrant("rtop-k", mean, r_over_k=r) for r in (0.0, 2.0) for mean in drawn),
        Entrant("dealt-k", suitable_mean(memory)),
    )


def _all(memory: MemoryName) -> tuple[Entrant, ...]:
    mean = suitable_mean(memory)
    rest = [Entrant(method, mean) for method in ("rage-k", "threshold")]
    return (*_core(memory), *rest, *(Entrant(method, mean, "4bit") for method in ("rtop-k", "dealt-k")))


_MATRICES = (Entrant("powersgd", memory="error-feedback"),)  # which it is defined with


def _digits(setting: Setting, split: Split, memory: MemoryName = "error-feedback") -> Panel:
    far = setting == "federated"
    config = Config(
        task="digits", setting=setting, split=split, memory=memory, local_steps=8 if far else 0,
        rounds=60 if far else 600, evaluate_every=5 if far else 50,
    )  # fmt: skip
    apart = "split by class" if split == "class" else "i.i.d."
    kept = "" if not far else ", error feedback" if memory == "error-feedback" else ", no memory"
    return Panel(
        name=f"digits, {setting}, {apart}{kept}",
        config=config,
        rates=(0.02, 0.05, 0.12, 0.3, 0.8) if far else (0.004, 0.01, 0.025, 0.06, 0.15, 0.4),
        pilot_rounds=10,
        threshold=0.05,
        tuning_seeds=3 if far else 1,  # by class, a rate that fails with one seed wins with another
        budgets=(
            (Budget(density=0.01), _all(memory)),
            (Budget(matrix_rank=1), (*_MATRICES, *_all(memory))),
            (Budget(matrix_rank=2), _MATRICES),
        ),
    )


def _small(name: str, config: Config, threshold: float, rates: tuple[float, ...], **changes: Any) -> Panel:
    """Make a panel of the small scale, mostly of a table's set-up; without warm-up, whose bytes would differ."""
    config = dataclasses.replace(config, warm_up=0, evaluate_every=10, **changes)
    return Panel(
        name=name,
        config=config,
        rates=rates,
        pilot_rounds=4,
        threshold=threshold,
        tuning_seeds=1,
        budgets=(
            (Budget(matrix_rank=1), (*_MATRICES, *_all(config.memory))),
            (Budget(density=0.01), _core(config.memory)),
        ),
    )


_GPT = Config(
    task="shakespeare",
    setting="federated",
    split="contiguous",
    batch=4,
    local_steps=10,
    rounds=70,
    clip_norm=1.0,
)

# CIFAR-10 and ImageNet take fewer local steps than their tables. The LSTM does not: after 600 steps its perplexity
# is no better than that of the words' frequencies, and no method can be told from another.
PANELS: dict[str, tuple[Panel, ...]] = {
    "digits": (_digits("federated", "class", "none"), _digits("distributed", "iid")),
    "cifar10": (
        _small(
            "CIFAR-10, federated, split by class", table(2).setups["small"].config,
            0.02, (0.005, 0.015, 0.045, 0.135, 0.405), rounds=60, local_steps=10, split="class",
        ),
    ),
    "imagenet": (
        _small(
            "Tiny ImageNet, federated, i.i.d.", table(3).setups["small"].config,
            0.02, (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64), local_steps=10,
        ),
    ),
    "ptb": (
        _small(
            "PTB, federated, no memory", table(5).setups["small"].config,
            0.05, (0.75, 1.5, 3.0, 6.0, 12.0, 24.0, 48.0, 96.0, 192.0, 384.0),
        ),
    ),
    "shakespeare": (
        _small(
            "Shakespeare, federated, contiguous parts", _GPT,
            0.02, (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
        ),
    ),
}  # fmt: skip


def with_entrants(panel: Panel, only: Sequence[str], added: Sequence[str]) -> Panel:
    """Return a panel with the entrants of some methods only (all, if none is named), and rules from elsewhere."""
    known = {entrant.method for entrant in panel.entrants}
    if unknown := set(only) - known:
        raise ValueError(
            f"--only must be one of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}"
        )
    own = tuple(Entrant(method, suitable_mean(panel.config.memory)) for method in added)
    budgets = tuple(
        (budget, (*(one for one in entrants if not only or one.method in only), *own))
        for budget, entrants in panel.budgets
    )
    return dataclasses.replace(panel, budgets=tuple(pair for pair in budgets if pair[1]))


def retuned(panel: Panel) -> Panel:
    """Return a panel whose rates are tuned with three seeds, on a grid that is two steps longer at both ends."""
    low, high = panel.rates[0] / panel.rates[1], panel.rates[-1] / panel.rates[-2]
    below = (float(f"{panel.rates[0] * low**steps:.4g}") for steps in (2, 1))
    above = (float(f"{panel.rates[-1] * high**steps:.4g}") for steps in (1, 2))
    return dataclasses.replace(panel, rates=(*below, *panel.rates, *above), tuning_seeds=3)


def smoke_panel(panel: Panel) -> Panel:
    """Return a panel of a few rounds and entrants, to see that everything runs."""
    config = dataclasses.replace(
        panel.config, rounds=4, evaluate_every=2, local_steps=min(2, panel.config.local_steps)
    )
    few = (
        (
            Budget(density=0.01),
            (*map(Entrant, ("top-k", "rtop-k", "rage-k")), Entrant("dealt-k", "received", "4bit")),
        ),
        (Budget(matrix_rank=1), (Entrant("powersgd"), Entrant("threshold"))),
    )
    return dataclasses.replace(
        panel, config=config, rates=panel.rates[1:3], pilot_rounds=2, tuning_seeds=1, budgets=few
    )
