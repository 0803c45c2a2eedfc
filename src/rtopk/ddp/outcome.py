"""How a round ends: read the ranks' headers, then take the step, skip it, or raise.

All ranks read the same headers, so all decide alike.
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
    """Return why this round must be skipped, or an empty string; raise if the ranks cannot continue."""
    if this.verdict is not None:
        raise this.verdict
    return "; ".join(
        f"the gradient of {state.layout.names[said.tensor]} is not finite on rank {rank}"
        for ranks in arrived
        for rank, said in enumerate(hear(state, this, ranks))
        if said.status == control.NOT_FINITE
    )


def hear(state: "State", this: "Round", messages: list[Tensor]) -> list[Control]:
    """Return the ranks' headers; raise if one has failed or they are not at the same point."""
    if this.failure is not None:
        raise this.failure
    controls = [Control.unpack(message) for message in messages]
    for rank, said in enumerate(controls):
        if said.status == control.FAILED:
            raise RuntimeError(f"rank {rank} failed to compress in step {state.step}; see its error")
    control.agree(controls)
    return controls


def give_up(state: "State", this: "Round") -> None:
    """Restore this rank to before the round; its gradients are lost."""
    for group in state.groups:
        group.rollback()
        group.put_back(this.held, this.scale)
    _spoil(state, this)


def _spoil(state: "State", this: "Round") -> None:
    """Make the gradients NaN, as plain DDP would, and as GradScaler expects."""
    for gradient in this.gradients.values():
        gradient.fill_(float("nan"))
    state.written.note(state.parameters.values(), skipped=True)
    state.skipping = True


def raise_after_backward(error: Exception) -> None:
    """Raise an error after DDP has finished this backward: raised in the hook, it would leave DDP broken."""
    engine = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise error

    # DDP queues the end of backward when the hook returns; what a callback queues runs after that.
    engine.queue_callback(lambda: engine.queue_callback(fail))


def skip(state: "State", this: "Round", refusal: str) -> None:
    """Undo the round on this rank, as all others do; raise if the options say so."""
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
