"""A training set divided among nodes, and each node's part served batch by batch.

Orders and augmentations depend on (seed, node, epoch or step) alone, so the batch of any step can be asked for at
any time, and a resumed run sees the same batches.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rtopk.seed import derive, generator

Batch = tuple[Any, ...]  # what the task's loss takes
Prepare = Callable[[Any, torch.Generator], Tensor]  # raw inputs and a generator to draw from -> inputs


class Shard(Protocol):
    """What the training loop needs to know of a node's data."""

    @property
    def steps_per_epoch(self) -> int:
        """Count the batches of an epoch."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: int) -> Batch: ...


class Examples:
    """Examples served in a new order every epoch, prepared (augmented) as they are served."""

    def __init__(
        self, inputs: Any, targets: Tensor, seed: int, node: int, batch: int, prepare: Prepare | None = None
    ) -> None:
        if not len(inputs):
            raise ValueError(f"node {node} has no examples; use fewer nodes or a larger alpha")
        self.inputs = inputs
        self.targets = targets
        self.seed = seed
        self.node = node
        self.batch = min(batch, len(inputs))
        self.prepare = prepare
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def steps_per_epoch(self) -> int:
        """Count the whole batches of an epoch; what is left over waits for another order."""
        return len(self) // self.batch

    def __getitem__(self, step: int) -> Batch:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            rng = generator(self.seed, "order", self.node, epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self), generator=rng)
        chosen = self._order[position * self.batch : (position + 1) * self.batch]
        inputs = self.inputs[chosen]
        if self.prepare is not None:
            inputs = self.prepare(inputs, generator(self.seed, "augment", self.node, step))
        return inputs, self.targets[chosen]


class Streams:
    """A text read in `batch` parallel streams, `unroll` tokens at a time, from the beginning every epoch."""

    def __init__(self, tokens: Tensor, batch: int, unroll: int, node: int) -> None:
        length = (len(tokens) - 1) // batch  # the last token is only ever a target
        if length < unroll:
            raise ValueError(
                f"node {node} has {len(tokens)} tokens, too few for {batch} streams of {unroll}; "
                "use fewer nodes or a smaller batch"
            )
        self.tokens = len(tokens)
        self.inputs = tokens[: batch * length].view(batch, length).T.contiguous()  # (time, batch)
        self.targets = tokens[1 : batch * length + 1].view(batch, length).T.contiguous()
        self.unroll = unroll

    def __len__(self) -> int:
        return self.tokens

    @property
    def steps_per_epoch(self) -> int:
        """Count the whole windows of an epoch."""
        return len(self.inputs) // self.unroll

    def __getitem__(self, step: int) -> Batch:
        """Return inputs and targets (unroll, batch), and whether the text begins here."""
        begin = step % self.steps_per_epoch * self.unroll
        window = slice(begin, begin + self.unroll)
        return self.inputs[window], self.targets[window], begin == 0


def split(targets: Tensor, nodes: int, kind: str, alpha: float, seed: int) -> list[Tensor]:
    """Return the positions of each node's examples; every example goes to exactly one node."""
    if nodes > len(targets):
        raise ValueError(f"{len(targets)} examples cannot be divided among {nodes} nodes")
    if kind == "iid":
        order = torch.randperm(len(targets), generator=generator(seed, "split"))
        return list(order.tensor_split(nodes))
    if kind == "contiguous":
        return list(torch.arange(len(targets)).tensor_split(nodes))
    if kind == "class":  # in the order of the classes, cut into equal parts: few classes a node
        order = torch.randperm(len(targets), generator=generator(seed, "split"))
        return list(order[targets[order].argsort(stable=True)].tensor_split(nodes))
    return _dirichlet(targets, nodes, alpha, seed)


def _dirichlet(targets: Tensor, nodes: int, alpha: float, seed: int) -> list[Tensor]:
    """Divide each class by shares drawn from a symmetric Dirichlet distribution (Yurochkin et al., 2019)."""
    rng = np.random.default_rng(derive(seed, "dirichlet"))
    parts: list[list[Tensor]] = [[] for _ in range(nodes)]
    for label in torch.unique(targets):
        members = (targets == label).nonzero()[:, 0]
        members = members[torch.from_numpy(rng.permutation(len(members)))]
        cuts = (np.cumsum(rng.dirichlet([alpha] * nodes))[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, members.tensor_split(torch.from_numpy(cuts)), strict=True):
            part.append(piece)
    return [torch.cat(pieces) for pieces in parts]
