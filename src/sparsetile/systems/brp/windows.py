"""Windows of sixteen rows: the counts by which f, g and windows are chosen, and their packing.

Two implementations with the same results: tensor operations (formats/brp.py,
formats/brp_windows.py), the reference, and the kernel ``pack_groups`` if A is on a GPU. There
tensor operations would be hundreds of small launches with a dozen host waits. The kernel takes one
launch for the counts and three or four for the arrays; the host waits for the counts and for the
list of rows in no window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparsetile.engines.cost import SHORT_WINDOW
from sparsetile.engines.request import Request
from sparsetile.engines.tiles.hybrid_cost import counted, give_window_tiles, window_tiles
from sparsetile.formats.brp import TILE_COLUMNS, WINDOW_ROWS, ColumnMajor, sort_windows
from sparsetile.formats.brp_windows import BRPWindows
from sparsetile.formats.units import HOST_UNITS, Units, row_units
from sparsetile.intake.csr import CSR
from sparsetile.kernels.groups import PACK_GROUPS, WINDOW_COUNTS, Stage
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels

__all__ = [
    "KernelWindows", "PackedWindows", "TensorWindows", "Windows", "windows_of",
]  # fmt: skip

# The kernel's inputs and counts, the same for all groups.
_COUNTED = ("indptr", "columns", "order", "starts", "place", "rank", "mask", "counts")
# The kernel's numbers per window after groups are chosen.
_PLAN = ("tiles", "tile_sums", "outside_sums", "kept_sums")


@dataclass(frozen=True, eq=False)
class PackedWindows:
    """The packed windows that keep their groups."""

    arrays: BRPWindows
    units: Units  # windows, whose lists are tiles; on the host if they are few
    others: Units  # rows in no window, likewise


class Windows(ABC):
    """Counts of the windows of a matrix in one row order.

    All are int64 [windows], on A's device or, if there are few windows, on the host.
    """

    entries: Tensor
    fresh: Tensor  # sums of ``Counts.delta`` over the rows (formats/window_split.py)
    pairs: Tensor  # distinct columns

    def __init__(self) -> None:
        self._grouped: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def slices(self, fixed: int) -> Tensor:
        """Slices of ``fixed`` entries."""

    def grouped(self, fixed: int, group: int) -> tuple[Tensor, Tensor]:
        """Return the tiles of each window in whole groups, and its entries outside them."""
        if (fixed, group) not in self._grouped:
            tiles = self.slices(fixed) // (TILE_COLUMNS * group) * group
            self._grouped[fixed, group] = tiles, self.entries - tiles * (TILE_COLUMNS * fixed)
        return self._grouped[fixed, group]

    @abstractmethod
    def pack(self, fixed: int, group: int, kept: Tensor) -> PackedWindows | None:
        """Pack the windows marked by ``kept`` (bool, one each), which all have a group; None if
        there are none."""


def windows_of(request: Request) -> Windows:
    """Return the windows of a request's matrix, counted once."""

    def found() -> Windows:
        if not (request.csr.nnz and built_by_kernels(request.device)):
            return TensorWindows(request)
        made = KernelWindows(request.csr, request.permutation.perm)
        # Predictions of other systems use these as well.
        tiles, short_pairs = torch.stack(
            [window_tiles(made.pairs), made.short_pairs.sum()]
        ).tolist()
        give_window_tiles(request, tiles)
        if request.counts_pairs:
            request.once(SHORT_WINDOW, lambda: int(short_pairs))
        return made

    return request.once("windows of brp", found)


def _by_window(of_rows: Tensor) -> Tensor:
    """Sums over the rows of each window."""
    padded = of_rows.new_zeros(-(-of_rows.numel() // WINDOW_ROWS) * WINDOW_ROWS)
    padded[: of_rows.numel()] = of_rows
    return padded.reshape(-1, WINDOW_ROWS).sum(1)


class TensorWindows(Windows):
    """By tensor operations; entries are sorted at the first call of ``slices``."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._csr, self._order = request.csr, request.permutation.perm
        counts = counted(request)
        self.entries, self.fresh = _by_window(counts.entries), _by_window(counts.delta)
        self.pairs = counts.pairs[::WINDOW_ROWS]
        self._slices: dict[int, Tensor] = {}

    @cached_property
    def _sorted(self) -> ColumnMajor:
        return sort_windows(self._csr, self._order)

    def slices(self, fixed: int) -> Tensor:
        if fixed == 1:
            return self.entries
        if fixed not in self._slices:
            self._slices[fixed] = self._sorted.slices(fixed)[1].diff()
        return self._slices[fixed]

    def pack(self, fixed: int, group: int, kept: Tensor) -> PackedWindows | None:
        if not bool(kept.any()):
            return None
        arrays = BRPWindows.pack(self._csr, self._order, self._sorted, fixed, group, kept)
        others = row_units(self._csr, arrays.other_rows).near()
        return PackedWindows(arrays, arrays.units().near(), others)


class KernelWindows(Windows):
    """By the kernel, of 1 to 2^31 - 1 entries; windows are cut from ``order``."""

    short_pairs: Tensor  # distinct columns of the two halves

    def __init__(self, csr: CSR, order: Tensor | None) -> None:
        super().__init__()
        self._csr, self._windows = csr, -(-csr.shape[0] // WINDOW_ROWS)
        starts = csr.indptr
        if order is not None:
            order = order.to(torch.int64).contiguous()
            starts = torch.zeros_like(starts)
            torch.cumsum(csr.row_lengths()[order], 0, out=starts[1:])
        with building_on(csr.device) as index:
            kernel = self._kernel = StagedKernel(
                PACK_GROUPS, csr.device, index, rows=csr.shape[0], windows=self._windows
            )
            kernel.give("indptr", csr.indptr.contiguous())
            kernel.give("columns", csr.indices.contiguous())
            kernel.give("starts", starts.contiguous())
            if order is not None:
                kernel.give("order", order)
            kernel.new("place", csr.nnz)
            kernel.new("rank", csr.nnz)
            kernel.new("mask", csr.nnz, dtype=torch.int16)
            shape = (len(WINDOW_COUNTS), self._windows)
            counts = torch.zeros(shape, dtype=torch.int32, device=csr.device)
            kernel.give("counts", counts)
            kernel.launch(Stage.COUNT, csr.nnz)
        if self._windows <= HOST_UNITS:
            counts = counts.cpu()
        lists = counts.to(torch.int64).unbind()
        self.entries, self.fresh, self.pairs, self.short_pairs, *sliced = lists
        self._slices = {1: self.entries, **dict(zip((2, 4, 8), sliced, strict=True))}

    def slices(self, fixed: int) -> Tensor:
        return self._slices[fixed]

    def pack(self, fixed: int, group: int, kept: Tensor) -> PackedWindows | None:
        counts = torch.stack([*self.grouped(fixed, group), torch.ones_like(self.entries)])
        counts *= kept
        sums = torch.cumsum(counts, 1)
        ends = torch.cat([sums[:, -1], counts[2, -1:]]).tolist()
        if not ends[0]:
            return None
        near = sums[0][kept] if self._windows <= HOST_UNITS else None
        plan = torch.cat([counts[:1], sums]).to(torch.int32)
        with building_on(self._csr.device):
            given = plan.to(self._csr.device, non_blocking=True).unbind()
            for name, numbers in zip(_PLAN, given, strict=True):
                self._kernel.give(name, numbers)
            return self._pack(fixed, near, *ends)

    def _pack(
        self, fixed: int, on_host: Tensor | None, tiles: int, outside: int, kept: int, last: int
    ) -> PackedWindows:
        """Write the arrays.

        ``on_host`` has the last tile of each window if they are few; ``last`` is whether the last
        window is kept, which may have fewer rows.
        """
        kernel, rows, nnz = self._kernel, self._csr.shape[0], self._csr.nnz
        inside = kept * WINDOW_ROWS - last * (-rows % WINDOW_ROWS)
        others, uint8 = rows - inside, torch.uint8
        kernel.params.update(fixed=fixed, others=others)
        window_rows = kernel.new("window_rows", inside)
        row_window_offset = kernel.new("row_window_offset", kept + 1)
        window_rest = kernel.new("window_rest", kept + 1)
        other_rows = kernel.new("other_rows", 3, others, dtype=torch.int64)
        kernel.launch(Stage.ROWS, rows)
        # The host waits for this list; the kernels below run while it makes schedules.
        listed = other_rows.cpu() if others <= HOST_UNITS else other_rows
        bundled = torch.zeros(others, dtype=torch.bool, device=listed.device)
        if fixed > 1:
            kernel.new("slices", nnz)
            kernel.launch(Stage.SLICES, nnz)
            kernel.sums("slices", into="slice_sums")
        columns = TILE_COLUMNS * tiles
        tile_columns = kernel.new("tile_columns", columns)
        slot_ids = kernel.new("slot_ids", columns * fixed, dtype=uint8)
        slot_entries = kernel.new("slot_entries", columns * fixed)
        kernel.new("outside", nnz)
        kernel.launch(Stage.GROUPS, nnz)
        rest_rows = kernel.new("rest_rows", outside, dtype=uint8)
        rest_columns = kernel.new("rest_columns", outside)
        rest_entries = kernel.new("rest_entries", outside)
        if outside:
            kernel.sums("outside", into="rest_sums")
            kernel.launch(Stage.REST, nnz)
        kernel.keep_only(_COUNTED)
        arrays = BRPWindows(
            window_rows, other_rows[0], row_window_offset, tile_columns, slot_ids, slot_entries,
            window_rest, rest_rows, rest_columns, rest_entries,
        )  # fmt: skip
        if on_host is None:
            units = arrays.units().near()
        else:
            units = Units.from_offsets(torch.nn.functional.pad(on_host, (1, 0)))
        label, begin, length = listed.unbind()
        return PackedWindows(arrays, units, Units(label, begin, length, bundled))
