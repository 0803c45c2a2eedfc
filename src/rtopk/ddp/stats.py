"""What one round cost, for logs and TensorBoard."""

from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True)
class Stats:
    """Measured on the messages and clocks of this rank in its last round."""

    step: int
    bytes_sent: int  # this rank's messages: control header, payload and padding
    bytes_received: int  # those of the other ranks
    density: float  # of the entries that compete, as scheduled
    entries: int  # sent, including those that are always sent
    residual_norm: float
    selection_seconds: float  # memory, selection and encoding
    exchange_seconds: float  # waiting for the others' messages after backward was done
    averaging_seconds: float  # decoding and averaging
    skipped: int  # rounds so far that all ranks skipped


class Writer(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that is needed."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record one number."""


def write(writer: Writer, stats: Stats, prefix: str = "rtopk") -> None:
    """Write every number of a round except its step, as `prefix/name`."""
    for name, value in asdict(stats).items():
        if name != "step":
            writer.add_scalar(f"{prefix}/{name}", float(value), stats.step)
