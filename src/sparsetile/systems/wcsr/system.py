"""``wcsr``: AsyncSparse's half for irregular patterns, windows of rows on WGMMA (sm_90a).

Parts: WCSR with bitmaps (formats/wcsr.py), windows shared out evenly between blocks of threads
(balance/windows.py), the kernel that gathers rows of B into shared memory and decodes A's tiles
into operand registers (kernels/cuda/spmm_wcsr.cu). For matrices whose neighbouring rows share
columns, as they are or in another row order. Where 64 rows share too few, windows of 8 or 16 rows
are multiplied by ``mma.sync`` instead: those of ``acc``, format, schedule and kernel.
Deterministic: cut windows are added in a fixed order. What is decided and why is in
docs/explanation/notes/wcsr.md.

``ablation`` fixes the height: ``tall`` (64 rows) or ``short`` (8 or 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sparsetile.balance import WindowShares
from sparsetile.balance.shares import WINDOW_COST
from sparsetile.core.device import l2_bytes, processors
from sparsetile.formats import WCSR
from sparsetile.kernels.wcsr import (
    ELEMENTS,
    STAGED_COLUMNS,
    STRIP,
    TILE,
    choose_window_tile,
)
from sparsetile.systems.acc.system import AccSystem
from sparsetile.systems.base import BuildTimer, BuiltSystem, Request, System, order_tensor
from sparsetile.systems.shared.requirements import hopper_reasons, tile_reasons
from sparsetile.systems.wcsr.cost import HEIGHT, predict_wcsr, tall_windows_pay
from sparsetile.systems.wcsr.runner import WCSRRunner

__all__ = ["WCSRSystem"]

TALL, SHORT = "tall", "short"
# B may take this share of L2 before slabs go one after the other.
L2_SHARE = 0.6
# What a window costs beside its tiles, in tiles, where its rows of B come from DRAM.
FAR_WINDOW_COST = 16
# Tiles that a thread block should have at least.
MIN_SHARE = 16
# Tiles past the last that the kernel may read with the last: a step, and one more strip.
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
    """Share out windows for each slab of B between all SMs, or its part of them where B fits L2.

    Where it does not fit, neighbouring windows go to different SMs, so that the rows of B that they
    share are read by both before they leave L2.
    """
    csr, device = request.csr, request.device
    tile = choose_window_tile(windows.height, request.n)
    slabs, step = tile.slabs(max(request.n, 1)), tile.step_tiles(request.dtype)
    fits = csr.shape[1] * request.row_bytes <= L2_SHARE * l2_bytes(device)
    most = processors(device) // slabs if fits else processors(device)
    work = windows.tile_count + WINDOW_COST * windows.window_count
    shares = WindowShares.make(
        windows.units().near(),
        workers=max(1, min(most, work // MIN_SHARE)),
        dealt=not fits,
        window_cost=WINDOW_COST if fits else FAR_WINDOW_COST,
        step=step,
    )
    return shares.to(csr.indptr.device)


class WCSRSystem(System):
    """Tensor Cores on windows of rows."""

    name = "wcsr"
    summary = (
        "AsyncSparse: windows of 64 rows on WGMMA, or short ones, TF32 or 16-bit, sums in order"
    )
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_90a"
    ordered = True
    rounds_to_tf32 = True
    counts_pairs = True
    kernels = ("spmm_wcsr", "join_wcsr", "redo_wcsr", "redo_windows", "spmm_bittcf")
    ablations = (TALL, SHORT)
    contract_ablations = (TALL,)  # small matrices would lead it to acc's windows

    def __init__(self) -> None:
        self._short = AccSystem()

    def further_reasons(self, request: Request) -> list[str]:
        return [*tile_reasons(request), *hopper_reasons(request)]

    def predict(self, request: Request) -> float:
        return predict_wcsr(request)

    def build(self, request: Request) -> BuiltSystem:
        tall = request.ablation == TALL
        if request.ablation is None:
            tall = tall_windows_pay(request)
        return self._tall_windows(request) if tall else self._short_windows(request)

    def _short_windows(self, request: Request) -> BuiltSystem:
        """What ``acc`` builds, run by its runner."""
        built = self._short.build(request.changed(ablation=None))
        choices = dict(built.choices)
        if request.ablation is not None:
            choices["ablation"] = request.ablation
        return replace(built, system=self.name, choices=choices)

    def _tall_windows(self, request: Request) -> BuiltSystem:
        csr, timer = request.csr, BuildTimer(request)
        windows = WCSR.pack(csr, request.permutation.perm, height=HEIGHT, pad=TILE)
        timer("format")
        schedule = _share(request, windows)
        timer("schedule")
        staged = windows.window_col_idx.reshape(-1, TILE)[:, list(STAGED_COLUMNS)]
        tensors = {
            "window_row_ptr": windows.window_row_ptr,
            "strip_value_ptr": _strip_value_ptr(windows),
            "columns": _with_margin(staged),
            "bitmaps": _with_margin(windows.bitmaps),
            "entries": windows.entries,
            "order": order_tensor(windows.order, csr),
            "indptr": csr.indptr,
            "items": schedule.items,
            "first_items": schedule.first_of_worker,
            "cuts": schedule.cuts,
        }
        choices = {
            "format": f"WCSR, windows of {windows.height} rows, {windows.tile_count} tiles of "
            f"{TILE} columns, {windows.entries_per_pair:.1f} entries a column, "
            f"{windows.bytes} bytes",
            "schedule": f"{schedule.item_count} items for {schedule.worker_count} thread blocks "
            f"a slab, {schedule.cut_count} windows in {schedule.slot_count} pieces",
        }
        timer("format")
        return self.built(
            request,
            tensors,
            choices,
            timer.seconds,
            positions=csr.shape[0],
            items=schedule.item_count,
            slots=schedule.slot_count,
            nodes=schedule.cut_count,
            height=windows.height,
            workers=schedule.worker_count,
            tiles=windows.tile_count,
            longest=int(windows.window_row_ptr.diff().max()) if windows.window_count else 0,
        )

    def make_runner(self, meta: Mapping[str, Any]) -> WCSRRunner:
        return WCSRRunner(meta)
