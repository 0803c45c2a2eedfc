"""Drive one run from start to record: rounds, evaluations, checkpoints, resume, a clean stop.

With a folder, a run writes `run.json` (what it is; when it begins), `events.jsonl` (one line per evaluation, as
it happens), `checkpoint.pt` (about every half minute and when stopped) and `record.json` (at the end). A run that
goes on from its checkpoint ends with the same weights, to the bit, as one that was never stopped. Under torchrun
every process holds one node, and the first one writes.
$RTOPK_TENSORBOARD asks for TensorBoard event files too; as a variable it reaches the workers of every command.
"""

import fcntl
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rtopk.state_file import write_atomically
from rtopk.studies.config import Config, command
from rtopk.studies.train.loop import Diverged, Run, device
from rtopk.studies.train.processes import ProcessRun, launched, leads
from rtopk.studies.train.records import Record, append, digest, environment

CHECKPOINT_SECONDS = 30.0
Point = dict[str, Any]  # what was measured at one evaluation


class Interrupted(Exception):  # noqa: N818 -- nothing went wrong
    """The run was asked to stop, and has written its checkpoint if it has a folder."""


def execute(
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = False,
    on_round: Callable[[Run], None] = lambda run: None,
    should_stop: Callable[[], bool] = lambda: False,
    wait: bool = False,
) -> Record:
    """Train to the last round and return the record.

    A folder in which another process is at work is refused; with `wait`, its end is waited for.
    """
    if folder is None or not leads():
        return _execute(config, folder, resume, on_round, should_stop)
    with _claimed(folder, should_stop, wait):
        return _execute(config, folder, resume, on_round, should_stop)


@contextmanager
def _claimed(folder: Path, should_stop: Callable[[], bool], wait: bool) -> Iterator[None]:
    """Hold a run's folder; the system lets go of it when this process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                if not wait:
                    owner = file.read() or "another"
                    raise ValueError(
                        f"process {owner} is at work in {folder}; wait for it, or choose another folder"
                    ) from None
            if should_stop():
                raise Interrupted(f"stopped while another process was at work in {folder}")
            time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _execute(
    config: Config, folder: Path | None, resume: bool, on_round: Callable[[Run], None],
    should_stop: Callable[[], bool],
) -> Record:  # fmt: skip
    if folder is not None and resume and (folder / "record.json").exists():
        record: Record = json.loads((folder / "record.json").read_text())
        if record["key"] != config.key:
            raise ValueError(f"{folder} holds a finished run of another configuration; choose another folder")
        return record
    if folder is not None and not resume and (folder / "checkpoint.pt").exists():
        raise ValueError(
            f"{folder} holds a run already; add --resume to go on with it, or choose another folder"
        )
    run = ProcessRun(config) if launched() else Run(config)
    curve: list[Point] = []
    seconds = 0.0
    if folder is not None and resume and (folder / "checkpoint.pt").exists():
        curve, seconds = _load(folder / "checkpoint.pt", run)
    if folder is not None and run.leads:  # events after the checkpoint will be lived through again
        write_atomically(folder / "run.json", json.dumps(_head(run)).encode())
        write_atomically(folder / "events.jsonl", "".join(json.dumps(p) + "\n" for p in curve).encode())
    log = event_file(folder if run.leads else None)
    started = saved = time.monotonic()
    diverged = False
    while run.round < config.rounds and not diverged:
        try:
            run.advance()
        except Diverged:  # a result like any other: the weights of the round before are its end
            diverged = True
        now = time.monotonic()
        if diverged or config.evaluates(run.round):
            curve.append(_point(run, seconds + now - started))
            if folder is not None and run.leads:
                append(folder / "events.jsonl", curve[-1])
            log(curve[-1])
        on_round(run)
        stop, late = run.anyone(should_stop(), now - saved > CHECKPOINT_SECONDS)
        if folder is not None and (stop or late):
            _save(folder / "checkpoint.pt", run, curve, seconds + now - started)
            saved = now
        if stop:
            raise Interrupted(f"stopped after round {run.round} of {config.rounds}")
    seconds += time.monotonic() - started
    record = _record(run, curve, seconds, diverged)
    if folder is not None:
        _save(folder / "checkpoint.pt", run, curve, seconds)
        if run.leads:
            write_atomically(folder / "record.json", json.dumps(record, indent=1).encode())
    return record


def _point(run: Run, seconds: float) -> Point:
    scores = run.evaluate()
    return {
        "round": run.round,
        "train_loss": run.loss,
        **scores,
        "sent_bytes": run.sent,
        "received_bytes": run.received,
        "density": run.nodes[0].sparsifier.density(run.round - 1),
        "residual_norm": run.residual_norm(),
        **({"overlap": run.overlap} if math.isfinite(run.overlap) else {}),
        "seconds": round(seconds, 3),
        "spent": {stage: round(value, 4) for stage, value in run.spent.items()},
    }


def _head(run: Run) -> Record:
    """Return what is known of a run before its first round."""
    return {
        "kind": "train",
        "key": run.config.key,
        "config": run.config.to_dict(),
        "command": command(run.config.to_dict()),
        "metric": run.task.metric,
        "higher_is_better": run.task.higher_is_better,
        "parameters": run.layout.size,
        "environment": environment(),
    }


def _record(run: Run, curve: list[Point], seconds: float, diverged: bool) -> Record:
    return {
        **_head(run),
        "final": curve[-1],
        "diverged": diverged,
        "sent_bytes_per_round": run.sent / max(1, run.round),
        "received_bytes_per_round": run.received / max(1, run.round),
        "curve": curve,
        "seconds": round(seconds, 3),
        "weights": digest(run.vector()),
    }


def _save(path: Path, run: Run, curve: list[Point], seconds: float) -> None:
    state = run.state_dict()  # under torchrun every process has a part in it
    if run.leads:
        buffer = io.BytesIO()
        torch.save({"run": state, "curve": curve, "seconds": seconds, "spent": run.spent}, buffer)
        write_atomically(path, buffer.getvalue())


def _load(path: Path, run: Run) -> tuple[list[Point], float]:
    try:
        state: dict[str, Any] = torch.load(path, map_location=device(), weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} is not a checkpoint that can be read ({error}); delete it to start over"
        ) from error
    run.load_state_dict(state["run"])
    run.spent.update(state.get("spent", {}))
    return state["curve"], state["seconds"]


VARIABLE = "RTOPK_TENSORBOARD"


def event_file(folder: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """Return what logs the points of a run in this folder: nothing, unless it was asked for."""
    if folder is None or os.environ.get(VARIABLE, "0") in ("", "0"):
        return lambda point: None
    return EventFile(folder / "tensorboard")


class EventFile:
    """Log every point that it is called with: one scalar for each name, at the point's round."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ValueError("event files need the tensorboard package: pip install 'rtopk[tensorboard]'")
        self.folder = folder
        self.writer: Any = None

    def __call__(self, point: Mapping[str, Any]) -> None:
        """Write one point and leave the file complete."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run lives through its last rounds again: what was logged of them before is void.
            self.writer = SummaryWriter(str(self.folder), purge_step=point["round"])
        for name, value in point.items():
            if name == "round":
                continue
            for tag, number in _scalars(name, value):
                self.writer.add_scalar(tag, number, point["round"])
        self.writer.flush()


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [(f"{name}/{part}", number) for part, number in value.items()]
    return [(name, value)]
