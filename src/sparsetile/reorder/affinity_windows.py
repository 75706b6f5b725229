"""Step 2 of the data-affinity order, compiled: rows that share columns, window by window.

Rows and columns are numbered in the order of step 1, so that the counts of a window's candidates,
the next `_AHEAD` rows, stay in the L1 cache. The work per entry of A has a fixed limit: a column
that is new to a window looks at `_LOOK` rows, and one pass over the candidates chooses a row.
Scores are integers; ties go to the smaller number.

`affinity_communities` says why indices are unsigned and why arrays come from NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from sparsetile.core.numba_cache import entry_point, inlined, inner

__all__ = ["filled_windows"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Numbers = NDArray[np.uint32]

# Rows of the windows that the kernels use: wgmma tiles, and the 8-row windows inside them. A set of
# a window's rows is the bits of one number.
_BLOCK = 64
_GROUP = 8
# Rows after the first unplaced one that may be chosen. Halving it and _LOOK loses 2 % of the
# sharing in 64-row windows.
_AHEAD = 4096
# Rows of one column, from its first unplaced one, that each window looks at.
_LOOK = 128
# Most candidates that are listed. Above that, a pass over all rows in reach is faster.
_LISTED = 192
# Rows of such a pass whose best is found at once.
_CHUNK = 128
# Approximate score of a row with all of its columns in the window.
_WHOLE = 1 << 30

# Fields of a column, stored together for one cache miss: the first of its rows that may be unplaced
# and the end of its rows, as places in `members`; its number among the columns of the window that
# took it last, counted on across windows; and that first row.
_HEAD, _END, _STAMP, _NEXT = 0, 1, 2, 3

_INT32_MAX = 2**31 - 1
# Entries of A up to which a column's record has fields of 32 bits.
MOST_NARROW = _INT32_MAX
# Casts: unsigned for an index, signed and wide for arithmetic.
_at: Any = np.uint64
_wide: Any = np.int64


def _lowest_bit(context: Any, mask: Any) -> Any:
    """Return the number of the lowest set bit, by the instruction for it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.int64), build


_lowest: Any = intrinsic(_lowest_bit)


@inner
def _begun(
    indptr: Longs, pointers: Longs, members: Numbers, state: Any, hits: Ints, inverse: Ints
) -> None:
    for c in range(_at(pointers.size - 1)):
        state[c, _HEAD] = pointers[c]
        state[c, _END] = pointers[c + _at(1)]
        state[c, _STAMP] = -1
        state[c, _NEXT] = members[_at(pointers[c])]  # no column is empty
    for p in range(_at(indptr.size - 1)):
        hits[p] = 0
        # The score that one column adds to a row: slightly less than its share of the whole, so
        # that of two rows entirely inside the window the longer goes first. Rounded up likewise.
        inverse[p] = _WHOLE // (indptr[p + _at(1)] - indptr[p] + 1) + 1


@inlined
def _best_listed(candidates: Numbers, count: int, hits: Ints, inverse: Ints, otherwise: int) -> int:
    """Return the listed row with the largest score, the smallest of equals."""
    best = _wide(0)
    for k in range(_at(count)):
        p = candidates[k]
        best = max(best, (_wide(hits[p] * inverse[p]) << 32) | (_INT32_MAX - p))
    return _INT32_MAX - (best & _INT32_MAX) if best >> 32 > 0 else otherwise


@inlined
def _best_between(first: int, last: int, hits: Ints, inverse: Ints, otherwise: int) -> int:
    """Return the row from ``first`` to ``last`` with the largest score, the smallest of equals.

    The inner loop compiles to vector code; only the chunk of the maximum is searched.
    """
    best, found = np.int32(0), otherwise
    for begin in range(first, last + 1, _CHUNK):
        most = np.int32(0)
        for p in range(_at(begin), _at(min(begin + _CHUNK, last + 1))):
            score = np.int32(hits[p] * inverse[p])
            most = score if score > most else most
        if most > best:
            best, found = most, begin
    if best > 0:
        while np.int32(hits[_at(found)] * inverse[_at(found)]) != best:
            found += 1
    return found


@inlined
def _taken(
    indptr: Longs,
    indices: Numbers,
    row: int,
    bit: int,
    limit: int,
    base: int,
    used: int,
    end: int,
    state: Any,
    fresh: Numbers,
    local: Numbers,
    mask: Longs,
) -> tuple[int, int, int]:
    """Add ``row`` to the window; return (columns of the window, entries of it, new columns).

    Writes, without branches so that the loads overlap, the window's number of each column to
    ``local``, the row's bit to the column's ``mask``, and to ``fresh`` the columns that are new to
    the window and have rows before ``limit``.
    """
    news = 0
    for e in range(_at(indptr[_at(row)]), _at(indptr[_at(row + 1)])):
        c = indices[e]
        stamp = state[c, _STAMP]
        new = stamp < base
        fresh[_at(news)] = c
        news += new & (state[c, _NEXT] < limit)
        number = _at(used if new else stamp - base)
        mask[number] = (_wide(0) if new else mask[number]) | bit
        state[c, _STAMP] = base + _wide(number)
        local[_at(end)] = number
        used += new
        end += 1
    return used, end, news


@inlined
def _looked(
    members: Numbers,
    frontier: int,
    limit: int,
    news: int,
    count: int,
    reach: int,
    state: Any,
    fresh: Numbers,
    scratch: Numbers,
    hits: Ints,
    candidates: Numbers,
) -> tuple[int, int]:
    """Count the new columns for the rows that have them; return (candidates, last row met).

    Rows already placed are counted as well, without effect: testing for them costs more.
    """
    first, past = np.uint32(frontier), np.uint32(limit)
    for j in range(_at(news)):  # independent loads bring the lists to cache
        scratch[j] = members[_at(state[fresh[j], _HEAD])]
    for j in range(_at(news)):
        c = fresh[j]
        head, end = _wide(state[c, _HEAD]), _wide(state[c, _END])
        while head + _LOOK < end and members[_at(head + _LOOK)] < first:
            head += _LOOK
        begin = k = head
        if count <= _LISTED:
            while k < end and k < head + _LOOK:
                p = members[_at(k)]
                if p >= past:
                    break
                head += p < first
                candidates[_at(count)] = p
                count += hits[p] == 0
                hits[p] += 1
                k += 1
        else:
            while k < end and k < head + _LOOK:
                p = members[_at(k)]
                if p >= past:
                    break
                head += p < first
                hits[p] += 1
                k += 1
        if k > begin:
            reach = max(reach, _wide(members[_at(k - 1)]))
        state[c, _HEAD] = head
        state[c, _NEXT] = members[_at(head)] if head < end else _INT32_MAX
    return count, reach


@inner
def _grouped(
    rows: Numbers,
    size: int,
    starts: Longs,
    steps: Ints,
    local: Numbers,
    mask: Longs,
    owner: Ints,
    group: int,
    score: Ints,
    order: Numbers,
    begin: int,
) -> int:
    """Write a window's rows so that its _GROUP-row windows are filled by the same rule.

    ``owner`` has the last group that took each column of the window; groups are numbered from
    ``group``, and the next number is returned.
    """
    end = 0
    for r in range(size):  # columns of only one row do not matter
        first, last, starts[r] = starts[r], starts[r + 1], end
        for j in range(_at(first), _at(last)):
            number = local[j]
            local[_at(end)] = number
            end += (mask[number] & (mask[number] - 1)) != 0
        score[r] = 0
    starts[size] = end
    left = _wide(-1) if size == _BLOCK else (_wide(1) << size) - 1
    near = _wide(0)  # rows with a score
    for place in range(size):
        if place % _GROUP == 0:
            group += 1
            while near != 0:
                score[_lowest(near)] = 0
                near &= near - 1
        chosen = _lowest(left)
        most = 0
        bits = near
        while bits != 0:
            r = _lowest(bits)
            bits &= bits - 1
            if score[r] > most:
                most, chosen = score[r], r
        left &= ~(_wide(1) << _wide(chosen))
        near &= left
        order[_at(begin + place)] = rows[chosen]
        if place % _GROUP == _GROUP - 1:
            continue
        for j in range(_at(starts[chosen]), _at(starts[chosen + _at(1)])):
            number = local[j]
            if owner[number] != group:
                owner[number] = group
                bits = mask[number] & left
                near |= bits
                while bits != 0:
                    r = _lowest(bits)
                    bits &= bits - 1
                    score[r] += steps[r]
    return group


@entry_point
def _fill(
    indptr: Longs,
    indices: Numbers,
    pointers: Longs,
    members: Numbers,
    state: Any,
    hits: Ints,
    inverse: Ints,
    candidates: Numbers,
    fresh: Numbers,
    scratch: Numbers,
    local: Numbers,
    mask: Longs,
    owner: Ints,
    order: Numbers,
) -> None:
    """Fill windows of _BLOCK rows; each begins with the first unplaced row.

    The next row is the one with the largest share of its columns in the window; if no row in reach
    has any, the first unplaced one.
    """
    rows = indptr.size - 1
    _begun(indptr, pointers, members, state, hits, inverse)
    placed = np.empty(_BLOCK, np.uint32)
    steps = np.empty(_BLOCK, np.int32)
    score = np.empty(_BLOCK, np.int32)
    starts = np.empty(_BLOCK + 1, np.int64)
    frontier, base, group = 0, 0, 0
    for begin in range(0, rows, _BLOCK):
        size = min(_BLOCK, rows - begin)
        used, end, count, reach = 0, 0, 0, frontier
        for place in range(size):
            while inverse[_at(frontier)] == 0:  # placed
                frontier += 1
            limit = min(frontier + _AHEAD, rows)
            if count <= _LISTED:
                chosen = _best_listed(candidates, count, hits, inverse, frontier)
            else:
                chosen = _best_between(frontier, reach, hits, inverse, frontier)
            placed[place] = chosen
            steps[place] = inverse[_at(chosen)]
            starts[place] = end
            inverse[_at(chosen)] = 0
            hits[_at(chosen)] = 1  # never a new candidate
            used, end, news = _taken(
                indptr, indices, chosen, _wide(1) << place, limit, base, used, end, state, fresh,
                local, mask,
            )  # fmt: skip
            if place < size - 1:
                count, reach = _looked(
                    members, frontier, limit, news, count, reach, state, fresh, scratch, hits,
                    candidates,
                )  # fmt: skip
        starts[size] = end
        if count <= _LISTED:
            for k in range(_at(count)):
                p = candidates[k]
                hits[p] = 0 if inverse[p] else 1
        else:
            for q in range(_at(frontier), _at(reach + 1)):
                hits[q] = 0 if inverse[q] else 1
        base += used
        group = _grouped(
            placed, size, starts, steps, local, mask, owner, group, score, order, begin
        )


def filled_windows(indptr: Longs, indices: Numbers, pointers: Longs, members: Numbers) -> Numbers:
    """Return the order of the rows of a matrix without empty rows or columns.

    ``indptr, indices`` are the columns of each row; ``pointers, members`` the rows of each column,
    ascending.
    """
    rows, columns = indptr.size - 1, pointers.size - 1
    lengths = np.diff(indptr)
    longest = int(lengths.max())
    most = min(_BLOCK, rows)
    entries = int(np.partition(lengths, rows - most)[rows - most :].sum())  # of any window
    order = np.empty(rows, np.uint32)
    _fill(
        indptr, indices, pointers, members,
        np.empty((columns, 4), np.int32 if indices.size <= MOST_NARROW else np.int64),
        np.empty(rows, np.int32), np.empty(rows, np.int32),
        np.empty(_LISTED + _LOOK + 2, np.uint32), np.empty(longest + 1, np.uint32),
        np.empty(longest + 1, np.uint32), np.empty(entries + 1, np.uint32),
        np.empty(min(entries, columns) + 1, np.int64),
        np.zeros(min(entries, columns) + 1, np.int32), order,
    )  # fmt: skip
    return order
