"""One node of a run: its data, its sparsifier with the memory, its buffers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rtopk.sparsifier import Sparsifier
from rtopk.studies.tasks.shards import Shard
from rtopk.studies.train.powersgd import LowRankNode, Matrices

if TYPE_CHECKING:
    from rtopk.studies.train.loop import Run


class Node:
    """What belongs to one node, and is saved with it."""

    def __init__(self, run: "Run", number: int, shard: Shard) -> None:
        self.number = number
        self.shard = shard
        self.buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
        config = run.config
        self.sparsifier: Sparsifier | LowRankNode
        if run.low_rank is not None:
            self.sparsifier = LowRankNode(run.low_rank, config.make_memory())
        else:
            self.sparsifier = Sparsifier(
                config.make_selector(),
                config.make_density(),
                config.make_memory(),
                run.codec,
                config.seed,
                node=number,
                layout=run.layout,
            )

    def answer(self, left: Matrices) -> Tensor:
        """Return PowerSGD's second message."""
        assert isinstance(self.sparsifier, LowRankNode)
        return self.sparsifier.answer(left)

    def residual_norm(self) -> float:
        """Return the norm of the residual; 0 where nothing is kept."""
        residual = getattr(self.sparsifier.memory, "residual", None)
        return 0.0 if residual is None else float(torch.linalg.vector_norm(residual))

    def state_dict(self) -> dict[str, Any]:
        """Return the node's part of a checkpoint."""
        return {"sparsifier": self.sparsifier.state_dict(), "buffers": self.buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.buffers = {name: value.clone() for name, value in state["buffers"].items()}
