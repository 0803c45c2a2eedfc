"""Three replica groups as processes, a real lighthouse, SIGKILL: training goes on, and nothing is applied twice."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow
ROUNDS = 30  # at least, after all that happens
SERVE = """
import sys, time
from torchft._torchft import LighthouseServer
server = LighthouseServer(bind=f"[::]:{sys.argv[1]}", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=50)
print(server.address(), flush=True)
while True:
    time.sleep(1)
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, {}
        self.start_lighthouse()

    def start_lighthouse(self, port: int = 0) -> None:
        self.lighthouse = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self.lighthouse.stdout.readline().strip()

    def stop_lighthouse(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.wait()
        self.lighthouse.stdout.close()

    def restart_lighthouse(self) -> None:
        self.stop_lighthouse()
        self.start_lighthouse(int(self.address.rpartition(":")[2]))

    def start(self, number: int) -> None:
        job = [sys.executable, str(Path(__file__).with_name("replica_job.py"))]
        with (self.folder / f"said-{number}").open("a") as said:
            self.running[number] = subprocess.Popen(
                [*job, str(number), str(self.folder), self.address], stdout=said, stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
            )  # fmt: skip

    def kill(self, number: int) -> None:
        self.running[number].send_signal(signal.SIGKILL)
        self.running[number].wait()

    def log(self, number: int) -> list[dict]:
        """Every round of a replica; a line that it is writing, or was killed in, is left out."""
        path = self.folder / f"log-{number}"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def until(self, step: int, number: int = 0) -> None:
        self.wait(lambda: self.log(number) and self.log(number)[-1]["step"] >= step)

    def wait(self, what) -> None:
        deadline = time.monotonic() + 150
        while not what():
            assert time.monotonic() < deadline, [self.log(n)[-1:] for n in range(3)]
            time.sleep(0.05)

    def hold(self, number: int) -> None:
        """Stop a replica between sending and committing."""
        (self.folder / f"hold-{number}").touch()
        self.wait((self.folder / f"held-{number}").exists)

    def end(self) -> list[float]:
        """Let all replicas take part in a round again and train on for some rounds; return their scores."""
        seen = [len(self.log(n)) for n in range(3)]
        self.wait(lambda: any(len(s["receipt"][0]) == 4 for n in range(3) for s in self.log(n)[seen[n] :]))
        last = max(self.log(n)[-1]["step"] for n in range(3))
        (self.folder / "draft").write_text(str(last + ROUNDS))
        (self.folder / "draft").rename(self.folder / "goal")
        self.wait(lambda: all((self.folder / f"end-{n}").exists() for n in range(3)))
        return [json.loads((self.folder / f"end-{n}").read_text())["accuracy"] for n in range(3)]

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        self.stop_lighthouse()


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    for number in range(3):
        cluster.start(number)
    cluster.until(3)
    yield cluster
    cluster.close()


def balance(cluster: Cluster) -> dict[int, list[int]]:
    """All replicas have the same weights after each step they committed, and no message was applied twice."""
    weights, receipts = {}, {}
    for number in range(3):
        for line in cluster.log(number):
            if line["committed"]:
                assert weights.setdefault(line["step"], line["weights"]) == line["weights"], line
                assert receipts.setdefault(line["step"], line["receipt"]) == line["receipt"], line
    tokens = [token for receipt in receipts.values() for token in receipt[0][1:]]
    assert len(set(tokens)) == len(tokens)
    assert set(weights) == set(range(1, max(weights) + 1))  # every round was committed by someone
    return {step: receipt[0][1:] for step, receipt in receipts.items()}


def test_undisturbed(cluster):
    assert min(cluster.end()) > 88
    senders = balance(cluster)
    assert all(len(tokens) == 3 for step, tokens in senders.items() if step > max(senders) - ROUNDS + 2)


def test_killed_between_sending_and_committing_then_back(cluster):
    cluster.hold(2)
    cluster.kill(2)
    (cluster.folder / "hold-2").unlink()
    cluster.until(cluster.log(0)[-1]["step"] + 8)
    cluster.start(2)
    scores = cluster.end()
    assert len(set(scores)) == 1  # the one that returned has the others' weights
    assert min(scores) > 88
    senders = balance(cluster)
    assert 2 in map(len, senders.values())


def test_two_killed_at_once(cluster):
    """The third waits for one of them: two of three make a quorum, so that no two parts train apart."""
    cluster.kill(1)
    cluster.kill(2)
    alone = cluster.log(0)[-1]["step"]
    cluster.start(1)
    cluster.until(alone + 1, 1)  # two that come back together may start anew without the third
    cluster.start(2)
    assert min(cluster.end()) > 88
    assert balance(cluster)
    assert cluster.log(0)[-1]["step"] > alone


def test_a_slow_replica(cluster):
    cluster.running[1].send_signal(signal.SIGSTOP)
    time.sleep(3)
    cluster.running[1].send_signal(signal.SIGCONT)
    assert min(cluster.end()) > 88
    balance(cluster)


def test_a_lighthouse_that_restarts(cluster):
    cluster.restart_lighthouse()
    assert cluster.address
    assert min(cluster.end()) > 88
    balance(cluster)


def test_the_example_survives_a_kill():
    program = Path(__file__).parents[2] / "examples/with_torchft.py"
    done = subprocess.run([sys.executable, program, "--kill"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "replica 2 is killed" in done.stdout
    last = [line for line in done.stdout.splitlines() if "round 60" in line]
    assert last, done.stdout
    assert all(float(line.partition("accuracy ")[2].split(",")[0]) > 80 for line in last)
