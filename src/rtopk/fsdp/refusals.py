"""What cannot be exchanged between replicas of a sharded model, refused at registration with the fix."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from rtopk.memory import Memory
from rtopk.replicas.options import plain_name, refuse_parameters

HOW = (
    'mesh = init_device_mesh(device, (sites, ranks_per_site), mesh_dim_names=("replicate", "shard")); '
    'fully_shard(module, mesh=mesh["shard"]); rtopk.fsdp.register(model, mesh["replicate"])'
)


def sharded_model(model: nn.Module) -> nn.Module:
    """Return the model that was sharded: itself, or the one inside what torch.compile returned."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    if any(isinstance(module, FullyShardedDataParallel) for module in inner.modules()):
        raise TypeError(f"the model is sharded with FSDP1 (FullyShardedDataParallel); use fully_shard: {HOW}")
    if not any(isinstance(module, FSDPModule) for module in inner.modules()):
        raise TypeError(
            f"{type(inner).__name__} is not sharded: call fully_shard first ({HOW}), or rtopk.ddp.register for a "
            "model in DistributedDataParallel"
        )
    return inner


def shard_mesh(model: nn.Module) -> DeviceMesh:
    """Return the mesh over which the parameters are sharded."""
    meshes = {parameter.device_mesh for _, parameter in _sharded(model)}
    for mesh in meshes:
        if mesh.ndim != 1:
            raise ValueError(
                f"parameters lie on a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}: with a 2-D mesh "
                f"FSDP reduces the whole gradient between replicas before rtopk sees it; shard over one: {HOW}"
            )
    if not meshes:
        raise ValueError("the model has no trainable parameters; thaw them before you register")
    if len(meshes) != 1:
        raise ValueError(
            f"the model must be sharded over one mesh, got {len(meshes)}: {sorted(map(str, meshes))}"
        )
    return meshes.pop()


def _sharded(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            yield plain_name(name), parameter


def trainable(model: nn.Module) -> dict[str, DTensor]:
    """Return the parameters that FSDP reduces, by their names in the plain model."""
    return dict(_sharded(model))


def roots(module: nn.Module) -> list[nn.Module]:
    """Return the sharded modules that are not inside another one."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in roots(child)]


def refuse_memory(memory: Memory, shards: int) -> None:
    """Raise ValueError if a memory needs the whole gradient of a replica, and gets a shard of it."""
    limit = getattr(memory, "clip_norm", None)
    if shards > 1 and limit is not None:
        raise ValueError(
            f"the memory's clip_norm={limit} would bound each of {shards} shards by itself; give it to "
            "register(..., clip_norm=), which bounds the gradient of the whole replica"
        )


def refuse(model: nn.Module, mesh: DeviceMesh, attach: bool) -> None:
    """Raise an error if gradients of this model cannot be exchanged over this mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be the DeviceMesh of the replicas, got {mesh!r}: {HOW}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, got {mesh.ndim} {mesh.mesh_dim_names or ''}; pass the one of the "
            f'replicas, mesh["replicate"]'
        )
    within = shard_mesh(model)
    both = set(mesh.mesh.flatten().tolist()) & set(within.mesh.flatten().tolist())
    if both != {torch.distributed.get_rank()}:
        raise ValueError(
            f"mesh must hold the ranks that have the same shard, one of each site, got ranks {mesh.mesh.tolist()} "
            f"where the model is sharded over {within.mesh.tolist()}; {HOW}"
        )
    for ranks in (mesh.mesh.tolist(), within.mesh.tolist()):
        if ranks != sorted(ranks):
            raise ValueError(
                f"the ranks of a mesh must ascend, got {ranks}: process groups sort them, and count replicas and "
                f"shards in another order than the mesh; {HOW}"
            )
    if len(roots(model)) > 1:
        raise ValueError(
            f"the model holds {len(roots(model))} sharded modules side by side, and FSDP ends backward for each by "
            "itself; call fully_shard on a module that contains them all"
        )
    parameters = trainable(model)
    refuse_parameters(model, parameters)
    hooked = [name for name, p in parameters.items() if getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        raise ValueError(
            f"{hooked[0]} has a hook that acts when its gradient is accumulated, before it is exchanged; an "
            "optimizer must step after backward"
        )
    plain = [
        plain_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    if plain:
        raise ValueError(
            f"{len(plain)} trainable parameters are not sharded, {plain[0]} among them, and FSDP would not average "
            "them; call fully_shard on the whole model too, after its blocks, or freeze what it ignores"
        )
    if not attach:
        return
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            groups = module._get_fsdp_state()._fsdp_param_groups
            if len(groups) > 1:
                raise ValueError(f"{name or 'model'} has parameters on several meshes; shard it over one")
            if any(group._all_reduce_hook is not None for group in groups):
                raise ValueError(
                    f"{name or 'model'} has an all-reduce hook already, and FSDP allows one; "
                    "register once, and remove other hooks first"
                )
