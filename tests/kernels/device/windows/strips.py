"""Sixteen rows of tiles that meet Inf and NaN: operands of ``exact.cu``, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILES, ROWS = 3, 24


@dataclass(frozen=True)
class Strip:
    """Operands by their names in ``exact.cu``, and what it should write."""

    given: dict[str, Tensor]
    expected: Tensor
    failed: list[int]


def a_strip(dtype: torch.dtype, n: int) -> Strip:
    """Whole numbers, an infinity in A, an entry that is zero, a column of A without a row of B."""
    maker = torch.Generator().manual_seed(3)
    cells = torch.rand(TILES, 16, 8, generator=maker) < 0.4
    values = torch.randint(1, 6, cells.shape, generator=maker).double()
    columns = torch.arange(ROWS).flip(0).reshape(TILES, 8)
    b = torch.randint(-4, 5, (ROWS, n), generator=maker).double()
    cells[1, :, 3] = False  # nobody refers to a row of NaN
    cells[2, :, 6] = False
    cells[2, 5, 6] = cells[2, 12, 6] = True  # two rows alone refer to one of infinities
    values[2, 12, 6] = 0.0
    cells[0, 9, 2], values[0, 9, 2] = True, torch.inf
    cells[0, :, 7] = False  # no row of B
    b[columns[1, 3]], b[columns[2, 6]] = torch.nan, torch.inf
    b[columns[0, 2]] = b[columns[0, 2]].clamp(min=1)
    values *= cells
    given = b.to(dtype)
    if dtype is torch.float32:  # TF32 has 11 bits
        given[columns[0, 0]], b[columns[0, 0]] = 4099.0, 4100.0
    rows = []
    for row in range(16):
        tile, k = cells[:, row].nonzero(as_tuple=True)
        rows.append((values[tile, row, k][:, None] * b[columns[tile, k]]).sum(0))
    columns[0, 7] = -1
    raw = values.nan_to_num(0.0, posinf=torch.inf).to(dtype)
    words = raw.view(torch.int32 if dtype.itemsize == 4 else torch.int16).to(torch.int32)
    words = words if dtype.itemsize == 4 else words & 0xFFFF
    operands = {
        "cells": cells.to(torch.int32),
        "raw": words,
        "columns": columns.to(torch.int32),
        "b": given,
    }
    # A lane has rows g and g + 8. Chunks past n are the first one's.
    failed = [int(g in (1, 4, 5)) for g in range(8) for t in range(4)]
    return Strip(operands, torch.stack(rows), failed)
