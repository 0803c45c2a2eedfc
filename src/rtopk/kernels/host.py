"""Between host memory and a device: one wait for any number of tensors, and none on the way back.

Whatever the host needs to know of a device's work goes through `fetch`, so what a step waits for can be counted.
Everything happens on the current stream of the device, on which the gradients came and collectives are issued.
"""

import torch
from torch import Tensor


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device in host memory; those that are there already as they are.

    Copies of one stream finish in order, so only the last one waits. The others go to pinned memory (torch takes it
    for such a copy) while the device is still at work.
    """
    here = [tensor.detach() for tensor in tensors]
    away = [place for place, tensor in enumerate(here) if not tensor.is_cpu]
    if away and here[away[0]].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the host must know what was selected, so a step cannot be captured in a CUDA graph; capture forward "
            "and backward under model.no_sync(), or train without graphs"
        )
    for place in away:
        here[place] = here[place].to("cpu", non_blocking=place != away[-1])
    return here


def begin_fetch(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, to be read only after the next `fetch` from that device."""
    return tensor.detach().to("cpu", non_blocking=True)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for what that device is doing.

    From pinned memory, because a copy from other memory may wait for the stream. Torch keeps the pinned memory
    until the copy is done.
    """
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
