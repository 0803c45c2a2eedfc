"""What decides between methods: one question a study.

A study is a table whose rows differ in one more thing than the method; rates are tuned as in the tables. Most run
on scikit-learn's digits (26,122 parameters, an MLP): they are small enough that a study takes minutes, and need no
data folder. Those named after a data set or a table need its data.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rtopk.aggregate import Mean
from rtopk.studies.config import Config
from rtopk.studies.paper import TABLES, Table, TableRow, row_with, study_of
from rtopk.studies.paper.explanations import EXPLANATIONS
from rtopk.studies.paper.regimes import MAPS

_BATCHES = Config(batch=16, rounds=1500, evaluate_every=100)
# A number of steps, not an epoch: with a fifth of the examples kept back for tuning, an epoch has fewer steps, and
# a rate that is stable with those need not be so in the runs that count.
_FAR = Config(setting="federated", batch=32, local_steps=8, rounds=60, memory="none", evaluate_every=5)
_RATES, _PLAIN_RATES, _FAR_RATES = (0.005, 0.02, 0.08), (0.08, 0.32, 1.28), (0.05, 0.1, 0.2)


def _study(
    name: str,
    title: str,
    config: Config,
    rates: tuple[float, ...],
    rows: Sequence[TableRow],
    tuning_seeds: int = 0,
    pairs: Sequence[tuple[str, str]] = (),
) -> Table:
    # By class, a rate that fails with one seed wins with another.
    seeds = tuning_seeds or (3 if config.setting == "federated" else 1)
    steps = 2 * (config.setting == "federated")
    return study_of(name, title, config, rates, rows, 0, seeds, pairs, batch=4, local_steps=steps)


def _each(
    methods: Sequence[tuple[str, Mean]], variants: Sequence[tuple[str, dict[str, Any]]], density: float = 0.01
) -> list[TableRow]:
    return [
        row_with(method, note, density, mean, **options)
        for note, options in variants
        for method, mean in methods
    ]


_Methods = Sequence[tuple[str, Mean]]
_BOTH: _Methods = (("rtop-k", "nodes"), ("top-k", "nodes"))
_BOTH_MEANS: _Methods = (
    ("rtop-k", "received"),
    ("rtop-k", "nodes"),
    ("top-k", "received"),
    ("top-k", "nodes"),
)

_FROM_TOP_K = [(f"r = {r:g} k", {"r_over_k": r}) for r in (1.0, 1.5, 2.0, 3.0, 5.0)]  # to the paper's r = n k


def _exchanges(nodes: int, second: bool = False) -> list[TableRow]:
    """All-gather and all-reduce at equal k, 1 %, and at equal bytes: each node receives 2 % of the entries.

    `second` adds the other rules for what owners pass on.
    """

    def row(density: float, note: str, **options: Any) -> TableRow:
        return row_with("top-k", f"{nodes} nodes, {note}", density, nodes=nodes, **options)

    rows = [
        row(0.01, "all-gather"),
        row(0.01, "all-reduce", exchange="all-reduce"),
        row(0.01, "all-reduce, 2 % passed on", exchange="all-reduce", owner_density=0.02),
        row(0.02 / (nodes - 1), "all-gather, bytes of the all-reduce"),
        row(0.005, "all-reduce, 1.5 % passed on", exchange="all-reduce", owner_density=0.015),
    ]
    if second:
        rows += [
            row(0.01, f"all-reduce, {told}", exchange="all-reduce", owner_rule=rule)
            for told, rule in (("owners draw", "rtop-k"), ("nodes keep what owners refuse", "intersection"))
        ]
    return rows


_ON_5, _ON_20 = _exchanges(5), _exchanges(20, second=True)


# Rows as the README's diff makes them: biases in full, momentum 0.9, the mean over the nodes.
_KEPT = (("", "error-feedback"), ("momentum in the memory", "momentum-correction"))
_DENSITIES = (0.01, 0.001)


def _as_shipped(
    method: str, density: float = 1.0, *notes: str, mean: Mean = "nodes", **options: Any
) -> TableRow:
    own = {"dense_biases": method != "powersgd", **options}
    return row_with(method, ", ".join(filter(None, notes)), density, mean, **own)


def _reduced(rows: Sequence[TableRow]) -> list[tuple[str, str]]:
    """Pair the rows of `_exchanges`: at equal k, at equal bytes, and the owners' rules."""
    return [
        (rows[one].label, rows[other].label)
        for one, other in ((1, 0), (2, 0), (4, 3), (5, 1), (6, 1))
        if one < len(rows)
    ]


def _shipped() -> list[TableRow]:
    """Top-k and r = 2 k, with momentum at the optimizer and in the memory."""
    return [_as_shipped("dense")] + [
        _as_shipped(method, density, told, note, memory=memory, r_over_k=among)
        for density in _DENSITIES
        for note, memory in _KEPT
        for method, among, told in (("top-k", 0.0, ""), ("rtop-k", 2.0, "r = 2 k"))
    ]


def _moved(rows: Sequence[TableRow]) -> list[tuple[str, str]]:
    """Pair the rows with momentum in the memory with those at the optimizer, and with the baseline."""
    moved = {row.label: row.label.partition(f", {_KEPT[1][0]}")[0] for row in rows if _KEPT[1][0] in row.note}
    known = {row.label for row in rows}
    return [(label, other) for label, at in moved.items() for other in (at, "baseline") if other in known]


def _rivals(ranks: Sequence[int]) -> list[TableRow]:
    return [
        _as_shipped("dense", 1.0, "fp16", values="fp16"),
        *(_as_shipped("powersgd", 1.0, f"rank {rank}", matrix_rank=rank) for rank in ranks),
    ]


def _unmasked(density: float) -> TableRow:
    return _as_shipped(
        "top-k", density, _KEPT[1][0], "not masked", masking=False, memory="momentum-correction"
    )


def _shipped_beside() -> list[TableRow]:
    """What else could be the default, and the rivals."""
    kept: dict[str, Any] = {"memory": "momentum-correction"}
    rows = _rivals((1, 2))
    for density in _DENSITIES:
        rows += [
            _as_shipped("top-k", density, "4 bits", values="4bit"),
            _as_shipped("top-k", density, "4 bits", _KEPT[1][0], values="4bit", **kept),
            _as_shipped("rtop-k", density, "r = n k", _KEPT[1][0], **kept),
            _as_shipped("dealt-k", density),
            _as_shipped("dealt-k", density, _KEPT[1][0], **kept),
            _as_shipped("top-k", density, mean="received"),
            _as_shipped("top-k", density, _KEPT[1][0], mean="received", **kept),
            _unmasked(density),
        ]
    return rows


def _cells(density: float = 0.01) -> list[TableRow]:
    """The rules, means, memories and values that `_shipped` and `_around` leave out."""
    rules: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("top-k", "", {}), ("rtop-k", "r = 2 k", {"r_over_k": 2.0}), ("rtop-k", "r = n k", {}), ("dealt-k", "", {}),
    )  # fmt: skip
    rows = [
        _as_shipped(method, density, told, note, mean=mean, memory=memory, **own)
        for note, memory in _KEPT
        for mean in ("nodes", "received")
        for method, told, own in rules
    ]
    known = [row.label for row in (*_shipped(), *_around(0))]
    four = [
        _as_shipped(method, density, told, "4 bits", note, memory=memory, values="4bit", **own)
        for method, told, own in rules[:2]
        for note, memory in _KEPT
    ]
    return [row for row in (*rows, *four) if row.label not in known]


def _around(warm_up: int) -> list[TableRow]:
    """One step from the default in each direction: is anything better?"""

    def row(
        density: float, note: str = "", method: str = "top-k", mean: Mean = "nodes", **own: Any
    ) -> TableRow:
        return _as_shipped(method, density, note, _KEPT[1][0], mean=mean, memory=_KEPT[1][1], **own)

    return [
        each
        for density in _DENSITIES
        for each in (
            row(density),
            row(density, "4 bits", values="4bit"),
            row(density, "r = 1.25 k", "rtop-k", r_over_k=1.25),
            row(density, "r = n k", "rtop-k"),
            row(density, method="dealt-k"),
            row(density, mean="received"),
            row(density, "warm-up", warm_up=warm_up),
            row(density, "r grows to n k", "rtop-k", r_over_k=1.0, r_over_k_end=5.0),
            row(density, "r falls from n k", "rtop-k", r_over_k=5.0, r_over_k_end=1.0),
            row(density, "what waits decays by 0.99", residual_decay=0.99),
            row(density, "what waits decays by 0.95", residual_decay=0.95),
        )
    ]


def _with_default(rows: Sequence[TableRow]) -> list[tuple[str, str]]:
    """Pair rows with the default at their density."""
    default = {density: _as_shipped("top-k", density, _KEPT[1][0]) for density in _DENSITIES}
    moving = [
        row for row in rows if "r_over_k_end" in dict(row.options)
    ]  # another fixed r is paired in any case
    others = [row for row in rows if row in moving or "r_over_k" not in dict(row.options)]
    named = [(row.label, default[row.density].label) for row in others]
    return [(one, other) for one, other in named if one != other]


def _masked_or_not() -> list[tuple[str, str]]:
    """Pair the default without masking with the default."""
    return [(_unmasked(at).label, _unmasked(at).label.removesuffix(", not masked")) for at in _DENSITIES]


_CELLS = _cells()

STUDIES = {
    "warm-up": _study(
        "study-warm-up", "Warm-up at 99 %: with k / r = 1/5, densities above 20 % make rTop-k random-k",
        _BATCHES, _RATES,
        _each(_BOTH, (
            ("no warm-up", {}),
            ("from 25 %, 150 rounds", {"warm_up": 150}),
            ("from 5 %, 150 rounds", {"warm_up": 150, "warm_up_start": 0.05}),
            ("from 25 %, 500 rounds", {"warm_up": 500}),
        )),
    ),
    "candidates": _study(
        "study-candidates", "Among how many to draw, distributed, error feedback, 99 %", _BATCHES, _RATES,
        _each((("rtop-k", "nodes"),), [
            *((f"i.i.d., {note}", options) for note, options in _FROM_TOP_K),
            *((f"by class, {note}", {**options, "split": "class"}) for note, options in _FROM_TOP_K),
        ]),
    ),
    "candidates-plain": _study(
        "study-candidates-plain", "Among how many to draw, distributed, error feedback, no momentum, 99 %",
        dataclasses.replace(_BATCHES, momentum=0.0), _PLAIN_RATES,
        _each((("rtop-k", "nodes"),), [
            (f"{told}, r = {r:g} k", {"r_over_k": r, "split": split})
            for told, split in (("i.i.d.", "iid"), ("by class", "class")) for r in (1.0, 2.0, 5.0)
        ]),
    ),
    "candidates-federated": _study(
        "study-candidates-federated", "Among how many to draw, by class, federated, no memory, 99 %",
        dataclasses.replace(_FAR, split="class"), _FAR_RATES,
        _each((("rtop-k", "received"),), [*_FROM_TOP_K, ("r = 10 k", {"r_over_k": 10.0})]),
    ),
    "split": _study(
        "study-split", "How data is divided, federated, no memory, 99 %", _FAR, _FAR_RATES,
        _each(_BOTH_MEANS, (
            ("i.i.d.", {}),
            ("Dirichlet 0.3", {"split": "dirichlet", "alpha": 0.3}),
            ("by class", {"split": "class"}),
        )),
    ),
    "split-distributed": _study(
        "study-split-distributed", "How data is divided, distributed, error feedback, 99 %", _BATCHES, _RATES,
        _each(_BOTH_MEANS, (("i.i.d.", {}), ("by class", {"split": "class"}))),
    ),
    "visits": _study(
        "study-visits", "Rounds at 99.9 %: rounds x density is the visits of a coordinate by a node",
        _BATCHES, _RATES,
        _each(_BOTH, (
            ("300 rounds", {"rounds": 300}), ("1,000 rounds", {"rounds": 1000}),
            ("3,000 rounds", {"rounds": 3000}),
        ), density=0.001),
    ),
    "momentum": _study(
        "study-momentum", "Where momentum is, 99 %, distributed", _BATCHES, _RATES,
        _each(_BOTH, (
            ("at the centre", {}),
            ("corrected at the nodes, masked", {"memory": "momentum-correction"}),
            ("corrected, not masked", {"memory": "momentum-correction", "masking": False}),
            ("none", {"momentum": 0.0}),
        )),
    ),
    "nodes": _study(
        "study-nodes", "Number of nodes, by class, federated, no memory, 99 %",
        dataclasses.replace(_FAR, split="class"), _FAR_RATES,
        _each(_BOTH_MEANS, (
            ("2 nodes", {"nodes": 2}), ("5 nodes", {}), ("10 nodes", {"nodes": 10}),
        )),
    ),
    "exchange": _study(
        "study-exchange", "All-gather and all-reduce, distributed, error feedback, 99 %",
        dataclasses.replace(_BATCHES, batch=8, rounds=600), _RATES,
        [*_ON_5, *_ON_20], tuning_seeds=3, pairs=[*_reduced(_ON_5), *_reduced(_ON_20)],
    ),
    "exchange-cifar10": _study(
        "study-exchange-cifar10", "All-gather and all-reduce on CIFAR-10 at 16 x 16, error feedback, 99 %",
        dataclasses.replace(TABLES[1].setups["small"].config, warm_up=0, batch=8, rounds=600),
        (0.005, 0.015, 0.045), [*_ON_5, *_ON_20[:5]], pairs=[*_reduced(_ON_5), *_reduced(_ON_20[:5])],
    ),
    "exchange-table-3": _study(
        "study-exchange-table-3", "All-gather and all-reduce in Table III, federated, 99 %",
        dataclasses.replace(TABLES[3].setups["small"].config, warm_up=0), (0.015, 0.045, 0.135), _ON_5,
        pairs=_reduced(_ON_5),
    ),
    "shipped": _study(
        "study-shipped", "As the README's diff runs: digits, momentum 0.9, biases in full", _BATCHES, _RATES,
        _shipped(), tuning_seeds=3, pairs=_moved(_shipped()),
    ),
    "shipped-cifar10": _study(
        "study-shipped-cifar10", "As the README's diff runs: CIFAR-10 at 16 x 16, momentum 0.9, biases in full",
        dataclasses.replace(TABLES[1].setups["small"].config, warm_up=0, rounds=1000, evaluate_every=50),
        (0.005, 0.015, 0.045), [*_shipped(), *_rivals((1, 2)), *map(_unmasked, _DENSITIES), *_CELLS],
        pairs=[
            *_moved([*_shipped(), *map(_unmasked, _DENSITIES)]), *_masked_or_not(), *_with_default(_CELLS),
        ],
    ),
    "shipped-ptb": _study(
        "study-shipped-ptb", "As the README's diff runs: LSTM on Penn Treebank, momentum 0.9, biases in full",
        dataclasses.replace(TABLES[4].setups["small"].config, warm_up=0, rounds=1000, momentum=0.9),
        (0.3, 0.9, 2.7), [*_shipped(), *_rivals((1, 2)), *_CELLS],
        pairs=[*_moved(_shipped()), *_with_default(_CELLS)],
    ),
    "shipped-shakespeare": _study(
        "study-shipped-shakespeare", "As the README's diff runs, with AdamW: a GPT on Shakespeare, biases in full",
        Config(
            task="shakespeare", split="contiguous", batch=4, rounds=400, evaluate_every=50, optimizer="adamw",
            clip_norm=1.0,
        ),
        (0.0005, 0.002, 0.008), [*_shipped(), *map(_unmasked, _DENSITIES)],
        pairs=[*_moved(_shipped()), *_masked_or_not()],
    ),
    "shipped-adamw": _study(
        "study-shipped-adamw", "As the README's diff runs, with AdamW: digits, biases in full",
        dataclasses.replace(_BATCHES, optimizer="adamw"), (0.0005, 0.002, 0.008), _shipped(), tuning_seeds=3,
        pairs=_moved(_shipped()),
    ),
    "shipped-beside": _study(
        "study-shipped-beside", "Beside the README's diff: other rules, means and values, and rivals; digits",
        _BATCHES, _RATES, _shipped_beside(), pairs=_moved(_shipped_beside()),
    ),
    "shipped-around-cifar10": _study(
        "study-shipped-around-cifar10", "One step from the default: CIFAR-10 at 16 x 16, momentum 0.9",
        dataclasses.replace(TABLES[1].setups["small"].config, warm_up=0, rounds=1000, evaluate_every=50),
        (0.015, 0.045, 0.135), _around(100), pairs=_with_default(_around(100)),
    ),
    "shipped-around-ptb": _study(
        "study-shipped-around-ptb", "One step from the default: LSTM on Penn Treebank, momentum 0.9",
        dataclasses.replace(TABLES[4].setups["small"].config, warm_up=0, rounds=1000, momentum=0.9),
        (0.3, 0.9, 2.7), [*_around(100), *map(_unmasked, _DENSITIES)],
        pairs=[*_with_default(_around(100)), *_masked_or_not()],
    ),
    **EXPLANATIONS,
    **MAPS,
}  # fmt: skip


def study(name: str) -> Table:
    """Return a study by its name."""
    if name not in STUDIES:
        raise ValueError(f"study must be one of {', '.join(STUDIES)}, got {name!r}")
    return STUDIES[name]
