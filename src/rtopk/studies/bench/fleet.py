"""The ranks of a benchmark: start them, one per host or all on loopback, give them orders, end them."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

from rtopk.studies.bench.hosts import INTERFACE, Hosts

PORT = 29_400  # on hosts of our own nobody else has it
PATIENCE = 1200.0  # seconds until an order counts as lost


class RankFailedError(RuntimeError):
    """A rank ended or did not answer."""


class Fleet:
    """`nodes` processes of torch.distributed; a context manager."""

    def __init__(self, nodes: int, hosts: Hosts | None) -> None:
        if nodes < 2:
            raise ValueError(f"nodes must be at least 2, got {nodes}")
        self.nodes = nodes
        self.hosts = hosts
        self._ranks: list[subprocess.Popen[str]] = []
        self._errors: list[IO[bytes]] = []

    def __enter__(self) -> "Fleet":
        address, port = "127.0.0.1", PORT
        if self.hosts is None:
            with socket.socket() as free:
                free.bind((address, 0))
                port = free.getsockname()[1]
        else:
            address = self.hosts.addresses[0]
        command = [sys.executable, "-m", "rtopk.studies.bench.rank"]
        for rank in range(self.nodes):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.nodes),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo" if self.hosts is None else INTERFACE,
                "OMP_NUM_THREADS": "1",  # ranks share the cores
            }
            errors = tempfile.TemporaryFile()
            self._errors.append(errors)
            self._ranks.append(
                subprocess.Popen(
                    command if self.hosts is None else self.hosts.command(rank, command),
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    bufsize=1,
                )
            )
        try:
            self._answers(range(self.nodes))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def order(self, order: str, **arguments: Any) -> list[dict[str, Any]]:
        """Give all ranks an order, return their answers in rank order."""
        return self._order(range(self.nodes), order, arguments)

    def order_first(self, order: str, **arguments: Any) -> dict[str, Any]:
        """Give an order to rank 0 alone."""
        return self._order(range(1), order, arguments)[0]

    def _order(self, ranks: Sequence[int], order: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        line = json.dumps({"order": order, **arguments}) + "\n"
        for rank in ranks:
            process = self._ranks[rank]
            if process.stdin is None or process.poll() is not None:
                raise self._failure(rank, "has ended")
            try:
                process.stdin.write(line)
            except BrokenPipeError:
                raise self._failure(rank, "has ended") from None
        return self._answers(ranks)

    def _answers(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Wait for one line of each rank; a rank that ends instead ends the wait."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(_out(self._ranks[rank]), selectors.EVENT_READ, rank)
            while len(answers) < len(ranks):
                events = selector.select(timeout=max(0.0, deadline - time.monotonic()))
                if not events:
                    late = sorted(set(ranks) - set(answers))
                    raise self._failure(late[0], f"did not answer within {PATIENCE:.0f} s")
                for key, _ in events:
                    line = _out(self._ranks[key.data]).readline()
                    if not line:
                        raise self._failure(key.data, "has ended")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in ranks]

    def _failure(self, rank: int, what: str) -> RankFailedError:
        self._errors[rank].seek(0)
        said = self._errors[rank].read().decode(errors="replace").strip().splitlines()
        return RankFailedError(f"rank {rank} {what}: {' | '.join(said[-3:]) or 'it said nothing'}")

    def close(self) -> None:
        """End the ranks, by process id."""
        for rank in self._ranks:
            if rank.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.stdin.close()  # the end of orders
        for rank in self._ranks:
            try:
                rank.wait(timeout=5)
            except subprocess.TimeoutExpired:
                rank.send_signal(signal.SIGKILL)
                rank.wait()
            _out(rank).close()
        for errors in self._errors:
            errors.close()
        self._ranks, self._errors = [], []


def _out(rank: subprocess.Popen[str]) -> IO[str]:
    if rank.stdout is None:
        raise RuntimeError("the rank was started without a pipe")
    return rank.stdout
