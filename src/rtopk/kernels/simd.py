"""What loops are made of: 64 entries at once, and bits of a word; numba cannot express these, `instructions` does.

Magnitudes are compared as keys: the bits of a float without its sign, read as an integer. Keys order finite
floats exactly, denormals included, and put Inf and NaN above all of them. Entries are taken in groups of 64,
so that one comparison gives one machine word; its set bits are the entries that reach the bound.
"""

import ctypes
from typing import Any

import numpy as np

from rtopk.kernels.jit import Array, Num, instruction

GROUP = 64
SIGNLESS = 0x7FFFFFFF


@instruction
def scan_group(vector: Array, start: Num, bound: Num) -> Num:
    """Return which of the 64 entries from `start` reach the bound."""
    reached = (vector[start : start + GROUP].view(np.int32) & SIGNLESS) >= bound
    return np.packbits(reached, bitorder="little").view(np.uint64)[0]


@instruction
def peak_group(vector: Array, start: Num, bound: Num) -> Num:
    """Return nonzero if one of the 64 entries from `start` reaches the bound; fewer operations than a scan."""
    return scan_group(vector, start, bound)


@instruction
def add_group(sums: Array, residual: Array, gradient: Array, start: Num, bound: Num) -> Num:
    """Write residual + gradient to 64 entries of the sums and return which reach the bound."""
    at = slice(start, start + GROUP)
    sums[at] = residual[at] + gradient[at]
    return scan_group(sums, start, bound)


@instruction
def move_group(
    sums: Array,
    moved: Array,
    residual: Array,
    velocity: Array,
    gradient: Array,
    momentum: Any,
    scale: Any,
    start: Num,
    bound: Num,
) -> Num:
    """Write 64 entries of the next velocity, and residual + that to the sums; return which sums reach the bound."""
    at = slice(start, start + GROUP)
    moved[at] = velocity[at] * momentum + gradient[at] * scale
    return add_group(sums, residual, moved, start, bound)


@instruction
def floats_at(address: Num, size: Num) -> Array:
    """Return the floats that begin at an address; whoever gives it keeps them alive."""
    return np.ctypeslib.as_array((ctypes.c_float * int(size)).from_address(int(address)))


@instruction
def prefetch(vector: Array, index: Num) -> None:
    """Prefetch the cache line of an entry; one outside the vector is no error."""


@instruction
def deposit(bits: Any, mask: Any) -> Any:
    """Move the lowest bits to the places of the mask's set bits, in order: one instruction of some processors.

    On others this is compiled: make room for each zero of the mask, the lowest first.
    """
    one = np.uint64(1)
    without = ~mask
    while without:
        below = (without & (~without + one)) - one
        bits = (bits & below) | ((bits & ~below) << one)
        without &= without - one
    return bits


@instruction
def lowest(word: Num) -> Num:
    """Return the position of the lowest set bit, 64 if there is none."""
    return (int(word) & -int(word)).bit_length() - 1 if word else 64


@instruction
def ones(word: Num) -> Num:
    """Count the set bits."""
    return int(word).bit_count()


@instruction
def high(x: Num, y: Num) -> Num:
    """Return the upper 64 bits of a product."""
    return np.uint64(int(x) * int(y) >> 64)
