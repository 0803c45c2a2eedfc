"""Where data sets are, and whether their files are whole.

Everything is looked for in one folder: `--data-dir`, or the variable RTOPK_DATA. A file is compared with its
published md5 before it is read; a folder with an `MD5SUMS` of its own (lines of `md5sum`) is held to that one
instead, for data in the same form that is not the original.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

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
