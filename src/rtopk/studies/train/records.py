"""Records of finished runs: one JSON object a line, appended, never rewritten.

A record holds the whole configuration, the seed, the curve, the bytes measured, the versions and the time, so
that a table or a picture can be made from the file alone and every row can be repeated.
"""

import errno
import fcntl
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from rtopk.state_file import digest_bits
from rtopk.tools.show.intervals import Lead, half_width, lead

Record = dict[str, Any]


def environment() -> dict[str, str | int]:
    """Describe what a run ran on."""
    return {
        "rtopk": installed("rtopk"),
        "torch": torch.__version__,
        "numpy": installed("numpy"),
        "numba": installed("numba"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def digest(vector: Tensor) -> str:
    """Name the exact bits of a vector; equal weights have equal digests on every machine."""
    return digest_bits(vector).hex()


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open a file, made if need be, and hold it for ourselves among all that ask this way; yield its descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)  # and let go


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file as one line, whoever else does the same."""
    with locked(path) as file:
        _write_line(file, record)


def _write_line(file: int, record: Mapping[str, Any]) -> None:
    size = _whole(file)
    os.truncate(file, size)  # half a line, of a writer that was killed
    line = json.dumps(record, sort_keys=True).encode() + b"\n"
    try:
        if os.write(file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.truncate(file, size)
        raise


def _whole(file: int) -> int:
    """Return where the last whole line of a file ends."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - 65536)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


class SeedRuns:
    """What runs reached that differ by their seed alone."""

    records: tuple[Record, ...]  # by seed

    @property
    def metric(self) -> str:
        """Name the score that counts."""
        return str(self.records[0]["metric"])

    @property
    def higher_is_better(self) -> bool:
        """Say which way the metric improves."""
        return bool(self.records[0].get("higher_is_better", True))

    @property
    def scores(self) -> list[float]:
        """Return the final scores by seed."""
        return list(self.by_seed.values())

    @property
    def by_seed(self) -> dict[int, float]:
        """Return the final score of each seed."""
        return {
            record["config"].get("seed", 0): float(record["final"][self.metric]) for record in self.records
        }

    @property
    def mean(self) -> float:
        """Return the mean score over seeds."""
        return mean(self.scores)

    @property
    def half_width(self) -> float:
        """Return half the 95 % interval of the mean (Student's t); infinite for one seed."""
        return half_width(self.scores)

    def lead(self, other: "SeedRuns") -> Lead:
        """Return how far these runs are ahead of others."""
        return lead(self.by_seed, other.by_seed, self.metric, self.higher_is_better)

    @property
    def sent_bytes_per_round(self) -> float:
        """Return the bytes that a node sent in a round, measured, mean over seeds."""
        return mean(float(record["sent_bytes_per_round"]) for record in self.records)


class Results:
    """The records of a file that others may add to as well; only what is new is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._end = 0  # of what was read
        self.refresh()

    def refresh(self) -> None:
        """Read what was added since the last time."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._end)
                *lines, _ = file.read().split(b"\n")
            for line in lines:
                self.records.append(_parsed(line, self.path, len(self.records) + 1))
                self._end += len(line) + 1

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record, unless another writer has added one with its key meanwhile."""
        with locked(self.path) as file:
            self.refresh()
            if all(other.get("key") != record["key"] for other in self.records):
                _write_line(file, record)
        self.refresh()


def read(path: Path) -> list[Record]:
    """Return the records of a file, none if there is no file; a damaged line is an error that names it.

    A last line without its end was never finished: its run goes again.
    """
    return Results(path).records


def _parsed(line: bytes, path: Path, number: int) -> Record:
    try:
        record: Record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} line {number} is not a record: {error}; delete that line") from error
    return record


def score(record: Record) -> float:
    """Return a run's final score, larger for better ones; a run that diverged scores least."""
    value = float(record["final"][record["metric"]])
    if math.isnan(value) or record.get("diverged"):
        return -math.inf
    return value if record["higher_is_better"] else -value


def installed(package: str) -> str:
    """Return the version of a package, or say that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Name the CPU."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
