"""Data files -> tensors: CIFAR-10 (Python and binary version), Penn Treebank by words, Shakespeare by characters.

Everything is looked for in one folder: `--data-dir`, or the variable RTOPK_DATA. A file is compared with its
published md5 before it is read; a folder with an `MD5SUMS` of its own (lines of `md5sum`) is held to that one
instead, for data in the same form that is not the original. A pickle can run any code when it is read, so the
reader here admits arrays of bytes, lists, strings and numbers, puts stand-ins where the file names numpy's
classes, and refuses every other name. Penn Treebank is Mikolov's preparation.
"""

import hashlib
import io
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

VARIABLE = "RTOPK_DATA"
OWN = "MD5SUMS"  # beside data that is not the original


class DataError(ValueError):
    """Data is missing, damaged or not what it should be."""


def data_dir() -> Path:
    """Return the folder of all data sets."""
    named = os.environ.get(VARIABLE)
    if not named:
        raise DataError(f"no data folder is named; add --data-dir FOLDER or set {VARIABLE}")
    folder = Path(named)
    if not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist; correct --data-dir or {VARIABLE}")
    return folder


def find(*names: str) -> Path:
    """Return the first of the folders that is there."""
    root = data_dir()
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise DataError(
        f"{root} holds no {' or '.join(names)}; see docs/reproduction.md for where data comes from"
    )


def verified(folder: Path, published: Mapping[str, str]) -> dict[str, bytes]:
    """Return the contents of the files, each checked against its md5 (or sha1, by length)."""
    wanted = {**published, **_own_sums(folder, published)}
    contents = {}
    for name, expected in wanted.items():
        path = folder / name
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; unpack the data set again") from error
        kind = "sha1" if len(expected) == 40 else "md5"
        found = hashlib.new(kind, raw, usedforsecurity=False).hexdigest()
        if found != expected:
            raise DataError(f"{path} is damaged or not the original: {kind} {found}, expected {expected}; "
                            "fetch it again, or write the sums of your own data to MD5SUMS beside it")  # fmt: skip
        contents[name] = raw
    return contents


def _own_sums(folder: Path, published: Mapping[str, str]) -> dict[str, str]:
    path = folder / OWN
    if not path.exists():
        return {}
    pairs = [line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip()]
    sums = {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
    missing = [name for name in published if name not in sums]
    if missing:
        raise DataError(f"{path} does not name {', '.join(missing)}; write it with: md5sum * > MD5SUMS")
    return {name: sums[name] for name in published}


PYTHON = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
BINARY = {  # sha1 of the records, as made from the python version
    "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
}
CIFAR_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin")
PIXELS = 3 * 32 * 32

Images = tuple[Tensor, Tensor]  # (n, 3, 32, 32) uint8, (n,) int64


def cifar10() -> tuple[Images, Images]:
    """Return CIFAR-10's training and test set from whichever version is in the data folder."""
    return cifar10_from(find(*CIFAR_FOLDERS))


def cifar10_from(folder: Path) -> tuple[Images, Images]:
    """Return CIFAR-10's training and test set of a folder."""
    binary = any((folder / name).exists() for name in BINARY)
    contents = verified(folder, BINARY if binary else PYTHON)
    parts = {}
    for name, raw in contents.items():
        parts[name] = read_binary(raw, name) if binary else read_python(raw, name)
    *train, test = parts.values()
    return (torch.cat([images for images, _ in train]), torch.cat([labels for _, labels in train])), test


def read_binary(raw: bytes, name: str) -> Images:
    """Read records of one label byte and 3072 bytes of pixels."""
    if not raw or len(raw) % (1 + PIXELS):
        raise DataError(f"{name} must hold records of {1 + PIXELS} bytes, got {len(raw)} bytes")
    records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + PIXELS)
    return _checked(records[:, 1:], records[:, 0].astype(np.int64), name)


def read_python(raw: bytes, name: str) -> Images:
    """Read a pickled dictionary with `data` and `labels`."""
    try:
        content = _Reader(io.BytesIO(raw), encoding="bytes").load()
        data, labels = content[b"data"], content[b"labels"]
        if not isinstance(data, _Array):
            raise DataError(f"data must be an array, got {type(data).__name__}")
        return _checked(data.to_numpy(), np.array(labels, np.int64), name)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:
        raise DataError(f"{name} is not a CIFAR-10 batch ({error}); unpack the data set again") from error


def _checked(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], name: str) -> Images:
    if pixels.shape != (len(labels), PIXELS):
        raise DataError(
            f"{name} must hold {PIXELS} bytes for each label, got {pixels.shape} for {len(labels)}"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise DataError(f"{name}: labels must be 0 to 9, got {labels.min()} to {labels.max()}")
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels)


class _Array:
    """Stands in for numpy's array while a pickle is read."""

    shape: tuple[int, ...] = ()
    raw: bytes = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Type) or dtype.name not in ("u1", b"u1") or fortran:
            raise DataError("the array must be of bytes in C order")
        if not isinstance(raw, bytes) or len(raw) != int(np.prod(shape)):
            raise DataError(f"an array of shape {shape} needs as many bytes, got {len(raw)}")
        self.shape, self.raw = tuple(shape), raw

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.raw, np.uint8).reshape(self.shape)


class _Type:
    """Stands in for numpy's dtype."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like: bytes have none


class _Empty:
    """Makes an array. No function: a pickle can set the attributes of whatever has any."""

    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return _Array()


class _Bytes:
    """Stands in for the way in which Python 3 writes bytes into old pickles."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise DataError(f"bytes must be written as latin1, got {encoding!r}")
        return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Empty(),
    ("numpy._core.multiarray", "_reconstruct"): _Empty(),
    ("_codecs", "encode"): _Bytes(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise DataError(f"the file asks for {module}.{name}; only arrays, lists and strings are admitted")
        return _ADMITTED[module, name]


PTB = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}
PTB_FOLDERS = ("ptb", "simple-examples/data")
SHAKESPEARE = {"input.txt": "6fb458f1232090904fb40fe944165e91"}
SHAKESPEARE_FOLDERS = ("shakespeare",)


@dataclass(frozen=True)
class Corpus:
    """Three parts of a text as token numbers, and where the lines of the training part begin."""

    train: Tensor  # (tokens,) int64
    validation: Tensor
    test: Tensor
    words: int
    lines: Tensor  # (lines,) int64, positions in train


def ptb(vocabulary: int = 0) -> Corpus:
    """Read Penn Treebank; with a vocabulary, words beyond the most frequent ones become <unk>."""
    contents = verified(find(*PTB_FOLDERS), PTB)
    parts = []
    for name, raw in contents.items():
        try:
            parts.append(raw.decode("ascii").replace("\n", " <eos> ").split())
        except UnicodeDecodeError as error:
            raise DataError(f"{name} must be plain ASCII text: {error}") from error
        if not parts[-1]:
            raise DataError(f"{name} is empty")
    # Most frequent first, ties by the alphabet: the same numbers on every machine.
    counts = Counter(parts[0])
    names = sorted(counts, key=lambda word: (-counts[word], word))
    if vocabulary:
        kept = [word for word in names if word != "<unk>"][: vocabulary - 1]
        names = ["<unk>", *kept]
    number = {word: position for position, word in enumerate(names)}
    unknown = number.get("<unk>")
    train, valid, test = (
        _encode(part, number, unknown, name) for part, name in zip(parts, contents, strict=True)
    )
    ends = (train == number["<eos>"]).nonzero()[:, 0]
    lines = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1])
    return Corpus(train, valid, test, len(names), lines)


def shakespeare() -> Corpus:
    """Read tiny Shakespeare by characters; the last tenth is the test part, the tenth before validation."""
    raw = verified(find(*SHAKESPEARE_FOLDERS), SHAKESPEARE)["input.txt"]
    bytes_, tokens = torch.unique(torch.frombuffer(bytearray(raw), dtype=torch.uint8), return_inverse=True)
    tenth = len(tokens) // 10
    train, validation, test = tokens.split([len(tokens) - 2 * tenth, tenth, tenth])
    newline = int((bytes_ == ord("\n")).nonzero()[0])
    ends = (train == newline).nonzero()[:, 0]
    lines = torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < len(train) - 1] + 1])
    return Corpus(train, validation, test, len(bytes_), lines)


def _encode(words: list[str], number: dict[str, int], unknown: int | None, name: str) -> Tensor:
    try:
        return torch.tensor([number[w] if unknown is None else number.get(w, unknown) for w in words])
    except KeyError as error:
        raise DataError(
            f"{name} has the word {error} that the training part lacks, and there is no <unk>"
        ) from error
