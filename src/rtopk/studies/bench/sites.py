"""The ranks of `rtopk bench link --engine fsdp`: a model sharded within each site and replicated between sites.

A site is one host with two ranks: traffic between them stays on the host, unshaped, and only what goes to the other
site meets the shaped link. Native HSDP is beside ours; "off" shards within the site and exchanges nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rtopk.fsdp
from rtopk.studies.bench import StandIn, Wait
from rtopk.studies.bench.link_methods import Parts, RTopK
from rtopk.studies.bench.ranks import Rank

RANKS = 2  # per site
MODULES = 8  # that are sharded each for itself, about as many as a network has blocks


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


class Sharded:
    """A method on a sharded model: "off", "hsdp" or "rtopk"."""

    def __init__(self, stand_in: StandIn, method: str, density: float | None, values: str | None) -> None:
        shape = (dist.get_world_size() // RANKS, RANKS)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        self.module = ShardedStandIn(stand_in)
        for module in (*self.module.blocks, self.module):
            fully_shard(module, mesh=mesh if method == "hsdp" else mesh["shard"])
        self._ours: RTopK | None = None
        if method == "rtopk":
            state = rtopk.fsdp.register(
                self.module, mesh["replicate"], density=density or 0.0, values=values or "fp32"
            )
            self._ours = RTopK(state)
        elif method == "hsdp":
            self.payload = sum(4 * p.to_local().numel() for p in self.module.parameters())  # type: ignore[attr-defined]
        elif method != "off":
            raise ValueError(f"unknown method {method!r} with --engine fsdp: hsdp or rtopk")

    def finish(self) -> Parts:
        """Say what the step cost."""
        return self._ours.finish() if self._ours is not None else Parts(payload=getattr(self, "payload", 0))


class SiteRank(Rank):
    """A rank of a site, and the methods that have been used on it."""

    def prepare(self) -> None:
        """Do nothing: each method shards its own copy."""

    def make(self, method: str, density: float | None, values: str | None) -> Sharded:
        """Shard a copy of the model for a method."""
        return Sharded(self.stand_in, method, density, values)

    @property
    def module(self) -> nn.Module:
        """What a step runs."""
        return cast(Sharded, self.current).module
