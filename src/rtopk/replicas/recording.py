"""Gradients of a job on disk: every rank's own, step by step, for `rtopk lab inspect --gradients`.

A step of a rank is one file. Of a large model the files hold a uniform sample of the entries, the same on all ranks
and in all steps: what they say of magnitudes, overlap and lag holds for the sample as for the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rtopk.seed import generator
from rtopk.select import draw
from rtopk.state_file import Format, StateError, write_atomically

FILE = Format(b"rtopk-gradients-1\n", 16, "record again")


class Recorder:
    """Write a rank's gradients of the first steps, each a flat vector of `size` entries."""

    def __init__(self, folder: Path, rank: int, nodes: int, size: int, steps: int, entries: int) -> None:
        for name, value in (("steps", steps), ("entries", entries), ("size", size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.folder, self.rank, self.nodes, self.size = folder, rank, nodes, size
        self.left = steps
        self._step = 0
        everything = entries >= size
        self._sample = None if everything else draw(size, entries, generator("recorded", size, entries))
        if any(folder.glob(_name("*", rank))):
            raise ValueError(
                f"{folder} holds gradients of rank {rank} already; give a new folder, or empty it"
            )
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, gradient: Tensor) -> None:
        """Write the next step."""
        if gradient.shape != (self.size,):
            raise ValueError(f"gradient must have shape ({self.size},), got {tuple(gradient.shape)}")
        kept = gradient if self._sample is None else gradient[self._sample.to(gradient.device)]
        state = {"step": self._step, "rank": self.rank, "nodes": self.nodes, "size": self.size,
                 "gradient": kept.detach().to("cpu", copy=True)}  # fmt: skip
        write_atomically(self.folder / _name(f"{self._step:05}", self.rank), FILE.pack(state))
        self._step += 1
        self.left -= 1


@dataclass(frozen=True)
class Recording:
    """What all ranks recorded; iterating gives the ranks' gradients of each step that is finite, in fp32."""

    folder: Path
    nodes: int
    steps: int
    size: int  # of the gradient
    entries: int  # recorded of it

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        """Find what a folder holds; refuse one that lacks a rank's steps."""
        first = folder / _name("00000", 0)
        if not first.is_file():
            raise ValueError(
                f"{folder} must hold {first.name}, which rtopk.ddp.record(model, {str(folder)!r}) writes on rank 0"
            )
        state = _load(first)
        nodes, steps = state["nodes"], sum(1 for _ in folder.glob(_name("*", 0)))
        found = cls(folder, nodes, steps, state["size"], state["gradient"].numel())
        missing = [path.name for path in found._paths() if not path.is_file()]
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of {steps * nodes} files, {missing[0]} first: {steps} steps of "
                f"{nodes} ranks were recorded; copy the files of all ranks into one folder"
            )
        return found

    def __iter__(self) -> Iterator[list[Tensor]]:
        for step in range(self.steps):
            gradients = [self._gradient(step, rank) for rank in range(self.nodes)]
            if all(
                bool(gradient.isfinite().all()) for gradient in gradients
            ):  # else a job skips the step, too
                yield gradients

    def _paths(self) -> Iterator[Path]:
        return (
            self.folder / _name(f"{step:05}", rank)
            for step in range(self.steps)
            for rank in range(self.nodes)
        )

    def _gradient(self, step: int, rank: int) -> Tensor:
        path = self.folder / _name(f"{step:05}", rank)
        state = _load(path)
        expected = {"step": step, "rank": rank, "nodes": self.nodes, "size": self.size}
        for name, value in expected.items():
            if state[name] != value:
                raise ValueError(
                    f"{path} is of {name} {state[name]}, not {value}: it is of another recording"
                )
        gradient: Tensor = state["gradient"]
        if gradient.shape != (self.entries,):
            raise ValueError(f"{path} must hold {self.entries} entries, got {tuple(gradient.shape)}")
        return gradient.float()


def _name(step: str, rank: int) -> str:
    return f"step-{step}-rank-{rank}.gradients"


def _load(path: Path) -> dict[str, Any]:
    state = FILE.unpack(path.read_bytes(), str(path))
    if state.keys() != {"step", "rank", "nodes", "size", "gradient"}:
        raise StateError(f"{path}: not a recorded gradient; {FILE.advice}")
    return state
