"""Move momentum from an optimizer into the memory: `register(..., optimizer=optimizer)`.

With error feedback, momentum amplifies stale gradients when they are finally sent. Deep Gradient Compression keeps
it at the nodes instead, before entries wait. A user has written SGD(momentum=0.9), or AdamW(betas=(0.9, 0.999)),
so registration sets the 0.9 to 0 and gives it to the memory. SGD's weight decay stays, and momentum m used to
multiply it, by 1 / (1 - m) in the long run; so it is multiplied by that. Adam divides by the size of what it sees,
so nothing else changes there.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from rtopk.memory import Memory, MomentumCorrection

log = logging.getLogger("rtopk")
ADAM = (Adam, AdamW)  # their momentum is the first beta
TAKEN = "rtopk_momentum"  # in a group of an optimizer: its momentum before; saved and loaded with it


def memory_for(
    optimizer: Optimizer, owns: Callable[[Tensor], bool], asked: bool = True
) -> Callable[[], Memory] | None:
    """Return how to make a memory with the momentum of an optimizer; None if it has none.

    If groups with our parameters differ, or have what a memory cannot take over: raise ValueError if the user asked
    for it, else say why the momentum stays where it is and return None.
    """
    try:
        found = {_of(group, optimizer) for group in _groups(optimizer, owns)}
        if len(found) > 1:
            raise ValueError(
                f"groups of {type(optimizer).__name__} differ in (momentum, nesterov): {sorted(found)}, and one "
                "memory takes over all of it; give all groups the same, or use memory='error-feedback'"
            )
    except ValueError as error:
        if asked:
            raise
        log.warning("momentum stays in the optimizer: %s", error)
        return None
    momentum, nesterov = found.pop() if found else (0.0, False)
    return partial(MomentumCorrection, momentum, nesterov=nesterov) if momentum else None


def take_over(optimizer: Optimizer, owns: Callable[[Tensor], bool]) -> None:
    """Set the momentum of the groups with our parameters to 0; again, if a checkpoint has brought it back."""
    for group in _groups(optimizer, owns):
        momentum = _own(group, optimizer)
        if not momentum:
            continue
        if TAKEN not in group:
            group[TAKEN], changes = momentum, ""
            if not isinstance(optimizer, ADAM):
                decay = group.get("weight_decay", 0.0)
                group["weight_decay"] = decay / (1.0 - momentum)
                changes = (
                    f"; weight_decay {decay:g} becomes {group['weight_decay']:g}, which it used to multiply"
                )
            log.warning(
                "momentum %g of %s moves into the memory, and its own becomes 0%s. Tune the learning rate again, "
                "upwards. state.return_momentum() undoes this",
                momentum, type(optimizer).__name__, changes,
            )  # fmt: skip
        _set(group, optimizer, 0.0)


def hand_back(optimizer: Optimizer) -> None:
    """Give an optimizer what `take_over` took."""
    for group in optimizer.param_groups:
        momentum = group.pop(TAKEN, None)
        if momentum is not None:
            _set(group, optimizer, momentum)
            if not isinstance(optimizer, ADAM):
                group["weight_decay"] *= 1.0 - momentum
            log.warning("momentum %g is back in %s", momentum, type(optimizer).__name__)


def _own(group: dict[str, Any], optimizer: Optimizer) -> float:
    """Return the momentum that a group has now and a memory could take over."""
    if isinstance(optimizer, ADAM):
        return float(group["betas"][0])
    return float(group["momentum"]) if isinstance(optimizer, SGD) else 0.0


def _set(group: dict[str, Any], optimizer: Optimizer, momentum: float) -> None:
    if isinstance(optimizer, ADAM):
        group["betas"] = (momentum, group["betas"][1])
    else:
        group["momentum"] = momentum


def _groups(optimizer: Optimizer, owns: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if any(owns(p) for p in group["params"])]


def _of(group: dict[str, Any], optimizer: Optimizer) -> tuple[float, bool]:
    """Return momentum and Nesterov's form of a group."""
    momentum = _own(group, optimizer) or float(group.get(TAKEN, 0.0))
    if not momentum and group.get("momentum"):  # it may act after scaling, and not on weight decay
        raise ValueError(
            f"momentum={group['momentum']} of {type(optimizer).__name__} cannot move into a memory, only that of "
            "SGD, Adam and AdamW; use memory='error-feedback'"
        )
    if momentum and group.get("dampening"):
        raise ValueError(
            f"{type(optimizer).__name__} has dampening={group['dampening']}, which no memory has; use dampening=0"
        )
    return momentum, bool(momentum and group.get("nesterov"))
