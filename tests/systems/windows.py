"""What tests of BRP's windows share, on the host and on a GPU: matrices and comparisons."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR
from sparsetile.systems.brp.windows import PackedWindows, Windows
from tests.formats.packed import MATRICES, matrix

__all__ = ["ALL_MATRICES", "any_matrix", "assert_same_counts", "assert_same_windows", "orders"]


def _of_keys(keys: Tensor, rows: int, cols: int) -> CSR:
    keys = torch.unique(keys)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // cols, minlength=rows), 0, out=indptr[1:])
    return CSR(indptr, (keys % cols).to(torch.int32), None, (rows, cols))


def _shared(rows: int, cols: int, count: int) -> CSR:
    """Neighbouring rows share columns, some of them all sixteen; some windows have no entry."""
    draw = torch.Generator().manual_seed(11)
    row = torch.randint(0, rows, (count,), generator=draw)
    column = (row // 16 * 7 + (24 * torch.rand(count, generator=draw) ** 2).long()) % cols
    keep = row // 16 % 4 != 2
    return _of_keys(row[keep] * cols + column[keep], rows, cols)


def _hub(rows: int, cols: int) -> CSR:
    """One window has most of the entries: some rows of it are full, others have an entry."""
    draw = torch.Generator().manual_seed(12)
    full = [row * cols + torch.arange(cols) for row in (16, 20, 31)]
    some = [row * cols + torch.randint(0, cols, (cols // 3,), generator=draw) for row in (17, 25)]
    few = torch.randint(0, rows * cols, (rows,), generator=draw)
    return _of_keys(torch.cat([*full, *some, few]), rows, cols)


def _half_full(rows: int, cols: int) -> CSR:
    """Columns of a window have about ten entries."""
    drawn = torch.rand(rows * cols, generator=torch.Generator().manual_seed(13)) < 0.6
    return _of_keys(torch.nonzero(drawn).squeeze(1), rows, cols)


_MORE = {
    "shared columns": lambda: _shared(243, 90, 2500),
    "a hub": lambda: _hub(70, 700),
    "half full": lambda: _half_full(37, 150),
    "full windows": lambda: _of_keys(torch.arange(48 * 64), 48, 64),
}
ALL_MATRICES = (*(name for name in MATRICES if MATRICES[name][2]), *_MORE)


def any_matrix(name: str) -> CSR:
    """Return a matrix with entries."""
    return _MORE[name]() if name in _MORE else matrix(name)


def orders(csr: CSR) -> tuple[Tensor | None, ...]:
    """Row orders: the given one, and another."""
    return None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(3))


def _assert_equal(name: str, wanted: Tensor, found: Tensor) -> None:
    assert wanted.dtype is found.dtype and wanted.shape == found.shape, name
    assert found.is_contiguous(), name
    assert torch.equal(wanted.cpu(), found.cpu()), name


def assert_same_counts(wanted: Windows, found: Windows) -> None:
    """The same numbers of each window."""
    for name in ("entries", "fresh", "pairs"):
        _assert_equal(name, getattr(wanted, name).contiguous(), getattr(found, name))
    for fixed in (1, 2, 4, 8):
        _assert_equal(f"slices of {fixed}", wanted.slices(fixed), found.slices(fixed))


def _assert_same_units(wanted: Units, found: Units) -> None:
    for name in ("label", "begin", "length", "bundled"):
        assert torch.equal(getattr(wanted, name).cpu(), getattr(found, name).cpu()), name
    assert (wanted.offsets is None) == (found.offsets is None)


def assert_same_windows(wanted: PackedWindows | None, found: PackedWindows | None) -> None:
    """The same arrays, bit by bit, and units."""
    assert (wanted is None) == (found is None)
    if wanted is None or found is None:
        return
    for field in dataclasses.fields(wanted.arrays):
        _assert_equal(
            field.name, getattr(wanted.arrays, field.name), getattr(found.arrays, field.name)
        )
    _assert_same_units(wanted.units, found.units)
    _assert_same_units(wanted.others, found.others)
