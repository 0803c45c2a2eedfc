"""CIFAR-10 files -> images and labels. Python version (pickles) and binary version, both checked.

A pickle can run any code when it is read. The reader here admits arrays of bytes, lists, strings and numbers,
puts stand-ins where the file names numpy's classes, and refuses every other name.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.studies.tasks.data import DataError, find, verified

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
FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin")
PIXELS = 3 * 32 * 32

Images = tuple[Tensor, Tensor]  # (n, 3, 32, 32) uint8, (n,) int64


def load() -> tuple[Images, Images]:
    """Return the training and the test set from whichever version is in the data folder."""
    return load_from(find(*FOLDERS))


def load_from(folder: Path) -> tuple[Images, Images]:
    """Return the training and the test set of a folder."""
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
