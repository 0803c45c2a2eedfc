"""The points of a run as TensorBoard event files, for those who have the tensorboard package.

`$RTOPK_TENSORBOARD` asks for them, so that it reaches the workers of every command that runs many.
"""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VARIABLE = "RTOPK_TENSORBOARD"


def event_file(folder: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """Return what logs the points of a run in this folder: nothing, unless it was asked for."""
    if folder is None or os.environ.get(VARIABLE, "0") in ("", "0"):
        return lambda point: None
    return EventFile(folder / "tensorboard")


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
