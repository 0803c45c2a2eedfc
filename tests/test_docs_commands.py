"""Every `rtopk` command of the README and the docs is run, as a user would: in a shell, in an empty folder.

What would take minutes gets the small options of SMALL behind its own (the last of an option counts); a command
that is not in SMALL runs as it is shown, marked slow. `make demo` is `rtopk demo`, `make test` is this suite.
"""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from test_readme import PAGES, blocks

SMALL = {
    "demo": "--seeds 1 --rounds 60",
    "train": "--rounds 20 --nodes 2 --evaluate-every 10",
    "report": "",
    "watch": "",
    "--install-completion": "",
}


def commands():
    seen = {}
    for page in PAGES:
        for block in blocks(page, "") + blocks(page, "sh"):
            for line in block.splitlines():
                if line.startswith("rtopk "):
                    words = shlex.split(line, comments=True)
                    seen[shlex.join(words[1:])] = words[1]
    for line, name in seen.items():
        marks = [] if name in SMALL else [pytest.mark.slow]
        yield pytest.param(line, SMALL.get(name, ""), id=line, marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A home and a working folder in which `rtopk demo` has been run, as the docs suppose."""
    folder = tmp_path_factory.mktemp("docs")
    result = run(f"demo {SMALL['demo']}", folder)
    assert result.returncode == 0, result.stderr
    return folder


def run(line, folder):
    # A command after it keeps the shell between us and rtopk: completion asks which shell called it.
    script = f"{shlex.quote(sys.executable)} -m rtopk {line}; exit $?"
    environment = {**os.environ, "HOME": str(folder), "SHELL": "/bin/bash"}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("line", "small"), commands())
def test_command_of_the_docs_runs(line, small, folder, tmp_path):
    if line.startswith("watch "):
        watch(line, folder)
        return
    if line.startswith("train "):  # each in a folder of its own, so that none meets another's checkpoint
        small += f" --out {tmp_path / 'run'}"
    result = run(f"{line} {small}", folder)
    assert result.returncode == 0, result.stdout + result.stderr
    if line.startswith("report "):
        assert (folder / "report.html").stat().st_size > 1_000_000


def watch(line, folder):
    """A command that goes on until it is stopped: it tells its address, and Ctrl-C ends it with 130."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "rtopk", *shlex.split(line)], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert "http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "stopped watching")
