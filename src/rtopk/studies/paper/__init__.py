"""The paper's Tables I to V as data: rows with the paper's figures, and what runs at each scale.

`paper` is the paper's set-up, for GPUs; `small` the same comparison on the same data with small models, for a
few hours on one core; `smoke` shows in seconds that every row runs. What the paper does not say (learning
rates of the image tasks, weight decay, number of epochs) is chosen as is usual, and the learning rate is tuned
for each row on the same grid. Rows without a figure of the paper are ours: the other of the two means,
densities that the paper left out, and what the studies found to decide: rTop-k with r = 2 k, no momentum.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rtopk.aggregate import Mean
from rtopk.studies.config import Config
from rtopk.tools.show.palette import with_compression

Scale = Literal["smoke", "small", "paper"]
TUNING_SEED = 1000  # the first; results count from 0


@dataclass(frozen=True)
class TableRow:
    """A line of a table: a method at a density, with the paper's figure."""

    method: str
    density: float
    paper: float | None = None
    mean: Mean = "nodes"
    note: str = ""  # what else sets the row apart
    options: tuple[tuple[str, Any], ...] = ()  # and by which options

    @property
    def label(self) -> str:
        """Name the row as the paper does; its compression is 1 - density."""
        if self.method == "dense":
            return f"baseline{', ' if self.note else ''}{self.note}"
        if self.method == "powersgd":
            return f"PowerSGD, {self.note}"
        name = {"rtop-k": "rTop-k"}.get(self.method, self.method.capitalize())
        mean = ", mean of received" if self.mean == "received" else ""
        return f"{with_compression(name, self.density)}{mean}{', ' if self.note else ''}{self.note}"


@dataclass(frozen=True)
class Setup:
    """What all rows of a table share at one scale, and how the learning rate is found."""

    config: Config
    rates: tuple[float, ...]  # a grid that every row tries whole
    tuning_rounds: int
    beyond: int = 3  # how many rates further a row goes whose best one is at the edge
    tuning_seeds: int = 1  # runs of each rate; 0 if there is one rate, which is given


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    name: str  # of its files
    title: str
    figure: int | None  # of the paper, the same runs as curves
    rows: tuple[TableRow, ...]
    setups: dict[Scale, Setup]
    small: str = ""  # what stands for the model and the data at the small scales; "" is as in the title
    pairs: tuple[tuple[str, str], ...] = ()  # labels of rows to compare, beside rTop-k with others

    def heading(self, scale: Scale) -> str:
        """Name the table, and what really ran at a scale."""
        return self.title if scale == "paper" or not self.small else f"{self.title} (here: {self.small})"

    def tuning(self, scale: Scale, row: TableRow, rate: float) -> list[Config]:
        """Return the runs that score a learning rate of a row: shorter, on validation data."""
        setup = self.setups[scale]
        full = _of(scale, setup.config, row, rate)
        rounds = full.rounds * setup.tuning_rounds // setup.config.rounds
        short = dataclasses.replace(
            full,
            rounds=rounds,
            evaluate_every=rounds,
            warm_up=full.warm_up * rounds // full.rounds,
            part="validation",
        )
        return [dataclasses.replace(short, seed=TUNING_SEED + more) for more in range(setup.tuning_seeds)]

    def results(self, scale: Scale, row: TableRow, rate: float, seeds: int) -> list[Config]:
        """Return the runs that make a row's figure, on test data."""
        config = self.setups[scale].config
        return [dataclasses.replace(_of(scale, config, row, rate), seed=seed) for seed in range(seeds)]


def row_with(
    method: str, note: str = "", density: float = 0.01, mean: Mean = "nodes", **options: Any
) -> TableRow:
    """Make a row of our own, at 99 % if nothing else is said, with these options of `Config`."""
    return TableRow(method, density, None, mean, note, tuple(sorted(options.items())))


def study_of(
    name: str,
    title: str,
    config: Config,
    rates: tuple[float, ...],
    rows: Sequence[TableRow],
    tuning_rounds: int = 0,  # 0: whole runs
    tuning_seeds: int = 1,
    pairs: Sequence[tuple[str, str]] = (),
    **smoke: Any,
) -> Table:
    """Make a study of a configuration: small, and smoke with what is still smaller then."""
    tiny = dataclasses.replace(config, rounds=4, evaluate_every=2, **smoke)
    setups: dict[Scale, Setup] = {
        "smoke": Setup(tiny, rates[:1], 2, beyond=0),
        "small": Setup(config, rates, tuning_rounds or config.rounds, tuning_seeds=tuning_seeds),
    }
    return Table(name, title, None, tuple(rows), setups, pairs=tuple(pairs))


def _of(scale: Scale, config: Config, row: TableRow, rate: float) -> Config:
    own = {"method": row.method, "density": row.density, "mean": row.mean, "learning_rate": rate}
    options = dict(row.options)
    if scale == "smoke":  # short, whatever the row says
        options.pop("rounds", None)
    return dataclasses.replace(config, **{**own, **options})


def _rows(
    *paper: tuple[str, float, float],
    more: tuple[tuple[str, float, Mean], ...],
    twice: tuple[float, Mean],
    also: tuple[TableRow, ...] = (),
) -> tuple[TableRow, ...]:
    """Return the paper's rows, then ours; `twice` is rTop-k with r = 2 k, at a density, with a mean."""
    ours = [TableRow(method, density, None, mean) for method, density, mean in more]
    half = TableRow("rtop-k", twice[0], None, twice[1], "r = 2 k", (("r_over_k", 2.0),))
    return (*[TableRow(method, density, figure) for method, density, figure in paper], *ours, half, *also)


# The other mean, for the methods of which the paper makes most.
_RECEIVED: tuple[tuple[str, float, Mean], ...] = (
    ("rtop-k", 0.01, "received"),
    ("top-k", 0.01, "received"),
    ("rtop-k", 0.001, "received"),
    ("top-k", 0.001, "received"),
)

_CIFAR = Config(
    task="cifar10", batch=128, rounds=150 * 78, warm_up=5 * 78, rate_schedule="piecewise", weight_decay=5e-4,
    evaluate_every=78,
)  # fmt: skip
_CIFAR_EPOCHS = dataclasses.replace(_CIFAR, setting="federated", rounds=150, warm_up=5, evaluate_every=1)
_IMAGENET = dataclasses.replace(_CIFAR_EPOCHS, task="imagenet", batch=32, rounds=90, weight_decay=1e-4)
# Zaremba's loss is a sum over the 35 words of a batch, ours a mean: rate 1 and norm 10 there are 35 and 10 / 35.
_PTB = Config(
    task="ptb", split="contiguous", batch=20, rounds=55 * 265, warm_up=5 * 265, rate_schedule="zaremba",
    momentum=0.0, clip_norm=10 / 35, evaluate_every=265,
)  # fmt: skip
_PTB_EPOCHS = dataclasses.replace(
    _PTB, setting="federated", rounds=55, warm_up=5, memory="none", evaluate_every=1
)

# Small: 30 visits at 99 % in the distributed tables; in the federated ones a round is 20 steps, not an epoch.
_CIFAR_SMALL = Config(task="cifar10-small", batch=16, rounds=3000, warm_up=100, evaluate_every=200)
_CIFAR_SMALL_EPOCHS = dataclasses.replace(
    _CIFAR_SMALL, setting="federated", local_steps=20, rounds=150, warm_up=5, evaluate_every=10
)
_IMAGENET_SMALL = dataclasses.replace(_CIFAR_SMALL_EPOCHS, task="imagenet-small", rounds=90)
_PTB_SMALL = dataclasses.replace(
    _PTB, task="ptb-small", batch=8, rounds=3000, warm_up=275, evaluate_every=200, clip_norm=0.25
)
_PTB_SMALL_EPOCHS = dataclasses.replace(
    _PTB_SMALL, setting="federated", local_steps=20, rounds=150, warm_up=14, memory="none", evaluate_every=10
)


def _setups(
    paper: Config, paper_rates: tuple[float, ...], small: Config, small_rates: tuple[float, ...]
) -> dict[Scale, Setup]:
    smoke = dataclasses.replace(
        small, rounds=4, batch=2, warm_up=1, evaluate_every=2, local_steps=2 if small.local_steps else 0
    )
    return {
        "smoke": Setup(smoke, small_rates[:2], 2, beyond=0),
        "small": Setup(small, small_rates, small.rounds // 2),
        "paper": Setup(paper, paper_rates, paper.rounds // 3),
    }


_IMAGE_RATES, _TEXT_RATES = (0.02, 0.05, 0.1), (3.5, 12.0, 35.0)
_SMALL_BATCH_RATES, _SMALL_EPOCH_RATES = (0.005, 0.015, 0.045), (0.015, 0.045, 0.135)
_SMALL_TEXT_RATES, _SMALL_TEXT_EPOCH_RATES = (3.0, 9.0, 27.0), (9.0, 27.0, 81.0)

TABLES = {
    1: Table(
        "table-1", "ResNet-18 on CIFAR-10, distributed", 2,
        _rows(
            ("dense", 1.0, 92.40), ("rtop-k", 0.01, 93.25), ("top-k", 0.01, 92.46), ("rtop-k", 0.001, 89.34),
            ("top-k", 0.001, 86.12), ("random-k", 0.01, 66.81), more=_RECEIVED, twice=(0.01, "nodes"),
            also=(
                *(
                    TableRow(method, density, note="no momentum", options=(("momentum", 0.0),))
                    for method, density in (
                        ("rtop-k", 0.01), ("top-k", 0.01), ("rtop-k", 0.001), ("top-k", 0.001), ("dense", 1.0),
                    )
                ),
                TableRow(
                    "rtop-k", 0.01, note="r = 2 k, no momentum", options=(("momentum", 0.0), ("r_over_k", 2.0)),
                ),
            ),
        ),
        _setups(_CIFAR, _IMAGE_RATES, _CIFAR_SMALL, _SMALL_BATCH_RATES),
        "a convolutional net, CIFAR-10 at 16 x 16",
    ),
    2: Table(
        "table-2", "ResNet-18 on CIFAR-10, federated", 3,
        _rows(
            ("dense", 1.0, 91.16), ("rtop-k", 0.01, 92.02), ("top-k", 0.01, 85.62), ("rtop-k", 0.001, 88.51),
            ("top-k", 0.001, 81.00), ("random-k", 0.01, 61.07), more=_RECEIVED, twice=(0.01, "nodes"),
        ),
        _setups(_CIFAR_EPOCHS, _IMAGE_RATES, _CIFAR_SMALL_EPOCHS, _SMALL_EPOCH_RATES),
        "a convolutional net, CIFAR-10 at 16 x 16",
    ),
    3: Table(
        "table-3", "ResNet-34 on ImageNet, federated", 4,
        _rows(
            ("dense", 1.0, 69.70), ("rtop-k", 0.01, 70.63), ("top-k", 0.01, 63.06), ("rtop-k", 0.001, 65.37),
            ("top-k", 0.001, 57.80), ("random-k", 0.01, 29.19), more=_RECEIVED, twice=(0.01, "nodes"),
        ),
        _setups(_IMAGENET, _IMAGE_RATES, _IMAGENET_SMALL, _SMALL_EPOCH_RATES),
        "a convolutional net, 20 classes of Tiny ImageNet at 16 x 16",
    ),
    4: Table(
        "table-4", "LSTM on Penn Treebank, distributed", 5,
        _rows(
            ("dense", 1.0, 84.63), ("rtop-k", 0.001, 82.49), ("top-k", 0.001, 91.84), ("top-k", 0.01, 84.31),
            ("random-k", 0.01, 281.61), more=(("rtop-k", 0.01, "nodes"), *_RECEIVED),
            twice=(0.01, "nodes"),
        ),
        _setups(_PTB, _TEXT_RATES, _PTB_SMALL, _SMALL_TEXT_RATES),
        "64 units, the 1,000 most frequent words",
    ),
    5: Table(
        "table-5", "LSTM on Penn Treebank, federated", 6,
        _rows(
            ("dense", 1.0, 82.14), ("rtop-k", 0.05, 82.02), ("top-k", 0.05, 97.05), ("top-k", 0.25, 81.97),
            ("random-k", 0.05, 130.91),
            more=(("rtop-k", 0.05, "received"), ("top-k", 0.05, "received"), ("random-k", 0.05, "received")),
            twice=(0.05, "received"),
        ),
        _setups(_PTB_EPOCHS, _TEXT_RATES, _PTB_SMALL_EPOCHS, _SMALL_TEXT_EPOCH_RATES),
        "64 units, the 1,000 most frequent words",
    ),
}  # fmt: skip


def table(number: int) -> Table:
    """Return a table by its number."""
    if number not in TABLES:
        raise ValueError(f"table must be 1 to {len(TABLES)}, got {number}")
    return TABLES[number]


def check_scale(scale: str) -> Scale:
    """Return the scale if there is one of that name."""
    for known in get_args(Scale):
        if scale == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {scale!r}")
