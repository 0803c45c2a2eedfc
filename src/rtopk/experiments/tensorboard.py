"""The points of a run as TensorBoard event files, for those who have the tensorboard package."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class EventFile:
    """Log every point that it is called with: one scalar for each name, at the point's round."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ValueError("event files need the tensorboard package: pip install 'rtopk[tensorboard]'")
        self.folder = folder
        self.writer: Any = None

    def __call__(self, point: Mapping[str, Any]) -> None:
        """Write one point and leave the file complete."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run lives through its last rounds again: what was logged of them before is void.
            self.writer = SummaryWriter(str(self.folder), purge_step=point["round"])
        for name, value in point.items():
            if name == "round":
                continue
            for tag, number in _scalars(name, value):
                self.writer.add_scalar(tag, number, point["round"])
        self.writer.flush()


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [(f"{name}/{part}", number) for part, number in value.items()]
    return [(name, value)]
