"""The map of regimes is a whole factorial design, and its effects are found."""

import dataclasses
import json
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rtopk.studies.lab.arrival import predict
from rtopk.studies.paper.regimes import DESIGNS, MAPS, MEANS, RULES
from rtopk.studies.paper.regimes_page import Map, _prediction, cells, effects, more_arrives
from rtopk.studies.paper.results import RowResult
from rtopk.tools.cli import app
from rtopk.tools.show.intervals import judge


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


PLANES = ((0.5, 3.0, -0.7), (-1.0, 20.0, -0.1))  # without a memory, with one


def known_map():
    """Make a map whose leads are on known planes over how much more arrives and how long entries wait."""
    design = DESIGNS["map-digits"]
    cosines = {
        (memory, overlap, nodes): {
            "top-k": {"nodes": 0.5, "received": 0.4},
            "r = 2 k": {"nodes": 0.3, "received": 0.5 + 0.1 * overlap - 0.2 * nodes},
            "r = n k": {"nodes": 0.4 + 0.15 * nodes, "received": 0.1},
        }
        for memory, overlap, nodes in product((0, 1), repeat=3)
    }

    def lead(at, rule):
        wait = ((2.0 if rule == "r = 2 k" else design.nodes[at[2]]) - 1) / (0.01 * design.rounds[at[3]])
        constant, slope, patience = PLANES[at[0]]
        return constant + slope * more_arrives(cosines[at[:3]])[rule] + patience * wait

    found = {}
    for at, rule, mean in product(design.jobs, RULES, MEANS):
        score = 80 + (0 if rule == "top-k" else lead(at, rule)) - (mean == "nodes")
        runs = [
            {
                "config": {"seed": s},
                "metric": "accuracy",
                "higher_is_better": True,
                "final": {"accuracy": score + s / 99},
            }
            for s in range(3)
        ]
        found[at, rule, mean] = RowResult(design.row(at, rule, mean), 0.1, score, False, False, tuple(runs))
    predicted = [
        {"memory": m, "overlap": o, "nodes": n, "rounds": 10, "cosines": c}
        for (m, o, n), c in cosines.items()
    ]
    return Map("map-digits", design, found, predicted), lead


def test_a_prediction_learns_how_leads_depend_on_what_arrives_and_on_the_wait():
    known, lead = known_map()
    told = predict(list(known.predicted), known.design, known)
    for cell in told:
        for rule, (short, long) in cell["leads"].items():
            kind = cell["memory"], cell["overlap"], cell["nodes"]
            assert short == pytest.approx(lead((*kind, 0), rule), abs=1e-3)
            assert long == pytest.approx(lead((*kind, 1), rule), abs=1e-3)
    foretold = dataclasses.replace(known, predicted=told)
    leads = known.leads()
    page = "\n".join(_prediction(foretold, dict(zip(leads, judge(list(leads.values())), strict=True))))
    assert "of all 32" in page
    assert "correlation of predicted and measured leads is 1.00" in page


def test_a_map_that_has_run_is_not_predicted_any_more(tmp_path):
    """The committed prediction stays as it was made."""
    results = Path(__file__).parents[3] / "results"
    before = (results / "prediction-map-cifar10.json").read_bytes()
    for known in ("map-digits", "map-cifar10"):
        done = CliRunner().invoke(app, ["lab", "predict", "--from", known, "--results", str(results)])
        assert done.exit_code == 2
        assert "map-cifar10 has runs in" in " ".join(done.output.split())
    assert (results / "prediction-map-cifar10.json").read_bytes() == before
    watch = ["lab", "predict", "--study", "map-digits", "--from", "none", "--rounds", "1"]
    assert CliRunner().invoke(app, [*watch, "--results", str(tmp_path / "new")]).exit_code == 0
    cells = json.loads((tmp_path / "new/prediction-map-digits.json").read_text())["cells"]
    assert len(cells) == 8
    assert all(
        -1 <= cosine <= 1 for c in cells for means in c["cosines"].values() for cosine in means.values()
    )
