"""Many runs side by side: one process each (one job: this process), skipping what is recorded already.

Each run has a folder of its own under `folder`, so a runner that was stopped or killed goes on where its runs
were. A finished run is one line in the results file.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType

import torch

from rtopk.studies.config import Config
from rtopk.studies.train.execute import Interrupted, execute
from rtopk.studies.train.loop import Run
from rtopk.studies.train.processes import barrier, launched, leads
from rtopk.studies.train.records import Record, Results

Progress = Callable[[str, int], None]  # key of a run, rounds it has done
OnRecord = Callable[[Record], None]  # when a run has finished
REPORT_EVERY = 25  # rounds between two reports of a worker
REQUESTS = {signal.SIGINT, signal.SIGTERM}  # to stop
SAME_REQUEST = 1.0  # seconds after which a second Ctrl-C is meant as one


def run_all(
    configs: Sequence[Config],
    results: Path,
    folder: Path,
    jobs: int,
    on_progress: Progress,
    notes: Mapping[str, Record] | None = None,
) -> list[Record]:
    """Run every configuration that has no record in `results`; return the records of all, in order.

    `notes` holds, by the key of a run, what its record is to say beside what was measured.

    Ctrl-C or SIGTERM lets every worker finish its round and write its checkpoint, then KeyboardInterrupt is raised.
    Two runners with the same folders share the work: a run that the other one is at is waited for.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    wanted, file = {config.key for config in configs}, Results(results)
    done = {key: record for record in file.records if (key := key_of(record)) in wanted}
    for config in configs:
        if config.key in done:
            on_progress(config.key, config.rounds)
    missing = [config for config in configs if config.key not in done]

    def on_record(record: Record) -> None:
        record = {**record, **(notes or {}).get(record["key"], {})}
        if leads():
            file.add(record)
        done[record["key"]] = record
        on_progress(record["key"], record["config"]["rounds"])  # it did fewer if it diverged

    if missing and (launched() or jobs == 1):
        _run_here(missing, on_record, folder, on_progress)
    elif missing:
        _run(missing, on_record, folder, jobs, on_progress)
    return [done[config.key] for config in configs]


def key_of(record: Record) -> str:
    """Return the key of a record's configuration; options that came after it was written count as default."""
    if record["kind"] != "train":
        return str(record["key"])
    try:
        return Config(**record["config"]).key
    except (TypeError, ValueError):  # of options that are no more
        return str(record["key"])


def _run(
    configs: Sequence[Config], on_record: OnRecord, folder: Path, jobs: int, on_progress: Progress
) -> None:
    context = multiprocessing.get_context("spawn")  # a forked torch may hang in its thread pool
    stop, reports = context.Event(), context.SimpleQueue()
    with (
        asked_to_stop() as should_stop,
        ProcessPoolExecutor(jobs, context, _start_worker, (stop, reports)) as pool,
    ):
        with _held_back():  # from the workers for good: they are asked through `stop`
            pending: set[Future[Record]] = {pool.submit(_work, c, folder / c.key) for c in configs}
        try:
            while pending and not should_stop():
                finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not reports.empty():
                    on_progress(*reports.get())
                for future in finished:
                    on_record(future.result())
        finally:
            stop.set()
            for future in pending:
                future.cancel()
        try:
            wait(pending)  # they save their runs
        except KeyboardInterrupt:  # asked again
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
    if pending or should_stop():  # asked while the workers left: the caller may have more to run
        raise KeyboardInterrupt


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the end of the block; processes started in it never get them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_here(configs: Sequence[Config], on_record: OnRecord, folder: Path, on_progress: Progress) -> None:
    """Run one after the other with the processes that there are: under torchrun they are the nodes."""

    def report(run: Run) -> None:
        on_progress(run.config.key, run.round)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with asked_to_stop() as should_stop:
            for config in configs:
                own = folder / config.key
                record = execute(
                    config, own, resume=True, on_round=report, should_stop=should_stop, wait=True
                )
                on_record(record)
    except Interrupted as stopped:
        raise KeyboardInterrupt from stopped
    finally:
        torch.set_num_threads(threads)
    barrier()  # nobody reads the results before they are written


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C and SIGTERM ask, inside the block, instead of breaking off; asked again, it breaks off.

    What comes within a second of the first is the same request: `timeout` signals the process and its group, and
    a key bounces.
    """
    asked: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > SAME_REQUEST:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
        yield lambda: False
        return
    previous = {number: signal.signal(number, ask) for number in REQUESTS}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_stop: Event
_reports: "SimpleQueue[tuple[str, int]]"
_alone = threading.Event()  # the parent is gone
_busy = threading.Lock()  # held while a run is under way


def _start_worker(stop: Event, reports: "SimpleQueue[tuple[str, int]]") -> None:
    global _stop, _reports  # how a pool hands things to its workers
    _stop, _reports = stop, reports
    threading.Thread(target=leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def leave_with_parent() -> None:
    """End the worker when its parent is gone, however it went; a run that is under way saves itself first."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    _alone.set()
    with _busy:
        # A pool's worker would wait for its next task forever: it holds the queue's other end too.
        os._exit(1)


def _work(config: Config, folder: Path) -> Record:
    def report(run: Run) -> None:
        if run.round % REPORT_EVERY == 0:
            _reports.put((config.key, run.round))

    def should_stop() -> bool:
        return _stop.is_set() or _alone.is_set()

    with _busy:
        if _alone.is_set():  # the next task of a queue that nobody reads any more
            os._exit(1)
        if _stop.is_set():  # a pool hands out one task more than it has workers
            raise Interrupted("stopped before the first round")
        return execute(config, folder, resume=True, on_round=report, should_stop=should_stop, wait=True)
