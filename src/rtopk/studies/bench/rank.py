"""One rank of `rtopk bench link`: orders on standard input, answers on standard output, as JSON lines.

Run as `python -m rtopk.studies.bench.rank` with the variables of torch.distributed set; `fleet.py` starts it.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rtopk.studies.bench import rivals
from rtopk.studies.bench.hosts import received_bytes
from rtopk.studies.bench.standin import StandIn

BARRIERS = 20  # over which the bytes of one are measured


class Rank:
    """A stand-in model under DDP, and the methods that have been used on it."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.methods: dict[str, rivals.Method] = {}
        self.current: rivals.Method = rivals.Off()
        self.start = torch.zeros(1, requires_grad=True)

    def load(self, model: str) -> dict[str, Any]:
        """Make a model, take two steps without communication: DDP rebuilds its buckets after the first."""
        if dist.get_rank() == 0:
            rivals.compile_loops()  # once, on disk for the others, who wait
        dist.barrier()
        self.methods.clear()
        self.current = rivals.Off()
        self.stand_in = StandIn(model, dist.get_rank())
        # Batch norm's buffers are no gradients: DDP would broadcast them in forward, with every method alike.
        self.ddp = DistributedDataParallel(
            self.stand_in, gradient_as_bucket_view=True, forward_sync_buffers=False
        )
        self.ddp.register_comm_hook(self, _dispatch)
        self._step()
        self._step()
        return {"size": self.stand_in.size}

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
        self,
        method: str,
        density: float | None,
        values: str | None,
        steps: int,
        warm: int,
        compute_ms: float,
        keep: bool,
    ) -> dict[str, Any]:
        """Take some steps with a method; the first `warm` are not counted."""
        key = f"{method} {density} {values}"
        fresh = key not in self.methods
        if fresh:
            self.methods[key] = rivals.make(method, self.ddp, density, values)
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
            self.current = rivals.Off()
            del self.methods[key]
        return {"steps": rows, "received": received}

    def _step(self) -> dict[str, Any]:
        self.ddp.zero_grad()
        started, worked = time.perf_counter(), time.process_time()
        self.ddp(self.start).backward()
        taken, worked = time.perf_counter() - started, time.process_time() - worked
        return {"step": taken, "cpu": worked, **vars(self.current.finish())}


def _dispatch(rank: Rank, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    return rank.current.hook(bucket)


def main() -> None:
    """Serve orders until standard input ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not mix with the answers
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    rank = Rank(os.environ["GLOO_SOCKET_IFNAME"])
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
