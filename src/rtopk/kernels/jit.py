"""How loops run: compiled by numba, without the GIL, kept on disk; until they are compiled, as plain Python.

numba is imported when a loop is first called. A loop that is on disk is loaded then. Otherwise a thread compiles
it; meanwhile a call that has little to do is interpreted, and any other waits. Both give the same bits. Of the
processes that start together on a host, one compiles a loop while the others wait for it. The thread does not
outlive the program: before each loop it looks whether that ends. A fork waits until no loop is being compiled.

For Python a loop remains a plain function. numba gets a twin, whose global names lead to compiled loops and to the
`instructions` of LLVM instead. numba checks for changes only in the file of the loop that Python calls: if you
change a loop or an instruction that loops in other files use, delete `__pycache__`.
"""

import functools
import importlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

P = ParamSpec("P")
R = TypeVar("R")
Array = NDArray[Any]  # numba compiles for the dtypes that it meets
Num = Any  # a machine number, not a Python one
int32: Any = np.int32
int64: Any = np.int64
uint8: Any = np.uint8
uint16: Any = np.uint16
uint32: Any = np.uint32
uint64: Any = np.uint64

LITTLE = 1 << 21  # bytes of its arrays that a call may have to be interpreted: about a second's work

_PLAIN = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_options: dict[Any, dict[str, Any] | None] = {}  # of every loop, for numba; None: an instruction


def loop(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a loop that only other loops call when compiled; division follows the machine, not Python."""
    _options[function] = _PLAIN
    return function


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a loop that LLVM merges into every loop that calls it; for arguments that are numbers."""
    _options[function] = _PLAIN | {"forceinline": True}
    return function


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a loop that numba copies into every loop that calls it: arrays as arguments then cost nothing."""
    _options[function] = {"nogil": True, "inline": "always"}
    return function


def instruction(function: Callable[P, R]) -> Callable[P, R]:
    """Mark what `instructions` has under the same name."""
    _options[function] = None
    return function


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Make a loop that Python calls, with positional arguments."""
    _options[function] = _PLAIN | {"no_cpython_wrapper": False}
    ready: list[Any] = []  # compiled
    asked: list[bool] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if ready:
            result: R = ready[0](*args)
            return result
        little = sum(getattr(arg, "nbytes", 0) for arg in args) <= LITTLE
        if little and not waits() and not on_disk(call):
            if not asked:
                asked.append(True)
                behind(functools.partial(_compile, function, args, ready))
            with np.errstate(over="ignore"):
                return function(*args, **kwargs)
        _compile(function, args, ready)
        return call(*args, **kwargs)

    return call


def on_disk(call: Callable[..., Any]) -> bool:
    """Return whether an entry was compiled by an earlier process, for whatever types."""
    function: Any = call.__wrapped__  # type: ignore[attr-defined]
    return _is_in(_compiled(function).stats.cache_path, function.__qualname__)


def _is_in(folder: str | None, name: str) -> bool:
    return folder is not None and any(Path(folder).glob(f"*.{name}-*.nbi"))


def _compile(function: Any, args: tuple[Any, ...], ready: list[Any]) -> None:
    """Compile a loop for arguments like these, or load it, and say so in `ready`."""
    if threading.current_thread() is _worker and not threading.main_thread().is_alive():
        raise _EndingError
    with _working:
        compiled = _compiled(function)
        with _alone(compiled.stats.cache_path, function.__qualname__):
            compiled.compile(tuple(_numba().typeof(arg) for arg in args))
        ready.append(compiled)


@contextmanager
def _alone(folder: str | None, name: str) -> Iterator[None]:
    """Let one process at a time compile a loop that is not on disk; the next one finds it there."""
    with ExitStack() as stack:
        if fcntl is not None and folder is not None and not _is_in(folder, name):
            with suppress(OSError):  # a file system without locks: all compile
                Path(folder).mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(Path(folder, f"{name}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# -- the thread that compiles


class _EndingError(Exception):
    """The program ends: what is not compiled yet will not be needed."""


_queue: deque[Callable[[], None]] = deque()
_guard = threading.Lock()
_working = threading.RLock()  # held while a loop is compiled
_worker: threading.Thread | None = None
_waits = os.environ.get("RTOPK_BACKEND") == "cpu"


def waits() -> bool:
    """Return whether loops are compiled at once, by the thread that calls them.

    So it is if RTOPK_BACKEND=cpu asks for it, in a forked child, where threads of torch's would hang that other
    backends need, in the thread that compiles, and after it has failed, so that the caller sees why.
    """
    return _waits or threading.current_thread() is _worker


def compile_at_once() -> None:
    """Compile loops where they are called, from now on: for measurements."""
    global _waits
    _waits = True


def behind(task: Callable[[], None]) -> None:
    """Let a thread do a task that compiles loops, after those that it has been given before."""
    global _worker, _waits
    with _guard:
        _queue.append(task)
        if _worker is None:
            _worker = threading.Thread(target=_work, name="rtopk compiles")
            try:
                _worker.start()
            except RuntimeError:  # the program ends
                _worker, _waits = None, True


def _work() -> None:
    global _worker, _waits
    while True:
        with _guard:
            if not _queue:
                _worker = None
                return
            task = _queue.popleft()
        try:
            task()
        except _EndingError:
            _queue.clear()
        except Exception:
            logging.getLogger("rtopk").warning(
                "rtopk could not compile a loop in the background", exc_info=True
            )
            _waits = True


def _in_child() -> None:
    global _worker, _waits, _guard, _working, _building
    _queue.clear()
    _worker, _waits = None, True
    _guard, _working, _building = threading.Lock(), threading.RLock(), threading.RLock()


# numba's locks must be free in the child.
os.register_at_fork(
    before=lambda: _working.acquire(), after_in_parent=lambda: _working.release(), after_in_child=_in_child
)

# -- what numba gets

_dispatchers: dict[Any, Any] = {}
_building = threading.RLock()


def _compiled(function: Any) -> Any:
    """Return what numba makes of a loop: something that it compiles when it is asked to."""
    with _building:
        if function not in _dispatchers:
            _dispatchers[function] = _build(function, _options[function])
        return _dispatchers[function]


def _build(function: Any, options: dict[str, Any] | None) -> Any:
    numba = _numba()
    if options is None:
        return importlib.import_module("rtopk.kernels.instructions").FOUND[function.__name__]
    scope = function.__globals__
    found = {name: scope[name] for name in _names(function.__code__) if name in scope}
    others = {name: _compiled(value) for name, value in found.items() if _is_loop(value)}
    twin = FunctionType(function.__code__, {**scope, **others}, function.__name__)
    twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
    if options.get("no_cpython_wrapper", True):
        return numba.njit(**options)(twin)
    try:
        return numba.njit(cache=True, **options)(twin)
    except RuntimeError:  # the package, NUMBA_CACHE_DIR and the home folder are all read-only
        _announce_no_cache()
        return numba.njit(**options)(twin)


def _names(code: CodeType) -> set[str]:
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_loop(value: Any) -> bool:
    return isinstance(value, FunctionType) and value in _options


@functools.cache
def _numba() -> Any:
    """Import numba, and say once if it compiles a loop of ours."""
    import numba
    from numba.core import event

    class Note(event.Listener):
        said = False

        def on_start(self, found: Any) -> None:
            if not self.said and found.data["dispatcher"].py_func.__module__.startswith("rtopk."):
                self.said = True
                logging.getLogger("rtopk").warning(
                    "rtopk compiles its loops for this processor; until that is done, some 10 to 30 s, steps are "
                    "slower. numba keeps them on disk"
                )

        def on_end(self, found: Any) -> None:
            pass

    event.register("numba:compile", Note())  # type: ignore[no-untyped-call]
    return numba


@functools.cache
def _announce_no_cache() -> None:
    logging.getLogger("rtopk").warning(
        "rtopk finds no writable folder for its compiled loops and compiles them in every process; "
        "set NUMBA_CACHE_DIR to a writable folder to keep them"
    )
