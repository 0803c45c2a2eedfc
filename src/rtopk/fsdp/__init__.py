"""One line for sharded models (FSDP2): `rtopk.fsdp.register(model, mesh["replicate"], density=0.001)`.

Shard the model within a site with `fully_shard(..., mesh=mesh["shard"])`, over fast links. rtopk then averages the
gradient shards between the sites, over slow ones, and sends a fraction of them. Options, statistics, checkpoints
and refusals are those of `rtopk.ddp`. See docs/fsdp.md.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rtopk.compat import FSDP, require_torch
from rtopk.fsdp.refusals import refuse, refuse_memory, shard_mesh, sharded_model
from rtopk.fsdp.shards import State
from rtopk.replicas.control import GradientNotFinite, RanksDisagree
from rtopk.replicas.options import Options, takes
from rtopk.replicas.state import Stats, make_alike
from rtopk.state_file import StateError
from rtopk.transport import AllGather

__all__ = ["GradientNotFinite", "Options", "RanksDisagree", "State", "StateError", "Stats", "register"]


@takes(Options)
def register(model: nn.Module, mesh: DeviceMesh, options: Options) -> State:
    """Make a model sharded with `fully_shard` exchange rTop-k payloads between its replicas.

    Call it on every rank, with the same options, after `fully_shard`. `mesh` is the one-dimensional mesh of the
    ranks that hold the same shard: `mesh["replicate"]` of a mesh with the dimensions "replicate" and "shard".
    """
    require_torch(FSDP, "rtopk.fsdp")

    def make() -> State:
        sharded = sharded_model(model)
        refuse(sharded, mesh, options.attach)
        device = next(sharded.parameters()).device
        between, within = (
            AllGather(mesh.get_group(), device),
            AllGather(shard_mesh(sharded).get_group(), device),
        )
        resolved = options.resolved(between.nodes)
        refuse_memory(resolved.make_memory(), within.nodes)
        return State(sharded, resolved, between, within)

    everyone = AllGather(device=torch.device(getattr(mesh, "device_type", "cpu")))
    state = make_alike(everyone, make)
    if options.attach:
        state.attach()
    return state
