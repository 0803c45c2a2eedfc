"""Lightning: a callback that puts the hook on the DDP model and keeps its state in Lightning's checkpoints.

    rtop_k = RTopKCallback(density=0.001)
    strategy = DDPStrategy(ddp_comm_state=rtop_k, ddp_comm_hook=hook)
    Trainer(strategy=strategy, callbacks=[rtop_k], ...)

Lightning hands hooks to DDP on CUDA only; where it has not, the callback does.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from rtopk import ddp
from rtopk.ddp import checkpoint
from rtopk.schedule import Schedule


class RTopKCallback(Callback):
    """Exchange rTop-k payloads in `Trainer.fit`; takes the options of `rtopk.ddp.register`.

    Lightning writes one file, on rank 0, so the residuals of all ranks are gathered there when a checkpoint
    is written; every rank takes its own back, also where the number of ranks has changed.
    """

    def __init__(self, density: float | Schedule = 0.001, **options: Any) -> None:
        self.density = density
        self.options = options
        self.state: ddp.State | None = None
        self._saved: list[dict[str, Any]] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the state, now that the model is wrapped, and go on from a checkpoint if there was one."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"RTopKCallback needs DDP, this strategy is {type(trainer.strategy).__name__}; "
                "use Trainer(strategy=DDPStrategy(...))"
            )
        others = [given.__name__ for given, _ in model._comm_hooks if given is not hook]
        if others:
            raise ValueError(f"the strategy brings another communication hook, {others[0]}; DDP allows one")
        attached = bool(model._comm_hooks)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        before = self.state
        self.state = ddp.register(model, self.density, scaler=scaler, attach=False, **self.options)
        if not attached:
            model.register_comm_hook(self, hook)
        if self._saved:
            checkpoint.scatter(self.state, self._saved)
        elif before is not None and all(map(before.owns, self.state.parameters.values())):
            # A second fit of the same model; another one's residuals are none of its business.
            self.state.load_state_dict(before.state_dict())
        self._saved = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell a schedule that counts epochs."""
        if self.state is not None:
            self.state.set_epoch(trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0; Lightning calls it on all ranks."""
        ranks = checkpoint.gather(self.state) if self.state is not None else None
        return {} if ranks is None else {"ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's states until the model is wrapped."""
        self._saved = state_dict.get("ranks")


def hook(
    state: RTopKCallback,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket; for `DDPStrategy(ddp_comm_state=callback, ddp_comm_hook=hook)`."""
    if state.state is None:
        raise RuntimeError("RTopKCallback is not in the Trainer's callbacks; add it: callbacks=[callback]")
    return ddp.hook(state.state, bucket)
