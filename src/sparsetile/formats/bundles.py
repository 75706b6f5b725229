"""Row bundles: four rows that share columns, processed together on CUDA cores.

Four neighbouring rows (in the plan's order) whose columns overlap are stored as one list of
distinct columns. Each list element has four bits, which mark the rows with an entry there, and four
values, zeros without an entry. A row of B is then read once for up to four rows of C. Absent
entries are skipped by their bits, not multiplied by zero, so Inf and NaN of B stay exact.

    tagged[u]   = bits << 28 | column        (columns below 2^28)
    packed[u]   = value of row 0, 1, 2, 3    (values are packed separately, by ``slots``)
    rows[b]     = the bundle's rows of A, -1 past the end
    indptr[b]   = first list element of bundle b, a multiple of 4

Lists are padded to whole batches of 4 elements, the kernel's step, with elements that have no
bits and repeat the bundle's last column (which is then in the cache).

Rows whose window shares too little stay outside, in ``loose``. Kernels read them from A's own
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.core.layout import BUNDLE_ROWS
from sparsetile.formats.base import Format
from sparsetile.formats.device_bundles import bundled_on_device
from sparsetile.formats.device_cells import SortedPairs, sorted_on_device
from sparsetile.formats.row_parts import counted_in_parts, row_parts
from sparsetile.formats.units import RowUnits, Units, row_units
from sparsetile.intake.csr import CSR, offsets
from sparsetile.reorder.permutation import positions

__all__ = ["BUNDLE_ROWS", "LIST_STEP", "MAX_COLUMNS", "RowBundles", "scatter_values"]

MAX_COLUMNS = 1 << (32 - BUNDLE_ROWS)
# List elements that the kernel takes with one load.
LIST_STEP = 4


@dataclass(frozen=True, eq=False)
class _Windows:
    """Windows of four rows, their entries sorted by column, and which of them are bundled.

    ``before``: distinct columns before each sorted entry. The others are per window: list elements,
    whether it is bundled, and its elements after padding.
    """

    windows: int
    found: SortedPairs
    before: Tensor
    elements: Tensor
    entries: Tensor
    chosen: Tensor
    padded: Tensor

    @classmethod
    def of(cls, csr: CSR, order: Tensor | None, min_sharing: float) -> Self:
        device, rows = csr.device, csr.shape[0]
        windows = -(-rows // BUNDLE_ROWS)
        found = _sorted(csr, order)
        starts = csr.indptr if order is None else offsets(csr.row_lengths()[order])
        # First sorted entry of each window, and the distinct columns before it.
        bounds = torch.arange(0, (windows + 1) * BUNDLE_ROWS, BUNDLE_ROWS, device=device)
        first_entry = starts[bounds.clamp_(max=rows)]
        before = torch.zeros(csr.nnz + 1, dtype=torch.int64, device=device)
        before[1:] = found.pair
        elements, entries = before[first_entry].diff(), first_entry.diff()
        # In 32 bits, whatever torch's default, as the kernel compares (pack/row_windows.cuh).
        chosen = (entries.float() >= elements.float() * min_sharing) & (elements > 0)
        padded = (elements + LIST_STEP - 1) // LIST_STEP * LIST_STEP * chosen
        return cls(windows, found, before, elements, entries, chosen, padded)

    def tally(self) -> list[int]:
        """Bundles, their entries, their list elements; all list elements, those of bundles after
        padding, and whether the last window is bundled. The host waits once for all of them."""
        chosen = self.chosen
        counts = [
            chosen.sum(), (self.entries * chosen).sum(), (self.elements * chosen).sum(),
            self.before[-1], self.padded.sum(), chosen[-1:].sum(),
        ]  # fmt: skip
        return torch.stack(counts).tolist()


@dataclass(frozen=True, eq=False)
class RowBundles(Format):
    """See the module's docstring. ``slots`` maps each bundled entry to its place in ``packed``."""

    index_arrays = ("tagged", "indptr", "rows")

    tagged: Tensor  # int32 [elements], padding included
    indptr: Tensor  # int64 [bundles + 1]
    rows: Tensor  # int32 [bundles, 4]
    loose: Tensor  # int64 [rows outside bundles]
    entries: Tensor  # int64 [bundled entries], canonical entry numbers
    slots: Tensor  # int64 [bundled entries], place in the packed values
    row_indptr: Tensor  # int64 [M + 1], A's own
    distinct: int  # list elements that are not padding
    shape: tuple[int, int]

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *, min_sharing: float = 1.0) -> Self:
        """Bundle the windows of four rows that hold ``min_sharing`` entries per distinct column.

        1 bundles every window with entries. A has at most 2^28 columns.
        """
        made = cls.pack_if(csr, order, lambda bundles, entries, distinct: True, min_sharing)
        assert made is not None  # `pays` is always true
        return made

    @classmethod
    def pack_if(
        cls,
        csr: CSR,
        order: Tensor | None,
        pays: Callable[[int, int, int], bool],
        min_sharing: float = 1.0,
        counted: tuple[int, int, int] | None = None,
    ) -> Self | None:
        """Do what :meth:`pack` does if ``pays`` says so; None if it does not.

        It decides from the number of bundles, their entries, and their list elements without
        padding. ``counted`` are those three numbers if they are known (``RowUnits.count_shared``).
        """
        device, (rows, cols) = csr.device, csr.shape
        if cols > MAX_COLUMNS:
            raise value_error(
                "RowBundles.pack", "csr", f"a matrix of at most {MAX_COLUMNS} columns", cols,
                "Multiply single rows",
            )  # fmt: skip
        if counted is None:
            counted = row_units(csr, order).count_shared(csr.indices, min_sharing)
        if counted is not None:
            if not pays(*counted):
                return None
            made = bundled_on_device(csr, order, min_sharing, *counted[:2])
            if made is not None:
                return cls(
                    made.tagged, made.indptr, made.rows, made.loose, made.entries, made.slots,
                    csr.indptr, counted[2], csr.shape,
                )  # fmt: skip
        elif counted_in_parts(csr, BUNDLE_ROWS):
            parts = row_parts(csr, order, BUNDLE_ROWS)
            tallies = [_Windows.of(part, None, min_sharing).tally()[:3] for _, part in parts]
            if not pays(*(sum(each) for each in zip(*tallies, strict=True))):
                return None
        cut = _Windows.of(csr, order, min_sharing)
        windows, found, before = cut.windows, cut.found, cut.before
        elements, chosen, padded = cut.elements, cut.chosen, cut.padded
        count, entry_count, distinct, every, listed, last_chosen = cut.tally()
        if counted is None and not pays(count, entry_count, distinct):
            return None
        order = torch.arange(rows, device=device) if order is None else order
        place = positions(order)[csr.row_ids()]  # of each entry's row in the order
        element = torch.empty_like(found.entry)  # list element of each entry
        element[found.entry] = before[1:] - 1
        keys = torch.empty(every, dtype=torch.int64, device=device)
        keys[before[1:] - 1] = found.keys.to(torch.int64)
        owner = keys // max(cols, 1)
        # Begin of each chosen window's padded list, and the place of each element.
        begin = torch.cumsum(padded, 0) - padded
        first_key = torch.cumsum(elements, 0) - elements
        target = begin[owner] + torch.arange(every, device=device) - first_key[owner]
        kept = chosen[owner]
        mine = torch.nonzero(kept[element]).squeeze(1) if csr.nnz else element
        place, element = place[mine], element[mine]
        bits = torch.zeros(every, dtype=torch.int64, device=device)
        bits.index_add_(0, element, torch.ones_like(element) << (place % BUNDLE_ROWS))
        column = keys % max(cols, 1)
        # Padding repeats the window's last column.
        bundled = torch.nonzero(chosen).squeeze(1)
        sizes = padded[bundled]
        last = column[(first_key + elements - 1)[bundled]]
        tagged = torch.repeat_interleave(last, sizes, output_size=listed)
        at = torch.nonzero(kept).squeeze(1)
        tagged[target[at]] = (bits * MAX_COLUMNS + column)[at]
        # The uppermost bit is the sign bit of an int32: wrap by hand, torch would raise.
        tagged = torch.where(tagged >= 2**31, tagged - 2**32, tagged).to(torch.int32)
        indptr = offsets(sizes)
        members = torch.full((windows * BUNDLE_ROWS,), -1, dtype=torch.int64, device=device)
        members[:rows] = order
        by_window = members.reshape(windows, BUNDLE_ROWS)
        loose = by_window[torch.nonzero(~chosen).squeeze(1)].reshape(-1)
        if not last_chosen:  # only the last window may have fewer than four rows
            loose = loose[: loose.numel() - (windows * BUNDLE_ROWS - rows)]
        return cls(
            tagged, indptr, by_window[bundled].to(torch.int32), loose, mine,
            target[element] * BUNDLE_ROWS + place % BUNDLE_ROWS, csr.indptr, distinct, csr.shape,
        )  # fmt: skip

    @property
    def bundle_count(self) -> int:
        return self.rows.shape[0]

    @property
    def element_count(self) -> int:
        return self.tagged.numel()

    def units(self) -> Units:
        """Bundles, then the loose rows; a row's list is its entries in the plain arrays."""
        return RowUnits(self.row_indptr, self.loose, self.indptr)


def _sorted(csr: CSR, order: Tensor | None) -> SortedPairs:
    """Entries of windows of four rows, by column."""
    found = sorted_on_device(csr, order, BUNDLE_ROWS)
    if found is not None:
        return found
    place = csr.row_ids()
    if order is not None:
        place = positions(order)[place]
    keys, entry = torch.sort((place // BUNDLE_ROWS) * csr.shape[1] + csr.indices)
    first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=first[1:])
    return SortedPairs(keys, entry, torch.cumsum(first, 0, dtype=torch.int32))


def scatter_values(values: Tensor, entries: Tensor, slots: Tensor, elements: int) -> Tensor:
    """Put canonical values into the four places of each list element; zeros elsewhere."""
    packed = torch.zeros(elements * BUNDLE_ROWS, dtype=values.dtype, device=values.device)
    packed[slots] = values[entries]
    return packed
