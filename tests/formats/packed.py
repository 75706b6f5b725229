"""What tests of packed tiles share, by tensor operations and by kernels: matrices and formats."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sparsetile.formats.base import Format
from sparsetile.intake.csr import CSR
from tests.formats.decoding import FORMATS, VARIANTS

__all__ = ["FORMS", "MATRICES", "assert_same", "matrix"]

FORMS = [
    pytest.param(FORMATS[form], options, id=f"{form}, {name}")
    for form in ("bittcf", "wcsr", "bmat")
    for name, options in VARIANTS[form].items()
]
# Rows, columns, entries.
MATRICES = {
    "no entry": (20, 9, 0),
    "no row": (0, 9, 0),
    "one entry": (19, 5, 1),
    "one row": (1, 40, 17),
    "one column": (37, 1, 20),
    "full": (17, 9, 17 * 9),
    "nine rows": (9, 33, 60),
    "a few hundred rows": (333, 150, 900),
    # Window times columns is over 2^31: keys of 64 bits.
    "far columns": (50, 2**31 - 1, 200),
}


def matrix(name: str) -> CSR:
    """Entries at random; about a third of the rows have none, but for full ones."""
    rows, cols, count = MATRICES[name]
    draw = torch.Generator().manual_seed(rows + count)
    if count == rows * cols:
        keys = torch.arange(count)
    else:
        row = torch.randint(0, max(rows, 1), (count,), generator=draw)
        row = torch.where(row % 3 == 1, row - 1, row)
        keys = torch.unique(row * cols + torch.randint(0, cols, (count,), generator=draw))
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // cols, minlength=rows), 0, out=indptr[1:])
    return CSR(indptr, (keys % cols).to(torch.int32), None, (rows, cols))


def assert_same(wanted: Format, found: Format) -> None:
    """The same arrays, bit by bit, and the same numbers."""
    for field in dataclasses.fields(wanted):  # type: ignore[arg-type]
        a, b = getattr(wanted, field.name), getattr(found, field.name)
        if isinstance(a, Tensor):
            assert isinstance(b, Tensor) and a.dtype is b.dtype, field.name
            assert a.shape == b.shape and a.is_contiguous() == b.is_contiguous(), field.name
            assert torch.equal(a.to(b.device), b), field.name
        else:
            assert a == b, field.name
