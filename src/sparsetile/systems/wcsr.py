"""``wcsr``: AsyncSparse's half for irregular patterns, windows of rows on WGMMA (sm_90a).

Parts: WCSR with bitmaps (formats/wcsr.py), windows shared out evenly between blocks of threads
(balance/windows.py), the kernel that gathers rows of B into shared memory and decodes A's tiles
into operand registers (kernels/cuda/spmm_wcsr.cu). For matrices whose neighbouring rows share
columns, as they are or in another row order. Deterministic: cut windows are added in a fixed
order. What is decided and why is in docs/asyncsparse.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.balance import WindowShares, share_windows
from sparsetile.balance.windows import A_WINDOW
from sparsetile.formats import WCSR, pack_wcsr
from sparsetile.kernels.wcsr import (
    ELEMENTS,
    STAGED_COLUMNS,
    STRIP,
    TILE,
    choose_window_tile,
)
from sparsetile.systems.base import Laps, Request, Stage, System, make_recipe
from sparsetile.systems.processors import l2_bytes, processors
from sparsetile.systems.tensor_cores import tile_reasons
from sparsetile.systems.wcsr_runner import WCSRRunner

__all__ = ["WCSRSystem"]

CAPABILITY = (9, 0)
HEIGHT = 64
# B may take this share of L2 before slabs go one after the other.
L2_SHARE = 0.6
# Tiles that a block of threads should have at least.
A_SHARE = 16
# Tiles past the last that the kernel may read with the last: a step, and one more strip.
MARGIN = 17


def _strip_value_ptr(windows: WCSR) -> torch.Tensor:
    """First value of each sixteen rows of each tile, and of MARGIN tiles more."""
    count = (windows.tile_count + MARGIN) * windows.height // STRIP
    places, _ = torch.sort(windows.places)
    starts = torch.arange(count + 1, device=places.device) * (STRIP * TILE)
    return torch.searchsorted(places, starts).to(torch.int32)


def _with_margin(part: torch.Tensor) -> torch.Tensor:
    """Add MARGIN tiles of zeros to ``part`` [tiles, words of a tile]."""
    return torch.cat([part, part.new_zeros((MARGIN, part.shape[1]))])


def _share(request: Request, windows: WCSR) -> WindowShares:
    """Share out windows for each slab of B between all SMs, or its part of them where B fits L2.

    Where it does not fit, neighbouring windows go to different SMs, so that the rows of B that they
    share are read by both before they leave L2.
    """
    csr, device = request.csr, request.device
    slabs = choose_window_tile(windows.height, request.n).slabs(max(request.n, 1))
    fits = csr.shape[1] * request.n * request.dtype.itemsize <= L2_SHARE * l2_bytes(device)
    most = processors(device) // slabs if fits else processors(device)
    work = windows.tile_count + A_WINDOW * windows.window_count
    workers = max(1, min(most, work // A_SHARE))
    return share_windows(windows.window_row_ptr, workers=workers, dealt=not fits)


def _with_workers(schedule: WindowShares) -> torch.Tensor:
    """Items, and behind them where each worker's begin."""
    first = schedule.first_of_worker
    first = torch.cat([first, first.new_zeros(-first.numel() % 4)])
    return torch.cat([schedule.items, first.reshape(-1, 4)])


class WCSRSystem(System):
    """Tensor cores on windows of rows."""

    name = "wcsr"
    summary = "AsyncSparse: windows of 64 rows on WGMMA, TF32 or 16-bit, sums in order"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_90a"
    ordered = True

    def further_reasons(self, request: Request) -> list[str]:
        found = tile_reasons(request)
        if request.device.type != "cuda":
            return found
        capability = torch.cuda.get_device_capability(request.device)
        if capability != CAPABILITY:
            found.append(
                f"needs a Hopper GPU (sm_90a), this GPU is sm_{capability[0]}{capability[1]}"
            )
        return found

    def build(self, request: Request) -> Stage:
        csr, laps = request.csr, Laps(request)
        windows = pack_wcsr(csr, HEIGHT, TILE, request.permutation.perm)
        laps("format")
        schedule = _share(request, windows)
        laps("schedule")
        recipe = make_recipe(
            self.name,
            csr,
            items=schedule.item_count,
            slots=schedule.slot_count,
            nodes=schedule.cut_count,
            height=windows.height,
            workers=schedule.worker_count,
        )
        order = windows.order
        if order is None:
            order = torch.empty(0, dtype=torch.int32, device=csr.device)
        columns = windows.window_col_idx.reshape(-1, TILE)[:, list(STAGED_COLUMNS)]
        parts = (
            windows.window_row_ptr, _strip_value_ptr(windows), _with_margin(columns),
            _with_margin(windows.bitmaps),
            windows.entries, order, csr.indptr,
            _with_workers(schedule), schedule.cuts[:0], schedule.cuts,
        )  # fmt: skip
        choices = {
            "format": f"WCSR, windows of {windows.height} rows, {windows.tile_count} tiles of "
            f"{TILE} columns, {windows.entries_per_pair:.1f} entries a column, "
            f"{windows.format_bytes} bytes",
            "schedule": f"{schedule.item_count} items for {schedule.worker_count} blocks of "
            f"threads a slab, {schedule.cut_count} windows in {schedule.slot_count} pieces",
        }
        laps("format")
        return Stage(self.name, parts, recipe, choices, laps.seconds)

    def make_runner(self, meta: Mapping[str, Any]) -> WCSRRunner:
        return WCSRRunner(meta)
