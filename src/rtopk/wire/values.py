"""The values of a payload: one value form, named in the header, and its bytes.

A form writes and reads one section of values at a byte of an array; a payload has a section for the values
at chosen positions and one for those of the dense tail, whose magnitudes differ. The number of a form in the
header is its place in FORMS. A form of your own is added by `add_form`, in the same order in every process.
"""

import sys
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rtopk.kernels.jit import Array, Num, entry, int32, int64, uint8, uint16, uint32
from rtopk.kernels.threads import INLINE
from rtopk.wire.levels import BLOCK as LEVELS_BLOCK
from rtopk.wire.levels import read_levels, section_size, write_levels

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
NO_DRAWS = np.empty(0, np.float32)
INT8_BLOCK = 256
PIECE = 1 << 15
HALF_MAX, HALF_MIN = 0x477FE000, 0x38800000  # bits of 65504 and of 2**-14


class Form(Protocol):
    """Write and read sections of values."""

    name: str
    exact: bool  # lossless: nothing is rounded
    block: int  # a section can be written in parts that start at multiples of this
    divisible_from: int  # if it has at least this many values

    def size(self, n: int) -> int:
        """Return the bytes of a section of n values."""

    def write(self, values: Floats, draws: Floats, decoded: Floats, at: int, out: Bytes) -> None:
        """Write a section of finite values at out[at:]; if not exact, also write what a reader gets to decoded."""

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Fill out from a section at data[at:]; return whether it was valid."""


@entry
def finite(patterns: Array) -> Num:
    """Return whether all float32, given as bits, are finite."""
    wrong = uint32(0)
    for i in range(len(patterns)):
        wrong |= (patterns[i] & uint32(0x7FFFFFFF)) + uint32(0x00800000)
    return wrong < uint32(0x80000000)


class Float32:
    """The float32 itself."""

    name, exact, block, divisible_from = "fp32", True, 1, INLINE

    def size(self, n: int) -> int:
        """Return 4 bytes a value."""
        return 4 * n

    def write(self, values: Floats, draws: Floats, decoded: Floats, at: int, out: Bytes) -> None:
        """Copy the values."""
        out[at : at + 4 * len(values)].view(np.float32)[:] = values

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Copy the values and look for NaN and infinity."""
        out[:] = data[at : at + 4 * len(out)].view(np.float32)
        return bool(finite(out.view(np.uint32)))


@entry
def _band(patterns: Array) -> Num:
    """Return the bits of the smallest magnitude that is not zero (2**32 if all are) and of the largest."""
    low, top = uint32(0xFFFFFFFF), uint32(0)
    for i in range(len(patterns)):
        size = patterns[i] & uint32(0x7FFFFFFF)
        low, top = min(low, uint32(size - uint32(1))), max(top, size)
    return int64(low) + 1, int64(top)


@entry
def _to_grid(values: Array, draws: Array, scale: float, out: Array) -> None:
    """Scale values and round them up or down, at random, to the grid of float16."""
    for i in range(len(values)):
        x = float(values[i]) * scale
        size = min(abs(x), 65504.0)
        grid = 2.0**-24
        while size >= grid * 2048.0:  # 11 bits hold the whole numbers of grid below 2048
            grid *= 2.0
        size = min(65504.0, np.floor(size / grid + float(draws[i])) * grid)
        out[i] = size if x >= 0 else -size


def _times_power(values: Floats, exponent: int) -> Floats:
    """Multiply by 2**exponent, which float32 may not hold: the first of two factors loses nothing."""
    if exponent == 0:
        return values
    first = exponent // 2
    with np.errstate(over="ignore", under="ignore"):
        product: Floats = values * np.float32(2.0**first) * np.float32(2.0 ** (exponent - first))
    return product


def _convert(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Round to the type of the target as numpy does, but faster; in pieces too small for torch to use threads."""
    for begin in range(0, len(source), PIECE):
        piece = slice(begin, begin + PIECE)
        torch.from_numpy(target[piece]).copy_(torch.from_numpy(source[piece]))


class Half:
    """float16 times a power of two per section: 1 where float16 holds all values as normal numbers."""

    name, exact, block, divisible_from = "fp16", False, 1, sys.maxsize  # one exponent

    def size(self, n: int) -> int:
        """Return 2 bytes a value and 2 for the exponent."""
        return 2 + 2 * n if n else 0

    def write(self, values: Floats, draws: Floats, decoded: Floats, at: int, out: Bytes) -> None:
        """Round to the nearest float16, or up or down at random."""
        smallest, top = _band(values.view(np.uint32))
        exponent = 0
        if top > 0 and not (smallest >= HALF_MIN and top <= HALF_MAX):
            largest = np.array(top, np.uint32).view(np.float32)
            exponent = int(np.frexp(largest)[1]) - 15  # the largest becomes 2**14 to 2**15
        if len(draws):
            scaled = np.empty_like(values)
            _to_grid(values, draws, 2.0**-exponent, scaled)
        else:
            scaled = _times_power(values, -exponent)
        halves = np.empty(len(values), np.float16)
        _convert(scaled, halves)
        if exponent == 113:  # 2**15 x 2**113 is beyond float32: stay one step below
            halves = halves.clip(-32752.0, 32752.0)
        out[at : at + 2].view(np.int16)[:] = exponent
        out[at + 2 : at + 2 + 2 * len(values)].view(np.float16)[:] = halves
        _convert(halves, decoded)
        decoded[:] = _times_power(decoded, exponent)

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values; an exponent beyond what float32 can need is refused."""
        if not len(out):
            return True
        exponent = int(data[at : at + 2].view(np.int16)[0])
        if not -164 <= exponent <= 113:
            return False
        _convert(data[at + 2 : at + 2 + 2 * len(out)].view(np.float16), out)
        if exponent:
            with np.errstate(invalid="ignore"):  # a signalling NaN of a stranger: refused below, no warning
                out[:] = _times_power(out, exponent)
        return bool(finite(out.view(np.uint32)))


@entry
def _write_bfloat(patterns: Array, draws: Array, out: Array, decoded: Array) -> None:
    for i in range(len(patterns)):
        size = patterns[i] & uint32(0x7FFFFFFF)
        if len(draws):
            size = (size + uint32(draws[i] * 65536.0)) >> uint32(16)
        else:
            size = (size + uint32(0x7FFF) + ((size >> uint32(16)) & uint32(1))) >> uint32(16)
        size = min(size, uint32(0x7F7F)) | ((patterns[i] >> uint32(31)) << uint32(15))
        out[i] = uint16(size)
        decoded[i] = size << uint32(16)


class BFloat:
    """The upper half of the float32."""

    name, exact, block, divisible_from = "bf16", False, 1, INLINE

    def size(self, n: int) -> int:
        """Return 2 bytes a value."""
        return 2 * n

    def write(self, values: Floats, draws: Floats, decoded: Floats, at: int, out: Bytes) -> None:
        """Round to the nearest bfloat16 (ties to even), or up or down at random."""
        upper = np.empty(len(values), np.uint16)
        _write_bfloat(values.view(np.uint32), draws, upper, decoded.view(np.uint32))
        out[at : at + 2 * len(values)].view(np.uint16)[:] = upper

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values and look for NaN and infinity."""
        patterns = out.view(np.uint32)
        patterns[:] = data[at : at + 2 * len(out)].view(np.uint16)
        patterns <<= 16
        return bool(finite(patterns))


@entry
def _write_int8(values: Array, draws: Array, out: Array, decoded: Array) -> None:
    at, scale, whole = 0, np.empty(1, np.float32), np.empty(INT8_BLOCK, np.int32)
    for begin in range(0, len(values), INT8_BLOCK):
        block, result = values[begin : begin + INT8_BLOCK], decoded[begin : begin + INT8_BLOCK]
        n, largest = len(block), np.float32(0.0)
        for i in range(n):
            largest = max(largest, abs(block[i]))
        scale[0] = largest
        out[at : at + 4] = scale.view(np.uint8)
        factor, step = 127.0 / float(largest) if largest > 0 else 0.0, float(largest)
        if len(draws):
            for i in range(n):
                whole[i] = int32(
                    max(-127.0, min(127.0, np.floor(float(block[i]) * factor + float(draws[begin + i]))))
                )
        else:
            for i in range(n):
                whole[i] = int32(max(-127.0, min(127.0, np.rint(float(block[i]) * factor))))
        codes = out[at + 4 : at + 4 + n]
        for i in range(n):
            codes[i] = uint8(whole[i] & 255)
            result[i] = np.float32(whole[i] * step / 127.0)
        at += 4 + n


@entry
def _read_int8(data: Array, out: Array) -> Num:
    at, scale, wrong = 0, np.empty(1, np.float32), False
    for begin in range(0, len(out), INT8_BLOCK):
        block = out[begin : begin + INT8_BLOCK]
        scale.view(np.uint8)[:] = data[at : at + 4]
        largest, codes = float(scale[0]), data[at + 4 : at + 4 + len(block)]
        if not largest >= 0.0 or largest == np.inf:
            return False
        for i in range(len(block)):
            wrong |= codes[i] == 128  # -128
            block[i] = np.float32(np.int32(np.int8(codes[i])) * largest / 127.0)
        at += 4 + len(block)
    return not wrong


class Int8:
    """A whole number from -127 to 127 times the largest magnitude of its block of 256, over 127."""

    name, exact, block, divisible_from = "int8", False, INT8_BLOCK, INLINE

    def size(self, n: int) -> int:
        """Return a byte a value and 4 a block."""
        return n + 4 * (-(-n // INT8_BLOCK))

    def write(self, values: Floats, draws: Floats, decoded: Floats, at: int, out: Bytes) -> None:
        """Round to the nearest multiple, or up or down at random."""
        _write_int8(values, draws, out[at:], decoded)

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values; a scale must be finite and not negative."""
        return bool(_read_int8(data[at:], out))


class Levels:
    """A sign and one of a few magnitudes, which are stored with each block of 512."""

    exact, block, divisible_from = False, LEVELS_BLOCK, INLINE

    def __init__(self, name: str, bits: int) -> None:
        self.name, self.bits = name, bits

    def size(self, n: int) -> int:
        """Return the bytes of n values with their magnitudes."""
        return section_size(n, self.bits)

    def write(self, values: Floats, draws: Floats, decoded: Floats, at: int, out: Bytes) -> None:
        """Fit magnitudes and take the nearest, or one of the two around the value at random."""
        write_levels(values, self.bits, draws, out, at, decoded)

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values; magnitudes must ascend and be finite."""
        return bool(read_levels(data, at, self.bits, out) == 0)


FORMS: list[Form] = []
BY_NAME: dict[str, int] = {}


def add_form(form: Form) -> None:
    """Let codecs write and read values in a form, by its name."""
    if form.name in BY_NAME:
        raise ValueError(f"there is a value form {form.name!r} already; choose another name")
    BY_NAME[form.name] = len(FORMS)
    FORMS.append(form)


for _form in (Float32(), Half(), BFloat(), Int8(), Levels("4bit", 4), Levels("2bit", 2)):
    add_form(_form)
