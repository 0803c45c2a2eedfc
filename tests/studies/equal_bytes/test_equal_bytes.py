"""The comparison at equal bytes: it fits bytes, tunes on validation data, and runs on test data."""

import dataclasses
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rtopk.select import METHODS
from rtopk.studies.equal_bytes import PANELS, Budget, Entrant, retuned
from rtopk.studies.equal_bytes.fit import (
    CLOSE,
    EntrantResult,
    Runs,
    entrant_runs,
    recorded_results,
    run_together,
)
from rtopk.studies.equal_bytes.rivals_page import marks, pairs, verdicts
from rtopk.studies.paper import TUNING_SEED
from rtopk.studies.train.records import Results
from rtopk.tools.cli import app
from rtopk.tools.report.inputs import read
from rtopk.tools.report.series import collect
from rtopk.tools.show.intervals import lead, plus_minus
from test_readme import ROOT, blocks

PANEL = PANELS["digits"][1]
SIZE = 26_122


class World:
    """Answers with what an imagined run would have sent and reached; keeps what it was asked."""

    def __init__(self, best_rate):
        self.best_rate = best_rate
        self.asked = []

    def __call__(self, configs):
        self.asked += configs
        return [self.record(config) for config in configs]

    def record(self, config):
        entries = config.density * SIZE
        if config.method == "threshold":
            entries = 0.002 / config.threshold**1.8 / config.learning_rate**0.4
        sent = 3488.0 if config.method == "powersgd" else 40 + 5.2 * entries
        score = 90.0 - abs(math.log(config.learning_rate / self.best_rate))
        return {
            "key": config.key, "config": config.to_dict(), "metric": "accuracy", "higher_is_better": True,
            "final": {"accuracy": score, "loss": 1.0}, "sent_bytes_per_round": sent,
        }  # fmt: skip


@pytest.mark.parametrize("best", [0, 1, 3, 5])
@pytest.mark.parametrize("method", ["dealt-k", "threshold", "powersgd"])
def test_an_entrant_is_fitted_tuned_and_run(method, best):
    world = World(PANEL.rates[best])
    (result,) = run_together(
        [entrant_runs(PANEL, Budget(matrix_rank=1), Entrant(method, "received"), 3)], world
    )
    assert result.target == 3488.0
    assert result.sent_bytes_per_round == pytest.approx(3488.0, rel=CLOSE)
    assert result.rate == PANEL.rates[best]
    # Both neighbours of the best were tried, unless it is at the end of the grid.
    tried = {run["config"]["learning_rate"] for (run,) in result.tried}
    assert {PANEL.rates[i] for i in (best - 1, best, best + 1) if 0 <= i < len(PANEL.rates)} <= tried
    assert [record["config"]["seed"] for record in result.records] == [0, 1, 2]
    for config in world.asked:
        assert (config.part == "test") == (config.seed != TUNING_SEED)
        assert config.split == PANEL.config.split
    # Nothing is decided by the test set: it is asked for last.
    assert [config.part for config in world.asked[-3:]] == ["test"] * 3


@pytest.mark.parametrize("method", ["rtop-k", "threshold"])
def test_a_rate_that_wins_with_one_seed_only_is_not_chosen(method):
    panel = dataclasses.replace(PANEL, tuning_seeds=3)
    world = World(panel.rates[2])
    honest = world.record

    def lucky_once(config):
        record = honest(config)
        if config.part == "validation" and config.learning_rate == panel.rates[4]:
            record["final"]["accuracy"] = 99.0 if config.seed == TUNING_SEED else 10.0
        return record

    world.record = lucky_once
    runs = entrant_runs(panel, Budget(matrix_rank=1), Entrant(method, r_over_k=2.0), 2)
    (result,) = run_together([runs], world)
    assert result.rate == panel.rates[2]
    assert all([run["config"]["seed"] for run in runs] == [1000, 1001, 1002] for runs in result.tried)
    assert all(len({run["config"]["threshold"] for run in runs}) == 1 for runs in result.tried)
    assert {record["config"]["r_over_k"] for record in result.records} == {2.0}


def test_every_panel_names_methods_that_there_are():
    for panels in PANELS.values():
        for panel in panels:
            for budget, entrants in panel.budgets:
                for entrant in entrants:
                    next(entrant_runs(panel, budget, entrant, 1))
                    assert (entrant.method != "powersgd") or budget.matrix_rank


@pytest.mark.slow
def test_smoke_runs_goes_on_and_shows_what_is_recorded(tmp_path):
    command = ["rivals", "--smoke", "--seeds", "2", "--jobs", "1", "--json"]
    folders = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    first = CliRunner().invoke(app, [*command, *folders])
    assert first.exit_code == 0, first.output
    rows = json.loads(first.stdout)["rows"]
    assert len(rows) == 2 * (1 + 4 + 2)
    assert all(len(row["scores"]) == 2 for row in rows)
    by_name = {(row["panel"], row["method"]): row for row in rows}
    for panel in {row["panel"] for row in rows}:
        top, dealt = by_name[panel, "top-k"], by_name[panel, "dealt-k, 4bit, received"]
        assert dealt["bytes_per_round"] == pytest.approx(top["bytes_per_round"], rel=0.1)
    assert (tmp_path / "rivals-digits-smoke.png").stat().st_size > 10_000
    file = tmp_path / "rivals-digits-smoke.jsonl"
    lines = file.read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "choice" for line in lines) == len(rows)
    again = CliRunner().invoke(app, [*command, *folders, "--recorded"])
    assert json.loads(again.stdout)["rows"] == rows
    assert file.read_text().splitlines() == lines
    # Without its last results an entrant is left out, and the command says nothing of it.
    kept = [line for line in lines if '"method": "threshold"' not in line]
    file.write_text("\n".join(kept) + "\n")
    fewer = CliRunner().invoke(app, [*command, *folders, "--recorded"])
    assert {row["method"] for row in json.loads(fewer.stdout)["rows"]} == {r["method"] for r in rows} - {
        "threshold"
    }
    table = CliRunner().invoke(app, [*[c for c in command if c != "--json"], *folders, "--recorded"])
    assert "digits, distributed, i.i.d." in table.stdout


@pytest.mark.slow
def test_a_rule_from_a_file_of_ones_own_takes_part(tmp_path, monkeypatch):
    """As docs/rivals.md shows it; workers, which are new processes, find it too, and the report names it."""
    (code,) = [block for block in blocks(ROOT / "docs/rivals.md", "python") if "class FirstK" in block]
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.setenv("RTOPK_RULES", "")
    monkeypatch.chdir(tmp_path)
    printed = "rtopk rivals --add mine.py:FirstK --only top-k --only rtop-k"
    assert f"\n{printed}\n" in (ROOT / "docs/rivals.md").read_text()
    command = [*shlex.split(printed)[1:], "--smoke", "--seeds", "1", "--jobs", "1", "--json"]
    result = CliRunner().invoke(app, [*command, "--results", ".", "--work", "work"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["method"].partition(",")[0] for row in rows} == {"dense", "top-k", "rtop-k", "first-k"}
    assert " runs, last first-k\n" in result.stderr  # progress where there is no terminal
    labels = {
        one.label
        for series in collect(read([Path("rivals-digits-smoke.jsonl")]).runs).values()
        for one in series
    }
    assert any(label.startswith("first-k") for label in labels)
    make = "from rtopk.studies.config import Config; print(Config(method='first-k').make_selector().label)"
    told = subprocess.run([sys.executable, "-c", make], capture_output=True, text=True, check=True)
    assert told.stdout == "FirstK\n"
    monkeypatch.delitem(METHODS, "first-k")
    for wrong, said in (
        ("none.py:FirstK", "there is no file"),
        ("mine.py", "a rule must be FILE.py:CLASS, got 'mine.py'"),
        ("mine.py:Other", "must be a rule with a name"),
    ):
        refused = CliRunner().invoke(app, ["rivals", "--smoke", "--add", wrong])
        assert refused.exit_code == 2
        assert said in refused.output
    assert "--only must be one of" in CliRunner().invoke(app, ["rivals", "--smoke", "--only", "best"]).output


@pytest.mark.slow
def test_a_page_takes_the_tables_between_its_marks(tmp_path):
    begin, end = marks("digits")
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    folders = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    command = ["rivals", "--smoke", "--seeds", "1", "--jobs", "1", *folders, "--write", str(page)]
    refused = CliRunner().invoke(app, command)
    assert f"the page must hold the lines {begin} and {end}" in str(refused.exception)
    assert not list(tmp_path.glob("*.jsonl"))  # before any run
    page.write_text(f"before\n{begin}\nstale\n{end}\nafter\n")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "stale" not in text
    assert text.startswith(f"before\n{begin}\n\ndigits, federated")
    assert text.endswith(f"|\n\n{end}\nafter\n")
    panels = text.split("digits, distributed, i.i.d.; accuracy, higher is better:\n\n")
    assert len(panels) == 2
    for panel in panels:  # every entrant in the panel's order, its score under its budget
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in panel.splitlines() if "|" in line
        ]
        assert [row[0] for row in rows[2:]] == [
            "dense", "top-k", "rtop-k", "rage-k", "dealt-k, 4bit, received", "powersgd", "threshold",
        ]  # fmt: skip
        at = {head.split("(")[1]: number for number, head in enumerate(rows[0]) if number}
        for row in rows[3:]:
            budget = "PowerSGD rank 1)" if row[0] in ("powersgd", "threshold") else "top-k 1 %)"
            assert [bool(cell) for cell in row[1:]] == [number == at[budget] for number in (1, 2)]


@pytest.mark.slow
def test_differences_of_one_entrant_to_each_other(tmp_path):
    folders = [
        "--results",
        str(tmp_path),
        "--work",
        str(tmp_path / "work"),
        "--picture",
        str(tmp_path / "x.png"),
    ]
    command = ["rivals", "--smoke", "--seeds", "2", "--jobs", "1", *folders]
    made = CliRunner().invoke(app, [*command, "--json"])
    rows = [r for r in json.loads(made.stdout)["rows"] if r["panel"] == "digits, distributed, i.i.d."]
    scores = {row["method"]: row["scores"] for row in rows}
    shown = CliRunner().invoke(app, [*command, "--recorded", "--against", "top-k"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    last = shown.stdout.split("lead over top-k")[-1]
    for other in ("dense", "rage-k"):
        line = next(line for line in last.splitlines() if f"│ {other} " in line)
        found = lead(*(dict(enumerate(scores[name])) for name in (other, "top-k")), "accuracy")
        expected = f"{found.mean:+.1f}{plus_minus(found.half, 1)} /{plus_minus(found.welch, 1)}, undecided"
        assert expected in line
    unknown = CliRunner().invoke(app, [*command, "--recorded", "--against", "topk"])
    assert "no results of 'topk'" in str(unknown.exception)


RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.parametrize("task", [task for task in PANELS if (RESULTS / f"rivals-{task}.jsonl").exists()])
def test_the_page_says_what_the_records_say(task, tmp_path):
    page = RESULTS.parent / "docs" / "rivals.md"
    copy = tmp_path / "rivals.md"
    copy.write_text(page.read_text())
    command = ["rivals", "--task", task, "--recorded", "--results", str(RESULTS), "--write", str(copy)]
    result = CliRunner().invoke(app, [*command, "--picture", str(tmp_path / "picture.png"), "--json"])
    assert result.exit_code == 0, result.output
    assert copy.read_text() == page.read_text()
    # Every result has its choice line, with the rate that it ran with.
    choices = {
        (record["panel"], record["budget"], record["row"]): record["chosen"]
        for record in map(json.loads, (RESULTS / f"rivals-{task}.jsonl").read_text().splitlines())
        if record["kind"] == "choice"
    }
    for row in json.loads(result.stdout)["rows"]:
        assert choices[row["panel"], row["budget"], row["method"]] == row["learning_rate"]


def standing(panel, entrant, scores, budget=PANEL.budgets[0][0]):
    rank = int(entrant.method == "powersgd")
    config = dataclasses.replace(panel.config, method=entrant.method, mean=entrant.mean, matrix_rank=rank)
    records = [
        {
            "config": {**config.to_dict(), "seed": seed}, "metric": "accuracy", "higher_is_better": True,
            "final": {"accuracy": score}, "sent_bytes_per_round": 100.0,
        }
        for seed, score in enumerate(scores)
    ]  # fmt: skip
    return EntrantResult(panel, budget, entrant, 100.0, (), tuple(records))


def test_each_method_meets_top_k_with_its_own_mean_and_all_panels_are_judged_together():
    panels = []
    for panel in PANELS["digits"]:  # no memory, then error feedback
        names = [("top-k", "nodes"), ("top-k", "received"), ("rtop-k", "received"), ("powersgd", "nodes")]
        entrants = [Entrant(*name) for name in names]
        panel = dataclasses.replace(panel, budgets=((PANEL.budgets[0][0], tuple(entrants)),))
        scores = ([90.0, 91.0, 92.0], [95.0, 96.1, 97.0], [95.1, 96.0, 97.1], [80.0, 82.0, 81.0])
        results = [standing(panel, *of) for of in zip(entrants, scores, strict=True)]
        panels.append([*results, standing(panel, Entrant("dense"), [97.0, 98.5, 98.9], None)])
    found = [
        {entrant.label: other.entrant.label for (entrant, _), (_, other) in pairs(results).items()}
        for results in panels
    ]
    for suits, over in (("top-k, received", found[0]), ("top-k", found[1])):
        assert over == {
            "dense": suits, "top-k, received": "top-k", "rtop-k, received": "top-k, received", "powersgd": suits,
        }  # fmt: skip
    page = verdicts(panels)
    assert "over 8 tests" in page
    assert page.count("| top-k, received | +5.0 ± 0.1 / ± 2.3, ahead |") == 2
    assert page.count("| rtop-k, received | +0.0 ± 0.3 / ± 2.3, level |") == 2
    assert "over 4 tests" in verdicts(panels[:1])


def test_results_that_were_tuned_again_count_when_all_have_them(tmp_path):
    panel = dataclasses.replace(
        PANEL, budgets=((Budget(density=0.01), (Entrant("top-k"), Entrant("rtop-k"))),)
    )
    world, file = World(0.0016), tmp_path / "records.jsonl"

    def run(which, entrants, seeds):
        for entrant in entrants:
            budget = None if entrant.method == "dense" else Budget(density=0.01)
            run_together([entrant_runs(which, budget, entrant, seeds)], world)
        for config in world.asked:
            Results(file).add({**world.record(config), "kind": "train"})

    entrants = [Entrant("dense"), Entrant("top-k"), Entrant("rtop-k")]
    run(panel, entrants, 3)
    first = recorded_results(panel, file, 3)
    assert [(result.rate, result.at_edge) for result in first] == [(panel.rates[0], True)] * 3
    wider = retuned(panel)
    assert wider.rates[2:-2] == panel.rates
    assert wider.rates[:2] == (0.00064, 0.0016)
    run(wider, entrants[:2], 5)
    assert recorded_results(panel, file, 3) == first  # one is missing
    run(wider, entrants[2:], 4)
    second = recorded_results(panel, file, 3)
    assert [(result.rate, result.at_edge) for result in second] == [(0.0016, False)] * 3
    assert [len(result.records) for result in second] == [5, 5, 4]  # all seeds that there are
    assert all(len(runs) == 3 for result in second for runs in result.tried)


def test_nothing_recorded_is_an_error(tmp_path):
    result = CliRunner().invoke(app, ["rivals", "--recorded", "--results", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no result of digits yet" in str(result.exception)
    assert Runs(tmp_path / "none.jsonl", tmp_path, recorded=True)([PANEL.config]) == [None]


@pytest.mark.slow  # two processes start
def test_two_at_a_time_are_recorded_as_one_at_a_time(tmp_path):
    configs = [dataclasses.replace(PANEL.config, rounds=2, seed=seed) for seed in (0, 1, 0)]
    heard = []
    both = Runs(tmp_path / "both.jsonl", tmp_path / "work", jobs=2, on_run=heard.append)(configs)
    alone = Runs(tmp_path / "alone.jsonl", tmp_path / "alone", jobs=1)(configs)
    assert [record["weights"] for record in both] == [record["weights"] for record in alone]
    assert len(heard) == 2
    assert len((tmp_path / "both.jsonl").read_text().splitlines()) == 2
