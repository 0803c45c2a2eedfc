"""Move momentum from an optimizer into the memory: `register(..., optimizer=optimizer)`.

With error feedback, momentum amplifies stale gradients when they are finally sent. Deep Gradient Compression keeps
it at the nodes instead, before entries wait. A user has written SGD(momentum=0.9), or AdamW(betas=(0.9, 0.999)),
so registration sets the 0.9 to 0 and gives it to the memory. SGD's weight decay stays, and momentum m used to
multiply it, by 1 / (1 - m) in the long run; so it is multiplied by that. Adam adds its own to the gradient, which
is now as much larger, so the same holds there; AdamW's is apart. Other optimizers keep their momentum: Muon and
RMSprop, for two, apply it to something else than gradients.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from rtopk.memory import Memory, MomentumCorrection

log = logging.getLogger("rtopk")
MOVES = (SGD, Adam, AdamW)
TAKEN = "rtopk_momentum"  # in a group of an optimizer: its momentum before; saved and loaded with it


def innermost(optimizer: Optimizer | None) -> Optimizer | None:
    """Return the optimizer that steps, without what Accelerate and Lightning wrap around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def memory_for(
    optimizer: Optimizer, owns: Callable[[Tensor], bool], asked: bool = True, level: int = logging.WARNING
) -> Callable[[], Memory] | None:
    """Return how to make a memory with the momentum of an optimizer; None if it has none.

    If groups with our parameters differ, or have what a memory cannot take over: raise ValueError if the user asked
    for it, else say why the momentum stays where it is and return None.
    """
    groups = _groups(optimizer, owns)
    if not groups:
        raise ValueError(
            f"the {type(optimizer).__name__} that was given holds none of the parameters that are trained here; "
            "pass the one that steps them, made after fully_shard"
        )
    try:
        found = {_of(group, optimizer) for group in groups}
        if any(p.requires_grad and not owns(p) for group in groups for p in group["params"]):
            raise ValueError(
                f"a group of {type(optimizer).__name__} also has parameters of something else, which would lose "
                "theirs; give the model's a group of their own, or use memory='error-feedback'"
            )
        if len(found) > 1:
            raise ValueError(
                f"groups of {type(optimizer).__name__} differ in (momentum, nesterov): {sorted(found)}, and one "
                "memory takes over all of it; give all groups the same, or use memory='error-feedback'"
            )
    except ValueError as error:
        if asked:
            raise
        log.log(level, "momentum stays in the optimizer: %s", error)
        return None
    momentum, nesterov = found.pop()
    return partial(MomentumCorrection, momentum, nesterov=nesterov) if momentum else None


def take_over(optimizer: Optimizer, owns: Callable[[Tensor], bool], level: int = logging.WARNING) -> None:
    """Set the momentum of the groups with our parameters to 0; again, if a checkpoint has brought it back."""
    for group in _groups(optimizer, owns):
        momentum = _own(group)
        if not momentum:
            continue
        if TAKEN not in group:
            group[TAKEN], changes = momentum, ""
            if _decays_gradients(optimizer, group):
                decay = group["weight_decay"]
                group["weight_decay"] = decay / (1.0 - momentum)
                changes = (
                    f"; weight_decay {decay:g} becomes {group['weight_decay']:g}, which it used to multiply"
                )
            log.log(
                level,
                "momentum %g of %s moves into the memory, and its own becomes 0%s. Tune the learning rate again, "
                "upwards. state.return_momentum() undoes this",
                momentum, type(optimizer).__name__, changes,
            )  # fmt: skip
        _set(group, 0.0)


def hand_back(optimizer: Optimizer, level: int = logging.WARNING) -> None:
    """Give an optimizer what `take_over` took."""
    for group in optimizer.param_groups:
        momentum = group.pop(TAKEN, None)
        if momentum is not None:
            _set(group, momentum)
            if _decays_gradients(optimizer, group):
                group["weight_decay"] *= 1.0 - momentum
            log.log(level, "momentum %g is back in %s", momentum, type(optimizer).__name__)


def _decays_gradients(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether weight decay is added to the gradient, before momentum or instead of it."""
    apart = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
    return bool(group.get("weight_decay", 0.0)) and not apart


def _own(group: dict[str, Any]) -> float:
    """Return the momentum that a group has now: a first beta is one."""
    return float(group.get("momentum") or (group.get("betas") or (0.0,))[0])


def _set(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum


def _groups(optimizer: Optimizer, owns: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if any(owns(p) for p in group["params"])]


def _of(group: dict[str, Any], optimizer: Optimizer) -> tuple[float, bool]:
    """Return momentum and Nesterov's form of a group."""
    momentum = float(group.get(TAKEN, 0.0)) or _own(group)  # a schedule of it may have written its own since
    if not momentum:
        return 0.0, False
    kind = type(optimizer).__name__
    if not isinstance(optimizer, MOVES):
        has = f"betas={group['betas']}" if group.get("betas") else f"momentum={momentum:g}"
        raise ValueError(
            f"{kind} has {has}, and only the momentum of SGD, Adam and AdamW can move; set it to 0, or use "
            "memory='error-feedback'"
        )
    if group.get("dampening"):
        raise ValueError(f"{kind} has dampening={group['dampening']}, which no memory has; use dampening=0")
    return momentum, bool(group.get("nesterov"))
