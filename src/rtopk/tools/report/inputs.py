"""Files and folders -> what a report is made of: runs (finished or going on) and studies (benchmarks, lab).

A run folder, a folder of runs, a results file (a record a line) or the JSON that `rtopk ... --json` printed.
What is none of these is refused with the file, the line and what is accepted.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtopk.studies.train.records import Record

HEAD = ("config", "metric")
NEEDED = (*HEAD, "curve", "final")
CONFIG = {"task": str, "setting": str, "method": str, "density": float, "nodes": float, "rounds": float}
TOTALS = ("parameters", "seconds", "sent_bytes_per_round", "received_bytes_per_round")
POINT = ("round", "sent_bytes", "received_bytes", "seconds")  # of each point of the curve


def faults(run: Record) -> Iterator[str]:
    """Yield what is wrong with the record of a finished run."""
    missing = [name for name in NEEDED if name not in run]
    if missing:
        yield f"is a train record without {', '.join(missing)}"
        return
    yield from head_faults(run)
    yield from _amounts(run, "", TOTALS)
    if not isinstance(run["curve"], list) or not all(
        isinstance(p, dict) for p in (*run["curve"], run["final"])
    ):
        yield "must have a list of objects as curve and an object as final"
        return
    if not run["curve"] or run["metric"] not in run["final"]:
        yield f"is a train record without a score named {run['metric']!r}"
        return
    for number, point in enumerate((*run["curve"], run["final"])):
        name = f"curve[{number}]." if number < len(run["curve"]) else "final."
        yield from point_faults(point, name)


def head_faults(run: Record) -> Iterator[str]:
    """Yield what is wrong with what is known of a run before its first round."""
    missing = [name for name in HEAD if name not in run]
    if missing:
        yield f"is a run without {', '.join(missing)}"
        return
    config = run["config"] if isinstance(run["config"], dict) else {}
    for name, kind in CONFIG.items():
        if name not in config:
            yield f"has a configuration without {name}"
        elif not (_is_amount(config[name]) if kind is float else isinstance(config[name], kind)):
            yield f"has {config[name]!r} as {name}"
    for name, kind in {"key": str, "metric": str, "environment": dict, "paper": dict, "command": str}.items():
        if name in run and not isinstance(run[name], kind):
            yield f"has {run[name]!r} as {name}"
    if "parameters" in run:
        yield from _amounts(run, "", ("parameters",))


def point_faults(point: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield what is wrong with a point of a curve; scores may be NaN, amounts may not."""
    yield from _amounts(point, name, POINT)
    for key, value in point.items():
        if key == "spent":  # seconds by stage
            right = isinstance(value, dict) and all(map(_is_number, value.values()))
        else:
            right = _is_number(value)
        if not right:
            yield f"has {value!r} as {name}{key}"


def _amounts(record: Mapping[str, Any], prefix: str, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if not _is_amount(record.get(name)):
            found = f"{record[name]!r} as" if name in record else "no"
            yield f"has {found} {prefix}{name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


ACCEPTED = (
    "accepted are records of `rtopk train`, `demo`, `fed`, `rivals` and `reproduce` and what "
    "`rtopk bench ... --json` and `rtopk lab ... --json` print"
)
# What tells one study from another; the first that matches counts.
STUDIES: Mapping[str, tuple[str, ...]] = {
    "lab risk": ("sweeps", "regime"),
    "lab convergence": ("outcomes", "problem"),
    "lab inspect": ("looks", "verdict"),
    "lab bounds": ("rows", "c", "C"),
    "bench": ("rows",),
}
BENCHES = {"bench link": "mbit", "bench codec": "index_bits", "bench compress": "over_floor"}  # by a column


@dataclass(frozen=True)
class Study:
    """The output of a benchmark or of a lab experiment."""

    kind: str  # a key of STUDIES
    title: str
    source: str
    data: Record


@dataclass
class Inputs:
    """Everything that goes into one page."""

    runs: list[Record] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    tuning: int = 0  # runs on validation data that are left out, because there are results
    choices: list[Record] = field(default_factory=list)  # of learning rates, by `rtopk reproduce`

    def add(self, runs: Iterable[Record]) -> None:
        """Add runs; of one that is there twice, a finished record counts more than a folder in progress."""
        known = {run["key"]: i for i, run in enumerate(self.runs) if "key" in run}
        for run in runs:
            at = known.get(run.get("key", ""))
            if at is None:
                known[run.get("key", "")] = len(self.runs)
                self.runs.append(run)
            elif is_going_on(self.runs[at]):
                self.runs[at] = run


def read(paths: Sequence[Path]) -> Inputs:
    """Read every file and folder; at least one run or study must come of it."""
    inputs = Inputs()
    for path in paths:
        if path.is_dir():
            _read_folder(path, inputs)
        elif path.exists():
            _read_file(path, inputs)
        else:
            raise ValueError(f"{path} does not exist; {ACCEPTED}")
    results = [run for run in inputs.runs if run["config"].get("part") != "validation"]
    if results and len(results) < len(inputs.runs):  # the others only tuned a learning rate
        inputs.runs, inputs.tuning = results, len(inputs.runs) - len(results)
    if not inputs.runs and not inputs.studies:
        raise ValueError(f"nothing to report in {', '.join(map(str, paths))}; {ACCEPTED}")
    return inputs


def is_going_on(run: Record) -> bool:
    """Say whether a run has not reached its last round (it may still run, or it was stopped)."""
    return "weights" not in run


def watched(paths: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """Return size and time of change of every file that a report of these paths reads."""
    seen = {}
    for path in paths:
        for file in _files(path) if path.is_dir() else [path]:
            try:
                state = file.stat()
            except FileNotFoundError:  # replaced or removed while we look
                continue
            seen[str(file)] = (state.st_size, state.st_mtime_ns)
    return seen


def _files(folder: Path) -> Iterator[Path]:
    for pattern in ("*.jsonl", "*.json"):
        yield from sorted(folder.rglob(pattern))


def _read_folder(folder: Path, inputs: Inputs) -> None:
    """Read run folders and results files below a folder; other JSON must be of a known kind too."""
    heads = sorted(folder.rglob("run.json"))
    inside = {head.parent for head in heads}
    for file in _files(folder):
        if file.parent not in inside or file.name == "record.json":
            _read_file(file, inputs)
    inputs.add(run for head in heads if (run := _going_on(head)) is not None)


def _going_on(head: Path) -> Record | None:
    """Return the run of a folder as far as it has come; None for what is only being written."""
    if (head.parent / "record.json").exists():
        return None
    run: Record = json.loads(head.read_text())
    fault = next(head_faults(run), None)
    events = head.parent / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True) if events.exists() else []
    run["curve"] = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
    for number, point in enumerate(run["curve"]):
        fault = fault or next(point_faults(point, f"curve[{number}]."), None)
    if fault is not None:
        raise ValueError(f"{head.parent} {fault[:200]}; {ACCEPTED}")
    if run["curve"]:
        final = run["final"] = run["curve"][-1]
        for way in ("sent", "received"):
            run[f"{way}_bytes_per_round"] = final[f"{way}_bytes"] / final["round"]
        run["seconds"] = final["seconds"]
    return run


def _read_file(path: Path, inputs: Inputs) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if "\n" not in text.strip():  # one line that is no JSON, not a file of lines
            raise ValueError(f"{path} line 1 is not JSON ({error.msg}); {ACCEPTED}") from error
        _read_lines(path, text, inputs)
        return
    _take(whole, path, 1, inputs)


def _read_lines(path: Path, text: str, inputs: Inputs) -> None:
    found = Inputs()
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if not line.endswith("\n"):  # the last, half written: its run goes again
                break
            raise ValueError(f"{path} line {number} is not JSON ({error.msg}); {ACCEPTED}") from error
        _take(value, path, number, found)
    inputs.add(found.runs)
    inputs.studies += found.studies
    inputs.choices += found.choices


def _take(value: Any, path: Path, line: int, inputs: Inputs) -> None:
    """Sort one JSON value into the inputs, or refuse it."""
    if not isinstance(value, dict):
        raise ValueError(f"{path} line {line} is a {type(value).__name__}, not a JSON object; {ACCEPTED}")
    kind = value.get("kind")
    if kind in ("train", "federated"):
        fault = next(faults(value), None)
        if fault is not None:
            raise ValueError(f"{path} line {line} {fault[:200]}; {ACCEPTED}")
        inputs.add([value])
        return
    if kind == "choice":
        inputs.choices.append(value)
        return
    name = next((name for name, keys in STUDIES.items() if all(key in value for key in keys)), None)
    if name is None:
        names = ", ".join(list(value)[:6]) or "nothing"
        what = f"an object with {names}" if kind is None else f"kind {kind!r}"
        raise ValueError(f"{path} line {line} is {what}; {ACCEPTED}")
    if name in ("bench", "lab bounds"):
        rows = value["rows"]
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} line {line}: rows must be a list of objects, at least one; {ACCEPTED}")
    if name == "bench":
        name = next((bench for bench, column in BENCHES.items() if column in rows[0]), name)
    inputs.studies.append(Study(name, str(kind or value.get("bench") or name), str(path), value))
