"""What the hook does not support, refused at registration with the reason."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


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
                f"{name or 'model'} is sharded with FSDP ({type(module).__name__}), which rtopk.ddp does not "
                "support yet: it serves replicas; wrap the plain module in DistributedDataParallel if it fits on "
                "one device, else train it without rtopk"
            )


def trainable(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, by their names in the plain model."""
    ignored = model.parameters_to_ignore
    return {
        name.replace("_orig_mod.", ""): parameter  # torch.compile inserts this; a state must not depend on it
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
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name} is {parameter.dtype}; only real floating-point parameters are supported"
            )
        if parameter.is_sparse or not parameter.numel():
            raise ValueError(f"{name} is sparse or empty; only dense parameters with entries are supported")
    made = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    reduced = made.get("num_parameter_tensors", len(parameters))
    if reduced != len(parameters):
        raise ValueError(
            f"DDP was made with {reduced} trainable parameters and there are {len(parameters)} now; freeze or thaw "
            "layers before you wrap the model, or after you register the hook"
        )
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(
            f"parameters lie on {sorted(map(str, devices))}; one device per process is supported"
        )
    for name, module in model.module.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"{name} makes sparse gradients; create it with sparse=False: few entries are sent anyway"
            )


def refuse_join(model: DistributedDataParallel) -> None:
    """Raise RuntimeError inside `model.join()`: it shadows the hook's collective with an all-reduce."""
    if model._join_config.enable:
        raise RuntimeError(
            "DDP's join() (uneven inputs) does not run communication hooks on ranks that are done, so the "
            "others would wait for ever; give all ranks the same number of batches"
        )


def joint_dtype(parameters: dict[str, Tensor]) -> torch.dtype:
    """Return the dtype of residuals: at least fp32."""
    dtype = torch.float32
    for parameter in parameters.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype
