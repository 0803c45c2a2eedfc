"""Track which gradients still hold what the last round wrote.

A hook on every parameter looks at `parameter.grad` just before backward adds to it. That tells two things:

- Which gradients are the NaN of a skipped round. They are removed before the optimizer steps, so that it does
  nothing; later gradients, of this model or another, are left alone.
- Whether backward adds to the mean of an exchange (a second full backward before the optimizer steps). The round
  then sends only what was added, and the old mean is added to the new one: it is neither sent twice nor lost.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

_all: "weakref.WeakSet[Written]" = weakref.WeakSet()


class Written:
    """The parameters, by id, whose gradients one state wrote and that were not cleared or used since."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.means: set[int] = set()
        self.skipped: set[int] = set()
        self.added_to: dict[int, Tensor] = {}  # what a gradient of `means` was before backward added to it
        # Hooks hold the parameters weakly, so as not to keep them alive.
        handles = [p.register_hook(_look(self, name, weakref.ref(p))) for name, p in parameters.items()]  # type: ignore[no-untyped-call]
        _all.add(self)
        self.stop = lambda: [handle.remove() for handle in handles]

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


def use(optimizer: Optimizer) -> None:
    """Remove the gradients of skipped rounds from an optimizer that is about to step; means count as used."""
    for written in list(_all):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in written.skipped:
                    parameter.grad = None
                written.forget(id(parameter))
