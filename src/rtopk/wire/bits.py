"""Unaligned little-endian words of memory, as numba intrinsics: one machine instruction each.

They take addresses, not arrays: passing an array to a fused function costs two atomic reference counts, more than
decoding an entry. Nothing is checked here: the calling loops compare with the end of their array first, and keep
the array alive while they run.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from rtopk.kernels.jit import Array, Num, entry, intrinsic, loop, uint64

_WORD = ir.IntType(64)
_HALF = ir.IntType(32)
_BYTE = ir.IntType(8)


@intrinsic
def address(typing: Any, data: Any) -> Any:
    """Return where a contiguous array begins."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(array.data, _WORD)

    return types.int64(data), codegen


@intrinsic
def load_word(typing: Any, at: Any) -> Any:
    """Read the 8 bytes at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _WORD.as_pointer()), align=1)

    return types.uint64(types.int64), codegen


@intrinsic
def load_byte(typing: Any, at: Any) -> Any:
    """Read the byte at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], _BYTE.as_pointer())), _WORD)

    return types.uint64(types.int64), codegen


@intrinsic
def load_half(typing: Any, at: Any) -> Any:
    """Read the 4 bytes at an address that is a multiple of 4."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], _HALF.as_pointer()), align=4), _WORD)

    return types.uint64(types.int64), codegen


@intrinsic
def store_word(typing: Any, at: Any, word: Any) -> Any:
    """Write 8 bytes at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), codegen


@intrinsic
def rotate(typing: Any, word: Any, by: Any) -> Any:
    """Rotate a word to the left, by 1 to 63 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        back = builder.sub(ir.Constant(_WORD, 64), args[1])
        return builder.or_(builder.shl(args[0], args[1]), builder.lshr(args[0], back))

    return types.uint64(types.uint64, types.int64), codegen


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Count the zero bits below the lowest one; 64 if there is none."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@intrinsic
def bit_length(typing: Any, word: Any) -> Any:
    """Return the bits that a word needs; 0 for 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(_WORD, 64), zeros)

    return types.int64(types.int64), codegen


@intrinsic
def float_bits(typing: Any, number: Any) -> Any:
    """Return the bits of a float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORD)

    return types.int64(types.float64), codegen


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
