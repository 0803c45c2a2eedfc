"""A model whose computation is replaced by waiting, so that ranks that share cores do not hide the link.

It has the parameters of the real model and hands out gradients that the real model gave on this rank; forward
waits a third of the measured step, backward the rest, spread evenly over the weight tensors in the order in
which backward meets them. So DDP fills and sends its buckets while backward goes on, as in real training.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rtopk.seed import derive, generator
from rtopk.studies.tasks.models import LanguageModel, ResNet

FORWARD = 1 / 3  # of a step's computation; backward is about twice forward
WORDS = 10_000  # of the Penn Treebank


def resnet18() -> tuple[nn.Module, Callable[[nn.Module, torch.Generator], Tensor]]:
    """Return ResNet-18 (CIFAR form, 11.2 M entries) and its loss on 8 random images."""

    def loss(model: nn.Module, rng: torch.Generator) -> Tensor:
        images = torch.randn(8, 3, 32, 32, generator=rng)
        labels = torch.randint(10, (8,), generator=rng)
        return F.cross_entropy(model(images), labels)

    return ResNet(), loss


def lstm1500() -> tuple[nn.Module, Callable[[nn.Module, torch.Generator], Tensor]]:
    """Return the PTB language model (two layers of 1500, tied, 51 M entries) and its loss on 4 x 10 words."""

    def loss(model: nn.Module, rng: torch.Generator) -> Tensor:
        words = torch.randint(WORDS, (11, 4), generator=rng)
        scores, _ = model(words[:-1])
        return F.cross_entropy(scores.reshape(-1, WORDS), words[1:].reshape(-1))

    return LanguageModel(WORDS, units=1500, layers=2, dropout=0.0, tied=True), loss


def small() -> tuple[nn.Module, Callable[[nn.Module, torch.Generator], Tensor]]:
    """Return a network of 0.2 M entries, for trials."""

    def loss(model: nn.Module, rng: torch.Generator) -> Tensor:
        return F.cross_entropy(
            model(torch.randn(8, 256, generator=rng)), torch.randint(10, (8,), generator=rng)
        )

    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128), nn.Linear(128, 10)), loss


MODELS = {"resnet18": resnet18, "lstm1500": lstm1500, "small": small}


class StandIn(nn.Module):
    """The parameters of a model, and steps that take a given time and give real gradients."""

    def __init__(self, name: str, rank: int, kinds: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive("link", name))  # the same weights on all ranks
            model, loss = MODELS[name]()
        self.model = model
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.groups = _group(parameters)
        self._loss = loss
        self._sets = cycle([self._gradients(generator("link", name, rank, kind)) for kind in range(kinds)])
        self.seconds = 0.0  # of computation that a step waits for

    def _gradients(self, rng: torch.Generator) -> list[list[Tensor]]:
        """Take a real step, return the gradients by group."""
        parameters = [p for group in self.groups for p in group]
        found = iter(torch.autograd.grad(self._loss(self.model, rng), parameters))
        return [[next(found).contiguous() for _ in group] for group in self.groups]

    def measure(self, times: int = 3) -> float:
        """Return the median time of a real step, in seconds."""
        taken = []
        for time_ in range(times):
            started = time.perf_counter()
            self._gradients(generator("link", time_))
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    @property
    def size(self) -> int:
        """The number of entries, d."""
        return sum(p.numel() for group in self.groups for p in group)

    def forward(self, start: Tensor) -> Tensor:
        """Return what `backward` is called on."""
        time.sleep(self.seconds * FORWARD)
        pause = self.seconds * (1 - FORWARD) / len(self.groups)
        out = start
        for group, gradients in zip(self.groups, next(self._sets), strict=True):
            out = cast(Tensor, _Wait.apply(out, pause, gradients, *group))  # type: ignore[no-untyped-call]
        return out.sum()


class _Wait(torch.autograd.Function):
    """Some layers: backward waits, then hands out their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: float, gradients: Sequence[Tensor], *weights: Tensor) -> Tensor:
        ctx.pause, ctx.gradients = pause, gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        time.sleep(ctx.pause)
        return (outputs[0], None, None, *ctx.gradients)


def _group(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Put each weight together with the norms and biases that follow it."""
    groups: list[list[nn.Parameter]] = []
    for parameter in parameters:
        if parameter.dim() > 1 or not groups:
            groups.append([])
        groups[-1].append(parameter)
    return groups
