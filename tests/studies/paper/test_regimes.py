"""The map of regimes is a whole factorial design, and its effects are found."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest

from rtopk.studies.paper.regimes import DESIGNS, MAPS, MEANS, RULES
from rtopk.studies.paper.regimes_page import cells, effects


@pytest.mark.parametrize("name", MAPS)
def test_every_level_meets_every_other(name):
    design, rows = DESIGNS[name], MAPS[name].rows
    assert len(rows) == len(set(rows)) == len({row.label for row in rows}) == 16 * 3 * 2
    for levels in design.factors.values():
        for (_, low), (_, high) in [levels]:
            for option in (low, high):
                assert sum(option.items() <= dict(row.options).items() for row in rows) == 48
    configs = [MAPS[name].results("small", row, 0.1, 1)[0] for row in rows]
    assert len({config.key for config in configs}) == 96
    paper = [config.make_selector().considered(10, 10_000) for config in configs if config.method == "rtop-k"]
    assert Counter(paper) == {20: 32, 40: 16, 100: 16}  # r = 2 k, and n k with 4 and 10 nodes


def test_effects_are_found():
    """Leads made of known effects, with noise that seeds share: the design separates all of them."""
    design = DESIGNS["map-digits"]
    found = {}
    for at, (place, mean), rule in product(design.jobs, enumerate(MEANS), RULES):
        memory, overlap, nodes, rounds = at
        lead = 1.0 + 2.0 * memory - 3.0 * (nodes == place)  # nodes x mean: -3 where alike
        base = {seed: 50 + 7 * rounds + 0.3 * seed * overlap for seed in range(10)}
        found[at, rule, mean] = SimpleNamespace(
            by_seed={s: b + lead * (rule == "r = 2 k") + 0.01 * (s % 3) * memory for s, b in base.items()}
        )
    known = effects(design, found, "r = 2 k")
    assert known["mean over all cells"].mean == pytest.approx(1 + 1 - 1.5, abs=0.05)
    assert known["memory"].mean == pytest.approx(2, abs=0.05)
    assert known["nodes x mean"].mean == pytest.approx(-3, abs=0.05)
    for name, effect in known.items():
        if name not in ("mean over all cells", "memory", "nodes x mean"):
            assert effect.mean == pytest.approx(0, abs=0.05), name
    assert effects(design, found, "r = n k")["memory"].mean == pytest.approx(0, abs=0.05)


def test_cells_are_those_that_have_run():
    design = DESIGNS["map-digits"]
    at = design.jobs[3]
    some = SimpleNamespace(row=design.row(at, "r = n k", "received"))
    assert cells(design, [some]) == {(at, "r = n k", "received"): some}
