"""Gradients to measure on: heavy-tailed synthetic ones, and those of the project's own models on real data.

Real data: CIFAR-10 and Penn Treebank from a directory that the user names (the layouts of their publishers);
else what is at hand anywhere: scikit-learn's digits for images, the manual that ships with Python for text.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rtopk.seed import derive, generator
from rtopk.studies.tasks import cifar
from rtopk.studies.tasks.models import LanguageModel, ResNet

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
        images, labels = cifar.read_python(file.read_bytes(), str(file))
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
