"""Seconds to a score: rounds on the curve times seconds of a step."""

import json
from pathlib import Path

import pytest

from rtopk.studies.bench import time_to_score
from rtopk.studies.bench.link import from_json
from rtopk.studies.bench.time_to_score import STEPS, STUDY, Times, reached
from rtopk.studies.paper.results import RowResult

ROOT = Path(__file__).parents[3]


def record(*curve):
    points = [{"round": at, "accuracy": score} for at, score in curve]
    return {"curve": points, "metric": "accuracy", "higher_is_better": True, "final": points[-1]}


@pytest.mark.parametrize(
    ("target", "rounds"), [(10.0, 5.0), (20.0, 10.0), (25.0, 15.0), (30.0, 20.0), (45.0, 40.0), (51.0, None)]
)
def test_a_score_is_reached_on_the_line_between_two_evaluations(target, rounds):
    assert reached(record((10, 20.0), (20, 30.0), (30, 25.0), (40, 45.0), (50, 50.0)), target) == rounds


def test_one_seed_that_never_reaches_it_is_never():
    runs = (record((10, 20.0)), record((10, 10.0)))
    result = RowResult(STUDY.rows[0], 0.1, 0.0, at_edge=False, tuned_again=False, records=runs)
    one = Times(result, "dense", {10.0: 2.0})
    assert one.rounds(10.0) == 7.5
    assert one.rounds(15.0) is None


def test_every_row_is_of_the_study_and_of_the_benchmark():
    assert set(STEPS) <= {row.label for row in STUDY.rows}
    links = from_json(json.loads((ROOT / "results/links.json").read_text()))
    measured = {(row.method, row.density, row.values, row.mbit) for row in links if row.nodes == 4}
    assert {(*key, mbit) for key in STEPS.values() for mbit in time_to_score.RATES} <= measured


def test_steps_that_were_not_measured_are_named():
    links = from_json(json.loads((ROOT / "results/links.json").read_text()))
    slow = [row for row in links if row.mbit != 10.0]
    with pytest.raises(
        ValueError, match=r"resnet18 on 4 nodes .* 5 of 15 are missing: run `rtopk bench link`"
    ):
        time_to_score.times(ROOT / "results", slow)


def test_the_page_says_what_the_records_say():
    links = from_json(json.loads((ROOT / "results/links.json").read_text()))
    found = time_to_score.times(ROOT / "results", links)
    assert len(found) == len(STEPS)
    assert time_to_score.render(found) in (ROOT / "docs/links.md").read_text()
