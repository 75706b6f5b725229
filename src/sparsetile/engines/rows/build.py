"""Plain row pointers and column ids, row bundles if four neighbouring rows share enough columns
(formats/bundles.py), and segment schedules (balance/segments.py).

docs/explanation/notes/csr.md has the measurements.
"""

from __future__ import annotations

import torch

from sparsetile.balance import SegmentSchedule
from sparsetile.core.device import processors
from sparsetile.engines.request import BuildTimer, EngineBuild, Request
from sparsetile.engines.rows.lengths import first_columns, item_lengths, row_shape, schedule_sizes
from sparsetile.formats import RowBundles
from sparsetile.formats.bundles import MAX_COLUMNS
from sparsetile.formats.units import RowUnits, row_units
from sparsetile.kernels.csr import BUNDLE_DTYPES, FEW_COLUMNS

__all__ = ["build_rows", "entries_per_read"]

# A window of four rows is bundled from this many entries per distinct column.
MIN_SHARING = 1.3
# Bundles are used only if they hold most of the entries, save about half of the reads of B, and are
# long enough to keep a group busy. Otherwise the plain kernel, with fewer registers, is faster
# (docs/explanation/notes/csr.md).
MIN_BUNDLED_SHARE = 0.6
MIN_MEAN_SHARING = {4: 1.9, 2: 2.4}  # by bytes of an element
MIN_MEAN_LENGTH = 38
# Very long rows are L2-bound if B does not fit the SMs' own caches; less sharing pays then, too, in
# float32. (list elements in all, distinct columns of a bundle, sharing, rows of B, bytes of a row
# of B)
LONG_ELEMENTS, LONG_LENGTH, LONG_SHARING, LONG_COLUMNS, LONG_BYTES = 2**17, 256, 1.4, 2048, 256


def _may_bundle(request: Request) -> bool:
    """Whether the kernel supports bundles of such a matrix, and there may be one."""
    csr = request.csr
    fits = request.dtype in BUNDLE_DTYPES and csr.shape[1] <= MAX_COLUMNS and csr.nnz > 0
    return fits and request.n > FEW_COLUMNS and not request.in_place


def _counted_units(request: Request) -> tuple[RowUnits, tuple[int, int, int] | None]:
    """Return A's rows and what windows of four of them share, None if it is not counted; once."""

    def count() -> tuple[RowUnits, tuple[int, int, int] | None]:
        units = row_units(request.csr, request.permutation.perm)
        # Counted first, so that the host waits once for this and for the tally.
        may = _may_bundle(request)
        return units, units.count_shared(request.csr.indices, MIN_SHARING) if may else None

    return request.once(("row units", _may_bundle(request)), count)


def entries_per_read(request: Request) -> float | None:
    """Return A's entries over the rows of B that bundles of four rows would read, all rows of A
    together; None if it is not known on A's device. A build counts the same."""
    _, shared = _counted_units(request)
    if shared is None or request.csr.nnz == 0:
        return None
    _, entries, distinct = shared
    return request.csr.nnz / (request.csr.nnz - entries + distinct)


def _mixed(request: Request, bundles: RowBundles) -> SegmentSchedule:
    """Return the schedule of bundles and of rows outside them."""
    units = bundles.units().near()
    lengths = item_lengths(units, request.row_bytes, processors(request.device))
    return lengths.schedule(units).to(request.csr.indptr.device)


def build_rows(request: Request, *, shares: bool = True) -> EngineBuild:
    """Build the tensors of :class:`RowRunner`.

    ``shares``: the kernel lets a thread block share a row of a product that is not small.
    """
    csr, order, timer = request.csr, request.permutation.perm, BuildTimer(request)
    tensors = {"indptr": csr.indptr, "columns": csr.indices}
    timer("format")
    units, shared = _counted_units(request)
    near = units.near()
    lengths = item_lengths(
        near, request.row_bytes, processors(request.device), request.n <= FEW_COLUMNS, shares
    )
    plain, short = lengths.schedule(near), lengths.short(near)
    shape = row_shape(csr, plain, order, request.row_bytes, short, lengths.small)
    plain = plain.to(request.csr.indptr.device)
    timer("schedule")
    bundles = _bundles(request, shared)
    timer("format")
    tensors |= plain.tensors()
    if shape.small and bundles is None:
        tensors = {**tensors, "heads": first_columns(plain, csr.indices)}
    choices = {"format": f"rows, {csr.indptr.nbytes + csr.indices.nbytes} bytes"}
    schedule, mixed = plain, None
    if bundles is not None:
        schedule = mixed = _mixed(request, bundles)
        tensors = {
            **tensors,
            "tagged": bundles.tagged,
            "bundle_rows": bundles.rows,
            "bundle_entries": bundles.entries,
            "bundle_slots": bundles.slots,
            **{f"mixed_{name}": tensor for name, tensor in mixed.tensors().items()},
        }
        sharing = bundles.entries.numel() / bundles.distinct
        choices["bundles"] = (
            f"{bundles.bundle_count} bundles of four rows hold {bundles.entries.numel()} of "
            f"{csr.nnz} entries, {sharing:.2f} per row of B read, {bundles.bytes} bytes"
        )
    choices["schedule"] = (
        f"{schedule.item_count} items of at most {schedule.longest_item()} entries, "
        f"{schedule.slot_count} partial sums"
    )
    if schedule.sections[0]:
        choices["schedule"] += f", {schedule.sections[0]} items shared by a thread block's warps"
    timer("schedule")
    meta = dict(
        plain=schedule_sizes(plain),
        mixed=None if mixed is None else schedule_sizes(mixed),
        elements=0 if bundles is None else bundles.element_count,
        shape=dict(vars(shape)),
        longest=near.tally.longest,
    )
    return EngineBuild(tensors, choices, timer.seconds, meta)


def _bundles(request: Request, shared: tuple[int, int, int] | None) -> RowBundles | None:
    """Return the bundles of rows if they pay; ``shared`` has their counts if known."""
    csr = request.csr
    if not _may_bundle(request):
        return None

    def pays(count: int, entries: int, elements: int) -> bool:
        long_rows = (
            elements >= LONG_ELEMENTS
            and elements >= LONG_LENGTH * count
            and csr.shape[1] >= LONG_COLUMNS
            and request.dtype is torch.float32
            and request.n * request.dtype.itemsize >= LONG_BYTES
        )
        sharing = LONG_SHARING if long_rows else MIN_MEAN_SHARING[request.dtype.itemsize]
        return (
            entries >= MIN_BUNDLED_SHARE * csr.nnz
            and entries >= sharing * elements
            and elements >= MIN_MEAN_LENGTH * count
        )

    return RowBundles.pack_if(csr, request.permutation.perm, pays, MIN_SHARING, shared)
