"""``wcsr``: AsyncSparse's half for irregular patterns, windows of rows on WGMMA (sm_90a).

Parts: WCSR with bitmaps (formats/wcsr.py), windows shared out evenly between blocks of threads
(balance/windows.py), the kernel that gathers rows of B into shared memory and decodes A's tiles
into operand registers (kernels/cuda/spmm_wcsr.cu). For matrices whose neighbouring rows share
columns, as they are or in another row order. Where 64 rows share too few, windows of 8 or 16 rows
are multiplied by ``mma.sync`` instead: those of ``acc``, format, schedule and kernel.
Deterministic: cut windows are added in a fixed order. What is decided and why is in docs/wcsr.md.

``ablation`` fixes the height: ``tall`` (64 rows) or ``short`` (8 or 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sparsetile.balance import WindowShares, share_windows
from sparsetile.balance.windows import A_WINDOW
from sparsetile.core.device import l2_bytes, processors
from sparsetile.formats import WCSR, pack_wcsr
from sparsetile.kernels.wcsr import (
    ELEMENTS,
    STAGED_COLUMNS,
    STRIP,
    TILE,
    choose_window_tile,
)
from sparsetile.systems.acc.system import AccSystem
from sparsetile.systems.base import Laps, Request, Stage, System, make_recipe
from sparsetile.systems.shared.requirements import tile_reasons
from sparsetile.systems.wcsr.runner import WCSRRunner

__all__ = ["WCSRSystem", "tall_windows_pay"]

CAPABILITY = (9, 0)
HEIGHT, SHORT_HEIGHT = 64, 8
TALL, SHORT = "tall", "short"
# What a tile of a tall window costs, and a tall window beside its tiles, in tiles of short windows:
# from readings of both kernels in float32 at N=512 (docs/wcsr.md). Decoding, which is the limit of
# tall windows, is the same for 16 bits, where short ones take 0.6 of the time; and for 256 columns
# of B, however many it has. These two are estimates.
A_TALL_TILE, A_TALL_WINDOW = 1.2, 50.0
SIXTEEN_BITS, TALL_COLUMNS = 1.6, 256
# B may take this share of L2 before slabs go one after the other.
L2_SHARE = 0.6
# What a window costs beside its tiles, in tiles, where its rows of B come from DRAM.
A_FAR_WINDOW = 16
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
    tile = choose_window_tile(windows.height, request.n)
    slabs, step = tile.slabs(max(request.n, 1)), tile.step_tiles(request.dtype)
    fits = csr.shape[1] * request.n * request.dtype.itemsize <= L2_SHARE * l2_bytes(device)
    most = processors(device) // slabs if fits else processors(device)
    work = windows.tile_count + A_WINDOW * windows.window_count
    workers = max(1, min(most, work // A_SHARE))
    return share_windows(
        windows.window_row_ptr,
        workers=workers,
        dealt=not fits,
        a_window=A_WINDOW if fits else A_FAR_WINDOW,
        step=step,
    )


def _tiles(request: Request, height: int) -> tuple[float, int]:
    """About how many tiles windows of ``height`` rows have, and how many windows there are."""
    windows = -(-request.csr.shape[0] // height)
    # A window's last tile is half full in the mean.
    return request.pairs(height) / TILE + windows / 2, windows


def tall_windows_pay(request: Request) -> bool:
    """Whether windows of 64 rows are expected to be faster than those of 8 or 16."""
    tall, windows = _tiles(request, HEIGHT)
    short, _ = _tiles(request, SHORT_HEIGHT)
    n = max(request.n, 1)
    a_tile = A_TALL_TILE * (-(-n // TALL_COLUMNS) * TALL_COLUMNS) / n
    if request.dtype.itemsize == 2:
        a_tile *= SIXTEEN_BITS
    return a_tile * tall + A_TALL_WINDOW * windows <= short


def _with_workers(schedule: WindowShares) -> torch.Tensor:
    """Items, and behind them where each worker's begin."""
    first = schedule.first_of_worker
    first = torch.cat([first, first.new_zeros(-first.numel() % 4)])
    return torch.cat([schedule.items, first.reshape(-1, 4)])


class WCSRSystem(System):
    """Tensor cores on windows of rows."""

    name = "wcsr"
    summary = (
        "AsyncSparse: windows of 64 rows on WGMMA, or short ones, TF32 or 16-bit, sums in order"
    )
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_90a"
    ordered = True
    ablations = (TALL, SHORT)

    def __init__(self, short: AccSystem) -> None:
        self._short = short

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
        tall = request.ablation == TALL
        if request.ablation is None:
            tall = tall_windows_pay(request)
        built = self._tall_windows(request) if tall else self._short_windows(request)
        if request.ablation is None:
            return built
        return replace(built, choices={**built.choices, "ablation": request.ablation})

    def _short_windows(self, request: Request) -> Stage:
        """What ``acc`` builds, run by its runner."""
        built = self._short.build(replace(request, ablation=None))
        return replace(built, system=self.name)

    def _tall_windows(self, request: Request) -> Stage:
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
