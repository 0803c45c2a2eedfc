"""What `parameter.grad` holds between a round and the step of an optimizer.

A hook on every parameter looks at `parameter.grad` just before backward adds to it. That tells two things:

- Which gradients are the NaN of a skipped round. They are removed before the optimizer steps, through torch's
  pre-step hook: torch's optimizers skip a parameter without a gradient, so neither momentum nor weight decay moves
  it. Later gradients, of this model or another, are left alone. A closure may run backward inside the step
  (Lightning always does), so it is wrapped.
- Whether backward adds to the mean of an exchange (a second full backward before the optimizer steps). The round
  then sends only what was added, and the old mean is added to the new one: it is neither sent twice nor lost.

An optimizer with its own momentum is refused with momentum correction, here too.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rtopk.replicas.momentum import hand_back, take_over

if TYPE_CHECKING:
    from rtopk.replicas.state import State

_all: "weakref.WeakSet[Written]" = weakref.WeakSet()
_states: "weakref.WeakSet[State]" = weakref.WeakSet()
_installed: list[Any] = []


class Written:
    """The parameters, by id, whose gradients one state wrote and that were not cleared or used since."""

    def __init__(self) -> None:
        self.means: set[int] = set()
        self.skipped: set[int] = set()
        self.added_to: dict[int, Tensor] = {}  # what a gradient of `means` was before backward added to it
        self._handles: list[Any] = []
        _all.add(self)

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Look at gradients before backward adds to them; hooks hold the parameters weakly."""
        self._handles = [p.register_hook(_look(self, name, weakref.ref(p))) for name, p in parameters.items()]  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def note(self, parameters: Collection[Tensor], skipped: bool) -> None:
        """Record that a round has written these gradients."""
        ids = set(map(id, parameters))
        for written in list(_all):  # of other models that share parameters, too
            for key in ids:
                written.forget(key)
        (self.skipped if skipped else self.means).update(ids)

    def forget(self, key: int) -> None:
        """Record that a gradient is no longer what a round wrote."""
        self.means.discard(key)
        self.skipped.discard(key)
        self.added_to.pop(key, None)


def _look(written: Written, name: str, parameter: "weakref.ref[Tensor]") -> Callable[[Tensor | None], None]:
    key = id(parameter())

    def look(gradient: Tensor | None) -> None:
        if gradient is not None and gradient.layout is not torch.strided:
            raise ValueError(
                f"{name} got a sparse gradient, as F.embedding(sparse=True) makes them; use sparse=False: "
                "few entries are sent anyway"
            )
        held = parameter()
        if held is None or (key not in written.means and key not in written.skipped):
            return
        if not _holds(held):
            written.forget(key)
        elif key in written.means and key not in written.added_to:  # no_sync adds more than once
            written.added_to[key] = cast(Tensor, held.grad).clone()

    look.__torch_unserializable__ = True  # type: ignore[attr-defined]  # else saving a parameter warns
    return look


def _holds(parameter: Tensor) -> bool:
    """Return whether a gradient has a nonzero entry."""
    return parameter.grad is not None and bool(parameter.grad.any())


def mean_in(parameter: Tensor, idle: bool) -> Tensor | None:
    """Return the exchanged mean that a gradient still holds; `idle`: this backward has added nothing to it.

    A mean that has become NaN or Inf since does not count: it would spoil the residual that it is returned to.
    """
    key, mean = id(parameter), None
    for written in list(_all):
        if not idle:
            mean = written.added_to.get(key, mean)
        elif key in written.means and _holds(parameter):
            mean = cast(Tensor, parameter.grad).clone()
    return mean if mean is not None and bool(mean.isfinite().all()) else None


def watch(state: "State") -> None:
    """Act before optimizer steps for as long as this state lives."""
    _states.add(state)
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    passed = [state for state in list(_states) if state.options.optimizer is optimizer]
    for state in passed:
        if state.takes_over:
            take_over(optimizer, state.owns, state.level)  # a checkpoint may have brought its momentum back
    if passed and not any(state.takes_over or state.corrects_momentum for state in passed):
        # A checkpoint may be of a run whose memory had the momentum; here nobody has it.
        hand_back(optimizer, passed[0].level)
    _use(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure) or not _states:
        return None

    def followed() -> Any:
        loss = closure()
        _use(optimizer)
        return loss

    return (
        ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})
    )


def _use(optimizer: Optimizer) -> None:
    """Remove the gradients of skipped rounds from an optimizer that is about to step; means count as used."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for state in list(_states):
        if state.corrects_momentum and not ids.isdisjoint(state.written.means):
            refuse_momentum(optimizer, state)
    for written in list(_all):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in written.skipped:
                    parameter.grad = None
                written.forget(id(parameter))


def refuse_momentum(optimizer: Optimizer, state: "State") -> None:
    """Raise ValueError if the optimizer adds momentum to gradients that already contain it."""
    for group in optimizer.param_groups:
        if not any(state.owns(parameter) for parameter in group["params"]):
            continue
        betas = group.get("betas") or (0.0,)
        if group.get("momentum") or betas[0]:
            has = f"momentum={group['momentum']}" if group.get("momentum") else f"betas={betas}"
            raise ValueError(
                f"MomentumCorrection puts momentum into the gradients, and {type(optimizer).__name__} "
                f"has {has}: it would act twice; let it move into the memory (SGD, Adam, AdamW), register(..., "
                "optimizer=optimizer), set it to 0, or use memory='error-feedback'"
            )
