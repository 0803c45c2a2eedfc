"""Many runs side by side: signals, kills, two runners in one folder, and a file that several write to."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rtopk.state_file import write_atomically
from rtopk.studies.config import Config
from rtopk.studies.train.records import append, locked, read
from rtopk.studies.train.runner import run_all


def until(true, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody may be there to collect it


def start(*arguments):
    """Start a command in a session of its own, so that a signal to its group reaches nobody else."""
    command = [sys.executable, "-m", "rtopk", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_seed_gives_the_same_bits_with_avx2_and_avx512(tmp_path):
    """torch's sums differ in their last bits; the command line keeps to AVX2, and what it is told goes."""
    found = {}
    for told in ("", "default"):
        environment = {n: v for n, v in os.environ.items() if n != "ATEN_CPU_CAPABILITY"}
        environment |= {"ATEN_CPU_CAPABILITY": told} if told else {}
        command = [
            sys.executable,
            "-m",
            "rtopk",
            "train",
            "--rounds",
            "2",
            "--out",
            str(tmp_path / f"run{told}"),
        ]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        record = json.loads((tmp_path / f"run{told}" / "record.json").read_text())
        found[told] = record["environment"]["instructions"]
    assert found[""] != "AVX512"
    assert found["default"] in ("DEFAULT", "NO AVX")


def long_demo(folder):
    """Start a demo that does not end by itself; return when both of its workers are at work."""
    parent = start("demo", "--seeds", "1", "--rounds", "100000", "--out", folder)
    try:
        until(lambda: len(list(folder.glob("runs/*/events.jsonl"))) == 2 or parent.poll() is not None)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) >= 2
    except BaseException:
        parent.kill()
        raise
    return parent, children


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    """They save their runs and none stays behind; the parent has no say in it."""
    parent, children = long_demo(tmp_path)
    parent.kill()
    parent.stderr.close()
    assert parent.wait(60) == -signal.SIGKILL
    until(lambda: not any(is_alive(pid) for pid in children))
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_asked_to_stop_it_saves_and_ends(tmp_path):
    """Several times within milliseconds, the whole group, as `timeout -s INT` does: it once hung."""
    parent, children = long_demo(tmp_path)
    for request in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        os.killpg(parent.pid, request)
        time.sleep(0.005)
    _, said = parent.communicate(timeout=60)
    assert (parent.returncode, "Traceback" in said) == (130, False)
    until(lambda: not any(is_alive(pid) for pid in children))
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2


@pytest.mark.slow
def test_asked_while_it_starts_it_ends(tmp_path):
    """Workers that still import torch must not be broken off by a Ctrl-C of their group."""
    parent = start("demo", "--seeds", "1", "--rounds", "100000", "--out", tmp_path)
    until(lambda: (tmp_path / "runs").exists() or parent.poll() is not None or children_of(parent.pid))
    os.killpg(parent.pid, signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert (parent.returncode, "Traceback" in said) == (130, False)


def children_of(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return path.exists() and len(path.read_text().split()) >= 3  # two workers and a tracker


@pytest.mark.slow
def test_sigterm_of_a_run_saves_it(tmp_path):
    run = start("train", "--rounds", "100000", "--out", tmp_path / "run")
    until(lambda: (tmp_path / "run/events.jsonl").exists() and (tmp_path / "run/events.jsonl").stat().st_size)
    run.terminate()
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "go on with --resume" in " ".join(said.split())
    assert (tmp_path / "run/checkpoint.pt").exists()


@pytest.mark.slow
def test_two_runners_share_the_work_and_repeat_nothing(tmp_path):
    """Both end with every result; each run was made once and is recorded once."""
    pair = [start("demo", "--seeds", "1", "--rounds", "60", "--out", tmp_path) for _ in range(2)]
    for runner in pair:
        _, said = runner.communicate(timeout=300)
        assert runner.returncode == 0, said
    keys = [record["key"] for record in read(tmp_path / "results.jsonl")]
    assert len(keys) == len(set(keys)) == len(list(tmp_path.glob("runs/*/record.json")))


@pytest.mark.slow
def test_a_folder_at_work_is_refused(tmp_path):
    run = start("train", "--rounds", "100000", "--out", tmp_path / "run")
    try:
        until(lambda: (tmp_path / "run/events.jsonl").exists())
        other = start("train", "--rounds", "100000", "--resume", "--out", tmp_path / "run")
        _, said = other.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
    assert other.returncode == 1
    assert f"process {run.pid} is at work in {tmp_path / 'run'}" in said


def write_many(path, writer, count):
    for number in range(count):
        append(path, {"key": f"{writer}-{number}", "filler": "x" * (1 + 97 * number % 9000)})


def test_writers_lose_no_records(tmp_path):
    """Six processes append to one file, one of them killed in mid-line now and then; 15 of 1,800 were once lost."""
    path = tmp_path / "results.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, w, 300)) for w in range(3)]
    for writer in writers:
        writer.start()
    torn = 0
    while any(writer.is_alive() for writer in writers):
        with locked(path) as file:  # a writer that is killed leaves half a line
            os.write(file, b'{"key": "half a li')
            torn += 1
        time.sleep(0.01)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert torn > 5
    assert {record["key"] for record in read(path)} == {f"{w}-{n}" for w in range(3) for n in range(300)}


def test_a_full_disk_leaves_records_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    append(path, {"key": "first"})
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    with pytest.raises(OSError, match="No space left"):
        append(path, {"key": "second"})
    monkeypatch.undo()
    assert [record["key"] for record in read(path)] == ["first"]
    assert path.read_bytes().endswith(b"}\n")

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "page.html", b"x" * 1000)
    assert [found.name for found in tmp_path.iterdir()] == ["results.jsonl"]


def test_ctrl_c_after_the_last_run_of_a_batch_is_not_lost(tmp_path):
    """A study runs batch after batch: a request that comes while the workers leave must stop the next ones."""

    def stop(key, rounds):
        os.kill(os.getpid(), signal.SIGINT)

    config, file = Config(rounds=2, nodes=2, evaluate_every=2), tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_all([config], file, tmp_path / "runs", 2, stop)
    assert [record["key"] for record in read(file)] == [config.key]  # and what ran is recorded
