"""The paper's tables: every row runs on data made here; rates are tuned; nothing runs twice."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_data import make_cifar, make_folder, make_ptb, make_shakespeare, make_text
from typer.testing import CliRunner

from rtopk.studies.config import Config
from rtopk.studies.paper import TABLES, check_scale, regimes_page, table
from rtopk.studies.paper.ablations import STUDIES
from rtopk.studies.paper.reproduce import results_file, run_table, tuning
from rtopk.studies.paper.results import (
    BEGIN,
    END,
    PAGES,
    Comparison,
    comparisons,
    insert,
    page_tables,
    render_page,
    row_results,
)
from rtopk.studies.tasks import TASKS
from rtopk.studies.train.loop import Run
from rtopk.studies.train.records import append, read
from rtopk.studies.train.runner import key_of, run_all
from rtopk.tools.cli import app
from rtopk.tools.cli.studies import _STUDIES as HELP
from rtopk.tools.show.intervals import judge


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """All data sets of the small tasks, made up and tiny."""
    root = tmp_path_factory.mktemp("data")
    make_cifar(root, per_batch=20)
    for part in ("train", "val"):
        make_folder(
            root / "tiny-imagenet-20" / part,
            {f"n{i}": [("RGB", (64, 64))] * 7 + [("L", (64, 64))] for i in range(5)},
        )
    make_ptb(root, make_text(50, 2000), make_text(50, 300, 1), make_text(50, 300, 2))
    make_shakespeare(root, make_text(50, 5000))
    return root


def quietly(what, configs, names):
    return lambda key, rounds: None


@pytest.fixture
def data(tiny, monkeypatch):
    from rtopk.studies import tasks

    cached = (tasks.cifar10, tasks.tiny_imagenet, tasks._ptb, tasks._shakespeare)
    monkeypatch.setenv("RTOPK_DATA", str(tiny))
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def mostly_slow(names, *quick):
    """Run a few of many in the default suite: each takes seconds."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


@pytest.mark.parametrize("number", mostly_slow(TABLES, 5))
def test_every_row_of_every_table_runs(number, data, tmp_path):
    chosen = TABLES[number]
    rows = run_table(chosen, chosen.rows, "smoke", 1, 1, tmp_path, tmp_path / "work", quietly)
    assert list(rows) == list(chosen.rows)
    records = read(results_file(tmp_path, chosen, "smoke"))
    choices = {r["row"]: r for r in records if r["kind"] == "choice"}
    for row, runs in rows.items():
        assert [run["config"]["seed"] for run in runs] == [0]
        assert all(run["config"]["part"] == "test" for run in runs)
        assert runs[0]["paper"] == {
            "table": f"table-{number}", "title": chosen.title, "scale": "smoke", "row": row.label,
            "value": row.paper,
        }  # fmt: skip
        choice = choices[row.label]
        assert {run["config"]["learning_rate"] for run in runs} == {choice["chosen"]}
        assert choice["chosen"] in choice["grid"]
        best = (max if runs[0]["higher_is_better"] else min)(choice["scores"])
        assert choice["scores"][choice["grid"].index(choice["chosen"])] == best
    tuned = [r for r in records if r["kind"] == "train" and r["config"]["part"] == "validation"]
    assert len(tuned) == len(chosen.rows) * 2
    assert len(records) == len(chosen.rows) * (2 + 1 + 1)
    again = run_table(chosen, chosen.rows, "smoke", 1, 1, tmp_path, tmp_path / "work", quietly)
    assert again == rows
    assert read(results_file(tmp_path, chosen, "smoke")) == records  # nothing ran again


@pytest.mark.parametrize("name", mostly_slow(STUDIES, "nodes", "shipped", "shared-rate-4"))
def test_studies_run(name, data, tmp_path):
    chosen = STUDIES[name]
    rows = run_table(chosen, chosen.rows, "smoke", 1, 1, tmp_path, tmp_path / "work", quietly)
    labels = [row.label for row in rows]
    assert len(set(labels)) == len(labels)
    for row, runs in rows.items():
        wanted = {option: value for option, value in row.options if option != "rounds"}
        assert {option: runs[0]["config"][option] for option in wanted} == wanted
    halves = name.startswith("why-")  # they tune half runs, as tables do
    whole = chosen.setups["small"].tuning_seeds and not halves
    for row in chosen.rows if whole else ():  # at the scale that counts
        for config in chosen.tuning("small", row, 0.1):
            assert config.rounds == chosen.results("small", row, 0.1, 1)[0].rounds


def test_the_help_names_every_study():
    """It is written by hand: the command's help must not import the experiments."""
    told = HELP.rstrip(".").replace(" or ", ", ").split(", ")
    assert sorted(told) == sorted(STUDIES)


def test_tables_are_the_papers():
    figures = {n: [row.paper for row in t.rows if row.paper is not None] for n, t in TABLES.items()}
    assert figures == {
        1: [92.40, 93.25, 92.46, 89.34, 86.12, 66.81],
        2: [91.16, 92.02, 85.62, 88.51, 81.00, 61.07],
        3: [69.70, 70.63, 63.06, 65.37, 57.80, 29.19],
        4: [84.63, 82.49, 91.84, 84.31, 281.61],
        5: [82.14, 82.02, 97.05, 81.97, 130.91],
    }
    for number, chosen in TABLES.items():
        for scale, setup in chosen.setups.items():
            config = setup.config
            assert config.nodes == 5
            assert config.setting == ("distributed" if number in (1, 4) else "federated")
            assert config.memory == ("none" if number == 5 else "error-feedback")
            assert config.task in TASKS
            if scale == "small" and config.setting == "distributed":
                assert config.rounds * 0.01 >= 30  # visits at 99 %
    assert TABLES[1].setups["paper"].config.rounds == 150 * 78
    assert TABLES[4].setups["paper"].config.warm_up == 5 * 265
    with pytest.raises(ValueError, match="table must be 1 to 5, got 6"):
        table(6)
    with pytest.raises(ValueError, match="scale must be one of smoke, small, paper, got 'huge'"):
        check_scale("huge")


def tried(row, scores, higher=True):
    """Return the records of tuning runs of table 2, small scale, whose grid is 0.015, 0.045, 0.135."""
    runs = {}
    for rate, score in scores.items():
        (config,) = TABLES[2].tuning("small", row, rate)
        runs[config.key] = {**made(config, score), "higher_is_better": higher}
    return runs


@pytest.mark.parametrize(
    ("scores", "higher", "rate", "following"),
    [
        ({0.015: 3.0, 0.045: 2.0, 0.135: 4.0}, False, 0.045, []),
        ({0.015: 3.0, 0.045: 4.0, 0.135: 4.0}, True, 0.045, []),  # of equals, the smaller
        ({0.015: math.nan, 0.045: 4.0, 0.135: math.nan}, False, 0.045, []),
        ({0.015: 3.0, 0.045: 4.0, 0.135: 5.0}, True, 0.135, [0.405]),
        ({0.015: 3.0, 0.045: 4.0, 0.135: 5.0}, False, 0.015, [0.005]),
        ({0.005: 3.1, 0.015: 3.0, 0.045: 4.0, 0.135: 5.0}, False, 0.015, []),
        ({0.015: 1.0, 0.045: 2.0, 0.135: 3.0, 0.405: 4.0}, True, 0.405, [1.215]),
        ({0.015: 1.0, 0.045: 2.0, 0.135: 3.0, 0.405: 4.0, 1.215: 5.0, 3.645: 6.0}, True, 3.645, []),  # enough
        ({0.015: 1.0, 0.135: 2.0}, True, 0.135, [0.045]),  # first the grid, whole
    ],
)
def test_the_rate_is_the_best_and_the_search_goes_beyond_the_edge(scores, higher, rate, following):
    row = TABLES[2].rows[1]
    found = tuning(TABLES[2], "small", row, tried(row, scores, higher))
    assert found.rate == rate
    assert [config.learning_rate for config in found.missing] == following
    assert all(config.part == "validation" for config in found.missing)
    assert found.whole == (0.045 in scores)
    assert found.at_edge == (rate in (min(scores), max(scores)))


def test_a_rate_that_diverged_is_not_chosen_whatever_it_had_reached():
    row = TABLES[2].rows[1]
    records = tried(row, {0.015: 30.0, 0.045: 90.0, 0.135: 20.0})
    (config,) = TABLES[2].tuning("small", row, 0.045)
    assert tuning(TABLES[2], "small", row, records).rate == 0.045
    records[config.key]["diverged"] = True
    assert tuning(TABLES[2], "small", row, records).rate == 0.015


@pytest.mark.slow
@pytest.mark.parametrize("task", ["cifar10", "imagenet", "ptb", "shakespeare"])
def test_rivals_run_on_the_tables_tasks(task, data, tmp_path):
    command = ["rivals", "--task", task, "--smoke", "--seeds", "1", "--jobs", "1", "--json"]
    folders = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(app, [*command, *folders])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["method"] for row in rows} >= {"dense", "top-k", "powersgd", "threshold", "rage-k"}
    assert (tmp_path / f"rivals-{task}-smoke.png").stat().st_size > 10_000


def test_where_a_rate_has_several_seeds_their_mean_counts():
    chosen = STUDIES["nodes"]
    row, records, wanted = chosen.rows[0], {}, []
    for rate, scores in ((0.05, (90.0, 90.0, 90.0)), (0.1, (92.0, 91.0, 93.0)), (0.2, (95.0, 96.0, 20.0))):
        configs = chosen.tuning("small", row, rate)
        assert [config.seed for config in configs] == [1000, 1001, 1002]
        wanted.append(configs)
        records |= {c.key: made(c, score) for c, score in zip(configs, scores, strict=True)}
    found = tuning(chosen, "small", row, records)
    assert (found.rate, found.missing) == (0.1, ())
    del records[wanted[2][1].key]
    found = tuning(chosen, "small", row, records)
    assert (found.missing, found.whole) == ((wanted[2][1],), False)


def test_records_of_older_versions_count(tmp_path):
    """A record without an option that came later is that of the option's default."""
    config = Config(rounds=2, nodes=2, batch=4, evaluate_every=2)
    [record] = run_all([config], tmp_path / "a.jsonl", tmp_path / "work", 1, lambda key, rounds: None)
    del record["config"]["split"]
    record["key"] = "older"
    assert key_of(record) == config.key
    append(tmp_path / "b.jsonl", record)
    assert run_all([config], tmp_path / "b.jsonl", tmp_path / "work2", 1, lambda k, r: None) == [record]
    assert not (tmp_path / "work2").exists()


@pytest.mark.slow
def test_killed_and_started_again_goes_on(tiny, tmp_path):
    """SIGKILL in the middle: the next call runs what is missing, keeps what is there, and prints the table."""
    command = [
        sys.executable, "-m", "rtopk", "reproduce", "--table", "5", "--scale", "smoke", "--seeds", "1",
        "--jobs", "1", "--rows", "paper", "--data-dir", str(tiny), "--results", str(tmp_path),
        "--work", str(tmp_path / "work"),
    ]  # fmt: skip
    file = tmp_path / "table-5-smoke.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read(file)
    assert 0 < len(before) < 20
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    after = read(file)
    assert after[: len(before)] == before
    assert len(after) == 5 * (2 + 1 + 1)
    rows = json.loads(result.stdout)["rows"]
    assert [row["paper"] for row in rows] == [82.14, 82.02, 97.05, 81.97, 130.91]
    assert all(row["seeds"] == 1 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--table", "9"], "9 is not in the range 0<=x<=5"),
        ([], "name one of --table 1 to 5 and --study"),
        (["--study", "luck"], "study must be one of warm-up, candidates"),
        (["--study", "split", "--scale", "paper"], "a study has the scales smoke, small"),
        (["--table", "1", "--scale", "huge"], "scale must be one of"),
        (["--table", "1", "--rows", "some"], "rows must be all, paper or a part"),
    ],
)
def test_wrong_use(options, message, rtopk):
    result = rtopk("reproduce", *options)
    assert result.returncode == 2
    assert message in result.stderr


def written(path, row, scores, scale="small", validation=40.0, number=2):
    """Write the tuning and result records of a row of a table as runs would have."""
    chosen = TABLES[number]
    for place, rate in enumerate(chosen.setups[scale].rates):
        for config in chosen.tuning(scale, row, rate):
            append(path, made(config, validation + (place == 1)))
    rate = chosen.setups[scale].rates[1]
    for config, score in zip(chosen.results(scale, row, rate, len(scores)), scores, strict=True):
        append(path, made(config, score))


def made(config, score):
    point = {"round": config.rounds, "train_loss": 1.0, "accuracy": score}
    return {
        "kind": "train", "key": config.key, "config": config.to_dict(), "metric": "accuracy",
        "higher_is_better": True, "final": point,
        "curve": [{**point, "round": 1}, point], "sent_bytes_per_round": 100.0, "diverged": False,
    }  # fmt: skip


def test_the_better_mean_is_chosen_on_validation_data_and_the_paper_keeps_its_lead(tmp_path):
    file = results_file(tmp_path, TABLES[2], "small")
    rows = {(row.method, row.density, row.mean): row for row in TABLES[2].rows if not row.options}
    written(file, rows["rtop-k", 0.01, "nodes"], [50.0, 51.0, 52.0], validation=40.0)
    written(file, rows["rtop-k", 0.01, "received"], [20.0, 21.0, 22.0], validation=45.0)  # worse on test data
    written(file, rows["top-k", 0.01, "nodes"], [55.0, 56.0, 57.0])
    (pair,) = comparisons(TABLES[2], row_results(TABLES[2], "small", tmp_path))
    assert pair.first.row.mean == "received"
    assert pair.lead.mean == -35.0
    assert pair.paper == pytest.approx(6.40)


def test_rows_with_a_note_are_compared_with_each_other(tmp_path):
    file = results_file(tmp_path, TABLES[1], "small")
    for row in TABLES[1].rows:
        if row.method in ("rtop-k", "top-k", "dense") and row.density in (0.01, 1.0):
            written(file, row, [50.0 + len(row.note), 51.0 + len(row.note)], number=1)
    found = row_results(TABLES[1], "small", tmp_path)
    pairs = [(p.first.row.note, p.second.row.label) for p in comparisons(TABLES[1], found)]
    by_note = [
        ("", "Top-k 99 %"), ("", "baseline"),
        ("no momentum", "Top-k 99 %, no momentum"), ("no momentum", "baseline, no momentum"),
        ("r = 2 k", "Top-k 99 %"), ("r = 2 k, no momentum", "Top-k 99 %, no momentum"),
    ]  # fmt: skip
    assert pairs == by_note
    named = ("baseline", "baseline, no momentum"), ("baseline", "no such row")
    more = comparisons(dataclasses.replace(TABLES[1], pairs=named), found)
    assert [pair.label for pair in more[len(by_note) :]] == ["baseline against baseline, no momentum"]
    # Another r is not the paper's method: its figures say nothing there.
    assert [pair.paper is None for pair in more] == [False] * 4 + [True] * 3


def test_among_draws_the_one_with_r_equal_to_k_is_top_k(tmp_path):
    study = STUDIES["candidates"]
    file = results_file(tmp_path, study, "small")
    for row in study.rows:
        for rate in study.setups["small"].rates:
            append(file, made(study.tuning("small", row, rate)[0], 90.0 + (rate == 0.02)))
        for config in study.results("small", row, 0.02, 2):
            append(file, made(config, 90.0))
    labels = [pair.label for pair in comparisons(study, row_results(study, "small", tmp_path))]
    assert len(labels) == 8
    for split in ("i.i.d.", "by class"):
        for r in ("1.5", "2", "3", "5"):
            assert f"rTop-k 99 %, {split}, r = {r} k against rTop-k 99 %, {split}, r = 1 k" in labels


def test_standings_compare_with_intervals(tmp_path):
    file = results_file(tmp_path, TABLES[2], "small")
    rows = {(row.method, row.density, row.mean): row for row in TABLES[2].rows if not row.note}
    written(file, rows["rtop-k", 0.01, "nodes"], [50.0, 51.0, 52.0])
    written(file, next(row for row in TABLES[2].rows if row.note), [60.0, 61.0, 62.0])  # an r of our own
    written(file, rows["rtop-k", 0.01, "received"], [40.0, 41.0, 42.0])
    written(file, rows["top-k", 0.01, "nodes"], [55.0, 56.1, 57.0])
    written(file, rows["dense", 1.0, "nodes"], [50.2, 51.3, 52.1])
    written(file, rows["top-k", 0.001, "nodes"], [30.0])
    found = row_results(TABLES[2], "small", tmp_path)
    assert [len(s.records) for s in found] == [3, 3, 3, 1, 3, 3]
    assert not any(s.at_edge for s in found)
    ours = found[1]
    assert ours.mean == 51.0
    assert ours.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)  # t(0.975, 2) s / sqrt(3)
    assert found[3].half_width == float("inf")
    top, baseline, twice = comparisons(TABLES[2], found)
    assert top.label == "rTop-k 99 % against Top-k 99 %"  # each method with its better mean
    assert baseline.label == "rTop-k 99 % against baseline"
    assert twice.label == "rTop-k 99 %, r = 2 k against Top-k 99 %"
    assert top.lead.mean == pytest.approx(-5.0333, abs=1e-4)
    assert top.lead.half == pytest.approx(
        4.303 * 0.057735 / 3**0.5, rel=1e-3
    )  # t(0.975, 2), differences 5, 5.1, 5
    assert top.paper == pytest.approx(6.40)
    words = [verdict.word for verdict in judge([pair.lead for pair in (top, baseline, twice)])]
    assert words == ["behind", "level", "ahead"]
    page = render_page("reproduction", "small", tmp_path)
    assert "over 3 tests" in page
    line = "| rTop-k 99 % against Top-k 99 % | -5.03 ± 0.14 | ± 2.27 | < 0.001 | behind | +6.40 | no |"
    assert line in page


@pytest.mark.parametrize(
    ("paper", "word", "said"),
    [
        (6.4, "ahead", "yes"), (6.4, "behind", "no"), (6.4, "level", "no"), (6.4, "undecided", "open"),
        (0.12, "level", "yes"), (0.12, "ahead", "yes"), (0.12, "behind", "no"), (-2.0, "behind", "yes"),
        (-2.0, "level", "no"), (None, "ahead", ""),
    ],
)  # fmt: skip
def test_what_the_paper_says_is_seen_or_not_or_open(paper, word, said):
    pair = Comparison(None, None, None, paper, 0.75)  # type: ignore[arg-type]
    assert pair.agrees(word) == said


def test_a_second_search_counts_when_all_rows_have_finished_it(tmp_path):
    file = results_file(tmp_path, TABLES[2], "small")
    rows = TABLES[2].rows[:2]
    for row in rows:
        written(file, row, [50.0, 51.0])
    records = {key_of(record): record for record in read(file)}
    first = tuning(TABLES[2], "small", rows[0], records)
    assert (first.rate, first.missing) == (0.045, ())
    again = tuning(TABLES[2], "small", rows[0], records, again=True)
    # Half steps around the rate that was found, three seeds, whole runs, still on validation data.
    assert {config.learning_rate for config in again.missing} == {0.02598, 0.045, 0.07794}
    assert {config.seed for config in again.missing} == {1000, 1001, 1002}
    assert {(config.rounds, config.part) for config in again.missing} == {(150, "validation")}
    for row in rows:
        for config in tuning(TABLES[2], "small", row, {key_of(r): r for r in read(file)}, again=True).missing:
            append(file, made(config, 60.0 - (config.learning_rate != 0.07794)))
        # At the edge: one more rate, which is worse.
        for config in tuning(TABLES[2], "small", row, {key_of(r): r for r in read(file)}, again=True).missing:
            assert config.learning_rate == 0.135
            append(file, made(config, 40.0))
        for config in TABLES[2].results("small", row, 0.07794, 2):
            assert [result.rate for result in row_results(TABLES[2], "small", tmp_path)] == [0.045] * 2
            append(file, made(config, 70.0))
    found = row_results(TABLES[2], "small", tmp_path)
    assert [(result.rate, result.mean, result.tuned_again) for result in found] == [(0.07794, 70.0, True)] * 2
    assert "Rates were tuned a second time" in render_page("reproduction", "small", tmp_path)


@pytest.mark.slow  # processes start
def test_reproduce_tunes_again(tmp_path, rtopk, monkeypatch):
    setup = STUDIES["split"].setups["smoke"]
    few = {"smoke": dataclasses.replace(setup, rates=(0.05, 0.2))}
    monkeypatch.setitem(STUDIES, "few", dataclasses.replace(STUDIES["split"], setups=few))
    command = [
        "reproduce",
        "--study",
        "few",
        "--scale",
        "smoke",
        "--rows",
        "rTop-k 99 %, i.i.d.",
        "--seeds",
        "1",
    ]
    folders = ["--jobs", "1", "--results", tmp_path, "--work", tmp_path / "work"]
    rates = []
    for more in ([], ["--retune"], ["--retune"]):  # the third time there is nothing left to run
        result = rtopk(*command, *folders, *more)
        assert result.returncode == 0, result.stderr
        records = read(tmp_path / "study-split-smoke.jsonl")
        rates.append(sorted({r["config"]["learning_rate"] for r in records if r["kind"] == "train"}))
    assert rates[0] == [0.05, 0.2]
    assert rates[1] in ([0.025, 0.05, 0.1, 0.2], [0.05, 0.1, 0.2, 0.4])  # half a step around the better one
    assert rates[2] == rates[1]
    assert [r["kind"] for r in records].count("choice") == 2


def test_tables_are_rendered_and_drawn(tmp_path, rtopk):
    file = results_file(tmp_path, TABLES[2], "small")
    for row in TABLES[2].rows[:3]:
        written(file, row, [50.0, 51.0])
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # writing again changes nothing
        result = rtopk(
            "tables", "--results", tmp_path, "--write", tmp_path / "page.md", "--pictures", tmp_path
        )
        assert result.returncode == 0, result.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| rTop-k 99 % | 92.02 | 50.50 ± 6.35 | 2 | 0.045 | 100 |" in page
    assert "| rTop-k 99.9 % | 88.51 | not run yet | | | |" in page
    assert "**Incomplete**: 8 of 11 rows have not run; the fewest seeds of a row are 2." in page
    assert page.count("Not run yet.") == len(page_tables("reproduction")) - 1
    assert (tmp_path / "figure-3.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "figure-2.png").exists()
    with pytest.raises(ValueError, match="the page must hold the lines"):
        insert("no marks", "tables")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_records_say(name):
    root = Path(__file__).parents[3]
    page = (root / "docs" / f"{name}.md").read_text()
    render = regimes_page.render if name == "regimes" else partial(render_page, name)
    assert insert(page, render("small", root / "results")) == page


def test_every_study_is_on_one_page():
    shown = [table for name in PAGES for table in page_tables(name).values()]
    assert sorted(table.name for table in shown) == sorted(
        t.name for t in (*TABLES.values(), *STUDIES.values())
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 5])
def test_under_torchrun_the_same_command_gives_the_same_weights(number, tiny, tmp_path):
    """Five processes, one node each, distributed and federated; rates, rows and weights as in one process."""
    options = ["reproduce", "--table", str(number), "--scale", "smoke", "--seeds", "1", "--rows", "paper"]
    options += ["--jobs", "1", "--data-dir", str(tiny)]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "5",
        "-m",
        "rtopk",
    ]
    found = []
    for name, command in (("one", [sys.executable, "-m", "rtopk"]), ("five", torchrun)):
        folders = ["--results", str(tmp_path / name), "--work", str(tmp_path / name / "work")]
        result = subprocess.run(
            [*command, *options, *folders], capture_output=True, text=True, timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("scale smoke") == 1  # one process talks
        found.append(read(tmp_path / name / f"table-{number}-smoke.jsonl"))
    one, five = ({r["key"]: r.get("weights", r.get("chosen")) for r in records} for records in found)
    assert one == five


@pytest.mark.slow
@pytest.mark.skipif("RTOPK_DATA" not in os.environ, reason="needs the real data: RTOPK_DATA=folder")
@pytest.mark.parametrize(
    ("number", "row"),
    [(number, row) for number, t in TABLES.items() for row in t.rows if row.paper is not None],
    ids=lambda value: str(value) if isinstance(value, int) else value.label.replace(" ", ""),
)
def test_two_rounds_of_every_row_at_the_papers_scale(number, row):
    """The paper's models and data; rTop-k at its first density has the paper's batch, other rows a small one.

    Without a GPU a batch takes a minute or two, and what sets rows apart comes after it. A federated round is
    cut to one step: an epoch takes hours here.
    """
    chosen = TABLES[number]
    config = chosen.results("paper", row, chosen.setups["paper"].rates[0], 1)[0]
    first = row is next(row for row in chosen.rows if row.method == "rtop-k")
    if not first:
        config = dataclasses.replace(config, batch=2)
    if config.setting == "federated":
        config = dataclasses.replace(config, local_steps=1)
    if config.task == "imagenet" and not (Path(os.environ["RTOPK_DATA"]) / "imagenet").exists():
        config = dataclasses.replace(config, task="imagenet-sample")
    run = Run(config)
    before = run.vector()
    for _ in range(2):
        run.advance()
    assert run.round == 2
    assert 0 < run.loss < 12
    # Warm-up starts at a density of 25 %; five nodes and two rounds together move at least that much.
    assert int((run.vector() != before).sum()) > 0.2 * run.layout.size
    assert run.sent > 4 * 0.25 * run.layout.size
    if not first:
        return
    again = Run(config)
    again.load_state_dict(run.state_dict())
    assert again.round == 2
    assert torch.equal(again.vector(), run.vector())
    held = run.task.held_out
    few = held[: 20 * 40] if isinstance(held, torch.Tensor) else tuple(part[:8] for part in held)
    run.task = dataclasses.replace(run.task, held_out=few)  # all of it takes minutes here
    scores = run.evaluate()
    assert math.isfinite(scores["loss"])
    assert scores[run.task.metric] > 0 or run.task.higher_is_better
