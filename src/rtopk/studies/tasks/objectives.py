"""The two kinds of task: classes by cross entropy, and the next token of a text (the score is its perplexity).

A training set is divided among the nodes, a text into one contiguous part per node, as in the paper, or by lines
dealt at random (iid). Each node's part is served batch by batch: orders and augmentations depend on (seed, node,
epoch or step) alone, so the batch of any step can be asked for at any time, and a resumed run sees the same
batches. An LSTM's state is carried from batch to batch: it is a buffer of the model, and buffers belong to the
node.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rtopk.seed import derive, generator
from rtopk.studies.config import Config
from rtopk.studies.tasks.datasets import Corpus

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


CHUNK = 500  # examples evaluated at a time


@dataclass(frozen=True)
class Classification:
    """A data set with classes and a model for it."""

    train: tuple[Any, Tensor]  # inputs (anything that is indexed as a tensor) and classes
    held_out: tuple[Any, Tensor]
    model: Callable[[], nn.Module]
    augment: Prepare | None = None  # training inputs, when served
    view: Callable[[Any], Tensor] | None = None  # held-out inputs, when evaluated
    metric: str = "accuracy"
    higher_is_better: bool = True

    def make_model(self) -> nn.Module:
        """Build a new model with freshly drawn weights."""
        return self.model()

    def shards(self, config: Config) -> Sequence[Examples]:
        """Divide the training data among the nodes."""
        inputs, targets = self.train
        parts = split(targets, config.nodes, config.split, config.alpha, config.seed)
        return [
            Examples(inputs[part], targets[part], config.seed, node, config.batch, self.augment)
            for node, part in enumerate(parts)
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a batch."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return cross entropy and accuracy (in percent) on the held-out part."""
        inputs, targets = self.held_out
        device = next(model.parameters()).device
        total, right = 0.0, 0
        for begin in range(0, len(inputs), CHUNK):
            chunk = inputs[begin : begin + CHUNK]
            scores = model((chunk if self.view is None else self.view(chunk)).to(device))
            wanted = targets[begin : begin + CHUNK].to(device)
            total += float(F.cross_entropy(scores, wanted, reduction="sum"))
            right += int((scores.argmax(1) == wanted).sum())
        return {"loss": total / len(inputs), "accuracy": 100.0 * right / len(inputs)}

    def chunks(self, shard: Examples, size: int) -> Sequence[tuple[int, Batch]]:
        """Return all of a node's examples as they are without augmentation, with their number, part by part."""
        parts = torch.split(torch.arange(len(shard)), size)
        return [
            (len(p), (shard.inputs[p] if self.view is None else self.view(shard.inputs[p]), shard.targets[p]))
            for p in parts
        ]


@dataclass(frozen=True)
class Prediction:
    """A text and a model for it: model(tokens, fresh) -> scores, fresh where the text begins."""

    corpus: Corpus
    held_out: Tensor  # (tokens,)
    model: Callable[[], nn.Module]
    unroll: int
    streams: int = 10  # of the evaluation
    metric: str = "perplexity"
    higher_is_better: bool = False

    def make_model(self) -> nn.Module:
        """Build a new model with freshly drawn weights."""
        return self.model()

    def shards(self, config: Config) -> Sequence[Streams]:
        """Divide the training text among the nodes."""
        text, starts = self.corpus.train, self.corpus.lines
        if config.split == "contiguous":
            parts = list(text.tensor_split(config.nodes))
        elif config.split == "iid":
            lines = text.tensor_split(starts[1:])
            dealt = split(starts, config.nodes, "iid", config.alpha, config.seed)
            parts = [torch.cat([lines[int(i)] for i in part]) for part in dealt]
        else:
            raise ValueError(f"split must be contiguous or iid for a text, got {config.split!r}")
        return [Streams(part, config.batch, self.unroll, node) for node, part in enumerate(parts)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy per token."""
        tokens, targets, fresh = batch
        scores = model(tokens, fresh)  # (time, batch, words)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return cross entropy and perplexity per token of the held-out text, read in parallel streams."""
        device = next(model.parameters()).device
        text = Streams(self.held_out, self.streams, self.unroll, 0)
        inputs, targets = text.inputs.to(device), text.targets.to(device)
        total = 0.0
        for begin in range(0, len(inputs), self.unroll):
            scores = model(inputs[begin : begin + self.unroll], begin == 0)
            wanted = targets[begin : begin + self.unroll]
            total += float(F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum"))
        loss = total / targets.numel()
        return {
            "loss": loss,
            "perplexity": math.exp(loss if loss < 50.0 else 50.0),
        }  # NaN too: a number to show


class Carrying(nn.Module):
    """A recurrent model that goes on from the state in which the last batch left it.

    Training and evaluation have a state each: looking at a model does not change its training.
    """

    def __init__(self, model: nn.Module, layers: int, units: int, batch: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("hidden", torch.zeros(2, layers, batch, units))
        self._seen: tuple[Tensor, Tensor] | None = None  # evaluation's state

    def forward(self, tokens: Tensor, fresh: bool) -> Tensor:
        """Map tokens (time, batch) to scores (time, batch, words)."""
        if not self.training:
            scores, self._seen = self.model(tokens, None if fresh else self._seen)
            return cast(Tensor, scores)
        carried = cast(Tensor, self.hidden)
        state = carried.clone().unbind() if not fresh else None  # autograd keeps it; we write over ours
        scores, after = self.model(tokens, state)
        carried.copy_(torch.stack([part.detach() for part in after]))
        return cast(Tensor, scores)
