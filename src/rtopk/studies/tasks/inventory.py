"""Say which data sets are in the data folder, whole or not, and which tables need them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rtopk.studies.tasks import datasets
from rtopk.studies.tasks.data import OWN, DataError, find
from rtopk.studies.tasks.images import Files, image_folder, read_image, train_and_val


@dataclass(frozen=True)
class Found:
    """What is known of one data set."""

    name: str
    state: str  # "ok", "missing" or "damaged"
    detail: str
    needed_for: str


def _cifar(folder: Path) -> str:
    (images, _), (test, _) = datasets.cifar10_from(folder)
    return f"{len(images):,} training and {len(test):,} test images"


def _ptb(folder: Path) -> str:
    text = datasets.ptb()
    sizes = (
        f"{len(text.train):,} training, {len(text.validation):,} validation, {len(text.test):,} test words"
    )
    return f"{sizes}, vocabulary {text.words:,}"


def _shakespeare(folder: Path) -> str:
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
            _first_and_last(files)
            where = f" in {part}" if part else ""
            said.append(f"{len(files):,} images of {len(classes):,} classes{where}")
        return ", ".join(said)

    return check


def _first_and_last(files: Files) -> None:
    """Decode two files; decoding all of ImageNet takes an hour, and each is checked when it is read."""
    for path in (files.paths[0], files.paths[-1]):
        read_image(path)


SETS: tuple[tuple[str, tuple[str, ...], Callable[[Path], str], str], ...] = (
    ("CIFAR-10", datasets.CIFAR_FOLDERS, _cifar, "tables 1 and 2"),
    ("ImageNet", ("imagenet",), _folders("train", "val"), "table 3, scale paper"),
    ("ImageNet sample", ("imagenet-sample",), _folders(""), "task imagenet-sample"),
    ("Tiny ImageNet, 20 classes", ("tiny-imagenet-20",), _folders("train", "val"), "table 3, scale small"),
    ("Penn Treebank", datasets.PTB_FOLDERS, _ptb, "tables 4 and 5"),
    ("tiny Shakespeare", datasets.SHAKESPEARE_FOLDERS, _shakespeare, "task shakespeare"),
)


def take() -> list[Found]:
    """Look at every data set."""
    found = []
    for name, folders, check, needed_for in SETS:
        try:
            folder = find(*folders)
        except DataError:
            found.append(Found(name, "missing", f"no folder {' or '.join(folders)}", needed_for))
            continue
        try:
            own = "; held to its own MD5SUMS, not to the published sums" if (folder / OWN).exists() else ""
            found.append(Found(name, "ok", f"{folder}: {check(folder)}{own}", needed_for))
        except DataError as error:
            found.append(Found(name, "damaged", str(error), needed_for))
    return found
