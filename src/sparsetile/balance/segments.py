"""Work items of the CUDA-core kernels: rows and bundles of rows; long ones are cut and rejoined.

The device side is ``kernels/cuda/rows/segment.cuh``; its comment draws the arrays. Built with
tensor operations on the matrix's device. All code that walks rows on CUDA cores (the ``csr``
system, residual rows of the hybrid ones, SDDMM) uses these items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from sparsetile.balance.tree import TreeSchedule, build_tree, host_ranges, no_tree, ranges
from sparsetile.core.errors import value_error
from sparsetile.formats.bundles import LIST_STEP
from sparsetile.formats.device_rows import ArrangedUnits, UnitLimits, arranged_on_device
from sparsetile.formats.units import RowUnits, Units

__all__ = ["SegmentSchedule", "cut_on_host", "default_wide_length"]

# Entries above which an item gets a whole warp if groups are narrower than that. Rows of similar
# lengths fill their warps' groups evenly, so the longer limit is better for them.
WIDE_LENGTH = 32
EVEN_WIDE_LENGTH = 96
# Sections of the item list, and those whose items get a warp or more.
SECTIONS, WIDE_SECTIONS = 5, 3
# Cut units whose pieces are listed side by side.
INTERLEAVED = 16
# Most pieces of cut units listed on the host. For so few, launches on a GPU take longer.
HOST_PIECES = 8192
# Items are sorted by length inside windows of this many, so that the groups of a warp have equal
# work while neighbours stay near each other.
SORT_WINDOW = 256


def _sorted_by(major: Tensor, minor: Tensor) -> Tensor:
    """Stable order by ``major``, then by ``minor``: integers under 2^31 in absolute value."""
    return torch.sort((major << 32) + minor, stable=True).indices


def _by_length(positions: Tensor, length: Tensor) -> Tensor:
    """Sort positions longest first inside windows of ``SORT_WINDOW``, stably."""
    if positions.numel() < 2:
        return positions
    window = torch.arange(positions.numel(), device=positions.device) // SORT_WINDOW
    return positions[_sorted_by(window, -length[positions])]


def _side_by_side(mine: Tensor, unit: Tensor, number: Tensor) -> Tensor:
    """Order pieces so that equal parts of neighbouring cut units follow each other.

    Entries are sorted by column, so such pieces read about the same rows of B: the warps of a
    block then find them in the SM's own cache.
    """
    if mine.numel() < 2:
        return mine
    unit = unit[mine]
    rank = torch.zeros_like(unit)  # of a piece's unit among cut units
    torch.cumsum(unit[1:] != unit[:-1], 0, out=rank[1:])
    return mine[_sorted_by(rank // INTERLEAVED, number[mine])]


def default_wide_length(units: Units) -> int:
    """Return the length above which an item should get a whole warp."""
    between = units.longer_total(WIDE_LENGTH) - units.longer_total(EVEN_WIDE_LENGTH)
    return EVEN_WIDE_LENGTH if 2 * between >= units.tally.total else WIDE_LENGTH


def cut_on_host(
    cut: np.ndarray, max_length: int, shared_length: int | None = None
) -> tuple[list[np.ndarray], tuple[Tensor, Tensor]]:
    """Cut units ``label, begin, length, whether a bundle``, all longer than ``max_length``.

    Returns items of shared rows, of wide bundles and of wide rows, int32 [pieces, 4], in the order
    of ``_pieces``, ``_by_section`` and ``_side_by_side``; and their tree.
    """
    label, begin, length, bundled = cut.T
    grain = np.where(bundled, LIST_STEP, 1)
    grains, most = length // grain, max_length // grain
    pieces = -(-grains // most)
    unit, number = host_ranges(pieces)
    count, whole, grain = pieces[unit], grains[unit], grain[unit]
    first, end = (begin[unit] + whole * (number + i) // count * grain for i in range(2))
    items = np.stack([label[unit], first, end, np.arange(unit.size)], 1).astype(np.int32)
    is_bundle = bundled[unit] > 0
    shared = np.zeros_like(is_bundle)
    if shared_length is not None:
        shared = ~is_bundle & (end - first > shared_length)
    lists = []
    for mine in map(np.flatnonzero, (shared, is_bundle, ~is_bundle & ~shared)):
        rank = np.zeros_like(mine)
        np.cumsum(unit[mine][1:] != unit[mine][:-1], out=rank[1:])
        lists.append(items[mine[np.lexsort((number[mine], rank // INTERLEAVED))]])
    return lists, build_tree(torch.from_numpy(pieces))


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Pieces of all units, unit after unit."""

    # unit, number: place of the piece's unit, and its number there; None if each unit is one piece.
    unit: Tensor | None
    number: Tensor | None
    begin: Tensor
    length: Tensor
    cut: Tensor | None
    tree: tuple[Tensor, Tensor]  # from ``build_tree``


def _pieces(units: Units, max_length: int) -> _Pieces:
    """Cut units longer than ``max_length`` into even pieces."""
    grain: Tensor | int = 1  # pieces of a unit are multiples of this
    most: Tensor | int = max_length
    length, total = units.length, units.count
    if units.tally.bundled:
        grain = torch.where(units.bundled, LIST_STEP, 1)
        most = torch.clamp(max_length // grain, min=1)
        length = length // grain
    if units.tally.longest > max_length:
        pieces = torch.clamp((length + (most - 1)) // most, min=1)
        total = int(pieces.sum())
    if total == units.count:
        whole = length * grain if isinstance(grain, Tensor) else length
        return _Pieces(None, None, units.begin, whole, None, no_tree(length.device))
    unit, number = ranges(pieces, total)
    count, grains = pieces[unit], length[unit]
    if isinstance(grain, Tensor):
        grain = grain[unit]
    first = grains * number // count
    begin = units.begin[unit] + first * grain
    cut_length = (grains * (number + 1) // count - first) * grain
    tree = build_tree(pieces[pieces > 1])
    return _Pieces(unit, number, begin, cut_length, count > 1, tree)


@dataclass(frozen=True, eq=False)
class SegmentSchedule(TreeSchedule):
    """Items ``label, begin, end, slot``; ``slot`` is -1 for a unit that was not cut.

    Five sections follow each other: shared rows, wide bundles, wide rows, bundles, rows; wide ones
    are long enough for a whole warp, shared ones for a whole thread block. In the first three
    pieces of cut units come first, because their sums finish in several steps.
    """

    sections: tuple[int, int, int, int, int]  # items in each of the five sections
    # Entries of the longest item, if the host knows them (:meth:`longest_item`).
    longest: int | None = None

    @classmethod
    def make(
        cls,
        units: Units,
        *,
        max_length: int,
        wide_length: int | None = None,
        shared_length: int | None = None,
    ) -> Self:
        """Cut units longer than ``max_length`` entries into even pieces and list all items.

        Items of more than ``wide_length`` entries get a whole warp (chosen by the units' lengths
        when None), rows and pieces of rows of more than ``shared_length`` a whole thread block
        (none when None).
        """
        if max_length < 1:
            raise value_error(
                "SegmentSchedule.make", "max_length", "at least 1", max_length,
                "Give a positive length",
            )  # fmt: skip
        if units.tally.end >= 2**31:
            raise value_error(
                "SegmentSchedule.make", "units", "under 2^31 entries", "more", "Split A by rows"
            )
        if wide_length is None:
            wide_length = default_wide_length(units)
        if shared_length is not None and units.tally.longest <= shared_length:
            shared_length = None
        if isinstance(units, RowUnits) and units.listed_by_kernels:
            listed = _by_kernels(units, max_length, wide_length, shared_length)
            if listed is not None:
                return cls(*listed)
        found = _pieces(units, max_length)
        label, bundled, cut = units.label, units.bundled, found.cut
        if found.unit is not None and cut is not None:
            label = label[found.unit]
            bundled = bundled[found.unit] if units.tally.bundled else cut.new_zeros(cut.shape)
            slot = torch.where(cut, torch.cumsum(cut, 0) - 1, -1)
        else:
            slot = torch.full_like(label, -1)
        begin, length = found.begin, found.length
        items = torch.stack([label, begin, begin + length, slot], 1).to(torch.int32)
        parts, sections = _by_section(units, found, bundled, wide_length, shared_length)
        order = []
        for each, (pieces, whole) in enumerate(parts):
            if each >= WIDE_SECTIONS:  # no piece of a cut unit is here
                order.append(_by_length(whole, length))
                continue
            if pieces.numel():
                assert found.unit is not None and found.number is not None
                order.append(_side_by_side(pieces, found.unit, found.number))
            order.append(whole)
        parent_of_slot, nodes = found.tree
        return cls(
            items[torch.cat(order)].contiguous(),
            parent_of_slot.contiguous(),
            nodes.contiguous(),
            sections,
        )

    def longest_item(self) -> int:
        """Return the entries of the longest item; the host may wait for them."""
        if self.longest is not None:
            return self.longest
        return int((self.items[:, 2] - self.items[:, 1]).max()) if self.item_count else 0


_Sections = tuple[int, int, int, int, int]


def _by_section(
    units: Units, found: _Pieces, bundled: Tensor, wide_length: int, shared_length: int | None
) -> tuple[list[tuple[Tensor, Tensor]], _Sections]:
    """Return the positions of each section's pieces of cut units and whole units, and the number
    of both together."""
    length, cut = found.length, found.cut
    everything, device = length.numel(), length.device
    if cut is None and shared_length is None and not units.tally.bundled:
        # Whole rows: two sections, whose sizes the tally knows.
        wide = units.longer(wide_length)
        in_order = torch.arange(everything, device=device)
        if 0 < wide < everything:
            in_order = torch.sort((length <= wide_length).to(torch.uint8), stable=True).indices
        counts = [0] * (2 * SECTIONS)
        counts[5], counts[9] = wide, everything - wide
    else:
        wide_items = length > wide_length if cut is None else cut | (length > wide_length)
        section = torch.where(wide_items, 1, 3) + (~bundled).to(torch.int64)
        if shared_length is not None:
            section = torch.where(~bundled & (length > shared_length), 0, section)
        kind = 2 * section + 1 if cut is None else 2 * section + (~cut).to(torch.int64)
        in_order = torch.sort(kind, stable=True).indices
        each = torch.arange(2 * SECTIONS, device=device)
        counts = (kind.unsqueeze(1) == each).sum(0).tolist()
    parts = torch.split(in_order, counts)
    a, b, c, d, e = (counts[2 * s] + counts[2 * s + 1] for s in range(SECTIONS))
    return list(zip(parts[::2], parts[1::2], strict=True)), (a, b, c, d, e)


def _by_kernels(
    units: RowUnits, max_length: int, wide_length: int, shared_length: int | None
) -> tuple[Tensor, Tensor, Tensor, _Sections, int] | None:
    """Return items, tree, sections and the longest item, made by kernels on the units' device.

    Units are cut there too, if their pieces have been counted and those of rows are in one section;
    otherwise they are copied to the host, which makes their pieces. None if there are many pieces.
    """
    if units.tally.bundled and max_length % LIST_STEP:
        return None  # bundles are cut at another length than rows
    sized = units.cut_at(max_length)
    if shared_length is not None and 2 * shared_length >= max_length:
        sized = None  # a piece has half of the greatest length or more
    if sized is None and (
        units.longer_total(max_length) // max_length + units.longer(max_length) > HOST_PIECES
    ):
        return None
    counts = None
    if not units.tally.bundled:  # the tally has the size of each class
        sharing = max_length if shared_length is None else min(shared_length, max_length)
        longer = [units.longer(limit) for limit in (max_length, sharing, min(wide_length, sharing))]
        cut, shared, wide = longer[0], longer[1] - longer[0], longer[2] - longer[1]
        counts = (0, cut, shared, 0, wide, 0, units.count - longer[2])
    limits = UnitLimits(max_length, wide_length, shared_length)
    made = arranged_on_device(units, limits, counts)
    if made is None:
        return None
    longest = units.longest_upto(max_length)
    _, _, shared, wide_bundles, wide, bundles, rows = made.counts
    if not made.cut_count:
        items = made.items((0, 0, 0))
        tree = no_tree(units.device)
        return items, *tree, (shared, wide_bundles, wide, bundles, rows), longest
    if sized is not None:
        pieces, nodes, of_bundles, longest_piece = sized
        sharing = 0 if shared_length is None else pieces - of_bundles
        own = pieces - of_bundles - sharing
        items = made.items((sharing, of_bundles, own))
        # Each piece has a slot, and each node but the roots.
        tree = made.cut_units(pieces + nodes - made.cut_count, nodes)
        sections = (shared + sharing, wide_bundles + of_bundles, wide + own, bundles, rows)
        return items, *tree, sections, max(longest, longest_piece)
    return _cut_by_host(units, made, max_length, shared_length)


def _cut_by_host(
    units: RowUnits, made: ArrangedUnits, max_length: int, shared_length: int | None
) -> tuple[Tensor, Tensor, Tensor, _Sections, int]:
    """Cut the units that are listed on the device."""
    device, longest = units.device, units.longest_upto(max_length)
    _, _, shared, wide_bundles, wide, bundles, rows = made.counts
    cut = made.cut.cpu().numpy().astype(np.int64)
    pieces, tree = cut_on_host(cut, max_length, shared_length)
    a, b, c = (part.shape[0] for part in pieces)
    items = made.items((a, b, c))
    sections = (shared + a, wide_bundles + b, wide + c, bundles, rows)
    # As in Schedule.to: without waiting for the device.
    first = 0
    for part, section in zip(pieces, sections, strict=False):
        if part.size:
            items[first : first + part.shape[0]].copy_(torch.from_numpy(part), non_blocking=True)
            longest = max(longest, int((part[:, 2] - part[:, 1]).max()))
        first += section
    parent_of_slot, nodes = (part.to(device, non_blocking=True) for part in tree)
    return items, parent_of_slot, nodes, sections, longest
