"""Units of work: what a schedule distributes. Rows, windows of tiles, bundles, block rows.

A unit is a label and a range of a list: entries of a row, tiles of a window, elements of a bundle's
list, blocks of a block row. Formats name their units; ``balance/`` makes items of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import CSR

__all__ = ["HOST_UNITS", "LENGTHS", "Tally", "Units", "concat_units", "row_units"]

# Units that are scheduled on the host.
HOST_UNITS = 1 << 12
# Lengths that decisions of schedules are made by (balance/segments.py, systems/csr/rows.py): how
# many units are longer is counted for all of them at once.
LENGTHS = (16, 24, 32, 64, 96, 128, 256)


@cache
def _limits(device: torch.device) -> Tensor:
    return torch.tensor(LENGTHS, device=device)


@dataclass(frozen=True)
class Tally:
    """What the host wants to know of units.

    Attributes
    ----------
    longest, total, end : int
        Greatest length, sum of the lengths, and the largest end of a range; 0 without units.
    bundled : int
        Units that are bundles.
    longer, longer_total : mapping of int to int
        Units of more elements than each of ``LENGTHS``, and the sum of their lengths.
    """

    longest: int
    total: int
    end: int
    bundled: int
    longer: dict[int, int]
    longer_total: dict[int, int]


@dataclass(frozen=True, eq=False)
class Units:
    """What is to be scheduled, in the order in which it should be visited.

    Attributes
    ----------
    label : Tensor of int64 [units]
        Row of A, number of the window, of the bundle, of the block row.
    begin, length : Tensor of int64 [units]
        Range in the unit's list.
    bundled : Tensor of bool [units]
        Whether the unit is a bundle of rows: its list is cut at multiples of ``LIST_STEP`` only
        (formats/bundles.py). Labels and lists of bundles are apart from those of other units.
    offsets : Tensor of int64 [units + 1] or None
        Where units 0, 1, 2, ... begin in one list, and where the last ends; None where units do
        not follow each other like that.
    """

    label: Tensor
    begin: Tensor
    length: Tensor
    bundled: Tensor
    offsets: Tensor | None = None

    @property
    def count(self) -> int:
        return self.label.numel()

    @cached_property
    def tally(self) -> Tally:
        """Counts of the lengths, which the host waits for once."""
        if not self.count:
            none = dict.fromkeys(LENGTHS, 0)
            return Tally(0, 0, 0, 0, none, none)
        if self.few_here:
            return self._near_tally()
        length = self.length
        longer = length.unsqueeze(1) > _limits(length.device)
        sums = [
            length.max(), length.sum(), (self.begin + length).max(), self.bundled.sum(),
        ]  # fmt: skip
        of_longer = [longer.sum(0), (longer * length.unsqueeze(1)).sum(0)]
        found = torch.cat([torch.stack(sums), *of_longer]).tolist()
        longest, total, end, bundled, *found = found
        count = len(LENGTHS)
        counts, totals = (
            dict(zip(LENGTHS, part, strict=True)) for part in (found[:count], found[count:])
        )
        return Tally(longest, total, end, bundled, counts, totals)

    @property
    def few_here(self) -> bool:
        """Whether units are few and on the host, where NumPy takes least time for them."""
        return self.label.device.type == "cpu" and self.count <= HOST_UNITS

    def _near_tally(self) -> Tally:
        """The same by NumPy."""
        length = self.length.numpy()
        ordered = np.sort(length)
        sums = np.concatenate([[0], np.cumsum(ordered)])
        first = np.searchsorted(ordered, LENGTHS, side="right")  # that is longer
        counts = dict(zip(LENGTHS, (self.count - first).tolist(), strict=True))
        totals = dict(zip(LENGTHS, (sums[-1] - sums[first]).tolist(), strict=True))
        end = int((self.begin.numpy() + length).max())
        bundled = int(np.count_nonzero(self.bundled.numpy()))
        return Tally(int(ordered[-1]), int(sums[-1]), end, bundled, counts, totals)

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

    def near(self) -> Units:
        """Return the same on the host where they are few.

        A schedule is hundreds of operations on lists of units, and dozens of numbers that the host
        asks for. A GPU takes longer to be told of one than a core takes to do it.
        """
        if self.label.device.type == "cpu" or self.count > HOST_UNITS:
            return self
        if self.offsets is not None:
            return Units.from_offsets(self.offsets.cpu())
        label, begin, length, bundled = torch.stack(
            [self.label, self.begin, self.length, self.bundled.to(torch.int64)]
        ).cpu()
        return Units(label, begin, length, bundled.to(torch.bool))

    @classmethod
    def from_offsets(cls, offsets: Tensor) -> Units:
        """Consecutive units: number u is ``offsets[u]`` to ``offsets[u + 1]`` of the list.

        Parameters
        ----------
        offsets : Tensor of int32 or int64 [units + 1]
            Never decreasing.
        """
        if offsets.dim() != 1 or not offsets.numel() or offsets.is_floating_point():
            raise value_error(
                "Units.from_offsets",
                "offsets",
                "integers [units + 1]",
                f"{offsets.dtype} of shape {tuple(offsets.shape)}",
                "Pass the offsets of a format",
            )
        offsets = offsets.to(torch.int64)
        count, device = offsets.numel() - 1, offsets.device
        return cls(
            torch.arange(count, device=device),
            offsets[:-1],
            offsets[1:] - offsets[:-1],
            torch.zeros(count, dtype=torch.bool, device=device),
            offsets,
        )


def row_units(csr: CSR, rows: Tensor | None = None) -> Units:
    """Every row of A, or those given in ``rows`` in that order, as a unit of its own."""
    if rows is None:
        return Units.from_offsets(csr.indptr)
    return Units(
        rows,
        csr.indptr[:-1][rows],
        csr.row_lengths()[rows],
        torch.zeros(rows.numel(), dtype=torch.bool, device=csr.device),
    )


def concat_units(first: Units, second: Units) -> Units:
    """Both lists, one after the other."""
    return Units(
        *(
            torch.cat([getattr(first, name), getattr(second, name)])
            for name in ("label", "begin", "length", "bundled")
        )
    )
