"""``csr``: CUDA cores on rows and bundles of rows. The yardstick of the other systems.

Parts: row pointers and column ids as given, row bundles where four neighbouring rows share enough
columns (formats/bundles.py), and segment schedules (balance/segments.py). Deterministic, exact
FP32 arithmetic, any shape, every dtype. What was measured is in docs/csr.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.balance import (
    SegmentSchedule,
    Units,
    concat_units,
    row_units,
    schedule_segments,
    spread,
)
from sparsetile.formats import RowBundles, pack_bundles, pack_rows
from sparsetile.formats.bundles import MAX_COLUMNS
from sparsetile.intake.csr import CSR
from sparsetile.kernels.csr import (
    BUNDLE_DTYPES,
    ELEMENTS,
    WIDE_SLAB_BYTES,
    RowShape,
)
from sparsetile.systems.base import Request, Stage, System, make_recipe
from sparsetile.systems.csr_runner import CSRRunner

__all__ = ["CSRSystem"]

# A window of four rows is bundled from this many entries per distinct column on.
MIN_SHARING = 1.3
# When bundles are used at all: they hold most of the entries, save about half of the reads of B,
# and are long enough to keep a group busy. Else the plain kernel, with its smaller register
# count, is faster (docs/csr.md).
MIN_BUNDLED_SHARE = 0.6
MIN_MEAN_SHARING = {4: 1.9, 2: 2.4}  # by bytes of an element
MIN_MEAN_LENGTH = 38
# Very long rows are bound by L2 where B does not fit the SMs' own caches; there less sharing
# pays too, in float32. (list elements in all, distinct columns a bundle, sharing, rows of B,
# bytes of a row of B)
LONG_ELEMENTS, LONG_LENGTH, LONG_SHARING, LONG_COLUMNS, LONG_BYTES = 2**17, 256, 1.4, 2048, 256


def segment_length(n: int, dtype: torch.dtype) -> int:
    """Entries of the longest item.

    Long enough that a group's start-up is a small share of its work, short enough that one dense
    row spreads over the whole GPU. Narrow products have several groups a warp share a wide item,
    so theirs may be longer.
    """
    return 256 if n * dtype.itemsize <= 256 else 128


def _bundle_units(bundles: RowBundles) -> Units:
    device = bundles.indptr.device
    return Units(
        torch.arange(bundles.bundle_count, device=device),
        bundles.indptr[:-1],
        bundles.indptr[1:] - bundles.indptr[:-1],
        torch.ones(bundles.bundle_count, dtype=torch.bool, device=device),
    )


def _sizes(schedule: SegmentSchedule) -> dict[str, Any]:
    return {
        "sections": list(schedule.sections),
        "slots": schedule.slot_count,
        "nodes": schedule.node_count,
    }


def _shape(csr: CSR, schedule: SegmentSchedule, apart: float) -> RowShape:
    """Return what the choice of a tile looks at."""
    short = schedule.items[sum(schedule.sections[:2]) :]
    lengths = (short[:, 2] - short[:, 1]).double()
    rows, total = lengths.numel(), float(lengths.sum())
    return RowShape(
        rows=rows,
        mean=total / rows if rows else 0.0,
        long_share=1.0 - total / csr.nnz if csr.nnz else 0.0,
        spread=apart,
    )


def _lists(schedule: SegmentSchedule) -> tuple[Tensor, Tensor, Tensor]:
    return schedule.items, schedule.parent_of_slot, schedule.nodes


class CSRSystem(System):
    """CUDA cores, deterministic, every shape and dtype."""

    name = "csr"
    summary = "CUDA cores on rows and bundles of rows, sums in a fixed order"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_80 and newer"

    def further_reasons(self, request: Request) -> list[str]:
        if request.csr.nnz >= 2**31:
            return [f"holds under 2^31 entries, A has {request.csr.nnz}"]
        return []

    def build(self, request: Request) -> Stage:
        csr, order = request.csr, request.permutation.perm
        rows = pack_rows(csr)
        length = segment_length(request.n, request.dtype)
        plain = schedule_segments(row_units(csr, order), length)
        slab_bytes = min(request.n * request.dtype.itemsize, WIDE_SLAB_BYTES)
        shape = _shape(csr, plain, spread(csr, order, slab_bytes))
        bundles, mixed = self._bundles(request, length)
        recipe = make_recipe(
            self.name,
            csr,
            plain=_sizes(plain),
            mixed=None if mixed is None else _sizes(mixed),
            elements=0 if bundles is None else bundles.element_count,
            shape=dataclasses.asdict(shape),
        )
        parts: tuple[Tensor, ...] = (rows.indptr, rows.columns, *_lists(plain))
        choices = {"format": f"rows, {rows.format_bytes} bytes"}
        schedule = plain
        if bundles is not None and mixed is not None:
            schedule = mixed
            parts += (
                bundles.tagged, bundles.rows, bundles.entries, bundles.slots, *_lists(mixed)
            )  # fmt: skip
            sharing = bundles.entries.numel() / bundles.distinct
            choices["bundles"] = (
                f"{bundles.bundle_count} bundles of four rows hold {bundles.entries.numel()} of "
                f"{csr.nnz} entries, {sharing:.2f} per row of B read, {bundles.format_bytes} bytes"
            )
        choices["schedule"] = (
            f"{schedule.item_count} items of at most {length} entries, "
            f"{schedule.slot_count} partial sums"
        )
        return Stage(self.name, parts, recipe, choices)

    def _bundles(
        self, request: Request, length: int
    ) -> tuple[RowBundles | None, SegmentSchedule | None]:
        csr = request.csr
        if request.dtype not in BUNDLE_DTYPES or csr.shape[1] > MAX_COLUMNS or not csr.nnz:
            return None, None
        bundles = pack_bundles(csr, request.permutation.perm, MIN_SHARING)
        entries, elements = bundles.entries.numel(), bundles.distinct
        count = bundles.bundle_count
        long_rows = (
            elements >= LONG_ELEMENTS
            and elements >= LONG_LENGTH * count
            and csr.shape[1] >= LONG_COLUMNS
            and request.dtype is torch.float32
            and request.n * request.dtype.itemsize >= LONG_BYTES
        )
        sharing = LONG_SHARING if long_rows else MIN_MEAN_SHARING[request.dtype.itemsize]
        if (
            entries < MIN_BUNDLED_SHARE * csr.nnz
            or entries < sharing * elements
            or elements < MIN_MEAN_LENGTH * count
        ):
            return None, None
        units = concat_units(_bundle_units(bundles), row_units(csr, bundles.loose))
        return bundles, schedule_segments(units, length)

    def make_runner(self, meta: Mapping[str, Any]) -> CSRRunner:
        return CSRRunner(meta)
