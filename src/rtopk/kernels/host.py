"""From a device to host memory, with one wait for any number of tensors.

Whatever the host needs to know of a device's work goes through `fetch`, so what a step waits for can be counted.
"""

from torch import Tensor


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device in host memory; those that are there already as they are.

    Copies of one stream finish in order, so only the last one waits. The others go to pinned memory (torch takes it
    for such a copy) while the device is still at work.
    """
    here = [tensor.detach() for tensor in tensors]
    away = [place for place, tensor in enumerate(here) if not tensor.is_cpu]
    for place in away:
        here[place] = here[place].to("cpu", non_blocking=place != away[-1])
    return here


def begin_fetch(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, to be read only after the next `fetch` from that device."""
    return tensor.detach().to("cpu", non_blocking=True)


def send(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor on the device of another, without waiting for what that device is doing."""
    return tensor.to(like.device, non_blocking=True)
