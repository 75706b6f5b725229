"""Launches of ``spmm_wcsr``, ``join_wcsr`` and ``redo_wcsr``; column ids are in the kernel's order.

Where windows are in pieces, a second launch joins them and a third computes again what is not
finite. Else the product does so itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.kernels.repair import REDO_THREADS
from sparsetile.kernels.wcsr import (
    JOIN_WCSR,
    REDO_WCSR,
    SPMM_WCSR,
    choose_join_tile,
    choose_window_tile,
    join_config,
    redo_wcsr_config,
    wcsr_config,
)
from sparsetile.systems.base import Tensors
from sparsetile.systems.shared.tile_runner import (
    AlignedTileRunner,
    LaterLaunch,
    TileLaunch,
    redo_blocks,
)

__all__ = ["WCSRRunner"]

_FORMAT = (
    "window_row_ptr", "strip_value_ptr", "columns", "bitmaps", "items", "first_items", "cuts",
)  # fmt: skip


class WCSRRunner(AlignedTileRunner):
    """As many thread blocks as share the items; two launches more where windows were cut."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._height = int(meta["height"])
        self._workers = int(meta["workers"])

    def _format_params(self, tensors: Tensors) -> dict[str, int]:
        return {name: tensors[name].data_ptr() for name in _FORMAT} | {"redo": 0}

    def _load(
        self,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        n: int,
        vector: int,
        weighted: bool,
        device: int,
    ) -> TileLaunch:
        tile = choose_window_tile(self._height, n)
        config = wcsr_config(dtype, tile, weighted, out_dtype=out_dtype)
        kernel = SPMM_WCSR.load(config, device, tile.shared_bytes(dtype, weighted))
        slabs = tile.slabs(n)
        if not self._slots:
            return TileLaunch(kernel, tile.threads, self._workers, slabs, slot_bytes=0)
        joined = choose_join_tile(tile, self._nodes, self._slots)
        config = join_config(dtype, joined, weighted, out_dtype=out_dtype)
        join = JOIN_WCSR.load(config, device)
        config = redo_wcsr_config(dtype, tile, weighted, out_dtype=out_dtype)
        redo = REDO_WCSR.load(config, device)
        units = tile.units(self._positions, dtype)
        return TileLaunch(
            kernel, tile.threads, self._workers, slabs,
            slot_bytes=tile.warps * 32 * tile.sums * 4, flags=units,
            later=(
                LaterLaunch(join, joined.threads, self._nodes * joined.blocks),
                LaterLaunch(redo, REDO_THREADS, redo_blocks(units, slabs, device)),
            ),
        )  # fmt: skip
