"""The command line as a user meets it: real processes, exit codes, one-line errors, JSON."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

RTOPK = [sys.executable, "-m", "rtopk"]
QUICK = ["--rounds", "20", "--nodes", "2", "--evaluate-every", "10"]


def rtopk(*arguments, **options):
    return subprocess.run(
        [*RTOPK, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.parametrize("command", [[], ["train"], ["demo"]])
def test_help_fits_in_80_columns(command):
    result = rtopk(*command, "--help", env={**os.environ, "COLUMNS": "80"})
    assert result.returncode == 0
    assert "Usage: " in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_train_writes_a_record_and_repeats(tmp_path):
    first = rtopk("train", *QUICK, "--out", tmp_path / "a", "--json")
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert json.loads((tmp_path / "a" / "record.json").read_text()) == record
    again = json.loads(rtopk("train", *QUICK, "--out", tmp_path / "b", "--json").stdout)
    assert again["weights"] == record["weights"]
    text = rtopk("train", *QUICK, "--out", tmp_path / "a", "--resume")
    assert "accuracy" in text.stdout
    assert "bytes sent per node and round" in text.stdout


def test_ctrl_c_saves_and_resume_goes_on_to_the_bit(tmp_path):
    # Enough rounds that the signal meets the run; stopped and resumed, it need not be waited for.
    options = ["train", "--rounds", "500", "--nodes", "1", "--batch", "8", "--out", str(tmp_path / "run")]
    process = subprocess.Popen([*RTOPK, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "events.jsonl").exists():  # written when the run begins
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    resumed = rtopk(*options, "--resume", "--json")
    whole = rtopk(*options[:-1], str(tmp_path / "whole"), "--json")
    assert json.loads(resumed.stdout)["weights"] == json.loads(whole.stdout)["weights"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "--density", "1.5"], 2, "density must be in (0, 1], got 1.5"),
        (["train", "--method", "best"], 2, "method must be one of"),
        (["train", "--no-such-option"], 2, "No such option"),
        (["nonsense"], 2, "No such command"),
        (["train", "--task", "nothing", "--out", "{tmp}/x"], 1, "task must be one of"),
        (["train", "--rounds", "1", "--out", "{file}/x"], 1, "Not a directory"),
    ],
)
def test_errors_are_one_line_with_the_right_code(arguments, code, message, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    result = rtopk(*(a.format(tmp=tmp_path, file=file) for a in arguments))
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback(tmp_path):
    assert "Traceback" in rtopk("--debug", "train", "--task", "nothing", "--out", tmp_path / "x").stderr


def test_demo_small(tmp_path):
    """Every row of the demo, short: all files there, all bytes measured, a second call runs nothing again."""
    options = ["demo", "--seeds", "1", "--rounds", "60", "--out", tmp_path]
    first = rtopk(*options)
    assert first.returncode == 0, first.stderr
    assert "distributed setting" in first.stdout
    assert "rtop-k 99.9 %" in first.stdout
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 10
    assert (tmp_path / "accuracy-against-bytes.png").read_bytes()[:4] == b"\x89PNG"
    rows = json.loads(rtopk(*options, "--json").stdout)["rows"]
    assert (tmp_path / "results.jsonl").read_text().splitlines() == lines
    assert {(row["setting"], row["method"], row["density"]) for row in rows} == {
        (setting, method, density)
        for setting in ("distributed", "federated")
        for method, density in [
            ("dense", 1.0), ("top-k", 0.01), ("random-k", 0.01), ("rtop-k", 0.01), ("rtop-k", 0.001),
        ]
    }  # fmt: skip
    by = {(row["setting"], row["method"], row["density"]): row for row in rows}
    assert by["distributed", "dense", 1.0]["sent_bytes_per_round"] >= 4 * 26_122
    assert by["distributed", "rtop-k", 0.01]["times_less"] > 30
