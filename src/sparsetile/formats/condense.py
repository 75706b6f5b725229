"""Condensed windows: rows in groups, each with the list of its distinct columns.

What WCSR and BMat are cut from. Within a window of ``height`` rows (in the plan's order) columns
without an entry are dropped. The others, ascending, have one slot each; a window has a multiple of
``pad`` slots. Tensor operations on A's own device: one sort of (window, column) keys, then gathers;
no loop over windows and no atomics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import positions

__all__ = ["Condensed", "condense"]


@dataclass(frozen=True, eq=False)
class Condensed:
    """Windows, slots and entries; all int64 but ``used``.

    Attributes
    ----------
    window_ptr : Tensor [windows + 1]
        First group of ``pad`` slots of each window.
    columns : Tensor [slots]
        Column of A behind each slot; slots past a window's last column repeat that column.
    used : Tensor of bool [slots]
        Whether a slot has a column of its own.
    entry, slot, row : Tensor [nnz]
        Canonical entry, its slot, and its row in the window; by window and column.
    """

    window_ptr: Tensor
    columns: Tensor
    used: Tensor
    entry: Tensor
    slot: Tensor
    row: Tensor

    @property
    def distinct(self) -> int:
        """(window, column) pairs."""
        return int(self.used.sum())


def condense(csr: CSR, order: Tensor | None, height: int, pad: int) -> Condensed:
    """Return A's windows of ``height`` rows, each with a multiple of ``pad`` slots."""
    device, (rows, cols) = csr.device, csr.shape
    windows = -(-rows // height)
    position = csr.row_ids()
    if order is not None:
        position = positions(order.to(torch.int64))[position]
    # One sort brings equal (window, column) pairs together, pairs of a window into order, and
    # windows after each other. Which entry of a pair comes first does not matter: places decide.
    keys, entry = torch.sort(position // height * cols + csr.indices)
    pair_keys, pair = torch.unique_consecutive(keys, return_inverse=True)
    bounds = torch.arange(windows + 1, device=device) * cols
    window_pair = torch.searchsorted(pair_keys, bounds)  # first pair of each window
    ptr = torch.zeros(windows + 1, dtype=torch.int64, device=device)
    torch.cumsum((window_pair[1:] - window_pair[:-1] + pad - 1) // pad, 0, out=ptr[1:])
    groups = int(ptr[-1])
    group_window = torch.repeat_interleave(
        torch.arange(windows, device=device), ptr[1:] - ptr[:-1], output_size=groups
    )
    number = torch.arange(groups, device=device) - ptr[group_window]  # of a group in its window
    slot_pair = (window_pair[group_window] + number * pad).unsqueeze(1)
    slot_pair = slot_pair + torch.arange(pad, device=device)
    last = (window_pair[group_window + 1] - 1).unsqueeze(1)
    used = slot_pair <= last
    columns = pair_keys[torch.minimum(slot_pair, last)] - (group_window * cols).unsqueeze(1)
    window = keys // max(cols, 1)
    slot = ptr[window] * pad + pair - window_pair[window]
    return Condensed(
        ptr, columns.reshape(-1), used.reshape(-1), entry, slot, position[entry] % height
    )
