"""How loops are compiled: by numba, at their first call, without the GIL, cached on disk.

Nothing is compiled at import. The first call of a loop prints a note if it compiles for more than a second. numba
checks for changes only in the file of the loop that Python calls: if you change a loop or an instruction that loops
in other files use, delete `__pycache__`.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.extending import intrinsic as numba_intrinsic
from numpy.typing import NDArray

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

PATIENCE = 1.0  # seconds of compiling before a note is printed


def loop(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Compile a loop that other loops call; division follows the machine, not Python."""
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return cast(Callable[P, R], numba.njit(cache=True, **options)(function))
    except RuntimeError:  # the package, NUMBA_CACHE_DIR and the home folder are all read-only
        _announce_no_cache()
        return cast(Callable[P, R], numba.njit(**options)(function))


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop that Python calls; print a note if that takes long."""
    compiled, ready = loop(function), False

    @functools.wraps(compiled)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal ready
        if ready:
            return compiled(*args, **kwargs)
        note = threading.Timer(PATIENCE, _announce)
        note.daemon = True
        note.start()
        try:
            result = compiled(*args, **kwargs)
        finally:
            note.cancel()
        ready = True
        return result

    return call


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Let numba copy a function into every loop that calls it: arrays as arguments then cost nothing."""
    return cast(Callable[P, R], numba.njit(nogil=True, inline="always")(function))


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Let LLVM merge a function into every loop that calls it; for arguments that are numbers."""
    return loop(function, forceinline=True)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make an instruction of LLVM callable from loops."""
    return numba_intrinsic(function)


@functools.cache  # say it once
def _announce() -> None:
    logging.getLogger("rtopk").warning(
        "rtopk compiles its loops, which takes some seconds; numba keeps them on disk for the next time"
    )


@functools.cache
def _announce_no_cache() -> None:
    logging.getLogger("rtopk").warning(
        "rtopk finds no writable folder for its compiled loops and compiles them in every process; "
        "set NUMBA_CACHE_DIR to a writable folder to keep them"
    )
