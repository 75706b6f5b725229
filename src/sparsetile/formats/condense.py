"""Condensed tiles: windows of rows without their empty columns.

Shared by BitTCF, WCSR and BMat. Within a window of ``height`` rows (in the plan's order) columns
without an entry are dropped; the others, ascending, are cut into tiles of ``pad`` columns. A bit
per cell tells whether it has an entry, and packed values are in the order of their cells.

Tensor operations on A's device: one sort of (window, column) keys, gathers, and one sort of cells;
no loop over windows and no atomics. On a GPU kernels do the same in a few launches
(formats/device_cells.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.formats.cells import WORD_BITS, pack_bits
from sparsetile.formats.device_cells import CellShape, PackedCells, packed_on_device
from sparsetile.intake.csr import CSR, offsets, owners
from sparsetile.reorder.permutation import positions

__all__ = ["condense"]


def condense(csr: CSR, order: Tensor | None, shape: CellShape) -> PackedCells:
    """Pack A into tiles of a shape; rows in ``order``, the given one when None."""
    made = packed_on_device(csr, order, shape)
    if made is not None:
        return made
    device, (rows, cols), pad = csr.device, csr.shape, shape.pad
    windows, slots = -(-rows // shape.height), pad * shape.group
    position = csr.row_ids()
    if order is not None:
        position = positions(order.to(torch.int64))[position]
    # One sort brings equal (window, column) pairs together, in the order of windows and columns.
    # The order of a pair's entries does not matter: cells decide.
    keys, entry = torch.sort(position // shape.height * cols + csr.indices)
    pair_keys, pair = torch.unique_consecutive(keys, return_inverse=True)
    bounds = torch.arange(windows + 1, device=device) * cols
    window_pair = torch.searchsorted(pair_keys, bounds)  # first pair of each window
    ptr = offsets((window_pair.diff() + slots - 1) // slots)  # in groups of tiles
    groups = int(ptr[-1])
    owner = owners(ptr.diff(), groups)
    number = torch.arange(groups, device=device) - ptr[owner]  # of a group in its window
    slot_pair = (window_pair[owner] + number * slots).unsqueeze(1)
    slot_pair = slot_pair + torch.arange(slots, device=device)
    last = (window_pair[owner + 1] - 1).unsqueeze(1)
    columns = pair_keys[torch.minimum(slot_pair, last)] - (owner * cols).unsqueeze(1)
    if not shape.repeat:
        columns = torch.where(slot_pair <= last, columns, -1)
    window = keys // max(cols, 1)
    slot = ptr[window] * slots + pair - window_pair[window]
    cell = _cells(shape, slot // pad, position[entry] % shape.height, slot % pad)
    in_order, at = torch.sort(cell)
    words = groups * shape.group * shape.height * pad // WORD_BITS
    places = None
    if shape.places:
        places = torch.empty_like(cell).index_copy_(0, entry, cell)
    return PackedCells(
        (ptr * shape.group).to(torch.int32), columns.reshape(-1).to(torch.int32),
        pack_bits(in_order, words * WORD_BITS),
        torch.searchsorted(in_order, torch.arange(words + 1, device=device) * WORD_BITS).int(),
        entry[at].to(torch.int32), places, pair_keys.numel(),
    )  # fmt: skip


def _cells(shape: CellShape, tile: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return the number of each cell from its tile, and row and column there."""
    if not shape.fragments:
        return (tile * shape.height + row) * shape.pad + column
    part = tile * (shape.height // 16) + row // 16
    word, lane = row % 16 // 8 + 2 * (column // 4), row % 8 * 4 + column % 4
    return part * 128 + word * 32 + lane
