"""What a report accepts, and how it refuses the rest."""

import functools
import json
import math
import operator

import pytest
from records import a_table, made_up

from rtopk.tools.report.inputs import is_going_on, read, watched
from rtopk.tools.report.page import Page


def write(path, *values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_runs_that_tuned_are_left_out_where_there_are_results(tmp_path):
    tuned = [made_up(seed=1000, part="validation"), made_up("top-k", seed=1000, part="validation")]
    inputs = read([write(tmp_path / "both.jsonl", *tuned, made_up())])
    assert (len(inputs.runs), inputs.tuning) == (1, 2)
    assert "2 more runs on validation data" in Page(inputs).parts()["run"]
    alone = read([write(tmp_path / "alone.jsonl", *tuned)])
    assert (len(alone.runs), alone.tuning) == (2, 0)


def test_a_file_of_lines_a_single_record_and_a_benchmark(tmp_path):
    results = write(tmp_path / "results.jsonl", *a_table(seeds=1))
    one = tmp_path / "record.json"
    one.write_text(json.dumps(made_up(seed=7), indent=1))
    bench = write(tmp_path / "bench.json", {"rows": [{"method": "rtopk", "ms": 1.5}]})
    inputs = read([results, one, bench])
    assert len(inputs.runs) == 11
    assert [study.kind for study in inputs.studies] == ["bench"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"sweeps": [], "regime": {}, "base": {}}, "lab risk"),
        ({"outcomes": [], "problem": {}}, "lab convergence"),
        ({"looks": [], "verdict": {}, "task": "digits"}, "lab inspect"),
        ({"rows": [{"risk": 1.0}], "c": 1.0, "C": 2.0}, "lab bounds"),
        ({"rows": [{"mbit": 1.0, "step_ms": 2.0}]}, "bench link"),
        ({"rows": [{"d": 10, "over_floor": 2.0}]}, "bench compress"),
        ({"rows": [{"d": 10, "index_bits": 2.0}]}, "bench codec"),
    ],
)
def test_output_of_lab_and_benchmarks_is_told_apart(value, kind, tmp_path):
    assert [s.kind for s in read([write(tmp_path / "x.json", value)]).studies] == [kind]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([made_up(), {"kind": "novel"}], "line 2 is kind 'novel'; accepted are"),
        ([made_up(), {"a": 1, "b": 2}], "line 2 is an object with a, b; accepted are"),
        ([{"rows": []}], "rows must be a list of objects"),
        ([{"rows": [1, 2]}], "rows must be a list of objects"),
        ([[1, 2]], "line 1 is a list, not a JSON object"),
        ([{**made_up(), "config": {"task": "digits"}}], "has a configuration without setting"),
        ([{"kind": "train", "config": {}}], "line 1 is a train record without metric, curve, final"),
        ([{**made_up(), "metric": "perplexity"}], "without a score named 'perplexity'"),
    ],
)
def test_what_is_unknown_is_refused_with_file_and_line(lines, message, tmp_path):
    path = write(tmp_path / "some.jsonl", *lines)
    with pytest.raises(ValueError, match=r"some\.jsonl") as caught:
        read([path])
    assert message in str(caught.value)


def test_what_is_not_json_is_refused_with_its_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(made_up()) + "\n{half of\n")
    with pytest.raises(ValueError, match=r"x.jsonl line 2 is not JSON"):
        read([path])
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"x.jsonl line 1 is not JSON"):
        read([path])
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"x.jsonl line 1 is not JSON"):
        read([path])


def test_a_last_line_that_was_never_finished_is_left_out(tmp_path):
    """As `records.read` does: the writer was killed, or is at it."""
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(made_up()) + '\n{"kind": "tr')
    assert len(read([path]).runs) == 1


def changed(record):
    """Every record in which one entry is missing or of another kind."""
    paths = [(name,) for name in record]
    paths += [("config", name) for name in record["config"]]
    paths += [(*at, name) for at in (("final",), ("curve", 2)) for name in record["final"]]
    for *at, name in paths:
        for value in (..., None, "x", [], {}, -1, math.nan, True, math.inf):
            other = json.loads(json.dumps(record))
            part = functools.reduce(operator.getitem, at, other)
            if value is ...:
                del part[name]
            else:
                part[name] = value
            yield (*at, name), value, other


def test_a_record_is_shown_or_refused_whatever_is_wrong_with_it(tmp_path):
    """`rtopk watch` once died of a record without a method."""
    path, refused = tmp_path / "x.jsonl", 0
    for place, value, record in changed(made_up()):
        write(path, record, made_up("dense"))
        try:
            Page(read([path]), live=True).model()
        except ValueError as error:
            assert "x.jsonl line 1" in str(error), (place, value)  # noqa: PT017
            refused += 1
    assert refused > 200


def test_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to report"):
        read([tmp_path])
    with pytest.raises(ValueError, match="does not exist"):
        read([tmp_path / "none"])


def test_a_folder_with_runs_going_on_and_finished(tmp_path):
    """As `rtopk demo` leaves it: results.jsonl beside run folders, some finished, one in the middle of a line."""
    done, going = made_up(seed=0), made_up(seed=1)
    write(tmp_path / "results.jsonl", done)
    for run in (done, going):
        folder = tmp_path / "unfinished" / run["key"]
        head = {k: v for k, v in run.items() if k in ("kind", "key", "config", "metric", "parameters")}
        write(folder / "run.json", head)
        write(folder / "events.jsonl", *run["curve"][:3])
    write(tmp_path / "unfinished" / done["key"] / "record.json", done)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"round": 40, "accu')
    before = watched([tmp_path])
    inputs = read([tmp_path])
    assert [run["config"]["seed"] for run in inputs.runs] == [0, 1]
    assert [is_going_on(run) for run in inputs.runs] == [False, True]
    assert inputs.runs[1]["final"]["round"] == 30
    assert inputs.runs[1]["sent_bytes_per_round"] == 20
    with (folder / "events.jsonl").open("a") as file:
        file.write('racy": 1}\n')
    assert watched([tmp_path]) != before
