"""Models, meshes and the slow, obvious reference of the FSDP tests; used inside worker processes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import bits, loss_of, net
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rtopk.fsdp
from rtopk import Codec, ErrorFeedback, Layout, Sparsifier, defaults
from rtopk.exchange import Vector, make_exchange
from rtopk.schedule import as_schedule
from rtopk.seed import derive
from rtopk.transport import InProcess

Loss = Callable[[nn.Module, int, int], Tensor]


def meshes(replicas: int = 2) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard every layer of a sequence with parameters but the last, then the whole."""
    layers = [layer for layer in model if next(layer.parameters(), None) is not None]
    for layer in layers[:-1]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def registered(mesh: DeviceMesh, model: nn.Module | None = None, how: Any = None, **options: Any) -> Any:
    """Return a sharded model and its state."""
    model = shard(net() if model is None else model, mesh["shard"], **(how or {}))
    return model, rtopk.fsdp.register(model, mesh["replicate"], **{"density": 0.05, **options})


def native(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """Return a model under FSDP's own hybrid sharding."""
    return shard(net() if model is None else model, mesh, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Gather the weights; a collective."""
    return {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): full(parameter)
        for name, parameter in model.named_parameters()
    }


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> str:
    return bits(whole(model))


def shards(tensor: Tensor, count: int) -> list[Tensor]:
    """Cut a tensor along its first dimension as FSDP does."""
    parts = list(tensor.chunk(count))
    return parts + [tensor[:0]] * (count - len(parts))


class Reference:
    """Algorithm 1 between replicas, on every shard by itself, all ranks in one process, one after the other."""

    def __init__(
        self,
        model: nn.Module,
        replicas: int,
        count: int,
        *,
        density: float = 0.05,
        scope: str = "global",
        values: str = "fp32",
        seed: int = 0,
        memory: Callable[[], Any] = ErrorFeedback,
        selector: Any = None,
        exchange: str = "all-gather",
        loss: Loss = loss_of,
    ) -> None:
        self.model, self.replicas, self.count, self.loss = model, replicas, count, loss
        self.parameters = dict(model.named_parameters())
        self.nodes: list[list[dict[str, Sparsifier]]] = []  # [shard][replica][name, or "" for all]
        self.exchanges: list[dict[str, Any]] = []  # [shard][name]
        for index in range(count):
            local = {name: shards(p.detach(), count)[index] for name, p in self.parameters.items()}
            layouts = {"": Layout.of(local.items())}
            if scope == "bucket":
                layouts = {name: Layout.of([(name, tensor)]) for name, tensor in local.items()}
            own = derive(seed, "shard", index)
            seeds = {name: derive(own, name) if name else own for name in layouts}
            self.exchanges.append({
                name: make_exchange(
                    exchange, InProcess(replicas),
                    Vector(layout.size, layout.dense_size, "nodes", None, keeps=True, seed=seeds[name]),
                    Codec(values, "nearest", layout.fingerprint, fixed=True, dense_size=layout.dense_size),
                    as_schedule(density),
                )
                for name, layout in layouts.items()
            })  # fmt: skip
            self.nodes.append([
                {
                    name: Sparsifier(
                        selector or defaults.selector(replicas, memory()), density, memory(),
                        self.exchanges[index][name].codec, seeds[name], node=replica, layout=layout,
                    )
                    for name, layout in layouts.items()
                }
                for replica in range(replicas)
            ])  # fmt: skip

    def step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        sites = []
        for replica in range(self.replicas):
            total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
            for place in range(self.count):
                self.model.zero_grad()
                self.loss(self.model, replica * self.count + place, step).backward()
                for name, parameter in self.parameters.items():
                    total[name] += parameter.grad
            sites.append({name: value / self.count for name, value in total.items()})
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for index in range(self.count):
            self._exchange(index, sites, step)
        optimizer.step()

    def _exchange(self, index: int, sites: list[dict[str, Tensor]], step: int) -> None:
        for name in self.nodes[index][0]:
            payloads = []
            layout = self.nodes[index][0][name].layout
            for replica, site in enumerate(sites):
                local = {
                    n: shards(value, self.count)[index] for n, value in site.items() if n in layout.names
                }
                payloads.append(self.nodes[index][replica][name].compress(layout.flatten(local), step))
            mean, _ = self.exchanges[index][name].mean(payloads, step)
            for n, values in layout.unflatten(mean).items():
                shards(self.parameters[n].grad, self.count)[index].copy_(values)


def residuals(state: rtopk.fsdp.State) -> dict[str, Tensor]:
    """Gather the residual of a replica from its shards; a collective."""
    saved = next(iter(state.sharded().state_dict().values()))
    return {name: full(tensor) for name, tensor in saved["memory"]["residual"].items()}
