"""Lightning: a callback that exchanges rTop-k payloads and keeps its state in Lightning's checkpoints.

    rtop_k = RTopKCallback(density=0.001)
    strategy = DDPStrategy(ddp_comm_state=rtop_k, ddp_comm_hook=hook)
    Trainer(strategy=strategy, callbacks=[rtop_k], ...)

Lightning hands hooks to DDP on CUDA only; where it has not, the callback does. For a model that `configure_model`
shards with `fully_shard` under ModelParallelStrategy, tell the callback the mesh of the replicas:

    RTopKCallback(density=0.001, mesh=lambda module: module.mesh["replicate"])
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from rtopk import ddp, fsdp
from rtopk.replicas import checkpoint
from rtopk.schedule import Schedule

SHARDED = (
    "ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1); in configure_model, self.mesh = "
    'init_device_mesh(device, (sites, ranks_per_site), mesh_dim_names=("replicate", "shard")) and '
    'fully_shard(..., mesh=self.mesh["shard"]); and RTopKCallback(mesh=lambda module: module.mesh["replicate"])'
)


class RTopKCallback(Callback):
    """Exchange rTop-k payloads in `Trainer.fit`; takes the options of `rtopk.ddp.register`.

    Under DDP the option `optimizer` is the module's own, if it has one only, so momentum moves into the memory. A
    sharded model keeps it in the optimizer: Lightning cannot load a checkpoint of an optimizer without a state.

    mesh: under ModelParallelStrategy, returns the mesh of the ranks that hold the same shard, given the module
        after its `configure_model`.

    Lightning's callbacks save on rank 0 alone, so the residuals of all ranks are gathered there when a checkpoint
    is written; every rank takes its own back, also where the number of ranks has changed.
    """

    def __init__(
        self,
        density: float | Schedule = 0.001,
        *,
        mesh: Callable[[LightningModule], DeviceMesh] | None = None,
        **options: Any,
    ) -> None:
        self.density = density
        self.mesh = mesh
        self.options = options
        self.state: ddp.State | fsdp.State | None = None
        self._fitting = False  # not validating, testing or predicting
        self._before: ddp.State | fsdp.State | None = None  # of an earlier fit
        self._saved: list[dict[str, Any]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the state of an earlier fit aside."""
        self._fitting = stage == "fit"
        if self._fitting and self.state is not None:
            self._before, self.state = self.state, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the state, now that the model is wrapped, and go on from a checkpoint if there was one."""
        strategy, before = trainer.strategy, self._before
        if isinstance(strategy, ModelParallelStrategy):
            self.state = self._sharded(pl_module)
        elif isinstance(strategy.model, DistributedDataParallel):
            self.state = self._replicated(strategy.model, trainer)
        else:
            version = " (FSDP1)" if isinstance(strategy, FSDPStrategy) else ""
            raise TypeError(
                f"RTopKCallback needs DDP or FSDP2, this strategy is {type(strategy).__name__}{version}; "
                f"use Trainer(strategy=DDPStrategy(...)), or for a sharded model {SHARDED}"
            )
        if self._saved:
            checkpoint.scatter(self.state, self._saved)
        elif before not in (None, self.state) and all(map(before.owns, self.state.parameters.values())):
            # A second fit of the same model; another one's residuals are none of its business.
            self.state.load_state_dict(before.state_dict())
        self._before = self._saved = None

    def _replicated(self, model: DistributedDataParallel, trainer: Trainer) -> ddp.State:
        others = [given.__name__ for given, _ in model._comm_hooks if given is not hook]
        if others:
            raise ValueError(f"the strategy brings another communication hook, {others[0]}; DDP allows one")
        attached = bool(model._comm_hooks)
        scaler, optimizers = getattr(trainer.precision_plugin, "scaler", None), trainer.optimizers
        options = {"optimizer": optimizers[0] if len(optimizers) == 1 else None, **self.options}
        state = ddp.register(model, self.density, scaler=scaler, attach=False, **options)
        if not attached:
            model.register_comm_hook(self, hook)
        return state

    def _sharded(self, module: LightningModule) -> fsdp.State:
        if self.mesh is None:
            raise ValueError(
                f"RTopKCallback needs the mesh of the replicas of a sharded model; use {SHARDED}"
            )
        before = self._before
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if isinstance(before, fsdp.State) and all(map(before.owns, trained)):
            before.end_round()  # in case the earlier fit was interrupted
            return before  # it is still attached to the model
        return fsdp.register(module, self.mesh(module), self.density, **self.options)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell a schedule that counts epochs."""
        if self.state is not None:
            self.state.set_epoch(trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0; Lightning calls it on all ranks."""
        ranks = checkpoint.gather(self.state) if self.state is not None else None
        return {} if ranks is None else {"ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint: at once under ModelParallelStrategy, else when the model is wrapped."""
        self._saved = state_dict.get("ranks")
        if self._saved and self._fitting and self.state is not None:
            checkpoint.scatter(self.state, self._saved)
            self._saved = None


def hook(
    state: RTopKCallback,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket; for `DDPStrategy(ddp_comm_state=callback, ddp_comm_hook=hook)`."""
    if not isinstance(state.state, ddp.State):
        raise RuntimeError("RTopKCallback is not in the Trainer's callbacks; add it: callbacks=[callback]")
    return ddp.hook(state.state, bucket)
