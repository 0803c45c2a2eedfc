"""What the hook does before an optimizer steps, through torch's public pre-step hook.

After a skipped round the gradients are NaN on all ranks, as plain DDP would leave them. They are removed here, so
that the step does nothing: torch's optimizers skip a parameter without gradient, so neither momentum nor weight
decay moves it. A closure may run backward inside the step (Lightning always does), so it is wrapped. And an
optimizer with its own momentum is refused with momentum correction.
"""

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rtopk.ddp.written import use

if TYPE_CHECKING:
    from rtopk.ddp.state import State

_states: "weakref.WeakSet[State]" = weakref.WeakSet()
_installed: list[Any] = []


def watch(state: "State") -> None:
    """Act before optimizer steps for as long as this state lives."""
    _states.add(state)
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    for state in list(_states):
        if state.corrects_momentum:
            refuse_momentum(optimizer, state)
    use(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure) or not _states:
        return None

    def followed() -> Any:
        loss = closure()
        use(optimizer)
        return loss

    return (
        ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})
    )


def refuse_momentum(optimizer: Optimizer, state: "State") -> None:
    """Raise ValueError if the optimizer adds momentum to gradients that already contain it."""
    for group in optimizer.param_groups:
        if not any(state.owns(parameter) for parameter in group["params"]):
            continue
        if group.get("momentum") or "betas" in group:
            has = f"momentum={group['momentum']}" if group.get("momentum") else f"betas={group['betas']}"
            raise ValueError(
                f"MomentumCorrection puts momentum into the gradients, and {type(optimizer).__name__} "
                f"has {has}: it would act twice; use SGD with momentum=0, or memory='error-feedback'"
            )
