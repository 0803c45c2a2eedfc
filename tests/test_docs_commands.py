"""Every command of the README and the docs is parsed by the real command line, and run as far as time allows.

RUN says which options make a command small (of an option given twice, the last counts). ONLY_PARSED says which
commands take too long even so, and where their work is tested instead. A command in neither fails the test.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from rtopk.tools.cli import Deferred, app
from test_readme import PAGES, ROOT, blocks
from tools.report.records import a_table

RUN = {
    "advise --model": "",
    "train": "--rounds 20 --nodes 2 --evaluate-every 10",
    "report": "",
    "bench traffic": "",
    "watch": "",
    "--install-completion": "",
}
ONLY_PARSED = {
    "demo": "tests/tools/cli/test_cli.py runs it with one seed and few rounds",
    "bench compress": "tests/studies/bench/test_bench_compress.py runs it with its smallest sizes",
    "bench codec": "tests/studies/bench/test_bench_codec.py runs it with its smallest sizes",
    "bench start": "minutes of new processes; tests/studies/bench/test_bench_start.py runs it with one rank",
    "selftest": "a minute; tests/studies/bench/test_selftest.py runs it small",
    "bench link": "needs root and minutes; tests/studies/bench/test_link_bench.py runs it small on loopback",
    "advise": "needs a second host or a long benchmark; tests/tools/advise/test_advise.py tests what it does",
    "fed": "tests/flower runs both engines",
    "reproduce": "hours; tests/studies/paper/test_reproduce.py runs it at scale smoke",
    "data": "needs the data sets; tests/studies/tasks/test_data.py makes small ones",
    "tables": "writes into docs; tests/studies/paper/test_reproduce.py runs it on records of its own",
    "rivals": "hours; tests/studies/equal_bytes/test_equal_bytes.py runs it small",
    "gpt": "an hour or more; tests/studies/local/test_gpt_study.py runs it small",
    "lab": "tests/studies/lab/test_lab_cli.py runs each of them small",
}
MAKE = {  # only parsed: each is a call of what is tested elsewhere
    "demo": "rtopk demo",
    "test": "pytest -n 3",
    "test-slow": "pytest -m slow",
    "test-versions": "tests/versions.py",
    "bench": "rtopk bench",
    "docs": "mkdocs build",
    "format": "ruff format",
}


def fenced():
    """Commands that stand in blocks, to be typed."""
    for page in PAGES:
        for block in blocks(page, "") + blocks(page, "sh"):
            for line in block.splitlines():
                line = line.removeprefix("sudo ")
                if line.startswith(("rtopk ", "make ")) and "..." not in line:
                    yield shlex.join(shlex.split(line, comments=True))


def inline():
    """Commands named in the text, without those that leave something out."""
    for page in PAGES:
        for line in re.findall(r"`(?:torchrun [^`]*?-m )?((?:rtopk|make)\s[^`]*)`", page.read_text()):
            if "..." not in line and "|" not in line:
                yield " ".join(line.split())


ALL = sorted({*fenced(), *inline()})


def starts(line, table):
    """The entry of a table that a command begins with."""
    words = line.split()[1:]
    return next((name for name in table if words[: len(name.split())] == name.split()), None)


@pytest.mark.parametrize("line", [line for line in ALL if line.startswith("rtopk ")])
def test_command_is_parsed(line):
    """Names, options and values are those of the real command line."""
    command, words = typer.main.get_command(app), shlex.split(line)[1:]
    if words[0] in (
        "--install-completion",
        "--help",
    ):  # act while they are parsed: see below, and test_cli.py
        return
    context = command.make_context("rtopk", words)
    while hasattr(command, "commands") and (words := [*context._protected_args, *context.args]):
        name, command, words = command.resolve_command(context, words)
        command = command.command() if isinstance(command, Deferred) else command
        if hasattr(command, "commands") and not words:
            return  # a group by its name
        if any(param.required for param in command.params) and not words:
            return  # a command by its name, what it needs left out
        context = command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("line", [line for line in ALL if line.startswith("make ")])
def test_make_target_is_there(line):
    target = line.split()[1]
    told = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert MAKE[target] in told.stdout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A home and a working folder with the records that the docs suppose to be there."""
    results = tmp_path / "runs" / "demo" / "results.jsonl"
    results.parent.mkdir(parents=True)
    results.write_text("".join(json.dumps(record) + "\n" for record in a_table(seeds=2)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RTOPK_TENSORBOARD", "0")  # a command that sets it does so for its own process
    return tmp_path


@pytest.mark.parametrize("line", sorted({line for line in fenced() if line.startswith("rtopk ")}))
def test_command_of_the_docs_runs(line, folder):
    name = starts(line, RUN)
    if name is None:
        assert starts(line, ONLY_PARSED), f"say in RUN or ONLY_PARSED how {line!r} is tested"
        return
    if name == "watch":
        watch(line, folder)
    elif name == "--install-completion":
        install_completion(line, folder)
    else:
        result = CliRunner().invoke(app, shlex.split(f"{line} {RUN[name]}")[1:])
        assert result.exit_code == 0, result.output
    if name == "report":
        assert (folder / "report.html").stat().st_size > 1_000_000


def install_completion(line, folder):
    # A command after it keeps the shell between us and rtopk: completion asks which shell called it.
    script = f"{shlex.quote(sys.executable)} -m {line}; exit $?"
    environment = {**os.environ, "HOME": str(folder), "SHELL": "/bin/bash"}
    result = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert list(folder.glob(".bash_completions/*"))


def watch(line, folder):
    """A command that goes on until it is stopped: it tells its address, and Ctrl-C ends it with 130."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "rtopk", *shlex.split(line)[1:]], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert "http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors.strip()) == (130, "stopped watching")
