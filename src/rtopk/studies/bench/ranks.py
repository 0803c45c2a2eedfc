"""The ranks of `rtopk bench link`: the parent gives orders as JSON lines, and each rank answers in kind.

Each rank runs `python -m rtopk.studies.bench.ranks` with the variables of torch.distributed set, on a host of its
own or on loopback.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rtopk.studies.bench import StandIn, link_methods
from rtopk.studies.bench.hosts import INTERFACE, Hosts, received_bytes

PORT = 29_400  # on hosts of our own nobody else has it
TIMEOUT = 1200.0  # seconds until an order counts as lost


class RankFailedError(RuntimeError):
    """A rank ended or did not answer."""


class Ranks:
    """`nodes` processes of torch.distributed, `per_host` of them on each host; a context manager."""

    def __init__(self, nodes: int, hosts: Hosts | None, engine: str = "ddp", per_host: int = 1) -> None:
        if nodes < 2:
            raise ValueError(f"nodes must be at least 2, got {nodes}")
        self.nodes = nodes
        self.hosts = hosts
        self.engine = engine
        self.per_host = per_host
        self._ranks: list[subprocess.Popen[str]] = []
        self._errors: list[IO[bytes]] = []

    def __enter__(self) -> "Ranks":
        address, port = "127.0.0.1", PORT
        if self.hosts is None:
            with socket.socket() as free:
                free.bind((address, 0))
                port = free.getsockname()[1]
        else:
            address = self.hosts.addresses[0]
        command = [sys.executable, "-m", "rtopk.studies.bench.ranks", self.engine]
        for rank in range(self.nodes):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.nodes), "MASTER_ADDR": address,
                "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo" if self.hosts is None else INTERFACE,
                "OMP_NUM_THREADS": "1",  # ranks share the cores
            }  # fmt: skip
            errors = tempfile.TemporaryFile()
            self._errors.append(errors)
            host = rank // self.per_host
            child = subprocess.Popen(
                command if self.hosts is None else self.hosts.command(host, command), env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
            )  # fmt: skip
            self._ranks.append(child)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._answers(range(self.nodes))
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
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
        deadline = time.monotonic() + TIMEOUT
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(_out(self._ranks[rank]), selectors.EVENT_READ, rank)
            while len(answers) < len(ranks):
                events = selector.select(timeout=max(0.0, deadline - time.monotonic()))
                if not events:
                    late = sorted(set(ranks) - set(answers))
                    raise self._failure(late[0], f"did not answer within {TIMEOUT:.0f} s")
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ranks[rank].wait(timeout=1)  # its output ends a moment before it does
        how = _ending(self._ranks[rank].returncode)
        return RankFailedError(f"rank {rank} {what}{how}: {' | '.join(said[-3:]) or 'it said nothing'}")

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


def _ending(code: int | None) -> str:
    """Say how a process ended: standard error alone does not tell of a signal."""
    if code is None:
        return ""
    if code >= 0:
        return f" with exit code {code}"
    name = signal.Signals(-code).name
    return f" by {name}" + (", which the kernel sends when memory runs out" if name == "SIGKILL" else "")


def _out(rank: subprocess.Popen[str]) -> IO[str]:
    if rank.stdout is None:
        raise RuntimeError("the rank was started without a pipe")
    return rank.stdout


# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.


BARRIERS = 20  # over which the bytes of one are measured


class Rank:
    """A stand-in model under DDP, and the methods that have been used on it."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.methods: dict[str, link_methods.Measured] = {}
        self.current: link_methods.Measured = link_methods.Off()
        self.start = torch.zeros(1, requires_grad=True)

    def load(self, model: str) -> dict[str, Any]:
        """Make a model, and what the engine needs of it."""
        if dist.get_rank() == 0:
            link_methods.compile_loops()  # once, on disk for the others, who wait
        dist.barrier()
        self.methods.clear()
        self.stand_in = StandIn(model, dist.get_rank())
        self.prepare()
        return {"size": self.stand_in.size}

    def prepare(self) -> None:
        """Wrap the model, take two steps without communication: DDP rebuilds its buckets after the first."""
        self.current = link_methods.Off()
        # Batch norm's buffers are no gradients: DDP would broadcast them in forward, with every method alike.
        self.ddp = DistributedDataParallel(
            self.stand_in, gradient_as_bucket_view=True, forward_sync_buffers=False
        )
        self.ddp.register_comm_hook(self, _dispatch)
        self._step()
        self._step()

    def compute(self) -> dict[str, Any]:
        """Measure a real step; asked of one rank while the others wait."""
        return {"compute_ms": 1e3 * self.stand_in.measure()}

    def barriers(self) -> dict[str, Any]:
        """Measure the bytes and seconds of a barrier."""
        dist.barrier()
        before, started = received_bytes(self.interface), time.perf_counter()
        for _ in range(BARRIERS):
            dist.barrier()
        seconds = time.perf_counter() - started
        return {"bytes": (received_bytes(self.interface) - before) / BARRIERS, "seconds": seconds / BARRIERS}

    def visit(
        self, method: str, density: float | None, values: str | None, steps: int, warm: int, compute_ms: float,
        keep: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Take some steps with a method; the first `warm` are not counted."""
        key = f"{method} {density} {values}"
        fresh = key not in self.methods
        if fresh:
            self.methods[key] = self.make(method, density, values)
        self.current = self.methods[key]
        self.stand_in.seconds = compute_ms / 1e3
        for _ in range(warm if fresh else min(warm, 1)):
            self._step()
        dist.barrier()
        before = received_bytes(self.interface)
        rows = [self._step() for _ in range(steps)]
        dist.barrier()
        received = received_bytes(self.interface) - before
        if not keep:
            self.current = link_methods.Off()
            del self.methods[key]
            gc.collect()  # a state and its sparsifiers hold each other, and 16 ranks fill the memory
        return {"steps": rows, "received": received}

    def make(self, method: str, density: float | None, values: str | None) -> link_methods.Measured:
        """Make a method for the model."""
        return link_methods.make(method, self.ddp, density, values)

    @property
    def module(self) -> nn.Module:
        """What a step runs."""
        return self.ddp

    def after_backward(self) -> None:
        """Do what belongs to a step besides its backward pass."""

    def _step(self) -> dict[str, Any]:
        module = self.module
        module.zero_grad()
        started, worked = time.perf_counter(), time.process_time()
        module(self.start).backward()
        self.after_backward()
        taken, worked = time.perf_counter() - started, time.process_time() - worked
        return {"step": taken, "cpu": worked, **vars(self.current.finish())}


def _dispatch(rank: Rank, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    return cast(link_methods.Method, rank.current).hook(bucket)


def _rank_of(engine: str) -> type[Rank]:
    if engine == "ddp":
        return Rank
    from rtopk.studies.bench.engines import ReplicaRank, SiteRank  # it imports this file

    return {"torchft": ReplicaRank, "fsdp": SiteRank}[engine]


def main() -> None:
    """Serve orders until standard input ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not mix with the answers
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    rank = _rank_of(sys.argv[1])(os.environ["GLOO_SOCKET_IFNAME"])
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        "load": rank.load,
        "compute": rank.compute,
        "barriers": rank.barriers,
        "visit": rank.visit,
    }
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = orders[order.pop("order")](**order)
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
