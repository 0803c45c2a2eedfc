"""The 40-byte header of every message: the status of this rank, and where it is in training.

A rank that cannot send (its gradient is not finite) reports it here, in a message of the usual size, so that all
ranks learn it from the one collective of the step and act alike. The header also carries the step, its density,
the loss scale and, every `verify_every` steps, a hash of the weights. The size of a message follows from the
density, so while that may change a separate header goes first, where ranks that disagree find out.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rtopk.state_file import byte_tensor, digest_bits

HEADER = struct.Struct("<4sB3sQddQ")  # magic, status, tensor, step, density, scale, weights
MAGIC = b"rTdd"
FINE, NOT_FINITE, FAILED, HOLDS = range(4)  # HOLDS: fine, and gradients hold the mean of an earlier exchange
SIZE = HEADER.size


class RanksDisagree(RuntimeError):  # noqa: N818 -- says what happened
    """The ranks are not at the same step, density, scale or weights."""


class GradientNotFinite(RuntimeError):  # noqa: N818 -- says what happened
    """A rank's gradient holds NaN or Inf, and the options say to stop or there were too many in a row."""


@dataclass(frozen=True)
class Control:
    """The header of one rank's message."""

    step: int
    status: int = FINE
    tensor: int = 0  # the parameter that is not finite, by its place in the layout
    density: float = 0.0
    scale: float = 1.0
    weights: int = 0  # hash of the weights, 0 in steps without verification

    def pack(self) -> Tensor:
        """Write the header, (40,) uint8."""
        tensor = self.tensor.to_bytes(3, "little")
        raw = HEADER.pack(MAGIC, self.status, tensor, self.step, self.density, self.scale, self.weights)
        return byte_tensor(raw)

    @classmethod
    def unpack(cls, message: Tensor) -> "Control":
        """Read the header of a message."""
        magic, status, tensor, *numbers = HEADER.unpack(message[:SIZE].cpu().numpy().tobytes())
        if magic != MAGIC:
            raise RanksDisagree(
                f"a message starts with {magic!r} instead of {MAGIC!r}: another collective is mixed into "
                "this one; issue collectives in the same order on all ranks"
            )
        step, density, scale, weights = numbers
        return cls(step, status, int.from_bytes(tensor, "little"), density, scale, weights)


def agree(controls: Sequence[Control]) -> None:
    """Raise RanksDisagree unless all ranks are at the same step, density, scale and weights."""
    for name, meaning in (
        ("step", "one rank went backward more often than another; resume all ranks from one checkpoint"),
        (
            "density",
            "the ranks' schedules moved apart; call state.set_epoch with the same epoch on all ranks, "
            "state.flush on all or none, and let a schedule depend on its argument alone",
        ),
        ("scale", "the ranks' GradScalers moved apart; resume all ranks from one checkpoint"),
        (
            "weights",
            "the replicas started from different weights or have drifted apart; give all the same weights at the "
            "start, or restart from a checkpoint of before",
        ),
    ):
        said = [getattr(control, name) for control in controls]
        if len(set(said)) > 1:
            raise RanksDisagree(f"{name} differs between ranks ({by_rank(said)}): {meaning}")
    statuses = [control.status for control in controls]
    if FINE in statuses and HOLDS in statuses:
        holding = [rank for rank, status in enumerate(statuses) if status == HOLDS]
        raise RanksDisagree(
            f"gradients still hold the mean of the last exchange on rank {', '.join(map(str, holding))} only; "
            "step, or clear gradients, on all ranks alike"
        )


def by_rank(values: Sequence[object]) -> str:
    """Say which ranks hold which value.

    >>> by_rank([3, 4, 3])
    '3 on rank 0, 2; 4 on rank 1'
    """
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on rank {', '.join(map(str, held))}" for value, held in ranks.items())


def hash_weights(tensors: Iterable[Tensor]) -> int:
    """Hash the bits of tensors to 64 bits, never 0."""
    return int.from_bytes(digest_bits(*tensors, size=8), "little") | 1
