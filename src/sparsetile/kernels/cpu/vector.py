"""Wide vectors for numba: the loads, stores and fused multiply-adds of the CPU kernels.

numba's own vectoriser keeps C in memory between a row's entries. These intrinsics let a kernel
keep a block of C in registers instead: a vector may be far wider than a machine register
(``<128 x float>``); LLVM splits it over as many as it needs, on any instruction set.

Conventions: an address is an int64, an offset counts elements. ``like`` is any scalar of the
element type. ``units`` (width in 64-byte units; -2 is half of one, -4 a quarter, never less than an
element) and ``masked`` must be compile-time constants, that is literals, globals or variables of an
enclosing function; if ``masked`` is True only the first ``count`` lanes access memory, which costs
a branch for each on a machine without masks. No address is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, register_model

__all__ = [
    "UNIT_BYTES", "add", "add_short_rows", "claim", "divide_by", "fence", "fma", "get",
    "keep_value", "keep_where", "lane_count", "load", "multiply", "prefetch", "put", "splat",
    "splat_position", "stack", "store", "store_positions", "total", "zeros",
]  # fmt: skip

# The widest register of current CPUs (AVX-512), also one cache line.
UNIT_BYTES = 64

# numba's annotation counts the typing context, which no caller passes.
intrinsic: Any = extending.intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class Vector(types.Type):
    """numba's type for an LLVM vector of ``lanes`` elements."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")

    @property
    def llvm(self) -> Any:
        return ir.VectorType(_element(self.dtype), self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def _element(dtype: Any) -> Any:
    if dtype == types.float32:
        return ir.FloatType()
    return ir.DoubleType() if dtype == types.float64 else ir.IntType(dtype.bitwidth)


def _of(like: Any, units: Any) -> Vector:
    width, unit = units.literal_value, UNIT_BYTES * 8 // like.bitwidth
    return Vector(like, width * unit if width > 0 else max(1, unit // -width))


def _positions_of(vector: Vector) -> Vector:
    """Vector of entry numbers with the lanes and bits of ``vector``."""
    return Vector(types.int32 if vector.dtype.bitwidth == 32 else types.int64, vector.lanes)


def _pointer(builder: Any, base: Any, offset: Any, dtype: Any) -> Any:
    element = _element(dtype)
    pointer = builder.inttoptr(base, element.as_pointer())
    return builder.gep(pointer, [offset], source_etype=element)


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


def _mask(builder: Any, count: Any, lanes: int) -> Any:
    numbers = ir.Constant(ir.VectorType(_I64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, _splat(builder, count, numbers.type))


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _name(operation: str, vector: Vector) -> str:
    kind = "f" if isinstance(vector.dtype, types.Float) else "i"
    return f"llvm.{operation}.v{vector.lanes}{kind}{vector.dtype.bitwidth}"


def _emit_store(
    builder: Any, vector: Vector, value: Any, pointer: Any, masked: Any, count: Any
) -> None:
    align = vector.dtype.bitwidth // 8  # of the element: the vector's is unknown
    if masked.literal_value:
        arguments = [value, pointer, _I32(align), _mask(builder, count, vector.lanes)]
        _call(builder, _name("masked.store", vector) + ".p0", ir.VoidType(), arguments)
    else:
        builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=align)


@intrinsic(prefer_literal=True)
def lane_count(typing: Any, like: Any, units: Any) -> Any:
    """Elements in a vector of ``units``, as a constant."""
    lanes = _of(like, units).lanes
    return types.int64(like, units), lambda _, builder, __, arguments: _I64(lanes)


@intrinsic
def get(typing: Any, like: Any, base: Any, offset: Any) -> Any:
    """Read one element."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[1], arguments[2], like))

    return like(like, types.int64, types.int64), emit


@intrinsic
def put(typing: Any, like: Any, base: Any, offset: Any, value: Any) -> Any:
    """Write one element."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[3], _pointer(builder, arguments[1], arguments[2], like))
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, like), emit


@intrinsic(prefer_literal=True)
def stack(typing: Any, size: Any) -> Any:
    """Return the address of ``size`` bytes, a constant, that last until the function returns."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), size.literal_value))
        memory.align = UNIT_BYTES
        return builder.ptrtoint(memory, _I64)

    return types.int64(size), emit


@intrinsic(prefer_literal=True)
def splat(typing: Any, scalar: Any, units: Any) -> Any:
    """Return the vector whose lanes all hold ``scalar``."""
    vector = _of(scalar, units)
    return vector(scalar, units), (
        lambda _, builder, __, arguments: _splat(builder, arguments[0], vector.llvm)
    )


@intrinsic(prefer_literal=True)
def zeros(typing: Any, like: Any, units: Any) -> Any:
    """Return the vector of zeros."""
    vector = _of(like, units)
    return vector(like, units), (
        lambda _, builder, __, arguments: ir.Constant(vector.llvm, [0] * vector.lanes)
    )


@intrinsic(prefer_literal=True)
def load(
    typing: Any, like: Any, base: Any, offset: Any, units: Any, masked: Any, count: Any
) -> Any:
    """Read a vector from any address; lanes outside of the mask are 0."""
    vector = _of(like, units)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        align = like.bitwidth // 8
        pointer = _pointer(builder, arguments[1], arguments[2], like)
        if masked.literal_value:
            mask = _mask(builder, arguments[5], vector.lanes)
            nothing = ir.Constant(vector.llvm, [0.0] * vector.lanes)
            name = _name("masked.load", vector) + ".p0"
            return _call(builder, name, vector.llvm, [pointer, _I32(align), mask, nothing])
        return builder.load(builder.bitcast(pointer, vector.llvm.as_pointer()), align=align)

    return vector(like, types.int64, types.int64, units, masked, types.int64), emit


@intrinsic(prefer_literal=True)
def store(typing: Any, base: Any, offset: Any, vector: Any, masked: Any, count: Any) -> Any:
    """Write a vector to any address."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, arguments[0], arguments[1], vector.dtype)
        _emit_store(builder, vector, arguments[2], pointer, masked, arguments[4])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, vector, masked, types.int64), emit


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` lane by lane, rounded once if the machine has the instruction."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, _name("fmuladd", a), a.llvm, list(arguments))

    return a(a, a, a), emit


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """``a + b`` lane by lane."""
    return a(a, a), lambda _, builder, __, arguments: builder.fadd(*arguments)


@intrinsic
def multiply(typing: Any, a: Any, b: Any) -> Any:
    """``a * b`` lane by lane."""
    return a(a, a), lambda _, builder, __, arguments: builder.fmul(*arguments)


@intrinsic
def divide_by(typing: Any, a: Any, count: Any) -> Any:
    """``a / count`` lane by lane, ``count`` an int64."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        divisor = builder.sitofp(arguments[1], a.llvm.element)
        return builder.fdiv(arguments[0], _splat(builder, divisor, a.llvm))

    return a(a, types.int64), emit


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """Sum of the lanes, halves added pairwise: one order on every machine."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, lanes = arguments[0], a.lanes
        while lanes > 1:
            lanes //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            index = ir.VectorType(_I32, lanes)
            low = ir.Constant(index, list(range(lanes)))
            high = ir.Constant(index, list(range(lanes, 2 * lanes)))
            value = builder.fadd(
                builder.shuffle_vector(value, undefined, low),
                builder.shuffle_vector(value, undefined, high),
            )
        return builder.extract_element(value, _I32(0))

    return a.dtype(a), emit


def _wins(builder: Any, maximum: bool, candidate: Any, best: Any) -> Any:
    # Unordered comparison is true if either side is NaN: a NaN candidate wins, unless the best is
    # NaN already (then it is the first NaN, and stays). Equal values keep the first.
    better = builder.fcmp_unordered(">" if maximum else "<", candidate, best)
    return builder.and_(better, builder.fcmp_ordered("ord", best, best))


@intrinsic(prefer_literal=True)
def keep_value(typing: Any, maximum: Any, candidate: Any, best: Any) -> Any:
    """Larger (``maximum``, a constant) or smaller of the two; the first NaN beats all."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wins = _wins(builder, maximum.literal_value, *arguments[1:])
        return builder.select(wins, *arguments[1:])

    return best(maximum, best, best), emit


@intrinsic(prefer_literal=True)
def keep_where(
    typing: Any, maximum: Any, candidate: Any, best: Any, position: Any, best_position: Any
) -> Any:
    """``position`` in lanes in which `keep_value` takes the candidate, else ``best_position``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wins = _wins(builder, maximum.literal_value, *arguments[1:3])
        return builder.select(wins, *arguments[3:])

    return best_position(maximum, best, best, best_position, best_position), emit


@intrinsic(prefer_literal=True)
def splat_position(typing: Any, like: Any, position: Any, units: Any) -> Any:
    """Vector of one entry number (int64, under 2^31 for 4-byte elements) beside `splat`'s."""
    vector = _positions_of(_of(like, units))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        narrow = arguments[1]
        if vector.dtype.bitwidth == 32:
            narrow = builder.trunc(narrow, _I32)
        return _splat(builder, narrow, vector.llvm)

    return vector(like, types.int64, units), emit


@intrinsic(prefer_literal=True)
def store_positions(
    typing: Any, base: Any, offset: Any, first: Any, vector: Any, masked: Any, count: Any
) -> Any:
    """Write ``first + position`` of each lane as int32."""
    narrow = Vector(types.int32, vector.lanes)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[3]
        if vector.dtype.bitwidth == 64:
            value = builder.trunc(value, narrow.llvm)
        first = builder.trunc(arguments[2], _I32)
        value = builder.add(value, _splat(builder, first, narrow.llvm))
        pointer = _pointer(builder, arguments[0], arguments[1], types.int32)
        _emit_store(builder, narrow, value, pointer, masked, arguments[5])
        return context.get_dummy_value()

    signature = types.void(types.int64, types.int64, types.int64, vector, masked, types.int64)
    return signature, emit


@intrinsic(prefer_literal=True)
def prefetch(typing: Any, like: Any, base: Any, offset: Any, units: Any) -> Any:
    """Prefetch ``units`` of memory to the cache; a wrong address does no harm.

    Only every other line is requested: hardware fetches lines in pairs, and an instruction for each
    would compete with the loads.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        start = _pointer(builder, arguments[1], arguments[2], like)
        start = builder.bitcast(start, byte.as_pointer())
        for unit in range(0, units.literal_value, 2):
            line = builder.gep(start, [_I64(unit * UNIT_BYTES)], source_etype=byte)
            # read, keep in all cache levels, data
            hints = [_I32(0), _I32(3), _I32(1)]
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [line, *hints])
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, units), emit


@intrinsic
def claim(typing: Any, counter: Any) -> Any:
    """Atomically add 1 to the int64 at an address and return its old value."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, _I64(1), "seq_cst")

    return types.int64(types.int64), emit


def _emit_fence(builder: Any) -> None:
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


@intrinsic
def fence(typing: Any) -> Any:
    """Keep the compiler from moving loads across this point; no instruction is emitted."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_fence(builder)
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic(prefer_literal=True)
def add_short_rows(
    typing: Any, alpha: Any, A: Any, b: Any, ldb: Any, c: Any, ldc: Any, lists: Any, counts: Any,
    row: Any, weighted: Any, two_sums: Any, lengths: Any, sorted_rows: Any,
) -> Any:  # fmt: skip
    """Write one column of C, ``alpha`` times the sums of rows, for rows of 0 to ``lengths`` - 1.

    ``A`` is as kernels take it, ``b`` and ``c`` are addresses of one column, with their row
    strides. ``lists`` has ``sorted_rows`` bytes for each length: the numbers, from ``row`` on, of
    its rows, of which there are ``counts[length]``. Every length has a loop with its entries
    written out. ``two_sums`` adds those at odd places apart.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scalar, sparse, b, ldb, c, ldc, lists, counts, row, *_ = arguments
        indptr, indices, values = (builder.extract_value(sparse, k) for k in range(3))
        byte, sums = types.uint8, 2 if two_sums.literal_value else 1

        def number(base: Any, offset: Any, dtype: Any) -> Any:
            return builder.sext(builder.load(_pointer(builder, base, offset, dtype)), _I64)

        def one(length: int, q: Any) -> None:
            place = builder.add(q, _I64(length * sorted_rows.literal_value))
            inside = builder.zext(builder.load(_pointer(builder, lists, place, byte)), _I64)
            i = builder.add(row, inside)
            first = number(indptr, i, A.types[4])
            totals = [ir.Constant(scalar.type, 0.0)] * sums
            for k in range(length):
                e = builder.add(first, _I64(k))
                at = builder.mul(number(indices, e, A.types[5]), ldb)
                entry = builder.load(_pointer(builder, b, at, alpha))
                total = totals[k % sums]
                if weighted.literal_value:
                    value = builder.load(_pointer(builder, values, e, alpha))
                    name = f"llvm.fmuladd.f{alpha.bitwidth}"
                    total = _call(builder, name, scalar.type, [value, entry, total])
                else:
                    total = builder.fadd(total, entry)
                totals[k % sums] = total
            result = builder.fadd(*totals) if sums == 2 else totals[0]
            place = _pointer(builder, c, builder.mul(i, ldc), alpha)
            builder.store(builder.fmul(scalar, result), place)
            _emit_fence(builder)  # or the compiler computes several rows at once, by slow gathers

        for length in range(lengths.literal_value):
            count = builder.load(_pointer(builder, counts, _I64(length), types.int64))
            with cgutils.for_range(builder, count) as loop:
                one(length, loop.index)
        return context.get_dummy_value()

    given = alpha, A, b, ldb, c, ldc, lists, counts, row, weighted, two_sums, lengths, sorted_rows
    return types.void(*given), emit
