"""What the hook does not support, refused at registration with the reason."""

import sys

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rtopk.replicas.options import plain_name, refuse_parameters


def unwrap(model: nn.Module) -> DistributedDataParallel:
    """Return the DDP module of a model: itself, or the one inside what torch.compile returned."""
    inner = getattr(model, "_orig_mod", model)
    refuse_sharded(inner)
    if not isinstance(inner, DistributedDataParallel):
        raise TypeError(
            f"model must be a DistributedDataParallel, got {type(inner).__name__}; "
            "wrap it first: DistributedDataParallel(model)"
        )
    return inner


def refuse_sharded(model: nn.Module) -> None:
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


def trainable(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, by their names in the plain model."""
    ignored = model.parameters_to_ignore
    return {
        plain_name(name): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def refuse(model: DistributedDataParallel, attach: bool = True) -> None:
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


def refuse_join(model: DistributedDataParallel) -> None:
    """Raise RuntimeError inside `model.join()`: it shadows the hook's collective with an all-reduce."""
    if model._join_config.enable:
        raise RuntimeError(
            "DDP's join() (uneven inputs) does not run communication hooks on ranks that are done, so the "
            "others would wait for ever; give all ranks the same number of batches"
        )
