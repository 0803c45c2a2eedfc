"""How a round ends: what the ranks said about themselves, and what happens where one of them is not well.

All ranks hear the same headers, so all come to the same end: take the step, skip it, or raise.
"""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rtopk.ddp import control
from rtopk.ddp.control import Control, GradientNotFinite

if TYPE_CHECKING:
    from rtopk.ddp.rounds import Round
    from rtopk.ddp.state import State

log = logging.getLogger("rtopk")


def judge(state: "State", this: "Round", arrived: list[list[Tensor]]) -> str:
    """Return why this round must be skipped, or nothing; raise if the ranks cannot go on."""
    if this.verdict is not None:
        raise this.verdict
    return "; ".join(
        f"the gradient of {state.layout.names[said.tensor]} is not finite on rank {rank}"
        for ranks in arrived
        for rank, said in enumerate(hear(state, this, ranks))
        if said.status == control.NOT_FINITE
    )


def hear(state: "State", this: "Round", messages: list[Tensor]) -> list[Control]:
    """Return what the ranks say about themselves; raise if one has failed or they are not at the same point."""
    if this.failure is not None:
        raise this.failure
    controls = [Control.unpack(message) for message in messages]
    for rank, said in enumerate(controls):
        if said.status == control.FAILED:
            raise RuntimeError(f"rank {rank} failed to compress in step {state.step}; see its error")
    control.agree(controls)
    return controls


def give_up(state: "State", this: "Round") -> None:
    """Leave this rank as it was before the round; its gradients are lost."""
    for group in state.groups:
        group.rollback()
        group.put_back(this.held, this.scale)
    _spoil(state, this)


def _spoil(state: "State", this: "Round") -> None:
    """Make the gradients NaN, which is what plain DDP would hand on and what GradScaler looks for."""
    for gradient in this.gradients.values():
        gradient.fill_(float("nan"))
    state.written.note(state.parameters.values(), skipped=True)
    state.skipping = True


def raise_after_backward(error: Exception) -> None:
    """Raise an error when DDP has ended this backward: raised in the hook, it would leave DDP half-way for ever."""
    engine = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise error

    # DDP queues its end of backward when the hook has returned; what is queued from a callback comes after that.
    engine.queue_callback(lambda: engine.queue_callback(fail))


def skip(state: "State", this: "Round", refusal: str) -> None:
    """Take the round back on this rank, as all others do; raise if the options say so."""
    state.refusal = f"step {state.step}: {refusal}"
    if state.options.on_nonfinite == "raise":
        raise GradientNotFinite(f"{state.refusal}; nothing was changed on any rank")
    state.skips_in_a_row += 1
    if state.skips_in_a_row >= state.options.max_skips:
        raise GradientNotFinite(
            f"{state.refusal}; {state.skips_in_a_row} rounds in a row could not be used, and max_skips is "
            f"{state.options.max_skips}; nothing was changed on any rank"
        )
    give_up(state, this)
    state.skipped += 1
    log.warning("all ranks skip this step. %s", state.refusal)
