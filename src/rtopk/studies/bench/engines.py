"""The ranks of `rtopk bench link --engine fsdp` and `--engine torchft`: what they run in place of DDP.

fsdp: a model sharded within each site and replicated between sites. A site is one host with two ranks: traffic
between them stays on the host, unshaped, and only what goes to the other site meets the shaped link. Native HSDP is
beside ours; "off" shards within the site and exchanges nothing.

torchft: replicas that take DiLoCo's outer step after every local one, torchft's own DiLoCo in fp32 beside ours.
Both run under a Manager with a lighthouse on the first host, as in a job: quorum, exchange and commit are part of
the step. "off" takes the local step alone.
"""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rtopk.fsdp
from rtopk.studies.bench import StandIn, Wait
from rtopk.studies.bench.link_methods import Measured, OurHook, Parts
from rtopk.studies.bench.ranks import Rank

RANKS = 2  # per site
MODULES = 8  # that are sharded each for itself, about as many as a network has blocks
PORT = 29_510  # of the first lighthouse; each method has its own, so that no quorum has two methods
WAIT = timedelta(minutes=15)  # fp32 on a slow link


class Block(nn.Module):
    """Some layers of a stand-in: their weights, and backward that waits for their gradients."""

    def __init__(self, layers: Iterable[Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList([nn.Parameter(weight.detach().clone()) for weight in weights])
            for weights in layers
        )

    def forward(self, x: Tensor, pause: float, gradients: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return what came in; backward waits `pause` seconds for each layer."""
        for layer, given in zip(self.layers, gradients, strict=True):
            x = cast(Tensor, Wait.apply(x, pause, given, *cast(nn.ParameterList, layer)))  # type: ignore[no-untyped-call]
        return x


class ShardedStandIn(nn.Module):
    """A stand-in in blocks, so that FSDP gathers and reduces them one after the other."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self.stand_in = [stand_in]  # in a list: its parameters are not ours
        groups = stand_in.groups
        sizes = [0, *accumulate(sum(weight.numel() for weight in group) for group in groups)]
        goals = [sizes[-1] * block / MODULES for block in range(MODULES + 1)]
        ends = {next(i for i, size in enumerate(sizes) if size >= goal) for goal in goals}
        self.cuts = [slice(*pair) for pair in pairwise(sorted(ends))]
        self.blocks = nn.ModuleList(Block(groups[cut]) for cut in self.cuts)

    def forward(self, start: Tensor) -> Tensor:
        """Return what `backward` is called on."""
        pause, gradients = self.stand_in[0].begin()
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            start = block(start, pause, gradients[cut])
        return start.sum()


class ShardedMethod:
    """A method on a sharded model: "off", "hsdp" or "rtopk"."""

    def __init__(self, stand_in: StandIn, method: str, density: float | None, values: str | None) -> None:
        shape = (dist.get_world_size() // RANKS, RANKS)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        self.module = ShardedStandIn(stand_in)
        for module in (*self.module.blocks, self.module):
            fully_shard(module, mesh=mesh if method == "hsdp" else mesh["shard"])
        self._ours: OurHook | None = None
        if method == "rtopk":
            state = rtopk.fsdp.register(
                self.module, mesh["replicate"], density=density or 0.0, values=values or "fp32"
            )
            self._ours = OurHook(state)
        elif method == "hsdp":
            self.payload = sum(4 * p.to_local().numel() for p in self.module.parameters())  # type: ignore[attr-defined]
        elif method != "off":
            raise ValueError(f"unknown method {method!r} with --engine fsdp: hsdp or rtopk")

    def finish(self) -> Parts:
        """Say what the step cost."""
        return self._ours.finish() if self._ours is not None else Parts(payload=getattr(self, "payload", 0))


class ReplicaMethod:
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

        port = PORT + ReplicaMethod.lighthouses
        ReplicaMethod.lighthouses += 1
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


class EngineRank(Rank):
    """A rank whose methods have a module of their own, and the methods that have been used on it."""

    kind: Callable[[StandIn, str, float | None, str | None], Measured]

    def prepare(self) -> None:
        """Do nothing: each method makes what it needs."""

    def make(self, method: str, density: float | None, values: str | None) -> Measured:
        """Make a method for the model."""
        return type(self).kind(self.stand_in, method, density, values)

    @property
    def module(self) -> nn.Module:
        """What a step runs."""
        return cast(ShardedMethod | ReplicaMethod, self.current).module


class SiteRank(EngineRank):
    """A rank of a site."""

    kind = ShardedMethod


class ReplicaRank(EngineRank):
    """A replica."""

    kind = ReplicaMethod

    def after_backward(self) -> None:
        """Take the local step; torchft's hook synchronises after it."""
        cast(ReplicaMethod, self.current).inner.step()


def _address() -> str:
    """Return the address of this host, as the first one sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
        return str(probe.getsockname()[0])
