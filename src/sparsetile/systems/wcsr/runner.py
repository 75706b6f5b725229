"""Launches of ``spmm_wcsr``, its join and its redos; column ids are in the kernel's order.

If windows are cut, a second launch joins the pieces and a third recomputes non-finite results, by
windows (``redo_windows``) or by parts of them (``redo_wcsr``). Otherwise the product does so
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.engines.tiles.tile_runner import (
    AlignedTileRunner,
    LaterLaunch,
    TileLaunch,
    redo_blocks,
    sm_count,
)
from sparsetile.kernels.repair import REDO_THREADS
from sparsetile.kernels.wcsr import (
    JOIN_WCSR,
    REDO_WCSR,
    REDO_WINDOWS,
    SPMM_WCSR,
    WINDOW_REDO_THREADS,
    WindowTile,
    choose_join_tile,
    choose_window_tile,
    join_config,
    redo_wcsr_config,
    redo_windows_config,
    redo_windows_pays,
    wcsr_config,
)
from sparsetile.launch.interface import Tensors

__all__ = ["WCSRRunner"]

_FORMAT = (
    "window_row_ptr", "strip_value_ptr", "columns", "bitmaps", "items", "first_items", "cuts",
)  # fmt: skip


class WCSRRunner(AlignedTileRunner):
    """As many thread blocks as share the items; two launches more if windows were cut."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._height = int(meta["height"])
        self._workers = int(meta["workers"])
        # Tiles in all, and of the longest window. Older plan files have none.
        self._tiles, self._longest = (int(meta.get(name, 0)) for name in ("tiles", "longest"))

    def _format_params(self, tensors: Tensors) -> dict[str, int]:
        return {name: tensors[name].data_ptr() for name in _FORMAT} | {"redo": 0}

    def _load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, n: int, vector: int, weighted: bool,
        device: int,
    ) -> TileLaunch:  # fmt: skip
        tile = choose_window_tile(self._height, n)
        config = wcsr_config(dtype, tile, weighted, out_dtype=out_dtype)
        kernel = SPMM_WCSR.load(config, device, tile.shared_bytes(dtype, weighted))
        slabs = tile.slabs(n)
        if not self._slots:
            return TileLaunch(kernel, tile.threads, self._workers, slabs, slot_bytes=0)
        joined = choose_join_tile(tile, self._nodes, self._slots)
        config = join_config(dtype, joined, weighted, out_dtype=out_dtype)
        join = JOIN_WCSR.load(config, device)
        return TileLaunch(
            kernel, tile.threads, self._workers, slabs,
            slot_bytes=tile.warps * 32 * tile.sums * 4, flags=tile.units(self._positions, dtype),
            later=(
                LaterLaunch(join, joined.threads, self._nodes * joined.blocks),
                self._redo(dtype, out_dtype, tile, slabs, weighted, device),
            ),
        )  # fmt: skip

    def _redo(
        self, dtype: torch.dtype, out_dtype: torch.dtype, tile: WindowTile, slabs: int,
        weighted: bool, device: int,
    ) -> LaterLaunch:  # fmt: skip
        share = self._tiles * slabs / sm_count(device)
        if self._tiles and redo_windows_pays(dtype, tile, share, self._longest):
            config = redo_windows_config(dtype, tile, weighted, out_dtype=out_dtype)
            windows = -(-self._positions // tile.height)
            # Twice as many as SMs: waiting ones begin when short windows have ended.
            blocks = redo_blocks(windows, slabs, device)
            return LaterLaunch(REDO_WINDOWS.load(config, device), WINDOW_REDO_THREADS, blocks)
        config = redo_wcsr_config(dtype, tile, weighted, out_dtype=out_dtype)
        blocks = redo_blocks(tile.units(self._positions, dtype), slabs, device)
        return LaterLaunch(REDO_WCSR.load(config, device), REDO_THREADS, blocks)
