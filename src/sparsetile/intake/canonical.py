"""Checks a matrix given as arrays and brings it to canonical CSR (sorted, duplicates summed).

Everything is torch operations on the data's device. Checks of the content (ranges, monotony, order)
are reduced to a handful of numbers that are fetched together, so that a canonical matrix on a GPU
costs one synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.core.settings import entry_limit
from sparsetile.intake.arrays import float_values
from sparsetile.intake.csr import CSR, NUMBERED_AT_ONCE, offsets, owners
from sparsetile.intake.ordering import sort_entries
from sparsetile.intake.pieces import row_pieces

__all__ = ["Names", "from_compressed", "from_coordinates", "row_pointers"]

# Entries of rows that are sorted at once if there are very many.
SORTED_ROWS_AT_ONCE = 2**26


@dataclass(frozen=True)
class Names:
    """Names of the parts of the input in error texts."""

    function: str
    indptr: str = "indptr"
    indices: str = "indices"
    rows: str = "row indices"
    columns: str = "column indices"
    values: str = "values"

    def inside(self, place: str) -> Names:
        """Return the names with a place added: ``indptr in cora.npz``."""
        return Names(
            self.function,
            *(
                f"{name} in {place}"
                for name in (self.indptr, self.indices, self.rows, self.columns, self.values)
            ),
        )


def from_compressed(
    names: Names,
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    shape: tuple[int, int],
    *,
    by_column: bool = False,
    block: tuple[int, int] = (1, 1),
) -> CSR:
    """Return canonical CSR of a compressed matrix (CSR, CSC, BSR or BSC).

    ``indptr`` and ``indices`` are int32 or int64, of blocks if ``block`` is not (1, 1); ``indptr``
    runs over columns if ``by_column``. ``values`` are None, float [entries], or [blocks, R, C] of a
    blocked matrix, whose zeros inside blocks become entries. ``shape`` is that of the whole matrix.
    """
    block_rows, block_columns = block
    _check_blocks(names, shape, block)
    grid = (shape[0] // block_rows, shape[1] // block_columns)
    major, minor = (grid[1], grid[0]) if by_column else grid
    _check_together(names, {names.indptr: indptr, names.indices: indices, names.values: values})
    _check_length(names, values, indices.numel())
    if indptr.numel() != major + 1:
        raise value_error(
            names.function, names.indptr,
            f"of length {major + 1} ({'columns' if by_column else 'rows'} + 1)",
            f"length {indptr.numel()}", "Check it against shape",
        )  # fmt: skip
    unit = "" if block == (1, 1) else "block "
    ascending = _check_compressed_content(
        names, indptr, indices, minor, f"{unit}{'rows' if by_column else 'columns'}"
    )
    if values is not None:
        values = float_values(names.function, names.values, values.flatten())

    blocked = block != (1, 1)
    if ascending and not by_column and not blocked:
        return CSR(
            indptr.to(torch.int64).contiguous(),
            indices.to(torch.int32).contiguous(),
            None if values is None else values.contiguous(),
            shape,
            checked=True,
        )

    entries = indices.numel()
    indptr = indptr.to(torch.int64)
    if entries >= entry_limit() and not by_column and not blocked:
        return _sorted_pieces(indptr, indices, values, shape)
    majors = owners(indptr.diff(), entries)
    minors = indices.to(torch.int64)
    rows, columns = (minors, majors) if by_column else (majors, minors)
    if blocked:
        rows, columns = _expand_blocks(rows, columns, block)
    return _sorted(rows, columns, values, shape)


def from_coordinates(
    names: Names, rows: Tensor, columns: Tensor, values: Tensor | None, shape: tuple[int, int]
) -> CSR:
    """Return canonical CSR of entries given as (row, column) pairs in any order.

    ``rows`` and ``columns`` are int32 or int64, 1-D; ``values`` is None or 1-D.
    """
    _check_together(names, {names.rows: rows, names.columns: columns, names.values: values})
    if rows.numel() != columns.numel():
        raise value_error(
            names.function, names.columns, f"of length {rows.numel()}, as {names.rows}",
            f"length {columns.numel()}", "Give one row and one column for each entry",
        )  # fmt: skip
    _check_length(names, values, rows.numel())
    if rows.numel() == 0:
        if values is not None:
            values = float_values(names.function, names.values, values)
        return _empty(rows.device, values, shape)

    rows, columns = rows.to(torch.int64), columns.to(torch.int64)
    low_row, high_row = torch.aminmax(rows)
    low_column, high_column = torch.aminmax(columns)
    keys = rows * shape[1] + columns  # < 2^62 when the indices are in range; wraps otherwise
    ascending = (keys[1:] > keys[:-1]).all()
    facts = [low_row, high_row, low_column, high_column, ascending.to(torch.int64)]
    row_min, row_max, column_min, column_max, strictly = torch.stack(facts).tolist()
    _check_range(names, names.rows, rows, row_min, row_max, shape[0], "rows")
    _check_range(names, names.columns, columns, column_min, column_max, shape[1], "columns")
    if values is not None:
        values = float_values(names.function, names.values, values)
    if strictly:
        values = None if values is None else values.contiguous()
        indptr = row_pointers(rows, shape[0])
        return CSR(indptr, columns.to(torch.int32), values, shape, checked=True)
    return _sorted(rows, columns, values, shape)


def _sorted(rows: Tensor, columns: Tensor, values: Tensor | None, shape: tuple[int, int]) -> CSR:
    """Sort valid entries (int64 rows and columns), merge duplicates, record where each went."""
    if rows.numel() == 0:
        return _empty(rows.device, values, shape)
    keys, order = sort_entries(rows, columns, shape)
    first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=first[1:])
    entry_map = torch.empty_like(order).scatter_(0, order, torch.cumsum(first, 0) - 1)
    keys = keys[first]
    csr = CSR(
        row_pointers(keys // shape[1], shape[0]),
        (keys % shape[1]).to(torch.int32),
        None,
        shape,
        entry_map,
        checked=True,
    )
    if values is None and csr.nnz < order.numel():
        # Two stored ones at one place add up to 2, as in COO.
        values = torch.ones(order.numel(), device=order.device)
    return csr if values is None else replace(csr, values=csr.canonical_values(values))


def _sorted_pieces(
    indptr: Tensor, indices: Tensor, values: Tensor | None, shape: tuple[int, int]
) -> CSR:
    """Return the same of rows whose entries are in any order, some rows at a time: a sort takes 40
    bytes for each entry."""
    device, first = indices.device, 0
    limit = min(entry_limit(), SORTED_ROWS_AT_ONCE)
    lengths, found, maps = list[Tensor](), list[Tensor](), list[Tensor]()
    for piece in row_pieces(indptr, limit):
        own = piece.pointers(indptr)
        count, columns = piece.end - piece.begin, indices[piece.entries].to(torch.int64)
        some = _sorted(owners(own.diff(), count), columns, None, (own.shape[0] - 1, shape[1]))
        assert some.entry_map is not None or not count
        lengths.append(some.row_lengths())
        found.append(some.indices)
        if some.entry_map is not None:
            maps.append(some.entry_map.add_(first))
        first += some.nnz
    none = torch.empty(0, dtype=torch.int64, device=device)
    csr = CSR(
        offsets(torch.cat([none, *lengths])), torch.cat(found), None, shape, torch.cat(maps),
        checked=True,
    )  # fmt: skip
    if values is None and csr.nnz < indices.numel():
        values = torch.ones(indices.numel(), device=device)
    return csr if values is None else replace(csr, values=csr.canonical_values(values))


def _empty(device: torch.device, values: Tensor | None, shape: tuple[int, int]) -> CSR:
    indptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    indices = torch.empty(0, dtype=torch.int32, device=device)
    return CSR(indptr, indices, values, shape, checked=True)


def row_pointers(sorted_rows: Tensor, count: int) -> Tensor:
    """Return the first position of each of ``count`` rows in sorted ones, and the end."""
    # A binary search per row needs no synchronisation on a GPU; bincount needs one.
    edges = torch.arange(count + 1, device=sorted_rows.device)
    return torch.searchsorted(sorted_rows.contiguous(), edges)


def _expand_blocks(rows: Tensor, columns: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (row, column) of every entry of every block, in the order of the values' storage."""
    count = rows.numel()
    inner_rows = torch.arange(block[0], device=rows.device)
    inner_columns = torch.arange(block[1], device=rows.device)
    all_rows = rows[:, None, None] * block[0] + inner_rows[None, :, None]
    all_columns = columns[:, None, None] * block[1] + inner_columns[None, None, :]
    return (
        all_rows.expand(count, *block).reshape(-1),
        all_columns.expand(count, *block).reshape(-1),
    )


def _check_blocks(names: Names, shape: tuple[int, int], block: tuple[int, int]) -> None:
    if min(block) < 1 or shape[0] % block[0] or shape[1] % block[1]:
        raise value_error(
            names.function, "A", f"of a shape that its blocks of {block[0]} x {block[1]} divide",
            f"shape {shape}", "Pad the matrix or choose another block size",
        )  # fmt: skip


def _check_together(names: Names, parts: dict[str, Tensor | None]) -> None:
    devices = {name: part.device for name, part in parts.items() if part is not None}
    if len(set(devices.values())) > 1:
        raise value_error(
            names.function, "A", "on one device",
            ", ".join(f"{name} on {device}" for name, device in devices.items()),
            "Move all parts to the same device with .to(device)",
        )  # fmt: skip


def _check_length(names: Names, values: Tensor | None, entries: int) -> None:
    if values is not None and values.shape[0] != entries:
        raise value_error(
            names.function, names.values, f"of length {entries}, one for each entry",
            f"length {values.shape[0]}", "Give one value for each index, or None for a pattern",
        )  # fmt: skip


def _check_compressed_content(
    names: Names, indptr: Tensor, indices: Tensor, minor: int, what: str
) -> bool:
    """Raise on the first defect; return whether indices strictly ascend in each line."""
    entries = indices.numel()
    falls = indptr[1:] < indptr[:-1]
    facts = [indptr[0], indptr[-1], falls.any()]
    if entries:
        facts += torch.aminmax(indices)
        # indptr is not checked yet, so it is clamped before it addresses memory.
        starts = torch.zeros(entries + 1, dtype=torch.bool, device=indices.device)
        starts.index_fill_(0, indptr.to(torch.int64).clamp(0, entries), True)
        # In parts, so that a check of very many entries takes little memory beside ``starts``.
        ascends = [
            (indices[at + 1 : (end := min(at + NUMBERED_AT_ONCE, entries - 1)) + 1]
             > indices[at:end]).logical_or_(starts[at + 1 : end + 1]).all()
            for at in range(0, entries - 1, NUMBERED_AT_ONCE)
        ]  # fmt: skip
        facts.append(torch.stack(ascends).all() if ascends else starts[0])
    first, last, falling, *rest = torch.stack([fact.to(torch.int64) for fact in facts]).tolist()
    if first != 0:
        raise value_error(
            names.function, f"{names.indptr}[0]", "0", first,
            "Subtract the first element when this is a slice of a larger matrix",
        )  # fmt: skip
    if falling:
        at = int(torch.nonzero(falls)[0, 0])
        raise value_error(
            names.function, names.indptr, "non-decreasing",
            f"{int(indptr[at])} followed by {int(indptr[at + 1])} at position {at + 1}",
            "Pass cumulative counts of the entries",
        )  # fmt: skip
    if last != entries:
        raise value_error(
            names.function, f"{names.indptr}[-1]", f"{entries}, the number of {names.indices}",
            last, f"Pass {names.indptr} and {names.indices} of the same matrix",
        )  # fmt: skip
    if not entries:
        return True
    low, high, ascending = rest
    _check_range(names, names.indices, indices, low, high, minor, what)
    return bool(ascending)


def _check_range(
    names: Names, argument: str, indices: Tensor, low: int, high: int, size: int, what: str
) -> None:
    if low >= 0 and high < size:
        return
    at = int(torch.nonzero((indices < 0) | (indices >= size))[0, 0])
    raise value_error(
        names.function, argument, f"at least 0 and below {size}, the number of {what}",
        f"{int(indices[at])} at entry {at}", "Check shape, and that indices count from 0",
    )  # fmt: skip
