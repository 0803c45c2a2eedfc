"""One line for PyTorch DDP: `rtopk.ddp.register(ddp_model, density=0.001, optimizer=optimizer)`.

From then on backward exchanges sparse payloads instead of whole gradients. What is not sent stays in a
residual and is sent later. Nothing else in the training loop changes. See docs/ddp.md.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rtopk.ddp.buckets import State, take, trainable
from rtopk.ddp.recording import Recording, record_hook
from rtopk.replicas.control import GradientNotFinite, RanksDisagree
from rtopk.replicas.options import Options, refuse_parameters, takes
from rtopk.replicas.state import Stats, make_alike
from rtopk.state_file import StateError
from rtopk.transport import AllGather

__all__ = [
    "GradientNotFinite",
    "Options",
    "RanksDisagree",
    "State",
    "StateError",
    "Stats",
    "hook",
    "record",
    "register",
]


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Exchange a bucket; DDP calls this."""
    return take(state, bucket)


@takes(Options)
def register(model: nn.Module, options: Options) -> State:
    """Make a DDP model exchange rTop-k payloads. Call it on every rank, with the same options."""
    ddp = _unwrap(model)
    transport = AllGather(ddp.process_group, next(ddp.parameters()).device)

    def make() -> State:
        _refuse(ddp, options.attach)
        return State(ddp, options.resolved(transport.nodes), transport)

    state = make_alike(transport, make)
    if options.attach:
        ddp.register_comm_hook(state, hook)
    return state


def record(model: nn.Module, folder: str | Path, steps: int = 20, entries: int = 1_000_000) -> None:
    """Train as plain DDP does, and write each rank's own gradients of the first steps.

    Call it on every rank of a job without `register`, then `rtopk lab inspect --gradients FOLDER`. 1-D tensors,
    which rtopk sends in full, are left out; of a larger gradient a sample of so many `entries` is written.
    """
    ddp = _unwrap(model)
    _refuse(ddp)
    ddp.register_comm_hook(Recording(ddp, Path(folder), steps, entries), record_hook)


def _unwrap(model: nn.Module) -> DistributedDataParallel:
    """Return the DDP module of a model: itself, or the one inside what torch.compile returned."""
    inner = getattr(model, "_orig_mod", model)
    _refuse_sharded(inner)
    if not isinstance(inner, DistributedDataParallel):
        raise TypeError(
            f"model must be a DistributedDataParallel, got {type(inner).__name__}; "
            "wrap it first: DistributedDataParallel(model)"
        )
    return inner


def _refuse_sharded(model: nn.Module) -> None:
    """Raise TypeError for a model with sharded parts, from either FSDP."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, it was not used
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise TypeError(
                f"{name or 'model'} is sharded with FSDP ({type(module).__name__}), and rtopk.ddp serves whole "
                "replicas; use rtopk.fsdp.register for a model sharded with fully_shard, or wrap the plain module "
                "in DistributedDataParallel if it fits on one device"
            )


def _refuse(model: DistributedDataParallel, attach: bool = True) -> None:
    """Raise ValueError if this DDP model is not supported."""
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "DDP's own mixed_precision= installs a communication hook of its own; "
            "use torch.amp.autocast instead"
        )
    if model._use_python_reducer:
        raise ValueError(
            "this model was wrapped with torch._dynamo.config.optimize_ddp = 'python_reducer', which gives hooks "
            "single gradients and no buckets; set it to 'ddp_optimizer' (the default) before you wrap the model"
        )
    if attach and model._comm_hooks:
        raise ValueError(
            "this model has a communication hook already, and DDP allows one; wrap the module in a new "
            "DistributedDataParallel first"
        )
    parameters = trainable(model)
    refuse_parameters(model.module, parameters)
    made = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    reduced = made.get("num_parameter_tensors", len(parameters))
    if reduced != len(parameters):
        raise ValueError(
            f"DDP was made with {reduced} trainable parameters and there are {len(parameters)} now; freeze or thaw "
            "layers before you wrap the model, or after you register the hook"
        )
