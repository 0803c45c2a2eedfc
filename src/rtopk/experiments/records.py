"""Records of finished runs: one JSON object a line, appended, never rewritten.

A record holds the whole configuration, the seed, the curve, the bytes measured, the versions and the time, so
that a table or a picture can be made from the file alone and every row can be repeated.
"""

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]


def environment() -> dict[str, str | int]:
    """Describe what a run ran on."""
    return {
        "rtopk": _version("rtopk"),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def digest(vector: Tensor) -> str:
    """Name the exact bits of a vector; equal weights have equal digests on every machine."""
    data = vector.detach().cpu().contiguous().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file as one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (half := len(_lines(path)[1])):  # of a writer that was killed
        os.truncate(path, path.stat().st_size - half)
    with path.open("ab") as file:
        file.write(json.dumps(record, sort_keys=True).encode() + b"\n")


def read(path: Path) -> list[Record]:
    """Return the records of a file, none if there is no file; a damaged line is an error that names it.

    A last line without its end was never finished: its run goes again.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(_lines(path)[0], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not a record: {error}; delete that line") from error
    return records


def _lines(path: Path) -> tuple[list[bytes], bytes]:
    """Return the lines of a file, and what stands behind the last end of a line."""
    *lines, rest = path.read_bytes().split(b"\n")
    return lines, rest


def score(record: Record) -> float:
    """Return a run's final score, larger for better ones; a run that diverged scores least."""
    value = float(record["final"][record["metric"]])
    if math.isnan(value) or record.get("diverged"):
        return -math.inf
    return value if record["higher_is_better"] else -value


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole, so that a reader or a crash never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
