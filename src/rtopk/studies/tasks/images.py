"""Image files and pixels on their way to a model: decoding, augmentation, normalisation, half size.

Files are in one folder per class (ImageFolder's layout) and read with Pillow when they are needed. Grey, palette
and CMYK images become RGB. A file that cannot be decoded is an error that names it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rtopk.seed import generator
from rtopk.studies.config import Part
from rtopk.studies.tasks.datasets import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


@dataclass(frozen=True)
class Files:
    """A list of image files that is taken apart as a tensor is."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, chosen: Tensor | slice) -> "Files":
        if isinstance(chosen, slice):
            return Files(self.paths[chosen])
        return Files(tuple(self.paths[int(i)] for i in chosen))


def image_folder(folder: Path) -> tuple[Files, Tensor, list[str]]:
    """Return the files below a folder, the number of each one's class, and the classes in alphabetical order."""
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; it must hold one folder per class")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise DataError(f"{folder} must hold one folder per class, got none")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{folder / name} holds no images ({', '.join(sorted(SUFFIXES))})")
        paths += found
        labels += [label] * len(found)
    return Files(tuple(paths)), torch.tensor(labels), classes


def train_and_val(folder: Path) -> tuple[tuple[Files, Tensor], tuple[Files, Tensor], list[str]]:
    """Return the two parts of a folder and their classes; both must have the same, or numbers would not agree."""
    files, labels, classes = image_folder(folder / "train")
    held_out, wanted, others = image_folder(folder / "val")
    differing = sorted(set(classes) ^ set(others))
    if differing:
        raise DataError(
            f"{folder / 'train'} and {folder / 'val'} must have the same classes, got {differing[0]!r} in one only "
            f"(and {len(differing) - 1} more); sort both by the same names"
        )
    return (files, labels), (held_out, wanted), classes


def read_image(path: Path) -> "Image":
    """Decode a file to RGB."""
    from PIL import Image, UnidentifiedImageError
    from PIL.Image import DecompressionBombError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError, DecompressionBombError) as error:
        raise DataError(f"{path} cannot be decoded ({error}); fetch it again or delete it") from error


def random_resized_crop(side: int) -> Callable[[Path, torch.Generator], Tensor]:
    """Return the standard augmentation: 8 to 100 % of the area, 3/4 to 4/3 in shape, flipped half the time."""

    def prepare(path: Path, rng: torch.Generator) -> Tensor:
        from PIL.Image import Resampling, Transpose

        image = read_image(path)
        box = _draw_box(*image.size, rng)
        image = image.resize((side, side), Resampling.BILINEAR, box=box)
        if torch.rand((), generator=rng) < 0.5:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(image)

    return prepare


def _draw_box(width: int, height: int, rng: torch.Generator) -> tuple[float, float, float, float]:
    for _ in range(10):
        share, shape, x, y = torch.rand(4, generator=rng).tolist()
        area = (0.08 + 0.92 * share) * width * height
        aspect = math.exp((2.0 * shape - 1.0) * math.log(4.0 / 3.0))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = round(x * (width - w)), round(y * (height - h))
            return left, top, left + w, top + h
    side = min(width, height)  # very long images: the middle
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def centre_crop(side: int) -> Callable[[Path], Tensor]:
    """Return the standard view for evaluation: short side to 8/7 of `side`, then the middle."""

    def prepare(path: Path) -> Tensor:
        from PIL.Image import Resampling

        image = read_image(path)
        short = round(side * 8 / 7)
        scale = short / min(image.size)
        image = image.resize(
            (max(side, round(image.width * scale)), max(side, round(image.height * scale))),
            Resampling.BILINEAR,
        )
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return to_tensor(image.crop((left, top, left + side, top + side)))

    return prepare


def squeezed(path: Path, side: int) -> Tensor:
    """Return a whole image at side x side, averaged down."""
    from PIL.Image import Resampling

    return to_tensor(read_image(path).resize((side, side), Resampling.BOX))


def to_tensor(image: "Image") -> Tensor:
    """Return the pixels as (3, h, w) uint8."""
    return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy())


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
