"""How loops are compiled: by numba, at their first call, without the GIL, cached on disk.

Nothing is compiled at import. If something is compiled, a note says so and how long it takes. Of the processes
that start together on a host, one compiles a loop while the others wait for it. numba checks for changes only in
the file of the loop that Python calls: if you change a loop or an instruction that loops in other files use, delete
`__pycache__`.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import event
from numba.extending import intrinsic as numba_intrinsic
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

P = ParamSpec("P")
R = TypeVar("R")
Array = NDArray[Any]  # numba compiles for the dtypes that it meets
Num = Any  # a machine number, not a Python one
int32: Any = numba.int32
int64: Any = numba.int64
uint8: Any = numba.uint8
uint16: Any = numba.uint16
uint32: Any = numba.uint32
uint64: Any = numba.uint64


def loop(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Compile a loop that only other loops call; division follows the machine, not Python.

    It gets no code that lets Python or C call it, which would take time to compile: a call from Python crashes.
    """
    options = {
        "nogil": True,
        "error_model": "numpy",
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
        **options,
    }
    try:
        return cast(Callable[P, R], numba.njit(cache=True, **options)(function))
    except RuntimeError:  # the package, NUMBA_CACHE_DIR and the home folder are all read-only
        _announce_no_cache()
        return cast(Callable[P, R], numba.njit(**options)(function))


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop that Python calls."""
    compiled: Any = loop(function, no_cpython_wrapper=False)
    ready = False

    @functools.wraps(compiled)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal ready
        if ready:
            return cast(R, compiled(*args, **kwargs))
        with _alone(compiled.stats.cache_path, function.__qualname__):
            result: R = compiled(*args, **kwargs)
        ready = True
        return result

    return call


@contextmanager
def _alone(folder: str | None, name: str) -> Iterator[None]:
    """Let one process at a time compile a loop that is not on disk; the next one finds it there."""
    with ExitStack() as stack:
        if fcntl is not None and folder is not None and not any(Path(folder).glob(f"*.{name}-*.nbi")):
            with suppress(OSError):  # a file system without locks: all compile
                Path(folder).mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(Path(folder, f"{name}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Let numba copy a function into every loop that calls it: arrays as arguments then cost nothing."""
    return cast(Callable[P, R], numba.njit(nogil=True, inline="always")(function))


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Let LLVM merge a function into every loop that calls it; for arguments that are numbers."""
    return loop(function, forceinline=True)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make an instruction of LLVM callable from loops."""
    return numba_intrinsic(function)


class _Note(event.Listener):
    """Say once that loops are compiled."""

    said = False

    def on_start(self, found: Any) -> None:
        """Hear of a compilation, anybody's."""
        if not self.said and found.data["dispatcher"].py_func.__module__.startswith("rtopk."):
            _Note.said = True
            logging.getLogger("rtopk").warning(
                "rtopk compiles its loops for this processor, which takes 5 to 15 s; numba keeps them on disk"
            )

    def on_end(self, found: Any) -> None:
        """Hear that it is done."""


event.register("numba:compile", _Note())  # type: ignore[no-untyped-call]


@functools.cache
def _announce_no_cache() -> None:
    logging.getLogger("rtopk").warning(
        "rtopk finds no writable folder for its compiled loops and compiles them in every process; "
        "set NUMBA_CACHE_DIR to a writable folder to keep them"
    )
