"""The values of a payload: one value form, named in the header, and its bytes.

A form writes and reads one section of values at a byte of an array; a payload has a section for the values
at chosen positions and one for those of the dense tail, whose magnitudes differ. A form is added by adding
a class to FORMS at the end: the number in the header is the place in that list.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rtopk.wire.compiling import Array, Num, entry, int64, uint16, uint32
from rtopk.wire.levels import read_levels, section_size, write_levels

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
NO_DRAWS = np.empty(0, np.float32)
INT8_BLOCK = 256
HALF_MAX, HALF_MIN = 65504.0, 2.0**-14


class Form(Protocol):
    """Write and read sections of values."""

    name: str
    exact: bool  # reads back what was written, so there is nothing to round

    def size(self, n: int) -> int:
        """Return the bytes of a section of n values."""

    def write(self, values: Floats, draws: Floats, out: Bytes, at: int) -> Floats:
        """Write a section of finite values at out[at:]; return what a reader gets."""

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Fill out from a section at data[at:]; say whether it was one."""


@entry
def finite(patterns: Array) -> Num:
    """Say whether no float32, given as bits, is NaN or infinite."""
    wrong = uint32(0)
    for i in range(len(patterns)):
        wrong |= (patterns[i] & uint32(0x7FFFFFFF)) + uint32(0x00800000)
    return wrong < uint32(0x80000000)


class Float32:
    """The float32 itself."""

    name, exact = "fp32", True

    def size(self, n: int) -> int:
        """Return 4 bytes a value."""
        return 4 * n

    def write(self, values: Floats, draws: Floats, out: Bytes, at: int) -> Floats:
        """Copy the values."""
        out[at : at + 4 * len(values)].view(np.float32)[:] = values
        return values

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Copy the values and look for NaN and infinity."""
        out[:] = data[at : at + 4 * len(out)].view(np.float32)
        return bool(finite(out.view(np.uint32)))


@entry
def _to_grid(values: Array, draws: Array, scale: float, out: Array) -> None:
    """Scale values and round them up or down, at random, to the grid of float16."""
    for i in range(len(values)):
        x = float(values[i]) * scale
        size = min(abs(x), HALF_MAX)
        grid = 2.0**-24
        while size >= grid * 2048.0:  # 11 bits hold the whole numbers of grid below 2048
            grid *= 2.0
        size = min(HALF_MAX, np.floor(size / grid + draws[i]) * grid)
        out[i] = size if x >= 0 else -size


def _times_power(values: Floats, exponent: int) -> Floats:
    """Multiply by 2**exponent, which float32 may not hold: the first of two factors loses nothing."""
    if exponent == 0:
        return values
    first = exponent // 2
    with np.errstate(over="ignore", under="ignore"):
        product: Floats = values * np.float32(2.0**first) * np.float32(2.0 ** (exponent - first))
    return product


class Half:
    """float16 times a power of two per section: 1 where float16 holds all values as normal numbers."""

    name, exact = "fp16", False

    def size(self, n: int) -> int:
        """Return 2 bytes a value and 2 for the exponent."""
        return 2 + 2 * n if n else 0

    def write(self, values: Floats, draws: Floats, out: Bytes, at: int) -> Floats:
        """Round to the nearest float16, or up or down at random."""
        sizes = np.abs(values)
        largest = float(sizes.max())
        smallest = float(sizes.min(where=sizes > 0, initial=np.inf))
        exponent = 0
        if largest > 0.0 and not (smallest >= HALF_MIN and largest <= HALF_MAX):
            exponent = int(np.frexp(largest)[1]) - 15  # the largest becomes 2**14 to 2**15
        if len(draws):
            scaled = np.empty_like(values)
            _to_grid(values, draws, 2.0**-exponent, scaled)
        else:
            scaled = _times_power(values, -exponent)
        with np.errstate(over="ignore", under="ignore"):
            halves = scaled.astype(np.float16)
        if exponent == 113:  # 2**15 x 2**113 is beyond float32: stay one step below
            halves = halves.clip(-32752.0, 32752.0)
        out[at : at + 2].view(np.int16)[:] = exponent
        out[at + 2 : at + 2 + 2 * len(values)].view(np.float16)[:] = halves
        return _times_power(halves.astype(np.float32), exponent)

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values; an exponent beyond what float32 can need is refused."""
        if not len(out):
            return True
        exponent = int(data[at : at + 2].view(np.int16)[0])
        if not -164 <= exponent <= 113:
            return False
        halves = data[at + 2 : at + 2 + 2 * len(out)].view(np.float16)
        with np.errstate(invalid="ignore"):  # a signalling NaN of a stranger: refused below, not warned about
            out[:] = _times_power(halves.astype(np.float32), exponent)
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

    name, exact = "bf16", False

    def size(self, n: int) -> int:
        """Return 2 bytes a value."""
        return 2 * n

    def write(self, values: Floats, draws: Floats, out: Bytes, at: int) -> Floats:
        """Round to the nearest bfloat16 (ties to even), or up or down at random."""
        decoded = np.empty_like(values)
        upper = np.empty(len(values), np.uint16)
        _write_bfloat(values.view(np.uint32), draws, upper, decoded.view(np.uint32))
        out[at : at + 2 * len(values)].view(np.uint16)[:] = upper
        return decoded

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values and look for NaN and infinity."""
        patterns = out.view(np.uint32)
        patterns[:] = data[at : at + 2 * len(out)].view(np.uint16)
        patterns <<= 16
        return bool(finite(patterns))


@entry
def _write_int8(values: Array, draws: Array, out: Array, decoded: Array) -> None:
    at, scale = 0, np.empty(1, np.float32)
    for begin in range(0, len(values), INT8_BLOCK):
        end = min(begin + INT8_BLOCK, len(values))
        largest = np.float32(0.0)
        for i in range(begin, end):
            largest = max(largest, abs(values[i]))
        scale[0] = largest
        for j in range(4):
            out[at + j] = scale.view(np.uint8)[j]
        at += 4
        factor = 127.0 / float(largest) if largest > 0 else 0.0
        for i in range(begin, end):
            x = float(values[i]) * factor
            q = np.floor(x + draws[i]) if len(draws) else np.rint(x)
            q = float(int64(max(-127.0, min(127.0, q))))  # a whole number has no -0
            out[at + i - begin] = int64(q) & 255
            decoded[i] = np.float32(q * float(largest) / 127.0)
        at += end - begin


@entry
def _read_int8(data: Array, out: Array) -> Num:
    at, scale = 0, np.empty(1, np.float32)
    for begin in range(0, len(out), INT8_BLOCK):
        end = min(begin + INT8_BLOCK, len(out))
        for j in range(4):
            scale.view(np.uint8)[j] = data[at + j]
        at += 4
        if not scale[0] >= 0.0 or scale[0] == np.inf:
            return False
        for i in range(begin, end):
            q = float(np.int8(data[at + i - begin]))
            if q < -127.0:
                return False
            out[i] = np.float32(q * float(scale[0]) / 127.0)
        at += end - begin
    return True


class Int8:
    """A whole number from -127 to 127 times the largest magnitude of its block of 256, over 127."""

    name, exact = "int8", False

    def size(self, n: int) -> int:
        """Return a byte a value and 4 a block."""
        return n + 4 * (-(-n // INT8_BLOCK))

    def write(self, values: Floats, draws: Floats, out: Bytes, at: int) -> Floats:
        """Round to the nearest multiple, or up or down at random."""
        decoded = np.empty_like(values)
        _write_int8(values, draws, out[at:], decoded)
        return decoded

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values; a scale must be finite and not negative."""
        return bool(_read_int8(data[at:], out))


class Levels:
    """A sign and one of a few magnitudes that each block of 512 brings along."""

    exact = False

    def __init__(self, name: str, bits: int) -> None:
        self.name, self.bits = name, bits

    def size(self, n: int) -> int:
        """Return the bytes of n values with their magnitudes."""
        return section_size(n, self.bits)

    def write(self, values: Floats, draws: Floats, out: Bytes, at: int) -> Floats:
        """Fit magnitudes and take the nearest, or one of the two around the value at random."""
        decoded = np.empty_like(values)
        write_levels(values, self.bits, draws, out, at, decoded)
        return decoded

    def read(self, data: Bytes, at: int, out: Floats) -> bool:
        """Read the values; magnitudes must ascend and be finite."""
        return bool(read_levels(data, at, self.bits, out) == 0)


FORMS: tuple[Form, ...] = (
    Float32(),
    Half(),
    BFloat(),
    Int8(),
    Levels("4bit", 4),
    Levels("2bit", 2),
)
BY_NAME = {form.name: number for number, form in enumerate(FORMS)}
