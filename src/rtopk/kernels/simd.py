"""What the compiled loops are made of: 64 entries at once, and bits of a word; numba cannot express these.

Magnitudes are compared as keys: the bits of a float without its sign, read as an integer. Keys order finite
floats exactly, denormals included, and put Inf and NaN above all of them. Entries are taken in groups of 64,
so that one comparison gives one machine word; its set bits are the entries that reach the bound.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core import cgutils, types

from rtopk.kernels.jit import inlined, intrinsic

GROUP = 64
SIGNLESS = 0x7FFFFFFF

_INT = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), GROUP)
_INTS = ir.VectorType(_INT, GROUP)


def _at(ctx: Any, b: Any, array: Any, value: Any, index: Any, kind: Any) -> Any:
    data = cgutils.create_struct_proxy(array)(ctx, b, value).data  # type: ignore[no-untyped-call]
    return b.bitcast(b.gep(data, [index]), kind.as_pointer())


def _splat(b: Any, vector: Any, scalar: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    lane = b.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return b.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(_INT, vector.count), None))


def _reach(b: Any, floats: Any, bound: Any) -> Any:
    keys = b.and_(b.bitcast(floats, _INTS), ir.Constant(_INTS, [SIGNLESS] * GROUP))
    return b.bitcast(b.icmp_signed(">=", keys, _splat(b, _INTS, bound)), ir.IntType(GROUP))


def _scan(typing: Any, vector: Any, start: Any, bound: Any) -> Any:
    """Return which of the 64 entries from `start` reach the bound."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return _reach(b, b.load(_at(ctx, b, vector, args[0], args[1], _FLOATS), align=4), args[2])

    return types.uint64(vector, types.intp, types.int32), emit


def _peak(typing: Any, vector: Any, start: Any, bound: Any) -> Any:
    """Return nonzero if one of the 64 entries from `start` reaches the bound; fewer operations than `_scan`."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        words = b.load(_at(ctx, b, vector, args[0], args[1], _INTS), align=4)
        keys, lanes = b.and_(words, ir.Constant(_INTS, [SIGNLESS] * GROUP)), GROUP
        while lanes > 8:
            undefined, half = ir.Constant(keys.type, ir.Undefined), ir.VectorType(_INT, lanes // 2)
            low = b.shuffle_vector(keys, undefined, ir.Constant(half, list(range(lanes // 2))))
            high = b.shuffle_vector(keys, undefined, ir.Constant(half, list(range(lanes // 2, lanes))))
            keys, lanes = b.select(b.icmp_signed(">", low, high), low, high), lanes // 2
        reached = b.icmp_signed(">=", keys, _splat(b, keys.type, args[2]))
        return b.zext(b.bitcast(reached, ir.IntType(lanes)), ir.IntType(64))

    return types.uint64(vector, types.intp, types.int32), emit


def _add(typing: Any, residual: Any, gradient: Any, start: Any, bound: Any) -> Any:
    """Add the gradient to the residual in 64 entries and return which reach the bound."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        kept = _at(ctx, b, residual, args[0], args[2], _FLOATS)
        total = b.fadd(
            b.load(kept, align=4), b.load(_at(ctx, b, gradient, args[1], args[2], _FLOATS), align=4)
        )
        b.store(total, kept, align=4)
        return _reach(b, total, args[3])

    return types.uint64(residual, gradient, types.intp, types.int32), emit


def _momentum(
    typing: Any,
    residual: Any,
    velocity: Any,
    gradient: Any,
    momentum: Any,
    scale: Any,
    start: Any,
    bound: Any,
) -> Any:
    """Update velocity and residual in 64 entries and return which of the residual reach the bound."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        kept = _at(ctx, b, residual, args[0], args[5], _FLOATS)
        speed = _at(ctx, b, velocity, args[1], args[5], _FLOATS)
        fresh = b.load(_at(ctx, b, gradient, args[2], args[5], _FLOATS), align=4)
        # Three roundings, as in plain torch: no fused multiply-add.
        moved = b.fadd(
            b.fmul(b.load(speed, align=4), _splat(b, _FLOATS, args[3])),
            b.fmul(fresh, _splat(b, _FLOATS, args[4])),
        )
        total = b.fadd(b.load(kept, align=4), moved)
        b.store(moved, speed, align=4)
        b.store(total, kept, align=4)
        return _reach(b, total, args[6])

    signature = types.uint64(
        residual, velocity, gradient, types.float32, types.float32, types.intp, types.int32
    )
    return signature, emit


def _prefetch(typing: Any, vector: Any, index: Any) -> Any:
    """Prefetch the cache line of an entry; one outside the vector is no error."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        numbers = [ir.Constant(_INT, n) for n in (0, 3, 1)]  # to read, keep near, data
        b.call(fetch, [_at(ctx, b, vector, args[0], args[1], ir.IntType(8)), *numbers])
        return ctx.get_dummy_value()

    return types.void(vector, types.intp), emit


def _deposit(typing: Any, bits: Any, mask: Any) -> Any:
    """Move the lowest bits to the places of the mask's set bits, in order: one instruction of x86."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        deposit = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.bmi.pdep.64")  # type: ignore[no-untyped-call]
        return b.call(deposit, args)

    return types.uint64(types.uint64, types.uint64), emit


def deposit_by_steps(bits: Any, mask: Any) -> Any:
    """Do the same on any machine: make room for each zero of the mask, the lowest first."""
    one = np.uint64(1)
    without = ~mask
    while without:
        below = (without & (~without + one)) - one
        bits = (bits & below) | ((bits & ~below) << one)
        without &= without - one
    return bits


def _has_deposit() -> bool:
    """Return whether code is compiled for this machine, and it has the instruction."""
    generic = numba.config.CPU_NAME or numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    return not generic and llvm.get_host_cpu_features().get("bmi2", False)


def _lowest(typing: Any, word: Any) -> Any:
    """Return the position of the lowest set bit, 64 if there is none."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), emit


def _ones(typing: Any, word: Any) -> Any:
    """Count the set bits."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.ctpop(args[0])

    return types.int64(types.uint64), emit


def _high(typing: Any, x: Any, y: Any) -> Any:
    """Return the upper 64 bits of a product."""

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = b.mul(b.zext(args[0], wide), b.zext(args[1], wide))
        return b.trunc(b.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit


scan_group = intrinsic(_scan)
peak_group = intrinsic(_peak)
add_group = intrinsic(_add)
momentum_group = intrinsic(_momentum)
prefetch = intrinsic(_prefetch)
deposit: Any = intrinsic(_deposit) if _has_deposit() else inlined(deposit_by_steps)
lowest = intrinsic(_lowest)
ones = intrinsic(_ones)
high = intrinsic(_high)
