"""The ranks of `rtopk bench link --engine torchft`: replicas that take DiLoCo's outer step after every local one.

torchft's own DiLoCo in fp32 is beside ours. Both run under a Manager with a lighthouse on the first host, as in a
job: quorum, exchange and commit are part of the step. "off" takes the local step alone.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rtopk.studies.bench import StandIn
from rtopk.studies.bench.link_methods import Parts
from rtopk.studies.bench.ranks import Rank

PORT = 29_510  # of the first lighthouse; each method has its own, so that no quorum has two methods
WAIT = timedelta(minutes=15)  # fp32 on a slow link


class Replica:
    """A method on one replica: "off", "diloco" (torchft's) or "rtopk"."""

    lighthouses = 0

    def __init__(self, stand_in: StandIn, method: str, density: float | None, values: str | None) -> None:
        if method not in ("off", "diloco", "rtopk"):
            raise ValueError(f"unknown method {method!r} with --engine torchft: diloco or rtopk")
        self.module, self._sent = stand_in, 0
        self.inner = torch.optim.SGD(stand_in.parameters(), lr=1e-4)
        self.trainer: Any = None
        if method != "off":
            self.trainer = self._join(method, density, values).__enter__()

    def _join(self, method: str, density: float | None, values: str | None) -> Any:
        """Join the other replicas, under a lighthouse of this method."""
        own, first = _address(), os.environ["MASTER_ADDR"]
        # Hosts of our own have no names, and torchft advertises the name: let that be the address.
        socket.gethostname = lambda: own
        from torchft._torchft import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        import rtopk.torchft

        port = PORT + Replica.lighthouses
        Replica.lighthouses += 1
        if dist.get_rank() == 0:
            self._lighthouse = LighthouseServer(bind=f"[::]:{port}", min_replicas=dist.get_world_size())
        dist.barrier()
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            own, 0, is_master=True, wait_for_workers=False
        )
        group, ours = ProcessGroupGloo(timeout=WAIT), method == "rtopk"
        manager = Manager(
            pg=rtopk.torchft.ProcessGroup(group) if ours else group,
            min_replica_size=dist.get_world_size(),
            use_async_quorum=False,
            init_sync=False,
            timeout=WAIT,
            quorum_timeout=WAIT,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self._store.port,
            hostname=own,
            lighthouse_addr=f"http://{first}:{port}",
            replica_id=f"replica{dist.get_rank()}",
            load_state_dict=lambda state: None,
            state_dict=dict,
        )
        outer = torch.optim.SGD(self.module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        parts = [manager, [self.module], self.inner, outer, 1]
        if ours:
            return rtopk.torchft.DiLoCo(*parts, density=density or 0.0, values=values or "fp32")
        self._payload = sum(4 * p.numel() for p in self.module.parameters())
        return DiLoCo(*parts, use_bucketization=True)

    def finish(self) -> Parts:
        """Say what the step cost."""
        if self.trainer is None:
            return Parts()
        if hasattr(self.trainer, "books"):
            sent = sum(books.bytes_sent for books in self.trainer.books)
            sent, self._sent = sent - self._sent, sent
            return Parts(payload=sent)
        return Parts(payload=self._payload)


class ReplicaRank(Rank):
    """A replica, and the methods that have been used on it."""

    def prepare(self) -> None:
        """Do nothing: the methods share the model."""

    def make(self, method: str, density: float | None, values: str | None) -> Replica:
        """Let a method join the others."""
        return Replica(self.stand_in, method, density, values)

    @property
    def module(self) -> nn.Module:
        """What a step runs."""
        return self.stand_in

    def after_backward(self) -> None:
        """Take the local step; torchft's hook synchronises after it."""
        assert isinstance(self.current, Replica)
        self.current.inner.step()


def _address() -> str:
    """Return the address of this host, as the first one sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
        return str(probe.getsockname()[0])
