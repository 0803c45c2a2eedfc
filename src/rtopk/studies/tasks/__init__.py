"""Tasks: what is learned, from which data, by which model. A task is added here and nowhere else.

The loop asks a task for a model, for each node's shard of the training data, for the loss of a batch and for
the score of a model. Everything random comes from `rtopk.seed`, or from torch's global generator inside a
fork that the loop has seeded (initial weights, dropout). Names: the paper's set-up plain; `-narrow` is its
narrow ResNet; `-small` is what the small scale of the tables runs, a thousand rounds a minute or more.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rtopk.seed import generator
from rtopk.studies.config import Config, Part
from rtopk.studies.tasks import datasets, images
from rtopk.studies.tasks.datasets import OWN, DataError, find
from rtopk.studies.tasks.images import image_folder, read_image, squeezed, train_and_val
from rtopk.studies.tasks.models import Gpt, LanguageModel, ResNet, mlp, small_convnet
from rtopk.studies.tasks.objectives import Batch, Carrying, Classification, Prediction, Shard


class Task(Protocol):
    """What the training loop needs to know."""

    @property
    def metric(self) -> str:
        """Name the score that counts."""

    @property
    def higher_is_better(self) -> bool:
        """Say which way the metric improves."""

    def make_model(self) -> nn.Module:
        """Build a new model with freshly drawn weights."""

    def shards(self, config: Config) -> Sequence[Shard]:
        """Divide the training data among the nodes."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss and the metric on the held-out part."""


@cache
def digits(part: Part) -> Classification:
    """Scikit-learn's 1,797 handwritten digits, 8 x 8: two hidden layers, 26,122 parameters."""
    from sklearn.datasets import load_digits

    data = load_digits()
    inputs = torch.from_numpy(data.data.astype(np.float32) / 16.0)
    targets = torch.from_numpy(data.target.astype(np.int64))
    train, held_out = hold_out((inputs, targets), part)
    return Classification(train, held_out, lambda: mlp(64, (128, 128), 10))


def wide_digits(hidden: int) -> Callable[[Config], Classification]:
    """Make the same task for a network of two hidden layers of this width: to measure traffic, not learning."""
    return lambda config: dataclasses.replace(
        digits(config.part), model=lambda: mlp(64, (hidden, hidden), 10)
    )


def hold_out(
    examples: tuple[Tensor, Tensor], part: Part
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Divide examples into train and held-out: a quarter is the test set, a fifth of the rest validation."""
    inputs, targets = examples
    order = torch.randperm(len(inputs), generator=generator("hold out"))
    test = len(inputs) // 4
    validation = (len(inputs) - test) // 5
    held_out, train = (
        (order[:test], order[test:])
        if part == "test"
        else (order[test : test + validation], order[test + validation :])
    )
    return (inputs[train], targets[train]), (inputs[held_out], targets[held_out])


@cache
def cifar10(part: Part, small: bool, model: Callable[[], nn.Module]) -> Classification:
    """CIFAR-10, cropped and flipped at random; small: at 16 x 16. A tenth of the training set validates."""
    train, test = datasets.cifar10()
    if small:
        train, test = (images.halved(train[0]), train[1]), (images.halved(test[0]), test[1])
    train, test = images.hold_back(train, test, part, len(train[1]) // 10)
    norm = images.normalise(images.CIFAR_MEAN, images.CIFAR_STD)
    crop = images.crop_and_flip(2 if small else 4)
    return Classification(train, test, model, lambda batch, rng: norm(crop(batch, rng)), norm)


@cache
def imagenet(part: Part, sample: bool) -> Classification:
    """ImageNet in folders; the sample, an image a class, is both training and test set: it shows no accuracy."""
    if sample:
        files, labels, classes = image_folder(find("imagenet-sample"))
        train: images.Pixels = files, labels
        test = train
    else:
        train, test, classes = train_and_val(find("imagenet"))
    train, test = images.hold_back(train, test, part, len(train[1]) // 20)
    model = partial(ResNet, (3, 4, 6, 3), 64, len(classes), large_images=True)
    return Classification(train, test, model, images.random_view(224), images.middle_view(224))


@cache
def tiny_imagenet(part: Part, model: Callable[[int], nn.Module]) -> Classification:
    """20 classes of Tiny ImageNet at 16 x 16, 10,000 training images."""
    *parts, classes = train_and_val(find("tiny-imagenet-20"))
    train, test = [(images.decoded(files, partial(squeezed, side=16)), labels) for files, labels in parts]
    train, test = images.hold_back(train, test, part, len(train[1]) // 10)
    norm = images.normalise(images.IMAGENET_MEAN, images.IMAGENET_STD)
    crop = images.crop_and_flip(2)
    make = partial(model, len(classes))
    return Classification(train, test, make, lambda batch, rng: norm(crop(batch, rng)), norm)


_ptb = cache(datasets.ptb)  # by the size of the vocabulary
_shakespeare = cache(datasets.shakespeare)


def ptb(config: Config, *, words: int, units: int, dropout: float, init: float, unroll: int) -> Prediction:
    """Penn Treebank with a two-layer LSTM whose input and output embeddings are one."""
    text = _ptb(words)

    def model() -> nn.Module:
        lstm = LanguageModel(text.words, units, 2, dropout, tied=True, init=init)
        return Carrying(lstm, 2, units, config.batch)

    return Prediction(text, text.test if config.part == "test" else text.validation, model, unroll)


def gpt(config: Config, *, corpus: Callable[[], datasets.Corpus]) -> Prediction:
    """Read a text with a small GPT: 107,840 parameters for the 65 characters of tiny Shakespeare."""
    text = corpus()
    model = partial(Gpt, text.words, width=64, layers=2, heads=4, context=64)
    return Prediction(text, text.test if config.part == "test" else text.validation, model, unroll=64)


def resnet18() -> nn.Module:
    """Make the paper's model for CIFAR-10."""
    return ResNet((2, 2, 2, 2), 64, 10)


def narrow_resnet(classes: int = 10) -> nn.Module:
    """Make a ResNet-8 of 16 channels: 78,042 parameters for ten classes."""
    return ResNet((1, 1, 1), 16, classes)


TASKS: dict[str, Callable[[Config], Task]] = {
    "digits": lambda config: digits(config.part),
    "digits-1m": wide_digits(968),  # 1,010,602 parameters
    "digits-11m": wide_digits(3290),  # 11,074,150 parameters
    "cifar10": lambda config: cifar10(config.part, False, resnet18),
    "cifar10-narrow": lambda config: cifar10(config.part, False, narrow_resnet),
    "cifar10-small": lambda config: cifar10(config.part, True, small_convnet),
    "imagenet": lambda config: imagenet(config.part, sample=False),
    "imagenet-sample": lambda config: imagenet(config.part, sample=True),
    "imagenet-narrow": lambda config: tiny_imagenet(config.part, narrow_resnet),
    "imagenet-small": lambda config: tiny_imagenet(config.part, small_convnet),
    # Zaremba et al.'s large model and its small sibling.
    "ptb": partial(ptb, words=0, units=1500, dropout=0.65, init=0.04, unroll=35),
    "ptb-small": partial(ptb, words=1000, units=64, dropout=0.0, init=0.1, unroll=10),
    "ptb-gpt": partial(gpt, corpus=partial(_ptb, 1000)),
    "shakespeare": partial(gpt, corpus=_shakespeare),
}


def check_task(name: str) -> None:
    """Raise ValueError if there is no task of that name."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")


def load(config: Config) -> Task:
    """Return the task of a configuration."""
    check_task(config.task)
    task = TASKS[config.task](config)
    if not config.examples:
        return task
    if not isinstance(task, Classification) or config.examples > len(task.train[1]):
        most = (
            f"at most {len(task.train[1]):,}" if isinstance(task, Classification) else "0: the task is a text"
        )
        raise ValueError(f"examples must be {most} for task {config.task}, got {config.examples:,}")
    inputs, classes = task.train  # in no order
    return dataclasses.replace(task, train=(inputs[: config.examples], classes[: config.examples]))


@dataclass(frozen=True)
class DataSetState:
    """What is known of one data set."""

    name: str
    state: str  # "ok", "missing" or "damaged"
    detail: str
    needed_for: str


def _images_of_cifar(folder: Path) -> str:
    (images, _), (test, _) = datasets.cifar10_from(folder)
    return f"{len(images):,} training and {len(test):,} test images"


def _words_of_ptb(folder: Path) -> str:
    text = datasets.ptb()
    sizes = (
        f"{len(text.train):,} training, {len(text.validation):,} validation, {len(text.test):,} test words"
    )
    return f"{sizes}, vocabulary {text.words:,}"


def _letters_of_shakespeare(folder: Path) -> str:
    text = datasets.shakespeare()
    total = len(text.train) + len(text.validation) + len(text.test)
    return f"{total:,} characters, {text.words} distinct"


def _folders(*parts: str) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        said = []
        if len(parts) == 2:
            train_and_val(folder)
        for part in parts:
            files, _, classes = image_folder(folder / part)
            for path in (files.paths[0], files.paths[-1]):  # all of ImageNet would take an hour
                read_image(path)
            where = f" in {part}" if part else ""
            said.append(f"{len(files):,} images of {len(classes):,} classes{where}")
        return ", ".join(said)

    return check


SETS: tuple[tuple[str, tuple[str, ...], Callable[[Path], str], str], ...] = (
    ("CIFAR-10", datasets.CIFAR_FOLDERS, _images_of_cifar, "tables 1 and 2"),
    ("ImageNet", ("imagenet",), _folders("train", "val"), "table 3, scale paper"),
    ("ImageNet sample", ("imagenet-sample",), _folders(""), "task imagenet-sample"),
    ("Tiny ImageNet, 20 classes", ("tiny-imagenet-20",), _folders("train", "val"), "table 3, scale small"),
    ("Penn Treebank", datasets.PTB_FOLDERS, _words_of_ptb, "tables 4 and 5"),
    ("tiny Shakespeare", datasets.SHAKESPEARE_FOLDERS, _letters_of_shakespeare, "task shakespeare"),
)


def inventory() -> list[DataSetState]:
    """Say which data sets are in the data folder, whole or not, and which tables need them."""
    found = []
    for name, folders, check, needed_for in SETS:
        try:
            folder = find(*folders)
        except DataError:
            found.append(DataSetState(name, "missing", f"no folder {' or '.join(folders)}", needed_for))
            continue
        try:
            own = "; held to its own MD5SUMS, not to the published sums" if (folder / OWN).exists() else ""
            found.append(DataSetState(name, "ok", f"{folder}: {check(folder)}{own}", needed_for))
        except DataError as error:
            found.append(DataSetState(name, "damaged", str(error), needed_for))
    return found
