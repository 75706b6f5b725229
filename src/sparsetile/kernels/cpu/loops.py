"""The CPU's numba kernels: sparse-dense product, max/min reduction, sampled dense-dense product.

Each kernel is one ``nogil`` function on raw addresses that several threads enter together; each
thread claims tasks from a shared counter until none is left. A task is a chunk of rows, or, for a
chunk with far more than its share of the entries (one dense row), one part of its columns.

Each element of C is the sum of its row's entries in a fixed order, by fused multiply-adds: one
after the other, or with AVX-512 those at even places, those at odd places, and the two sums. C is
the same bit for bit from run to run, for any number of threads and any split of the columns.

Longer than a file should be: the three kernels share their units and blocks of columns, and each
kind of block is written out, because numba takes its width for a constant of the function.

``entries.py`` compiles the kernels, ``api.py`` makes all checks.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np

from sparsetile.core.numba_cache import inlined, inner
from sparsetile.kernels.cpu.vector import (
    UNIT_BYTES,
    add,
    add_short_rows,
    claim,
    divide_by,
    fence,
    fma,
    get,
    keep_value,
    keep_where,
    lane_count,
    load,
    multiply,
    prefetch,
    put,
    splat,
    splat_position,
    stack,
    store,
    store_positions,
    total,
    zeros,
)

__all__ = ["sddmm", "spmm_extremum", "spmm_sum", "spmm_won"]

# Widths of the blocks of C that stay in registers, in units of 64 bytes. With AVX-512 a unit is
# one of 32 registers: 8 units and two sums take 16. Elsewhere it takes two (AVX2, of 16) or four
# (NEON, of 32): 4 units take half of the registers as one sum, whose 8 or 16 parts already hide the
# latency of a multiply-add; loads take the other half.
_FEATURES = llvm.get_host_cpu_features()
_AVX512 = _FEATURES.get("avx512f", False)
_WIDE, _HALF = (8, 4) if _AVX512 else (4, 2)
_TWO_SUMS = _AVX512
# Whether an instruction can read only the first lanes of a vector. Without one (NEON) each lane of
# a masked vector has its own branch and load, and the remaining columns cost more than the others.
_MASKS = _FEATURES.get("avx", False)
# Units of columns in one task: a chunk's rows of C stay in cache over the blocks of a panel. A wide
# one reads more of a row of B at once, a narrow one lets more rows fit the caches.
_PANEL, _NARROW_PANEL = 8, 8 if _AVX512 else 4
# Entries ahead of the current one whose rows of B are prefetched. With AVX-512 each block of 4
# units and more prefetches for itself. Elsewhere the first block of a strip prefetches whole rows
# of the panel, half as far ahead if those are long: a core has about 32 lines in flight.
_AHEAD, _AHEAD_LONG, _LONG = 8, 4, 4
# Entries of a strip of rows: their rows of B, 512 bytes of a panel each, stay in a core's cache.
_STRIP = 64
# A chunk with this many times the mean number of entries is split by columns.
_HEAVY = 4

# Arguments of the kernels: addresses, counts, and zeros of the types of indptr and indices.
Schedule = tuple[int, int, int, int]  # bounds or 0, rows, number of chunks, parts of a heavy chunk
Sparse = tuple[int, int, int, int, Any, Any]  # indptr, indices, values or 0, nnz, both types
Dense = tuple[int, int]  # matrix, row stride in elements
Sum = tuple[Sparse, Dense, Dense, Any, Any, bool]  # A, B, C, alpha, beta, whether a mean
Extremum = tuple[Sparse, Dense, Dense, Dense, Any]  # A, B, C, arg, a scalar of the element type

_COUNT = np.int64(0)  # element type of bounds and entry numbers
_PLACE = np.int32(0)  # of winners' places
_BYTE = np.uint8(0)  # of rows' numbers among those that are sorted
# Rows of one column that are sorted by length at a time, those shorter than _LENGTHS. Ranges with a
# mean of at most _SHORT entries are.
_SORTED, _LENGTHS, _SHORT = 128, 16, 12
_LISTS, _COUNTS = (_LENGTHS + 1) * _SORTED, (_LENGTHS + 1) * 8  # bytes
# Cost of a row besides its entries, in entries, if chunks are searched (as in balance.row_chunks).
ROW_COST = 4


@inlined
def _offset(A: Sparse, row: int) -> int:
    """Return the first entry of a row."""
    return np.int64(get(A[4], A[0], row))  # type: ignore[return-value]


@inlined
def _column(A: Sparse, e: int) -> int:
    """Return the column of an entry."""
    return np.int64(get(A[5], A[1], e))  # type: ignore[return-value]


@inner
def _bound(schedule: Schedule, A: Sparse, chunk: int) -> int:
    """Return the first row of a chunk: given, or found by the cost of the rows before it."""
    bounds, rows, chunks, _ = schedule
    if bounds != 0:
        return get(_COUNT, bounds, chunk)
    cost = (A[3] + ROW_COST * rows) * chunk // chunks
    low, high = 0, rows if chunk > 0 else 0
    while low < high:
        middle = (low + high) // 2
        if _offset(A, middle) + ROW_COST * middle < cost:
            low = middle + 1
        else:
            high = middle
    return low if chunk < chunks else rows


@inner
def _rows_fit(A: Sparse, row: int, stop: int) -> bool:
    """Whether row pointers ascend within the entries of A."""
    last = _offset(A, row)
    if stop < row or last < 0 or _offset(A, stop) > A[3]:
        return False
    ascend = True
    for i in range(row, stop):
        offset = _offset(A, i + 1)
        ascend = ascend and last <= offset
        last = offset
    return ascend


@inner
def _columns_fit(A: Sparse, row: int, stop: int, columns: int) -> bool:
    """Whether all columns of a range of rows are among so many.

    A pass of its own: it costs 0.1 to 0.3 ns for an entry, 15 to 40 % of a product of one column
    and nothing beside wide ones. To compare inside :func:`_sum_column` and clamp the address took
    1.9 times as long in all (bcsstk32, one thread, 2.1 and 4.1 ms; a Xeon, development readings).
    """
    first, end = _offset(A, row), _offset(A, stop)
    least = greatest = A[5]  # in the type of the columns: more lanes
    for e in range(first, end):
        column = get(A[5], A[1], e)
        least = column if column < least else least
        greatest = column if column > greatest else greatest
    return least >= 0 and (greatest < columns or end == first)


@inner
def _next_task(
    counter: int, schedule: Schedule, A: Sparse, n: int, width: int, unit: int
) -> tuple[int, int, int, int]:
    """Claim a task: (rows from, to, columns from, to); ``from`` is -1 if none is left.

    Columns come in panels of ``width``, all chunks of one panel before the next, so that the
    panel of B stays in cache. A heavy chunk is split into ``parts`` ranges of whole units.
    """
    _, _, chunks, parts = schedule
    nnz = A[3]
    task = claim(counter)
    panel = task // (chunks * parts)
    first = panel * width
    if first >= n:
        return -1, -1, 0, 0
    stop = min(first + width, n)
    chunk = task // parts % chunks
    row = _bound(schedule, A, chunk)
    end = _bound(schedule, A, chunk + 1)
    part = task % parts
    entries = _offset(A, end) - _offset(A, row)
    if entries * chunks > _HEAVY * nnz:
        share = -(-(stop - first) // (parts * unit)) * unit
        first += part * share
        stop = min(first + share, stop)
    elif part > 0:
        stop = first
    return row, end, first, stop


@inlined
def _fetch_row(e: int, j: int, lines: int, A: Sparse, B: Dense, like: Any) -> None:
    """Prefetch ``lines`` units, from column ``j`` on, of the row of B that a later entry needs."""
    if lines > 0:
        ahead = _AHEAD if lines <= _LONG else _AHEAD_LONG
        later = _column(A, min(e + ahead, A[3] - 1)) * B[1] + j
        step = lane_count(like, 1)
        # A loop of ``lines`` steps would cost more than the fetches.
        if lines >= 8:
            for k in range(8):
                prefetch(like, B[0], later + k * step, 1)
        else:
            if lines & 4:
                for k in range(4):
                    prefetch(like, B[0], later + k * step, 1)
                later += 4 * step
            if lines & 2:
                prefetch(like, B[0], later, 1)
                prefetch(like, B[0], later + step, 1)
                later += 2 * step
            if lines & 1:
                prefetch(like, B[0], later, 1)


def _sum_block(units: int, masked: bool) -> Any:
    """Make the product of a range of rows and one block of columns.

    The block is ``units`` wide from column ``j`` on; if ``masked``, the first ``count`` of that.
    """
    ahead = _AHEAD if units > 2 else 0  # a block of one vector is as wide only with AVX-512

    @inlined  # a call would pass the sums through memory, entry by entry
    def add_entry(
        acc: Any, e: int, j: int, count: int, fetched: int, A: Sparse, B: Dense, like: Any
    ) -> Any:
        values, nnz = A[2], A[3]
        b, ldb = B
        if ahead > 0:
            later = _column(A, min(e + ahead, nnz - 1))
            prefetch(like, b, later * ldb + j, units)
        else:
            _fetch_row(e, j, fetched, A, B, like)
        entry = load(like, b, _column(A, e) * ldb + j, units, masked, count)
        if values == 0:
            return add(acc, entry)
        return fma(splat(get(like, values, e), units), entry, acc)

    @inner
    def block(row: int, stop: int, j: int, count: int, fetched: int, work: Sum) -> None:
        A, B, (c, ldc), alpha, beta, mean = work
        start = _offset(A, row)
        for i in range(row, stop):
            end = _offset(A, i + 1)
            # Two sums: one would wait for each addition to finish before the next.
            even = zeros(alpha, units)
            odd = zeros(alpha, units)
            e = start
            while _TWO_SUMS and e + 1 < end:
                even = add_entry(even, e, j, count, fetched, A, B, alpha)
                odd = add_entry(odd, e + 1, j, count, fetched, A, B, alpha)
                e += 2
            while e < end:
                even = add_entry(even, e, j, count, fetched, A, B, alpha)
                e += 1
            acc = add(even, odd) if _TWO_SUMS else even
            if mean and end > start:
                acc = divide_by(acc, end - start)
            acc = multiply(splat(alpha, units), acc)
            if beta != 0:  # 0 must not read C: it may be uninitialised
                old = load(alpha, c, i * ldc + j, units, masked, count)
                acc = fma(splat(beta, units), old, acc)
            store(c, i * ldc + j, acc, masked, count)
            start = end

    return block


def _sum_pair(units: int, overlap: bool) -> Any:
    """Make the same with one sum, of a block of two vectors of ``units`` each.

    As one vector the compiler would load all of an entry's row before it adds, and spill. With
    ``overlap`` the block is ``count`` wide, one to two vectors: the second ends at the end of the
    block, and their overlap is computed twice.
    """

    @inner
    def block(row: int, stop: int, j: int, count: int, fetched: int, work: Sum) -> None:
        A, (b, ldb), (c, ldc), alpha, beta, mean = work
        values = A[2]
        half = count - lane_count(alpha, units) if overlap else lane_count(alpha, units)
        start = _offset(A, row)
        for i in range(row, stop):
            end = _offset(A, i + 1)
            low = zeros(alpha, units)
            high = zeros(alpha, units)
            for e in range(start, end):
                _fetch_row(e, j, fetched, A, work[1], alpha)
                place = _column(A, e) * ldb + j
                if values == 0:
                    low = add(low, load(alpha, b, place, units, False, count))
                    fence()
                    high = add(high, load(alpha, b, place + half, units, False, count))
                else:
                    value = splat(get(alpha, values, e), units)
                    low = fma(value, load(alpha, b, place, units, False, count), low)
                    fence()
                    high = fma(value, load(alpha, b, place + half, units, False, count), high)
            if mean and end > start:
                low = divide_by(low, end - start)
                high = divide_by(high, end - start)
            low = multiply(splat(alpha, units), low)
            high = multiply(splat(alpha, units), high)
            place = i * ldc + j
            if beta != 0:  # 0 must not read C; both are read before either is written
                kept = splat(beta, units)
                low = fma(kept, load(alpha, c, place, units, False, count), low)
                high = fma(kept, load(alpha, c, place + half, units, False, count), high)
            store(c, place, low, False, count)
            store(c, place + half, high, False, count)
            start = end

    return block


def _sum_rest() -> Any:
    """Make the same for less than one unit of columns, without masks."""
    of_halves, of_quarters = _sum_pair(-2, True), _sum_pair(-4, True)
    of_eighths, of_sixteenths = _sum_pair(-8, True), _sum_pair(-16, True)

    @inner
    def block(row: int, stop: int, j: int, count: int, fetched: int, work: Sum) -> None:
        unit = lane_count(work[3], 1)
        if 2 * count > unit:
            of_halves(row, stop, j, count, fetched, work)
        elif 4 * count > unit:
            of_quarters(row, stop, j, count, fetched, work)
        elif 8 * count > unit:
            of_eighths(row, stop, j, count, fetched, work)
        else:
            of_sixteenths(row, stop, j, count, fetched, work)

    return block


_sum_wide = _sum_block(_WIDE, False) if _AVX512 else _sum_pair(_WIDE // 2, False)
_sum_half = _sum_block(_HALF, False)
_sum_2 = _sum_block(2, False)
_sum_1 = _sum_block(1, False)
_sum_tail = _sum_block(1, True) if _MASKS else _sum_rest()


@inlined
def _add_one(acc: Any, e: int, j: int, A: Sparse, B: Dense, weighted: bool, like: Any) -> Any:
    entry = load(like, B[0], _column(A, e) * B[1] + j, -16, False, 1)  # a vector of one element
    if weighted:
        return fma(splat(get(like, A[2], e), -16), entry, acc)
    return add(acc, entry)


def _sum_column(weighted: bool) -> Any:
    """Make one column of a range of rows: the bits of a block, with less to do for each row.

    Against a block of one element with its prefetches: 0.8 of the time on short rows (PubMed,
    usroads), the same on long ones (a Xeon, development readings).

    The end of a short row is a mispredicted branch: 20 cycles, where an entry takes 2. So rows of a
    range with few entries are visited by length, ``_SORTED`` rows at a time: 0.53 to 0.72 of the
    time on PubMed, DD, usroads and PROTEINS (2.6 to 5 entries a row), 0.82 on CoauthorCS (8.9),
    1.13 on finan512 (8, in a pattern that is predicted anyway). In other ranges a row's odd entry
    is computed either way, from the range's first entry if there is none, and then selected.
    """

    @inner
    def column(row: int, stop: int, j: int, work: Sum) -> None:
        A, B, (c, ldc), alpha, beta, mean = work
        start = first = _offset(A, row)
        filled = _offset(A, stop) > first
        for i in range(row, stop):
            end = _offset(A, i + 1)
            even = zeros(alpha, -16)
            odd = zeros(alpha, -16)
            e = start
            while _TWO_SUMS and e + 1 < end:
                even = _add_one(even, e, j, A, B, weighted, alpha)
                odd = _add_one(odd, e + 1, j, A, B, weighted, alpha)
                e += 2
            if _TWO_SUMS:
                if filled:
                    here = e < end
                    more = _add_one(even, e if here else first, j, A, B, weighted, alpha)
                    even = more if here else even
            else:
                while e < end:
                    even = _add_one(even, e, j, A, B, weighted, alpha)
                    e += 1
            acc = add(even, odd) if _TWO_SUMS else even
            if mean and end > start:
                acc = divide_by(acc, end - start)
            acc = multiply(splat(alpha, -16), acc)
            if beta != 0:  # 0 must not read C
                acc = fma(splat(beta, -16), load(alpha, c, i * ldc + j, -16, False, 1), acc)
            store(c, i * ldc + j, acc, False, 1)
            start = end

    @inner
    def by_length(row: int, stop: int, j: int, work: Sum) -> None:
        A, B, C, alpha, _, _ = work
        size = UNIT_BYTES // lane_count(alpha, 1)
        lists, counts = stack(_LISTS), stack(_COUNTS)
        for block in range(row, stop, _SORTED):
            for length in range(_LENGTHS + 1):
                put(_COUNT, counts, length, _COUNT)
            start = _offset(A, block)
            for i in range(min(_SORTED, stop - block)):
                # The hardware's prefetcher does not follow rows by length.
                prefetch(A[5], A[1], start, 1)
                if weighted:
                    prefetch(alpha, A[2], start, 1)
                end = _offset(A, block + i + 1)
                length = min(end - start, _LENGTHS)
                count = get(_COUNT, counts, length)
                put(_BYTE, lists, length * _SORTED + count, np.uint8(i))
                put(_COUNT, counts, length, count + 1)
                start = end
            add_short_rows(
                alpha, A, B[0] + j * size, B[1], C[0] + j * size, C[1], lists, counts, block,
                weighted, _TWO_SUMS, _LENGTHS, _SORTED,
            )  # fmt: skip
            for q in range(get(_COUNT, counts, _LENGTHS)):
                long_row = block + np.int64(get(_BYTE, lists, _LENGTHS * _SORTED + q))
                column(long_row, long_row + 1, j, work)

    @inner
    def either(row: int, stop: int, j: int, work: Sum) -> None:
        A, _, _, _, beta, mean = work
        short = _offset(A, stop) - _offset(A, row) <= _SHORT * (stop - row)
        if short and beta == 0 and not mean:
            by_length(row, stop, j, work)
        else:
            column(row, stop, j, work)

    return either


_sum_weighted, _sum_pattern = _sum_column(True), _sum_column(False)


@inner
def _strip_end(row: int, stop: int, A: Sparse) -> int:
    """Return the end of a strip of rows: at ``_STRIP`` entries, and after one row at least."""
    limit = _offset(A, row) + _STRIP
    end = row + 1
    while end < stop and _offset(A, end + 1) <= limit:
        end += 1
    return end


@inner
def spmm_sum(
    counter: int,
    schedule: Schedule,
    A: Sparse,
    B: Dense,
    C: Dense,
    n: int,
    alpha: Any,
    beta: Any,
    mean: bool,
    fetch: bool,
    scattered: bool,
    columns: int,
) -> None:
    """C = alpha * (A @ B) + beta * C, with the mean of each row's products instead if ``mean``.

    ``counter`` is the address of two int64 0 that all threads of a call share. If A is not known to
    be right, ``columns`` is their number, otherwise -1: a chunk with a wrong index is left as it
    is, and the second int64 becomes 1. ``alpha`` and
    ``beta`` are of the element type. ``fetch`` prefetches rows of B, which costs a tenth if they
    are in cache already. ``scattered`` means that B is far larger than the caches: then each visit
    of a row reads as much of it as it can.
    """
    unit, work = lane_count(alpha, 1), (A, B, C, alpha, beta, mean)
    width = (_PANEL if scattered else _NARROW_PANEL) * unit
    checked = columns >= 0
    if checked and (_offset(A, 0) != 0 or _offset(A, schedule[1]) != A[3] or columns == 0 < A[3]):
        put(_COUNT, counter, 1, 1)
        return
    while True:
        row, stop, first, end = _next_task(counter, schedule, A, n, width, unit)
        if row < 0:
            break
        if checked and not (_rows_fit(A, row, stop) and _columns_fit(A, row, stop, columns)):
            put(_COUNT, counter, 1, 1)
            continue
        blocks = (end - first) // (_WIDE * unit)
        # If a panel has several blocks, they follow each other in strips of few rows: the rows of B
        # that the first block brings into the cache are still there for the others.
        several = not _AVX512 and blocks > 1
        while row < stop:
            last = _strip_end(row, stop, A) if several else stop
            fetched = -(-(end - first) // unit) if fetch and not _AVX512 else 0
            j = first
            while j < end:
                left = end - j
                if left >= _WIDE * unit:
                    _sum_wide(row, last, j, left, fetched, work)
                    j += _WIDE * unit
                elif left >= _HALF * unit:
                    _sum_half(row, last, j, left, fetched, work)
                    j += _HALF * unit
                elif left >= 2 * unit:
                    _sum_2(row, last, j, left, fetched, work)
                    j += 2 * unit
                elif left >= unit:
                    _sum_1(row, last, j, left, fetched, work)
                    j += unit
                elif left == 1:
                    if A[2] != 0:
                        _sum_weighted(row, last, j, work)
                    else:
                        _sum_pattern(row, last, j, work)
                    j = end
                else:
                    _sum_tail(row, last, j, left, fetched, work)
                    j = end
                fetched = 0
            row = last


def _extremum_block(units: int, masked: bool, maximum: bool) -> Any:
    """Make the max or min over a range of rows and one block of columns; see `_sum_block`."""

    @inner
    def block(row: int, stop: int, j: int, count: int, work: Extremum) -> None:
        A, (b, ldb), (c, ldc), arg, like = work
        values, nnz = A[2], A[3]
        start = _offset(A, row)
        for i in range(row, stop):
            end = _offset(A, i + 1)
            best = zeros(like, units)
            # Places count from the row's first entry, so that they fit 32 bits.
            position = splat_position(like, 0, units)
            for e in range(start, end):
                if units > 2:
                    later = _column(A, min(e + _AHEAD, nnz - 1))
                    prefetch(like, b, later * ldb + j, units)
                k = _column(A, e)
                entry = load(like, b, k * ldb + j, units, masked, count)
                if values != 0:
                    entry = multiply(splat(get(like, values, e), units), entry)
                if e == start:
                    best = entry
                else:
                    here = splat_position(like, e - start, units)
                    position = keep_where(maximum, entry, best, here, position)
                    best = keep_value(maximum, entry, best)
            store(c, i * ldc + j, best, masked, count)
            first = 0 if end > start else -1  # an empty row has no winner
            address, stride = arg
            store_positions(address, i * stride + j, first, position, masked, count)
            start = end

    return block


def _extremum_part(units: int, maximum: bool) -> Any:
    """Make the same for ``count`` columns, one to two vectors: two blocks that may overlap."""
    part = _extremum_block(units, False, maximum)

    @inner
    def block(row: int, stop: int, j: int, count: int, work: Extremum) -> None:
        lanes = lane_count(work[4], units)
        part(row, stop, j, count, work)
        if count > lanes:
            part(row, stop, j + count - lanes, count, work)

    return block


def _extremum_rest(maximum: bool) -> Any:
    """Make the same for less than one unit of columns, without masks."""
    of_halves, of_quarters = _extremum_part(-2, maximum), _extremum_part(-4, maximum)
    of_eighths, of_sixteenths = _extremum_part(-8, maximum), _extremum_part(-16, maximum)

    @inner
    def block(row: int, stop: int, j: int, count: int, work: Extremum) -> None:
        unit = lane_count(work[4], 1)
        if 2 * count > unit:
            of_halves(row, stop, j, count, work)
        elif 4 * count > unit:
            of_quarters(row, stop, j, count, work)
        elif 8 * count > unit:
            of_eighths(row, stop, j, count, work)
        else:
            of_sixteenths(row, stop, j, count, work)

    return block


def _extremum(maximum: bool) -> Any:
    """Make the same for any range of columns."""
    half, one = _extremum_block(_HALF, False, maximum), _extremum_block(1, False, maximum)
    tail = _extremum_block(1, True, maximum) if _MASKS else _extremum_rest(maximum)

    @inner
    def blocks(row: int, stop: int, j: int, end: int, work: Extremum) -> None:
        unit = lane_count(work[4], 1)
        while j < end:
            left = end - j
            if left >= _HALF * unit:
                half(row, stop, j, left, work)
                j += _HALF * unit
            elif left >= unit:
                one(row, stop, j, left, work)
                j += unit
            else:
                tail(row, stop, j, left, work)
                j = end

    return blocks


_largest, _smallest = _extremum(True), _extremum(False)


@inner
def spmm_extremum(
    counter: int,
    schedule: Schedule,
    A: Sparse,
    B: Dense,
    C: Dense,
    n: int,
    arg: Dense,
    maximum: bool,
    like: Any,
) -> None:
    """C = max (or min) over each row's products, ``arg`` = the place of the winner in its row.

    ``arg`` is int32; ``like`` is any scalar of the element type.
    """
    unit, work = lane_count(like, 1), (A, B, C, arg, like)
    while True:
        row, stop, j, end = _next_task(counter, schedule, A, n, _PANEL * unit, unit)
        if row < 0:
            break
        if maximum:
            _largest(row, stop, j, end, work)
        else:
            _smallest(row, stop, j, end, work)


@inner
def spmm_won(
    counter: int,
    schedule: Schedule,
    A: Sparse,
    B: Dense,
    C: Dense,
    n: int,
    order: int,
    starts: int,
    arg: Dense,
    like: Any,
) -> None:
    """C[i] = the sum of the elements of B that row i of A, a transpose, won.

    ``order`` and ``starts`` are addresses: the entry of the given matrix that is each entry of A,
    and the given matrix's row pointers. ``arg`` and B are as the max or min and its gradient.
    """
    unit = lane_count(like, 1)
    size, (b, ldb), (c, ldc), (places, ldp) = UNIT_BYTES // unit, B, C, arg
    while True:
        row, stop, j, end = _next_task(counter, schedule, A, n, _PANEL * unit, unit)
        if row < 0:
            break
        for i in range(row, stop):
            out = c + i * ldc * size
            for f in range(j, end):
                put(like, out, f, like * 0)
            for e in range(_offset(A, i), _offset(A, i + 1)):
                k = _column(A, e)
                place = get(_COUNT, order, e) - get(_COUNT, starts, k)
                weight = get(like, A[2], e) if A[2] != 0 else like * 0 + 1
                grad, won = b + k * ldb * size, places + k * ldp * 4
                for f in range(j, end):
                    if get(_PLACE, won, f) == place:
                        put(like, out, f, get(like, out, f) + weight * get(like, grad, f))


@inlined
def _dot_rest(g: int, b: int, j: int, n: int, result: Any) -> Any:
    """Add the products of columns ``j`` to ``n``, less than one unit, without masks."""
    like = result
    unit = lane_count(like, 1)
    if (n - j) * 2 >= unit:
        result += total(multiply(load(like, g, j, -2, False, 0), load(like, b, j, -2, False, 0)))
        j += unit // 2
    if (n - j) * 4 >= unit:
        result += total(multiply(load(like, g, j, -4, False, 0), load(like, b, j, -4, False, 0)))
        j += unit // 4
    while j < n:
        result += get(like, g, j) * get(like, b, j)
        j += 1
    return result


@inner
def _dot(g: int, b: int, n: int, later: int, like: Any) -> Any:
    """Dot product of two rows of ``n`` elements, summed lane by lane, then over the lanes."""
    unit = lane_count(like, 1)
    four = zeros(like, 4)
    one = zeros(like, 1)
    j = 0
    while j + 4 * unit <= n:
        prefetch(like, later, j, 4)
        four = fma(load(like, g, j, 4, False, 0), load(like, b, j, 4, False, 0), four)
        j += 4 * unit
    while j + unit <= n:
        prefetch(like, later, j, 1)
        one = fma(load(like, g, j, 1, False, 0), load(like, b, j, 1, False, 0), one)
        j += unit
    if _MASKS and j < n:
        left = n - j
        one = fma(load(like, g, j, 1, True, left), load(like, b, j, 1, True, left), one)
        j = n
    result = total(one)
    if n >= 4 * unit:
        fence()  # or the compiler adds up the zeros of fewer columns as well
        result = total(four) + result
    return result if _MASKS or j == n else _dot_rest(g, b, j, n, result)


@inner
def sddmm(
    counter: int, schedule: Schedule, A: Sparse, G: Dense, B: Dense, n: int, out: int, like: Any
) -> None:
    """out[e] = dot(G[row of e], B[column of e]) for every stored entry ``e``.

    ``out`` is an address. A heavy chunk is split by entries, not by columns.
    """
    _, _, chunks, parts = schedule
    nnz = A[3]
    g, ldg = G
    b, ldb = B
    size = UNIT_BYTES // lane_count(like, 1)
    while True:
        task = claim(counter)
        if task >= chunks * parts:
            break
        row = _bound(schedule, A, task // parts)
        stop = _bound(schedule, A, task // parts + 1)
        first = _offset(A, row)
        last = _offset(A, stop)
        part = task % parts
        if (last - first) * chunks > _HEAVY * nnz:
            share = -(-(last - first) // parts)
            first += part * share
            last = min(first + share, last)
        elif part > 0:
            continue
        for i in range(row, stop):
            start = max(_offset(A, i), first)
            end = min(_offset(A, i + 1), last)
            for e in range(start, end):
                k = _column(A, e)
                later = _column(A, min(e + _AHEAD, nnz - 1))
                row_g = g + i * ldg * size
                row_b = b + k * ldb * size
                put(like, out, e, _dot(row_g, row_b, n, b + later * ldb * size, like))
