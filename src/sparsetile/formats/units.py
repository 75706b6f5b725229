"""Units of work that a schedule distributes: rows, windows of tiles, bundles, block rows.

A unit is a label and a range of a list: entries of a row, tiles of a window, elements of a bundle's
list, blocks of a block row. Formats define their units; ``balance/`` makes items of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.core.layout import LENGTHS
from sparsetile.formats.device_rows import CutSizes, RowCounts, Tally, counted_on_device
from sparsetile.intake.csr import CSR
from sparsetile.launch.staged import built_by_kernels

__all__ = [
    "HOST_UNITS", "LENGTHS", "RowUnits", "Tally", "Units", "row_units",
]  # fmt: skip

# Most units that are scheduled on the host.
HOST_UNITS = 1 << 12


@cache
def _limits(device: torch.device) -> Tensor:
    return torch.tensor(LENGTHS, device=device)


@dataclass(frozen=True, eq=False)
class Units:
    """Units to schedule, in the order in which they should be visited."""

    label: Tensor  # int64 [units]: number of the row of A, window, bundle or block row
    # begin, length: int64 [units]: range in the unit's list.
    begin: Tensor
    length: Tensor
    # bool [units]: whether the unit is a bundle of rows: its list is cut only at multiples of
    # ``LIST_STEP`` (formats/bundles.py). Labels and lists of bundles are separate from those of
    # other units.
    bundled: Tensor
    # int64 [units + 1]: begin of units 0, 1, 2, ... in one list, and the end of the last; None if
    # units do not follow each other like that.
    offsets: Tensor | None = None

    @property
    def count(self) -> int:
        return self.label.numel()

    @cached_property
    def tally(self) -> Tally:
        """Counts of the lengths; the host waits once for them."""
        if not self.count:
            none = dict.fromkeys(LENGTHS, 0)
            return Tally(0, 0, 0, 0, none, none, none)
        counted = self._counted()
        if counted is not None:
            return counted.tally
        length = self.length
        longer = length.unsqueeze(1) > _limits(length.device)
        sums = [
            length.max(), length.sum(), (self.begin + length).max(), self.bundled.sum(),
        ]  # fmt: skip
        lengths = length.unsqueeze(1)
        by_limit = [
            longer.sum(0), (longer * lengths).sum(0), torch.where(longer, 0, lengths).amax(0),
        ]  # fmt: skip
        found = torch.cat([torch.stack(sums), *by_limit]).tolist()
        longest, total, end, bundled, *found = found
        count = len(LENGTHS)
        counts, totals, upto = (
            dict(zip(LENGTHS, found[first : first + count], strict=True))
            for first in range(0, 3 * count, count)
        )
        return Tally(longest, total, end, bundled, counts, totals, upto)

    def _counted(self) -> RowCounts | None:
        """Counts by kernels; None if the device has none."""
        return None

    @property
    def device(self) -> torch.device:
        return self.label.device

    def longer(self, length: int) -> int:
        """Count the units of more than ``length`` elements."""
        if length >= self.tally.longest:
            return 0
        found = self.tally.longer.get(length)
        return int((self.length > length).sum()) if found is None else found

    def longer_total(self, length: int) -> int:
        """Add up the lengths of those units."""
        if length >= self.tally.longest:
            return 0
        found = self.tally.longer_total.get(length)
        return int(self.length[self.length > length].sum()) if found is None else found

    def longest_upto(self, length: int) -> int:
        """Return the greatest length up to ``length``; 0 without such a unit."""
        if length >= self.tally.longest:
            return self.tally.longest
        found = self.tally.upto.get(length)
        if found is not None:
            return found
        return int(torch.where(self.length > length, 0, self.length).max())

    def near(self) -> Units:
        """Return the same on the host if they are few.

        A schedule is many small operations on lists of units, and the host reads dozens of numbers.
        For few units a launch on a GPU takes longer than the operation on a core.
        """
        if self.device.type == "cpu" or self.count > HOST_UNITS:
            return self
        if self.offsets is not None:
            return Units.from_offsets(self.offsets.cpu())
        label, begin, length, bundled = torch.stack(
            [self.label, self.begin, self.length, self.bundled.to(torch.int64)]
        ).cpu()
        return Units(label, begin, length, bundled.to(torch.bool))

    @classmethod
    def from_offsets(cls, offsets: Tensor) -> Units:
        """Consecutive units: number u is ``offsets[u]`` to ``offsets[u + 1]`` of the list."""
        if offsets.dim() != 1 or not offsets.numel() or offsets.is_floating_point():
            raise value_error(
                "Units.from_offsets", "offsets", "integers [units + 1]",
                f"{offsets.dtype} of shape {tuple(offsets.shape)}", "Pass the offsets of a format",
            )  # fmt: skip
        offsets = offsets.to(torch.int64)
        count, device = offsets.numel() - 1, offsets.device
        return cls(
            torch.arange(count, device=device),
            offsets[:-1],
            offsets[1:] - offsets[:-1],
            torch.zeros(count, dtype=torch.bool, device=device),
            offsets,
        )


class RowUnits(Units):
    """Bundles of rows, then rows of A; lists of units are made on first use.

    Kernels make schedules from these few tensors (formats/device_rows.py), so that no list is made
    on a device with kernels. ``rows`` are rows of A in the order of visits, all of A when None;
    ``bundle_ptr`` has the begin of each bundle's list, and the end of the last.
    """

    indptr: Tensor
    rows: Tensor | None
    bundle_ptr: Tensor | None

    def __init__(
        self, indptr: Tensor, rows: Tensor | None = None, bundle_ptr: Tensor | None = None
    ) -> None:
        indptr = indptr.to(torch.int64)
        given = {
            "indptr": indptr,
            "rows": rows,
            "bundle_ptr": bundle_ptr,
            "offsets": indptr if rows is None and bundle_ptr is None else None,
        }
        for name, tensor in given.items():
            object.__setattr__(self, name, tensor)  # the class is frozen

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    @property
    def row_count(self) -> int:
        """Rows that are single units."""
        return self.indptr.numel() - 1 if self.rows is None else self.rows.numel()

    @property
    def bundle_count(self) -> int:
        return 0 if self.bundle_ptr is None else self.bundle_ptr.numel() - 1

    @property
    def count(self) -> int:
        return self.bundle_count + self.row_count

    @cached_property
    def label(self) -> Tensor:  # type: ignore[override]
        rows = self.rows
        if rows is None:
            rows = torch.arange(self.row_count, device=self.device)
        if self.bundle_ptr is None:
            return rows
        return torch.cat([torch.arange(self.bundle_count, device=self.device), rows])

    def _with_bundles(self, of_rows: Tensor, of_bundles: Callable[[Tensor], Tensor]) -> Tensor:
        if self.rows is not None:
            of_rows = of_rows[self.rows]
        if self.bundle_ptr is None:
            return of_rows
        return torch.cat([of_bundles(self.bundle_ptr), of_rows])

    @cached_property
    def begin(self) -> Tensor:  # type: ignore[override]
        return self._with_bundles(self.indptr[:-1], lambda ptr: ptr[:-1])

    @cached_property
    def length(self) -> Tensor:  # type: ignore[override]
        return self._with_bundles(self.indptr.diff(), Tensor.diff)

    @cached_property
    def bundled(self) -> Tensor:  # type: ignore[override]
        found = torch.zeros(self.count, dtype=torch.bool, device=self.device)
        if self.bundle_count:
            found[: self.bundle_count] = True
        return found

    @property
    def listed_by_kernels(self) -> bool:
        """Whether kernels on the device list these units."""
        return built_by_kernels(self.device)

    def near(self) -> Units:
        """Return the same on the host if they are few and no kernel on the device lists them."""
        return self if self.listed_by_kernels else super().near()

    def _counted(self) -> RowCounts | None:
        return self._keep(counted_on_device(self))

    def _keep(self, found: RowCounts | None) -> RowCounts | None:
        if found is not None:
            self.__dict__["_cut"] = found.cut
        return found

    def cut_at(self, length: int) -> CutSizes | None:
        """Return what cutting units at a length makes; None if kernels have not counted it."""
        if length & (length - 1) or not self.tally.total:
            return None
        found: dict[int, CutSizes] = self.__dict__.get("_cut", {})
        return found.get(length)

    def count_shared(self, columns: Tensor, min_sharing: float) -> tuple[int, int, int] | None:
        """Count windows of four rows that hold ``min_sharing`` entries per distinct column.

        Returns their number, entries and distinct columns; None if no kernel counts them. Every row
        of A, whose entries' columns are given, is a unit. Also computes the tally of all units.
        """
        found = self._keep(counted_on_device(self, columns, min_sharing))
        if found is None:
            return None
        self.__dict__.setdefault("tally", found.tally)
        return found.shared


def row_units(csr: CSR, rows: Tensor | None = None) -> RowUnits:
    """Every row of A, or those given in ``rows`` in that order, as one unit each."""
    return RowUnits(csr.indptr, rows)
