"""Hugging Face Accelerate: one call on a prepared model; its state goes with `save_state` and `load_state`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    register(accelerator, model, density=0.001, optimizer=optimizer)

For a model that Accelerate shards with FSDP2, make the accelerator like this:

    Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=RTopKParallelismConfig(dp_replicate_size=sites, dp_shard_size=gpus_per_site),
    )
"""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.utils import DistributedType, ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rtopk import ddp, fsdp
from rtopk.schedule import Schedule

FOLDER = "rtopk"  # inside a checkpoint of Accelerate
_registered: "WeakKeyDictionary[Accelerator, int]" = WeakKeyDictionary()  # the number of its last model


class RTopKParallelismConfig(ParallelismConfig):  # type: ignore[misc]
    """A ParallelismConfig with which FSDP2 reduces gradients within a site only; rtopk does it between sites."""

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the dimensions of the mesh that Accelerate gives to `fully_shard`: without replicas."""
        return [name for name in super().fsdp_dim_names if name != "dp_replicate"]


def register(
    accelerator: Accelerator, model: nn.Module, density: float | Schedule = 0.001, **options: Any
) -> ddp.State | fsdp.State:
    """Make a prepared model exchange rTop-k payloads; takes the options of `rtopk.ddp.register`.

    Not `register_for_checkpointing`: what is registered there is written by the main process alone, and
    residuals differ between ranks.
    """
    scaler = options.pop("scaler", accelerator.scaler)
    state: ddp.State | fsdp.State
    if accelerator.distributed_type is DistributedType.FSDP:
        mesh = _replicas(accelerator)
        state = fsdp.register(model, mesh, density, scaler=scaler, **options)
    else:
        state = ddp.register(model, density, scaler=scaler, **options)

    number = _registered[accelerator] = _registered.get(accelerator, -1) + 1
    folder = FOLDER if number == 0 else f"{FOLDER}_{number}"  # as Accelerate names its models' files

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        state.save(Path(output_dir) / folder)

    def load(models: list[nn.Module], input_dir: str) -> None:
        state.load(Path(input_dir) / folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return state


def _replicas(accelerator: Accelerator) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same shard."""
    config = accelerator.parallelism_config
    if not accelerator.is_fsdp2:
        raise ValueError("the plugin uses FSDP1; use FullyShardedDataParallelPlugin(fsdp_version=2)")
    if not isinstance(config, RTopKParallelismConfig) or not config.dp_replicate_enabled:
        raise ValueError(
            "FSDP must reduce gradients within a site only; pass parallelism_config=RTopKParallelismConfig("
            f"dp_replicate_size=sites, dp_shard_size=gpus_per_site) with 2 sites or more, got {config}"
        )
    mesh: DeviceMesh = accelerator.torch_device_mesh["dp_replicate"]
    return mesh
