"""``wcsr``: AsyncSparse's half for irregular patterns, windows of rows on WGMMA (sm_90a).

Parts: WCSR with bitmaps (formats/wcsr.py), windows distributed evenly over thread blocks
(balance/windows.py), the kernel that gathers rows of B into shared memory and decodes A's tiles
into operand registers (kernels/cuda/windows/spmm_wcsr.cu). For matrices whose neighbouring rows
share columns, in the given or another row order. If 64 rows share too few, windows of 8 or 16 rows
are multiplied by ``mma.sync`` instead: those of ``acc``, format, schedule and kernel.
Deterministic: cut windows are added in a fixed order. docs/explanation/notes/wcsr.md explains the
decisions.

``ablation`` fixes the height: ``tall`` (64 rows) or ``short`` (8 or 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.balance import WindowShares
from sparsetile.balance.window_shares import WINDOW_COST
from sparsetile.core.device import l2_bytes, processors
from sparsetile.engines.request import BuildTimer, BuiltSystem, Request, order_tensor
from sparsetile.engines.tiles.short import build_short_windows
from sparsetile.engines.tiles.short_runner import ShortWindowRunner
from sparsetile.engines.tiles.tile_runner import TileRunner
from sparsetile.formats import WCSR
from sparsetile.kernels.wcsr import (
    ELEMENTS,
    STAGED_COLUMNS,
    STRIP,
    TILE,
    choose_window_tile,
)
from sparsetile.systems.tiles import TileSystem
from sparsetile.systems.wcsr.cost import HEIGHT, predict_wcsr, tall_windows_pay
from sparsetile.systems.wcsr.runner import WCSRRunner

__all__ = ["SYSTEM", "WCSRSystem"]

TALL, SHORT = "tall", "short"
# Share of L2 up to which B's slabs run together.
L2_SHARE = 0.6
# Cost of a window beside its tiles, in tiles, if its rows of B come from DRAM.
FAR_WINDOW_COST = 16
# Fewest tiles of a thread block.
MIN_SHARE = 16
# Tiles past the last that the kernel may read: a step, and one more strip.
MARGIN = 17


def _strip_value_ptr(windows: WCSR) -> torch.Tensor:
    """First value of each sixteen rows of each tile, and of MARGIN tiles more."""
    count = (windows.tile_count + MARGIN) * windows.height // STRIP
    places = windows.places[windows.entries]  # ascending
    starts = torch.arange(count + 1, device=places.device) * (STRIP * TILE)
    return torch.searchsorted(places, starts).to(torch.int32)


def _with_margin(rows: torch.Tensor) -> torch.Tensor:
    """Add MARGIN tiles of zeros to ``rows`` [tiles, words of a tile]."""
    return torch.cat([rows, rows.new_zeros((MARGIN, rows.shape[1]))])


def _share(request: Request, windows: WCSR) -> WindowShares:
    """Distribute windows, for each slab of B, over all SMs, or over a part of them if B fits L2.

    If it does not fit, neighbouring windows go to different SMs, so that both read their common
    rows of B before these leave L2.
    """
    csr, device = request.csr, request.device
    tile = choose_window_tile(windows.height, request.n)
    slabs, step = tile.slabs(max(request.n, 1)), tile.step_tiles(request.dtype)
    fits = csr.shape[1] * request.row_bytes <= L2_SHARE * l2_bytes(device)
    most = processors(device) // slabs if fits else processors(device)
    work = windows.tile_count + WINDOW_COST * windows.window_count
    shares = WindowShares.make(
        windows.units().near(), workers=max(1, min(most, work // MIN_SHARE)), dealt=not fits,
        window_cost=WINDOW_COST if fits else FAR_WINDOW_COST, step=step,
    )  # fmt: skip
    return shares.to(csr.indptr.device)


class WCSRSystem(TileSystem):
    """Tensor Cores on windows of rows."""

    name = "wcsr"
    summary = (
        "AsyncSparse: windows of 64 rows on WGMMA, or short ones, TF32 or 16-bit, sums in order"
    )
    dtypes = tuple(ELEMENTS)
    architectures = "sm_90a"
    kernels = ("spmm_wcsr", "join_wcsr", "redo_wcsr", "redo_windows", "spmm_bittcf")
    ablations = (TALL, SHORT)
    contract_ablations = (TALL,)  # small matrices would use acc's windows

    def predict(self, request: Request) -> float:
        return predict_wcsr(request)

    def build(self, request: Request) -> BuiltSystem:
        tall = request.ablation == TALL
        if request.ablation is None:
            tall = tall_windows_pay(request)
        if tall:
            return self._tall_windows(request)
        return self.built_by(request, build_short_windows(request))

    def _tall_windows(self, request: Request) -> BuiltSystem:
        csr, timer = request.csr, BuildTimer(request)
        windows = WCSR.pack(csr, request.permutation.perm, height=HEIGHT, pad=TILE)
        timer("format")
        schedule = _share(request, windows)
        timer("schedule")
        staged = windows.window_col_idx.reshape(-1, TILE)[:, list(STAGED_COLUMNS)]
        tensors = {
            "window_row_ptr": windows.window_row_ptr, "strip_value_ptr": _strip_value_ptr(windows),
            "columns": _with_margin(staged), "bitmaps": _with_margin(windows.bitmaps),
            "entries": windows.entries, "order": order_tensor(windows.order, csr),
            "indptr": csr.indptr, "items": schedule.items, "first_items": schedule.first_of_worker,
            "cuts": schedule.cuts,
        }  # fmt: skip
        choices = {
            "format": f"WCSR, windows of {windows.height} rows, {windows.tile_count} tiles of "
            f"{TILE} columns, {windows.entries_per_pair:.1f} entries a column, "
            f"{windows.bytes} bytes",
            "schedule": f"{schedule.item_count} items for {schedule.worker_count} thread blocks "
            f"a slab, {schedule.cut_count} windows in {schedule.slot_count} pieces",
        }
        timer("format")
        return self.built(
            request, tensors, choices, timer.seconds, positions=csr.shape[0],
            items=schedule.item_count, slots=schedule.slot_count, nodes=schedule.cut_count,
            height=windows.height, workers=schedule.worker_count, tiles=windows.tile_count,
            longest=int(windows.window_row_ptr.diff().max()) if windows.window_count else 0,
        )  # fmt: skip

    def make_runner(self, meta: Mapping[str, Any]) -> TileRunner:
        return WCSRRunner(meta) if "height" in meta else ShortWindowRunner(meta)


SYSTEM = WCSRSystem()
