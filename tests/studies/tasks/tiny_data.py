"""Data sets in their standard forms, made up and tiny, with sums of their own."""

import hashlib
import pickle

import numpy as np
from PIL import Image

from rtopk.studies.tasks import datasets


def write_sums(folder):
    lines = [
        f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.iterdir())
        if path.name != "MD5SUMS"
    ]
    (folder / "MD5SUMS").write_text("\n".join(lines) + "\n")


def make_cifar(root, per_batch=20, binary=False):
    """Write six batches of noise; return their pixels and labels, in order."""
    rng = np.random.default_rng(0)
    folder = root / datasets.CIFAR_FOLDERS[binary]
    folder.mkdir(parents=True)
    pixels = rng.integers(0, 256, (6 * per_batch, 3072), dtype=np.uint8)
    labels = [int(x) for x in rng.integers(0, 10, 6 * per_batch)]
    for number, name in enumerate(datasets.BINARY if binary else datasets.PYTHON):
        part = slice(number * per_batch, (number + 1) * per_batch)
        if binary:
            raw = b"".join(
                bytes([label]) + row.tobytes() for label, row in zip(labels[part], pixels[part], strict=True)
            )
        else:
            raw = pickle.dumps({b"data": pixels[part], b"labels": labels[part]}, protocol=2)
        (folder / name).write_bytes(raw)
    write_sums(folder)
    return pixels, labels


def make_ptb(root, train, valid, test):
    folder = root / "ptb"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"ptb.{name}.txt").write_text(text)
    write_sums(folder)


def make_shakespeare(root, text):
    """Write the one file of tiny Shakespeare."""
    folder = root / "shakespeare"
    folder.mkdir()
    (folder / "input.txt").write_text(text)
    write_sums(folder)


def make_folder(root, classes):
    """Write images of the given modes and (width, height), one folder per class."""
    rng = np.random.default_rng(0)
    for name, entries in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number, (mode, (width, height)) in enumerate(entries):
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
            suffix = "png" if mode == "P" else "JPEG"
            image.save(root / name / f"it's {number}.{suffix}")


def make_text(words, count, seed=0):
    """Write lines of ten made-up words each, some frequent and some rare."""
    rng = np.random.default_rng(seed)
    names = [f"w{i}" for i in range(words)]
    drawn = [names[i] for i in np.minimum(rng.geometric(0.3, count) - 1, words - 1)]
    return "".join(" " + " ".join(drawn[i : i + 10]) + "\n" for i in range(0, count, 10))
