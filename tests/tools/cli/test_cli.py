"""The command line as a user meets it: real processes, exit codes, one-line errors, JSON."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rtopk.tools.cli import Deferred, app, main
from tools.report.records import a_table

RTOPK = [sys.executable, "-m", "rtopk"]
QUICK = ["--rounds", "20", "--nodes", "2", "--evaluate-every", "10"]


def rtopk(*arguments, program=None, **options):
    start = [str(Path(sys.executable).parent / program)] if program else RTOPK
    return subprocess.run(
        [*start, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


def every_command():
    """The path of every command and group there is."""

    def below(command, path):
        command = command.command() if isinstance(command, Deferred) else command
        yield path
        for name, one in getattr(command, "commands", {}).items():
            yield from below(one, [*path, name])

    return below(typer.main.get_command(app), [])


@pytest.mark.parametrize("command", list(every_command()), ids=lambda path: " ".join(path) or "rtopk")
def test_help_fits_in_80_columns(command):
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "\\[" not in result.output
    assert "..." not in result.output.partition("Commands:")[2], (
        "a summary does not fit: shorten its first line"
    )


def test_help_in_a_real_process_needs_no_torch():
    show = "import sys; from rtopk.tools.cli import app; app(standalone_mode=False); print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", show, "--help"],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    *text, modules = result.stdout.splitlines()
    assert max(map(len, text)) <= 80
    assert "typer" in modules.split()
    assert not {"torch", "numba", "numpy", "rich"} & set(modules.split())


def test_a_line_of_the_help_is_the_first_line_of_the_command():
    for name, command in typer.main.get_command(app).commands.items():
        assert command.short_help == command.command().help.partition("\n")[0], name


def test_train_writes_a_record_and_repeats(tmp_path):
    first = rtopk("train", *QUICK, "--out", tmp_path / "a", "--json")
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert json.loads((tmp_path / "a" / "record.json").read_text()) == record
    again = rtopk("train", *QUICK, "--out", tmp_path / "b", "--json")
    assert json.loads(again.stdout)["weights"] == record["weights"]
    text = CliRunner().invoke(app, ["train", *QUICK, "--out", str(tmp_path / "a"), "--resume"])
    assert "accuracy" in text.stdout
    assert "bytes sent per node and round" in text.stdout


@pytest.mark.slow
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
        (["train", "--task", "nothing", "--out", "{tmp}/x"], 2, "task must be one of"),
        (["train", "--rounds", "1", "--out", "{file}/x"], 1, "rtopk: {file}/x: Not a directory"),
        (["lab", "risk", "--family", "odd"], 2, "family must be one of"),
        (["advise", "--mbit", "-5"], 2, "mbit must be positive, got -5"),
        (["advise", "--model", "many", "--mbit", "5"], 2, "model must be a number"),
        (["advise"], 2, "how fast is the link?"),
        (["advise", "--machine", "{file}", "--mbit", "5"], 1, "{file} is not what `rtopk advise --measure"),
        (["advise", "--against", "{file}"], 1, "{file} is not what `rtopk bench link --out` writes"),
        (["advise", "--machine", "{parts}", "--mbit", "5"], 1, "{parts} is not what `rtopk advise --measure"),
        (["advise", "--against", "{parts}"], 1, "{parts} is not what `rtopk bench link --out` writes"),
        (["advise", "--against", "{empty}"], 1, "{empty} has no row of a method that is predicted"),
        (["advise", "--mbit", "inf"], 2, "mbit and latency_ms must be finite, got inf"),
        (["advise", "--mbit", "5", "--latency-ms", "nan"], 2, "must be finite, got 5.0 and nan"),
        (["advise", "--mbit", "5", "--step-ms", "nan"], 2, "step_ms must be finite"),
        (["advise", "--mbit", "5", "--model", "inf"], 2, "model must be a number"),
        (["advise", "--listen", "99999"], 2, "99999 is not in the range"),
        (["advise", "--probe", "127.0.0.1:99999"], 2, "with a port of 1 to 65535, got '127.0.0.1:99999'"),
        (["train", "--r-over-k", "0.5"], 2, "r_over_k must be at least 1, or 0"),
        (["train", "--weight-decay", "nan"], 2, "weight_decay must be finite, got nan"),
        (
            ["rivals", "--add", "{tmp}/clash.py:Mine"],
            2,
            "names a rule top-k, as rtopk does; choose another name",
        ),
        (["fed", "traffic", "--task", "nothing"], 2, "task must be one of"),
        (["fed", "traffic", "--density", "2"], 2, "density must be in (0, 1], got 2.0"),
        (["lab", "inspect", "--task", "nothing"], 2, "task must be one of"),
        (["rivals", "--add", "{parts}:Mine"], 2, "a rule must be FILE.py:CLASS, got"),
        (["lab", "risk", "--out", "{file}"], 2, "is a file"),
        (["advise", "--probe", "nowhere.invalid:9"], 1, "cannot reach nowhere.invalid:9"),
        (["tables", "--results", "{tmp}/none"], 2, "there is no folder"),
        (["bench", "link", "--loopback", "--model", "vgg"], 2, "--model must be one of resnet18"),
        (["report", "{tmp}", "-o", "{tmp}"], 2, "--out must name a file"),
    ],
)
def test_errors_are_one_line_with_the_right_code(arguments, code, message, tmp_path, monkeypatch, capsys):
    texts = {
        "file": "",
        "parts": '{"name": "a machine", "rows": [1]}',
        "empty": '{"rows": []}',
        "clash.py": 'import rtopk\nclass Mine(rtopk.Rule, method="top-k"): ...\n',
    }
    files = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    monkeypatch.setattr(sys, "argv", ["rtopk", *(a.format(tmp=tmp_path, **files) for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == code
    assert message.format(**files) in told.err
    assert len(told.err.splitlines()) == 1, "an error is one line"
    assert told.out == ""


def test_an_error_in_a_real_process(tmp_path):
    result = rtopk("report", tmp_path / "nothing")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"rtopk: {tmp_path}/nothing does not exist")
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_the_traceback(tmp_path):
    assert "Traceback" in rtopk("--debug", "report", tmp_path / "nothing").stderr


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zsh", "fish"))]
)
def test_shell_completion(shell):
    """The script of each shell is printed, and asking as the shell does names the commands."""
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = rtopk("--show-completion", shell, env=environment, program="rtopk")
    assert script.returncode == 0
    assert "_RTOPK_COMPLETE" in script.stdout
    if shell == "bash":
        asked = {"_RTOPK_COMPLETE": "complete_bash", "COMP_WORDS": "rtopk re", "COMP_CWORD": "1"}
        assert "report" in rtopk(env={**os.environ, **asked}, program="rtopk").stdout


@pytest.mark.slow
def test_tensorboard_event_files(tmp_path):
    """Every point of the record is in the event file."""
    pytest.importorskip("tensorboard")
    result = rtopk("train", *QUICK, "--tensorboard", "--out", tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    curve = json.loads(result.stdout)["curve"]
    # In a process of its own: tensorboard's own imports warn, and warnings are errors here.
    code = (
        "import json, sys;from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E;"
        "e = E(sys.argv[1]).Reload();"
        "print(json.dumps({n: [[v.step, v.value] for v in e.Scalars(n)] for n in e.Tags()['scalars']}))"
    )
    read = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tensorboard")],
        capture_output=True,
        text=True,
        check=True,
    )
    logged = json.loads(read.stdout)
    for name in ("accuracy", "loss", "sent_bytes", "residual_norm"):
        assert logged[name] == [[p["round"], pytest.approx(p[name])] for p in curve]
    assert "spent/compress" in logged


@pytest.mark.slow
def test_report_of_a_run_and_its_refusals(tmp_path):
    assert rtopk("train", *QUICK, "--out", tmp_path / "run").returncode == 0
    told = rtopk("report", tmp_path / "run", "-o", tmp_path / "page.html", "--json")
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stdout)
    assert (facts["runs"], facts["studies"]) == (1, 0)
    assert facts["bytes"] == (tmp_path / "page.html").stat().st_size < 3_000_000
    assert "rtopk train --nodes 2 --rounds 20 --evaluate-every 10" in (tmp_path / "page.html").read_text()
    (tmp_path / "odd.json").write_text('{"kind": "novel"}')
    refused = rtopk("report", tmp_path / "odd.json", "-o", tmp_path / "other.html")
    assert refused.returncode == 1
    assert "odd.json line 1 is kind 'novel'; accepted are" in refused.stderr
    assert not (tmp_path / "other.html").exists()


@pytest.mark.slow
def test_demo_small(tmp_path):
    """Every row of the demo, short: all files there, all bytes measured, a second call runs nothing again."""
    options = ["demo", "--seeds", "1", "--rounds", "60", "--tensorboard", "--out", tmp_path]
    first = rtopk(*options)
    assert first.returncode == 0, first.stderr
    assert "distributed setting" in first.stdout
    assert "± is the standard deviation over seeds" in " ".join(first.stdout.split())
    assert re.search(
        r"\d+ of 10 runs, \d+ % of the rounds, \d+ s passed, (about \d+ s left|starting)", first.stderr
    )
    assert "rtop-k 99.9 %" in first.stdout
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 10
    assert (tmp_path / "accuracy-against-bytes.png").read_bytes()[:4] == b"\x89PNG"
    assert "plotly.js (basic" in (tmp_path / "report.html").read_text()
    assert len(list(tmp_path.glob("runs/*/tensorboard/events*"))) == 10
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
    for setting in ("distributed", "federated"):
        slow, fast = (
            by[(setting, *key)]["seconds_at_100_mbit"] for key in (("dense", 1.0), ("rtop-k", 0.01))
        )
        assert 8 * 1.6 * 4 * 26_122 / 100e6 < slow < 0.1  # five nodes all-reduce 1.6 times the gradient
        assert fast < slow / 2


def test_a_command_that_is_interrupted_ends_with_130(monkeypatch):
    def stop():
        raise KeyboardInterrupt

    other = typer.Typer()
    other.command()(stop)
    monkeypatch.setattr("rtopk.tools.cli.app", other)
    monkeypatch.setattr(sys, "argv", ["rtopk"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_a_port_in_use_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "results.jsonl").write_text(json.dumps(a_table(seeds=1)[0]) + "\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in (["watch", str(tmp_path), "--port"], ["advise", "--listen"]):
            monkeypatch.setattr(sys, "argv", ["rtopk", *command, str(port)])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 1
            assert f"{port}: Address already in use" in capsys.readouterr().err
