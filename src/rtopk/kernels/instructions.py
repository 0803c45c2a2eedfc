"""The instructions that loops are made of, for numba: each emits the LLVM of the Python function of its name.

Those functions, with what they mean, are in `simd` and `wire.bits`. Only `jit` imports this file, when a loop is
compiled, because it imports numba.
"""

from typing import Any

import numba
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from rtopk.kernels import simd
from rtopk.kernels.simd import GROUP, SIGNLESS

_INT = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), GROUP)
_INTS = ir.VectorType(_INT, GROUP)
_WORD, _HALF, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)


def _at(ctx: Any, b: Any, array: Any, value: Any, index: Any, kind: Any) -> Any:
    data = cgutils.create_struct_proxy(array)(ctx, b, value).data  # type: ignore[no-untyped-call]
    return b.bitcast(b.gep(data, [index]), kind.as_pointer())


def _all_at(ctx: Any, b: Any, kinds: Any, args: Any, index: Any) -> list[Any]:
    return [_at(ctx, b, kind, arg, index, _FLOATS) for kind, arg in zip(kinds, args, strict=False)]


def _splat(b: Any, vector: Any, scalar: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    lane = b.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return b.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(_INT, vector.count), None))


def _reach(b: Any, floats: Any, bound: Any) -> Any:
    keys = b.and_(b.bitcast(floats, _INTS), ir.Constant(_INTS, [SIGNLESS] * GROUP))
    return b.bitcast(b.icmp_signed(">=", keys, _splat(b, _INTS, bound)), ir.IntType(GROUP))


def _scan_group(typing: Any, vector: Any, start: Any, bound: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return _reach(b, b.load(_at(ctx, b, vector, args[0], args[1], _FLOATS), align=4), args[2])

    return types.uint64(vector, types.intp, types.int32), emit


def _peak_group(typing: Any, vector: Any, start: Any, bound: Any) -> Any:
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


def _add_group(typing: Any, sums: Any, residual: Any, gradient: Any, start: Any, bound: Any) -> Any:
    kinds = sums, residual, gradient

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        out, kept, fresh = _all_at(ctx, b, kinds, args, args[3])
        total = b.fadd(b.load(kept, align=4), b.load(fresh, align=4))
        b.store(total, out, align=4)
        return _reach(b, total, args[4])

    return types.uint64(*kinds, types.intp, types.int32), emit


def _move_group(
    typing: Any,
    sums: Any,
    moved: Any,
    residual: Any,
    velocity: Any,
    gradient: Any,
    momentum: Any,
    scale: Any,
    start: Any,
    bound: Any,
) -> Any:
    kinds = sums, moved, residual, velocity, gradient

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        out, faster, kept, speed, fresh = _all_at(ctx, b, kinds, args, args[7])
        # Three roundings, as in plain torch: no fused multiply-add.
        now = b.fadd(
            b.fmul(b.load(speed, align=4), _splat(b, _FLOATS, args[5])),
            b.fmul(b.load(fresh, align=4), _splat(b, _FLOATS, args[6])),
        )
        total = b.fadd(b.load(kept, align=4), now)
        b.store(now, faster, align=4)
        b.store(total, out, align=4)
        return _reach(b, total, args[8])

    return types.uint64(*kinds, types.float32, types.float32, types.intp, types.int32), emit


def _floats_at(typing: Any, address: Any, size: Any) -> Any:
    kind = types.Array(types.float32, 1, "C")

    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        array = ctx.make_array(kind)(ctx, b)
        width = ir.Constant(_WORD, 4)
        data = b.inttoptr(args[0], array.data.type)
        populate_array(array, data, [args[1]], [width], width, None)  # type: ignore[no-untyped-call]
        return array._getvalue()

    return kind(types.int64, types.int64), emit


def _prefetch(typing: Any, vector: Any, index: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        numbers = [ir.Constant(_INT, n) for n in (0, 3, 1)]  # to read, keep near, data
        b.call(fetch, [_at(ctx, b, vector, args[0], args[1], ir.IntType(8)), *numbers])
        return ctx.get_dummy_value()

    return types.void(vector, types.intp), emit


def _deposit(typing: Any, bits: Any, mask: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        deposit = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.bmi.pdep.64")  # type: ignore[no-untyped-call]
        return b.call(deposit, args)

    return types.uint64(types.uint64, types.uint64), emit


def _has_deposit() -> bool:
    """Return whether code is compiled for this machine, and it has the instruction."""
    generic = numba.config.CPU_NAME or numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    return not generic and llvm.get_host_cpu_features().get("bmi2", False)


def _lowest(typing: Any, word: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), emit


def _ones(typing: Any, word: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.ctpop(args[0])

    return types.int64(types.uint64), emit


def _high(typing: Any, x: Any, y: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = b.mul(b.zext(args[0], wide), b.zext(args[1], wide))
        return b.trunc(b.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit


def _address(typing: Any, data: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        array = ctx.make_array(signature.args[0])(ctx, b, args[0])
        return b.ptrtoint(array.data, _WORD)

    return types.int64(data), emit


def _load_word(typing: Any, at: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(b.inttoptr(args[0], _WORD.as_pointer()), align=1)

    return types.uint64(types.int64), emit


def _load_byte(typing: Any, at: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.zext(b.load(b.inttoptr(args[0], _BYTE.as_pointer())), _WORD)

    return types.uint64(types.int64), emit


def _load_half(typing: Any, at: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.zext(b.load(b.inttoptr(args[0], _HALF.as_pointer()), align=4), _WORD)

    return types.uint64(types.int64), emit


def _store_word(typing: Any, at: Any, word: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], _WORD.as_pointer()), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.uint64), emit


def _rotate(typing: Any, word: Any, by: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        back = b.sub(ir.Constant(_WORD, 64), args[1])
        return b.or_(b.shl(args[0], args[1]), b.lshr(args[0], back))

    return types.uint64(types.uint64, types.int64), emit


def _bit_length(typing: Any, word: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        zeros = b.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return b.sub(ir.Constant(_WORD, 64), zeros)

    return types.int64(types.int64), emit


def _float_bits(typing: Any, number: Any) -> Any:
    def emit(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], _WORD)

    return types.int64(types.float64), emit


MAKERS: list[Any] = [
    _scan_group, _peak_group, _add_group, _move_group, _floats_at, _prefetch, _lowest, _ones, _high, _address,
    _load_word, _load_byte, _load_half, _store_word, _rotate, _bit_length, _float_bits,
]  # fmt: skip
FOUND: dict[str, Any] = {maker.__name__[1:]: intrinsic(maker) for maker in MAKERS}
FOUND["deposit"] = intrinsic(_deposit) if _has_deposit() else numba.njit(inline="always")(simd.deposit)
