"""Benchmarks: each measures us beside a floor and rivals in the same run. Here: what they run on.

That is gradients, synthetic or of real models; and models that wait instead of computing.

Real data: CIFAR-10 and Penn Treebank from a directory that the user names (the layouts of their publishers); else
what is at hand anywhere: scikit-learn's digits for images, the manual that ships with Python for text.

A stand-in has the parameters of a real model and hands out gradients that the model gave on this rank. Forward
waits a third of the measured step, backward the rest, spread evenly over the weight tensors in the order in which
backward reaches them. So ranks that share cores do not hide the link, and DDP sends its buckets while backward goes
on, as in real training.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rtopk.kernels import jit
from rtopk.seed import derive, generator
from rtopk.studies.tasks import datasets
from rtopk.studies.tasks.models import LanguageModel, ResNet

jit.compile_at_once()  # a process that measures does not time loops that are interpreted

WORDS = 10_000
ALIGNED = 16  # floats in a line of the cache


@dataclass(frozen=True)
class Gradients:
    """A few consecutive gradients of one source."""

    source: str  # what they are, for a table
    vectors: list[Tensor]  # each (d,), fp32
    long: Tensor | None = None  # if given, every stretch of d entries of it is a gradient too

    @property
    def size(self) -> int:
        """The number of entries, d."""
        return self.vectors[0].numel()

    def at(self, step: int) -> Tensor:
        """Return the gradient of a step: one of a few in turn, or a stretch that begins at a random place."""
        if self.long is None:
            return self.vectors[step % len(self.vectors)]
        places = (self.long.numel() - self.size) // ALIGNED + 1
        begin = ALIGNED * int(torch.randint(places, (), generator=generator("place", step)))
        return self.long[begin : begin + self.size]


def as_json(rows: Iterable[Any]) -> dict[str, Any]:
    """Return the rows of a benchmark, dataclasses, as one JSON object."""
    return {"rows": [asdict(row) for row in rows]}


def synthetic(d: int, count: int, seed: int = 0) -> Gradients:
    """Draw gradients with heavy tails: a normal variable times the exponential of another."""
    rng = generator(seed, "synthetic")
    size = d + d // 2
    long = torch.randn(size, generator=rng).mul_(torch.randn(size, generator=rng).exp_())
    begins = [i * (d // 2) // count // ALIGNED * ALIGNED for i in range(count)]
    return Gradients("normal x lognormal", [long[begin : begin + d] for begin in begins], long)


def real(d: int, count: int, data_dir: Path | None = None, seed: int = 0) -> Gradients:
    """Train the project's model of about d entries for a few steps and keep its gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        if d > 30_000_000:
            text, tokens = _tokens(data_dir)
            model: nn.Module = LanguageModel(WORDS, tied=False)
            return Gradients(
                f"LSTM on {text}", _train(model, _language_batches(tokens), _language_loss, count)
            )
        width = max(1, round(64 * (d / 11_173_962) ** 0.5))
        name, images, labels = _images(data_dir)
        model = ResNet(width=width)
        batches = _image_batches(images, labels, seed)
        source = f"ResNet-18 on {name}" if width == 64 else f"ResNet-18 ({width} channels) on {name}"
        return Gradients(source, _train(model, batches, _image_loss, count))


Batch = tuple[Tensor, Tensor]


def _train(
    model: nn.Module, batches: Iterator[Batch], loss: Callable[[nn.Module, Batch], Tensor], count: int
) -> list[Tensor]:
    """Take steps of plain SGD; return the last `count` gradients, the first two left out."""
    vectors = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(count + 2):
        optimizer.zero_grad()
        loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        if step >= 2:
            vectors.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return vectors


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch[0])[0]  # (time, batch, words)
    return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten())


def _images(data_dir: Path | None) -> tuple[str, Tensor, Tensor]:
    file = None if data_dir is None else data_dir / "cifar-10-batches-py" / "data_batch_1"
    if file is not None and file.exists():
        images, labels = datasets.read_python(file.read_bytes(), str(file))
        return "CIFAR-10", (images.float() - 120.0) / 64.0, labels
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.from_numpy(digits.images).float().unsqueeze(1)  # (1797, 1, 8, 8), 0 to 16
    images = F.interpolate(pixels, scale_factor=4.0).expand(-1, 3, -1, -1)
    return "digits, enlarged", (images - 8.0) / 8.0, torch.from_numpy(digits.target)


def _image_batches(images: Tensor, labels: Tensor, seed: int, size: int = 4) -> Iterator[Batch]:
    rng = generator(seed, "batches")
    while True:
        chosen = torch.randint(len(images), (size,), generator=rng)
        yield images[chosen].contiguous(), labels[chosen]


def _tokens(data_dir: Path | None) -> tuple[str, Tensor]:
    file = None if data_dir is None else data_dir / "ptb" / "ptb.train.txt"
    if file is not None and file.exists():
        name, words = "Penn Treebank", file.read_text().replace("\n", " <eos> ").split()
    else:
        from pydoc_data.topics import topics

        name, words = "the manual of Python", re.findall(r"\w+|[^\w\s]", " ".join(topics.values()))
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
    return name, torch.tensor([number.get(word, WORDS - 1) for word in words])


def _language_batches(tokens: Tensor, time: int = 10, batch: int = 8) -> Iterator[Batch]:
    columns = tokens[: len(tokens) // batch * batch].view(batch, -1).t().contiguous()  # (length, batch)
    begin = 0
    while True:
        if begin + time >= len(columns):
            begin = 0
        yield columns[begin : begin + time], columns[begin + 1 : begin + time + 1]
        begin += time


FORWARD = 1 / 3  # of a step's computation; backward is about twice forward


Loss = Callable[[nn.Module, torch.Generator], Tensor]


def _on_images(*shape: int) -> Loss:
    """Make the loss on 8 random inputs of ten classes."""

    def loss(model: nn.Module, rng: torch.Generator) -> Tensor:
        inputs = torch.randn(8, *shape, generator=rng)
        return F.cross_entropy(model(inputs), torch.randint(10, (8,), generator=rng))

    return loss


def _on_words(model: nn.Module, rng: torch.Generator) -> Tensor:
    """Return the loss on 4 x 10 random words."""
    words = torch.randint(WORDS, (11, 4), generator=rng)
    return _language_loss(model, (words[:-1], words[1:]))


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "resnet18": (ResNet, _on_images(3, 32, 32)),  # the CIFAR form, 11.2 M entries
    # The PTB language model: two layers of 1500, tied, 51 M entries.
    "lstm1500": (lambda: LanguageModel(WORDS, units=1500, layers=2, dropout=0.0, tied=True), _on_words),
    "small": (  # 0.2 M entries, for trials
        lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128), nn.Linear(128, 10)),
        _on_images(256),
    ),
}


def make_model(name: str) -> tuple[nn.Module, Loss]:
    """Make a model, with the same weights in every process, and return its loss too."""
    make, loss = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive("link", name))
        return make(), loss


class StandIn(nn.Module):
    """The parameters of a model, and steps that take a given time and give real gradients."""

    def __init__(self, name: str, rank: int, kinds: int = 2) -> None:
        super().__init__()
        self.model, self._loss = make_model(name)
        self.groups = _group([p for p in self.model.parameters() if p.requires_grad])
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

    def begin(self) -> tuple[float, list[list[Tensor]]]:
        """Wait for forward; return how long backward waits for each group, and the gradients of this step."""
        time.sleep(self.seconds * FORWARD)
        return self.seconds * (1 - FORWARD) / len(self.groups), next(self._sets)

    def forward(self, start: Tensor) -> Tensor:
        """Return what `backward` is called on."""
        pause, sets = self.begin()
        for group, gradients in zip(self.groups, sets, strict=True):
            start = cast(Tensor, Wait.apply(start, pause, gradients, *group))  # type: ignore[no-untyped-call]
        return start.sum()


class Wait(torch.autograd.Function):
    """Some layers: backward waits, then hands out their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: float, gradients: Sequence[Tensor], *weights: Tensor) -> Tensor:
        """Return what came in."""
        ctx.pause, ctx.gradients = pause, gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        """Wait, then return the gradients of the weights."""
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
