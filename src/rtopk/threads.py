"""Share work between as many threads as torch uses.

A plain pool: numba's own threads do not survive a fork and allow one caller at a time. A forked child makes
its own pool; several callers share one, and no task waits for another.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

R = TypeVar("R")

MOST = 8  # more threads than this do not move memory faster
INLINE = 1 << 18  # below this many entries, waking a thread costs more than it saves

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def together(tasks: Sequence[Callable[[], R]]) -> list[R]:
    """Run tasks at the same time, the first one in this thread; return their results in order."""
    if len(tasks) == 1:
        return [tasks[0]()]
    futures = [_executor().submit(task) for task in tasks[1:]]
    try:
        first = tasks[0]()
    finally:
        rest = [future.result() for future in futures]
    return [first, *rest]


def ranges(size: int, multiple: int, inline: int = INLINE) -> list[tuple[int, int]]:
    """Cut `size` entries into one range for each thread, at multiples of `multiple`; below `inline` into one."""
    count = 1 if size < inline else max(1, min(torch.get_num_threads(), MOST))
    cuts = [size * i // count // multiple * multiple for i in range(count)] + [size]
    return list(itertools.pairwise(cuts))


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST - 1, thread_name_prefix="rtopk")
        return _pool


def _forget() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
