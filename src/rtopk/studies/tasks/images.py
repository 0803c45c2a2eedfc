"""What is done to pixels on their way to a model: normalisation, standard augmentation, half size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rtopk.seed import generator
from rtopk.studies.tasks.folders import Files, centre_crop, random_resized_crop
from rtopk.studies.train.config import Part

CIFAR_MEAN, CIFAR_STD = (0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Pixels = tuple[Any, Tensor]  # images (a uint8 tensor or files) and their classes


def normalise(mean: tuple[float, ...], std: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    """Return the map from uint8 pixels to numbers of mean 0 and variance 1 over the training set."""
    scale = 1.0 / (255.0 * torch.tensor(std).view(3, 1, 1))
    shift = -torch.tensor(mean).view(3, 1, 1) / torch.tensor(std).view(3, 1, 1)
    return lambda images: torch.addcmul(shift, images.float(), scale)


def crop_and_flip(padding: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return the standard augmentation of CIFAR: pad with zeros, crop at random, flip half of the images."""

    def augment(images: Tensor, rng: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        padded = nn.functional.pad(images, (padding,) * 4)
        tops, lefts = torch.randint(0, 2 * padding + 1, (2, n), generator=rng)
        rows = tops[:, None] + torch.arange(height)  # (n, h)
        columns = lefts[:, None] + torch.arange(width)  # (n, w)
        flipped = torch.rand(n, generator=rng) < 0.5
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
        return padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
            0, 3, 1, 2
        )

    return augment


def halved(images: Tensor) -> Tensor:
    """Return uint8 images at half the side, each pixel the mean of four."""
    return nn.functional.avg_pool2d(images.float(), 2).round_().to(torch.uint8)


def hold_back(train: Pixels, test: Pixels, part: Part, count: int) -> tuple[Pixels, Pixels]:
    """Return what to train and to evaluate on; for validation `count` training examples are kept back."""
    if part == "test":
        return train, test
    inputs, targets = train
    order = torch.randperm(len(targets), generator=generator("hold back"))
    kept, rest = order[:count], order[count:].sort().values
    return (inputs[rest], targets[rest]), (inputs[kept], targets[kept])


def decoded(files: Files, prepare: Callable[[Path], Tensor]) -> Tensor:
    """Return the images of files, decoded and prepared one by one."""
    return torch.stack([prepare(path) for path in files.paths])


def random_view(side: int) -> Callable[[Files, torch.Generator], Tensor]:
    """Return ImageNet's augmentation for a batch of files, normalised."""
    crop, norm = random_resized_crop(side), normalise(IMAGENET_MEAN, IMAGENET_STD)
    return lambda files, rng: norm(decoded(files, lambda path: crop(path, rng)))


def middle_view(side: int) -> Callable[[Files], Tensor]:
    """Return ImageNet's view for evaluation of a batch of files, normalised."""
    crop, norm = centre_crop(side), normalise(IMAGENET_MEAN, IMAGENET_STD)
    return lambda files: norm(decoded(files, crop))
