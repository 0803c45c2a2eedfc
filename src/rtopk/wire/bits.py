"""Unaligned little-endian words of memory: one machine instruction each.

They take addresses, not arrays: passing an array to a fused function costs two atomic reference counts, more than
decoding an entry. Nothing is checked here: the calling loops compare with the end of their array first, and keep
the array alive while they run.
"""

import ctypes

import numpy as np

from rtopk.kernels.jit import Array, Num, entry, instruction, loop, uint64
from rtopk.kernels.simd import lowest as trailing_zeros

__all__ = [
    "address", "all_zero", "bit_length", "float_bits", "last_word", "load_byte", "load_half", "load_word", "rotate",
    "store_word", "trailing_zeros",
]  # fmt: skip


@instruction
def address(data: Array) -> Num:
    """Return where a contiguous array begins."""
    return data.ctypes.data


@instruction
def load_word(at: Num) -> Num:
    """Read the 8 bytes at an address."""
    return np.uint64(int.from_bytes(ctypes.string_at(int(at), 8), "little"))


@instruction
def load_half(at: Num) -> Num:
    """Read the 4 bytes at an address that is a multiple of 4."""
    return np.uint64(int.from_bytes(ctypes.string_at(int(at), 4), "little"))


@instruction
def load_byte(at: Num) -> Num:
    """Read the byte at an address."""
    return np.uint64(ctypes.string_at(int(at), 1)[0])


@instruction
def store_word(at: Num, word: Num) -> None:
    """Write 8 bytes at an address."""
    ctypes.memmove(int(at), int(word).to_bytes(8, "little"), 8)


@instruction
def rotate(word: Num, by: Num) -> Num:
    """Rotate a word to the left, by 1 to 63 bits."""
    return (word << np.uint64(by)) | (word >> np.uint64(64 - by))


@instruction
def bit_length(word: Num) -> Num:
    """Return the bits that a word needs; 0 for 0."""
    return int(word).bit_length()


@instruction
def float_bits(number: float) -> Num:
    """Return the bits of a float64."""
    return int(np.float64(number).view(np.int64))


@loop
def last_word(at: Num, end: Num) -> Num:
    """Read the up to 8 bytes from an address to the end, zero beyond it."""
    word = uint64(0)
    for i in range(max(0, min(8, end - at))):
        word |= load_byte(at + i) << uint64(8 * i)
    return word


@entry
def all_zero(data: Array, begin: Num, end: Num) -> Num:
    """Return whether bytes begin to end are zero."""
    total = 0
    for i in range(begin, end):
        total |= data[i]
    return total == 0
