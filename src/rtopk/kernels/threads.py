"""Share work between as many threads as torch uses, if possible the same threads.

After every parallel operation torch's threads wait for the next one in a busy loop, for some milliseconds. Threads
of our own would compete with them for the cores, right after the backward pass. So if torch runs on libgomp, work
goes to libgomp too. Otherwise, and in a forked child, where libgomp's threads are gone and waiting for them would
hang, a plain pool is used. Both allow several callers at once.

A region ends when its last thread does. Beside other work, such as data loaders or the other ranks of a host, a
thread may be put aside for milliseconds, and all wait for it. So each kind of work is timed: what threads save is
put down against what they lose, and where they lose more, it stays in one thread for a while, longer every time.
"""

import ctypes
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

R = TypeVar("R")
Cuts = tuple[tuple[int, int], ...]  # where ranges begin and end

MOST = 8  # more threads than this do not move memory faster
INLINE = 1 << 18  # below this many entries, waking a thread costs more than it saves
PIECES = 4  # for each thread: one that is put aside holds up a piece, and the others take the rest
PIECE = (
    1 << 21
)  # entries of a piece, at least: each costs the interpreter some microseconds, and candidates some room
PATIENCE = 1024  # the most times that work stays in one thread before threads are tried again
WORTH = (
    0.85  # of the processor time of all tasks, which is more than one thread needs: threads share the memory
)

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_forked = False


def together(tasks: Sequence[Callable[[], R]], size: int = INLINE) -> list[R]:
    """Run tasks at the same time, one of them in this thread; return their results in order.

    Tasks with fewer than `INLINE` entries in total run one after the other, as do all if torch uses one thread.
    """
    if len(tasks) <= 1 or size < INLINE or torch.get_num_threads() == 1:
        return [task() for task in tasks]
    trial = _trials.setdefault(_kind(tasks[0]), _Trial())
    if trial.left > 0:
        trial.left -= 1
        return [task() for task in tasks]
    spent: list[float] = []
    timed = [functools.partial(_timed, task, spent) for task in tasks]
    parallel = None if _forked else _libgomp()
    begin = time.perf_counter()
    results = _in_pool(timed) if parallel is None else _in_region(parallel, timed)
    trial.judge(time.perf_counter() - begin, sum(spent))
    return results


class _Trial:
    """Whether threads help with one kind of work."""

    def __init__(self) -> None:
        self.left = 0  # how many times it stays in one thread
        self.pause = 2
        self.saved = 0.0  # seconds by threads lately: at most what one region takes alone

    def judge(self, elapsed: float, alone: float) -> None:
        """Compare the time that threads took with the time that one would have needed."""
        self.saved = min(alone, self.saved + WORTH * alone - elapsed)
        if self.saved >= 0.0:
            self.pause = max(2, self.pause // 4)
        else:
            self.left = self.pause = min(PATIENCE, 4 * self.pause)
            self.saved = 0.0


_trials: dict[Any, _Trial] = {}


def _kind(task: Any) -> Any:
    """Return the function that a task runs, and the one that it is given: the same pass may run several loops."""
    given = getattr(task, "args", None)
    return getattr(task, "func", None), getattr(given[0], "func", None) if given else None


def _timed(task: Callable[[], R], spent: list[float]) -> R:
    begin = time.thread_time()
    result = task()
    spent.append(time.thread_time() - begin)
    return result


def ranges(size: int, multiple: int, inline: int = INLINE) -> Cuts:
    """Cut entries into pieces, as many for each thread, at multiples of `multiple`; below `inline` into one."""
    threads = 1 if size < inline else max(1, min(torch.get_num_threads(), MOST))
    each = 1 if threads == 1 else max(1, min(PIECES, size // (PIECE * threads)))
    return _cuts(size, multiple, each * threads)


# Cached: a step starts with cold processor caches, so even a short computation is slow.
@functools.lru_cache(1024)
def _cuts(size: int, multiple: int, count: int) -> Cuts:
    cuts = [size * i // count // multiple * multiple for i in range(count)] + [size]
    return tuple(itertools.pairwise(cuts))


def _in_region(parallel: Any, tasks: Sequence[Callable[[], R]]) -> list[R]:
    """Run tasks in a parallel region of libgomp; the threads it provides, however many, take all tasks."""
    job: _Job = iter(enumerate(tasks)), {}, []
    number = next(_numbers)
    _jobs[number] = job
    try:
        parallel(_work, number, min(len(tasks), torch.get_num_threads()), 0)
    finally:
        del _jobs[number]
    _, results, errors = job
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(tasks))]


_Job = tuple[Iterator[tuple[int, Callable[[], Any]]], dict[int, Any], list[BaseException]]
_jobs: dict[int, _Job] = {}
_numbers = itertools.count(1)


def _take_tasks(number: int) -> None:
    left, results, errors = _jobs[number]
    try:
        while (mine := next(left, None)) is not None:
            results[mine[0]] = mine[1]()
    except BaseException as error:  # must not pass through C
        errors.append(error)


_work = _Region(_take_tasks)  # made once: creating a C callback takes longer than calling it


@functools.cache
def _libgomp() -> Any:
    """Return GOMP_parallel of the libgomp that torch has loaded, or None."""
    try:
        loaded = Path("/proc/self/maps").read_text().split()
        path = next(word for word in loaded if "libgomp" in word and "torch" in word)
        parallel = ctypes.CDLL(path).GOMP_parallel
    except (OSError, StopIteration, AttributeError):
        return None
    parallel.argtypes = [_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _in_pool(tasks: Sequence[Callable[[], R]]) -> list[R]:
    futures = [_executor().submit(task) for task in tasks[1:]]
    try:
        first = tasks[0]()
    finally:
        rest = [future.result() for future in futures]
    return [first, *rest]


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST - 1, thread_name_prefix="rtopk")
        return _pool


def _after_fork() -> None:
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, threading.Lock(), True


os.register_at_fork(after_in_child=_after_fork)
