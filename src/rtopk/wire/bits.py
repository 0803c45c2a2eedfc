"""Unaligned little-endian words of memory, one machine instruction each; and the checksum of a payload.

Words take addresses, not arrays: passing an array to a fused function costs two atomic reference counts, more than
decoding an entry. Nothing is checked here: the calling loops compare with the end of their array first, and keep
the array alive while they run. The checksum is XXH64 (https://github.com/Cyan4973/xxHash, the 64-bit algorithm).
"""

import ctypes

import numpy as np

from rtopk.kernels.jit import Array, Num, entry, instruction, int64, loop, uint64
from rtopk.kernels.simd import lowest as trailing_zeros

__all__ = [
    "address", "all_zero", "bit_length", "float_bits", "last_word", "load_byte", "load_half", "load_word",
    "payload_checksum", "rotate", "store_word", "trailing_zeros", "xxh64",
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


P1 = 0x9E3779B185EBCA87
P2 = 0xC2B2AE3D27D4EB4F
P3 = 0x165667B19E3779F9
P4 = 0x85EBCA77C2B2AE63
P5 = 0x27D4EB2F165667C5


@loop
def _round(state: Num, word: Num) -> Num:
    return rotate(state + word * uint64(P2), 31) * uint64(P1)


@loop
def _merge(h: Num, state: Num) -> Num:
    return (h ^ _round(uint64(0), state)) * uint64(P1) + uint64(P4)


@loop
def _xxh64(data: Array, begin: Num, end: Num, seed: Num) -> Num:
    """Hash data[begin:end] to 64 bits."""
    length = end - begin
    i = address(data) + begin
    end = i + length
    seed = uint64(seed)
    if length >= 32:
        a, b = seed + uint64(P1) + uint64(P2), seed + uint64(P2)
        c, d = seed, seed - uint64(P1)
        while i + 32 <= end:
            a = _round(a, load_word(i))
            b = _round(b, load_word(i + 8))
            c = _round(c, load_word(i + 16))
            d = _round(d, load_word(i + 24))
            i += 32
        h = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18)
        h = _merge(_merge(_merge(_merge(h, a), b), c), d)
    else:
        h = seed + uint64(P5)
    h += uint64(length)
    while i + 8 <= end:
        h = rotate(h ^ _round(uint64(0), load_word(i)), 27) * uint64(P1) + uint64(P4)
        i += 8
    if i + 4 <= end:
        word = uint64(0)
        for j in range(4):
            word |= load_byte(i + j) << uint64(8 * j)
        h = rotate(h ^ (word * uint64(P1)), 23) * uint64(P2) + uint64(P3)
        i += 4
    while i < end:
        h = rotate(h ^ (load_byte(i) * uint64(P5)), 11) * uint64(P1)
        i += 1
    h = (h ^ (h >> uint64(33))) * uint64(P2)
    h = (h ^ (h >> uint64(29))) * uint64(P3)
    return h ^ (h >> uint64(32))


@entry
def xxh64(data: Array, begin: Num, end: Num, seed: Num) -> Num:
    """Hash data[begin:end] to 64 bits, for Python."""
    return _xxh64(data, int64(begin), int64(end), uint64(seed))


@entry
def payload_checksum(data: Array, header: Num, end: Num) -> Num:
    """Hash a payload: all of the header before its own last 8 bytes seeds the hash of the body."""
    return _xxh64(data, header, end, _xxh64(data, int64(0), header - 8, uint64(0)))
