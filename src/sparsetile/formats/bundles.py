"""Row bundles: four rows that share columns, walked together on CUDA cores.

Four neighbouring rows (in the plan's order) whose columns overlap are stored as one list of
distinct columns; each list element says by four bits which of the rows hold an entry there and
brings four values, zeros where there is none. A row of B is then read once for up to four rows
of C. Bits decide, not zeros: an absent entry takes no part, so Inf and NaN of B stay exact.

    tagged[u]   = bits << 28 | column        (columns below 2^28)
    packed[u]   = value of row 0, 1, 2, 3    (values are packed apart, by ``slots``)
    rows[b]     = the bundle's rows of A, -1 past the end
    indptr[b]   = first list element of bundle b, a multiple of 4

Lists are padded to whole batches of 4 elements, the kernel's step, with elements that have no
bits and repeat the bundle's last column (which is in the cache by then).

Rows whose window shares too little stay outside, in ``loose``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import positions

__all__ = [
    "BUNDLE_ROWS",
    "LIST_STEP",
    "MAX_COLUMNS",
    "RowBundles",
    "pack_bundles",
    "scatter_values",
]

# Eight rows were tried: more sums in registers cost more than fewer reads of B saved.
BUNDLE_ROWS = 4
MAX_COLUMNS = 1 << (32 - BUNDLE_ROWS)
# List elements that the kernel takes with one load.
LIST_STEP = 4


@dataclass(frozen=True, eq=False)
class RowBundles:
    """See the module's text. ``slots`` maps each bundled entry to its place in ``packed``."""

    tagged: Tensor  # int32 [elements], padding included
    indptr: Tensor  # int64 [bundles + 1]
    rows: Tensor  # int32 [bundles, 4]
    loose: Tensor  # int64 [rows outside bundles]
    entries: Tensor  # int64 [bundled entries], canonical entry numbers
    slots: Tensor  # int64 [bundled entries], place in the packed values
    distinct: int  # list elements that are not padding
    shape: tuple[int, int]

    @property
    def bundle_count(self) -> int:
        return self.rows.shape[0]

    @property
    def element_count(self) -> int:
        return self.tagged.numel()

    @property
    def format_bytes(self) -> int:
        """Bytes the kernel reads beside values and loose rows."""
        return sum(t.numel() * t.element_size() for t in (self.tagged, self.indptr, self.rows))

    def pack_values(self, values: Tensor) -> Tensor:
        """Canonical values [nnz] -> packed values [elements * 4]."""
        return scatter_values(values, self.entries, self.slots, self.element_count)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return (row, column) of every bundled entry, in bundle order: the round trip."""
        device = self.tagged.device
        sizes = self.indptr[1:] - self.indptr[:-1]
        bundle = torch.repeat_interleave(torch.arange(self.bundle_count, device=device), sizes)
        tagged = self.tagged.to(torch.int64) & (2**32 - 1)
        bits, column = tagged // MAX_COLUMNS, tagged % MAX_COLUMNS
        held = (bits.unsqueeze(1) >> torch.arange(BUNDLE_ROWS, device=device)) & 1
        element, member = torch.nonzero(held, as_tuple=True)
        return self.rows.to(torch.int64)[bundle[element], member], column[element]


def scatter_values(values: Tensor, entries: Tensor, slots: Tensor, elements: int) -> Tensor:
    """Put canonical values into the four places of each list element; zeros elsewhere."""
    packed = torch.zeros(elements * BUNDLE_ROWS, dtype=values.dtype, device=values.device)
    packed[slots] = values[entries]
    return packed


def pack_bundles(csr: CSR, order: Tensor | None, min_sharing: float) -> RowBundles:
    """Bundle the windows of four rows that hold ``min_sharing`` entries per distinct column.

    Parameters
    ----------
    csr : CSR
        Fewer than 2^28 columns.
    order : Tensor [M], optional
        Order of the rows; windows are cut from it. Row order when None.
    min_sharing : float
        Entries per distinct column from which a window is bundled.
    """
    device, (rows, cols) = csr.device, csr.shape
    order = torch.arange(rows, device=device) if order is None else order
    windows = -(-rows // BUNDLE_ROWS)
    place = positions(order)[csr.row_ids()]  # of each entry's row in the order
    keys, element = torch.unique((place // BUNDLE_ROWS) * cols + csr.indices, return_inverse=True)
    owner = keys // max(cols, 1)
    elements = torch.bincount(owner, minlength=windows)
    entries = torch.bincount(place // BUNDLE_ROWS, minlength=windows)
    chosen = (entries >= min_sharing * elements) & (elements > 0)
    # Where each chosen window's list begins and ends once padded, and where each element goes.
    padded = (elements + LIST_STEP - 1) // LIST_STEP * LIST_STEP * chosen
    begin = torch.cumsum(padded, 0) - padded
    first_key = torch.cumsum(elements, 0) - elements
    target = begin[owner] + torch.arange(keys.numel(), device=device) - first_key[owner]
    kept = chosen[owner]
    mine = torch.nonzero(kept[element]).squeeze(1) if csr.nnz else element
    place, element = place[mine], element[mine]
    bits = torch.zeros(keys.numel(), dtype=torch.int64, device=device)
    bits.index_add_(0, element, torch.ones_like(element) << (place % BUNDLE_ROWS))
    column = keys % max(cols, 1)
    # Padding repeats the window's last column.
    last = column[(first_key + elements - 1)[chosen]]
    tagged = torch.repeat_interleave(last, padded[chosen])
    tagged[target[kept]] = (bits * MAX_COLUMNS + column)[kept]
    # The uppermost bit is the sign bit of an int32: wrap by hand, torch would refuse.
    tagged = torch.where(tagged >= 2**31, tagged - 2**32, tagged).to(torch.int32)
    indptr = torch.zeros(int(chosen.sum()) + 1, dtype=torch.int64, device=device)
    torch.cumsum(padded[chosen], 0, out=indptr[1:])
    members = torch.full((windows * BUNDLE_ROWS,), -1, dtype=torch.int64, device=device)
    members[:rows] = order
    by_window = members.reshape(windows, BUNDLE_ROWS)
    loose = by_window[~chosen].reshape(-1)
    return RowBundles(
        tagged,
        indptr,
        by_window[chosen].to(torch.int32),
        loose[loose >= 0],
        mine,
        target[element] * BUNDLE_ROWS + place % BUNDLE_ROWS,
        int(elements[chosen].sum()),
        csr.shape,
    )
