"""How the bit loops are compiled: at their first call, without the interpreter lock, kept on disk.

numba looks for changes only in the file of the loop that is called from Python: whoever changes a loop that
others inline deletes `__pycache__`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.extending import intrinsic as numba_intrinsic
from numpy.typing import NDArray

from rtopk.kernels.jit import announced, jit

P = ParamSpec("P")
R = TypeVar("R")
Array = NDArray[Any]
Num = Any  # a number of the machine, not of Python
int32: Any = numba.int32
int64: Any = numba.int64
uint8: Any = numba.uint8
uint16: Any = numba.uint16
uint32: Any = numba.uint32
uint64: Any = numba.uint64


def loop(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop that other loops call; division is that of the machine, not of Python."""
    return jit(function, error_model="numpy")


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a piece of a loop into every loop that uses it."""
    return jit(function, error_model="numpy", forceinline=True)


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop that Python calls; say so if that takes more than a second."""
    return announced(loop(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an instruction of LLVM callable from loops."""
    return cast(Callable[..., Any], numba_intrinsic(function))
