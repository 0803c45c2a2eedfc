"""Images in folders, one folder per class (ImageFolder's layout), read with Pillow when they are needed.

Grey, palette and CMYK images become RGB. A file that cannot be decoded is an error that names it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rtopk.studies.tasks.data import DataError

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
