"""Many runs side by side: what becomes of the workers when the process that started them is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    """They save their runs and none stays behind; the parent has no say in it, so any signal will do."""
    command = [sys.executable, "-m", "rtopk", "demo", "--seeds", "1", "--rounds", "100000", "--out", tmp_path]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    parent = subprocess.Popen([*map(str, command)], env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)
    try:
        until(lambda: len(list(tmp_path.glob("runs/*/events.jsonl"))) == 2)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) >= 2
    finally:
        parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == -signal.SIGTERM
    until(lambda: not any(is_alive(pid) for pid in children))
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2
