"""Launches of ``spmm_bittcf``. Parts (``tile_runner.py``): RowWindowOffset, TCOffset, SparseAToB,
TCLocalBit, entry number of each packed value, row order, row pointers; the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.kernels.bittcf import SPMM_BITTCF, THREADS, Policy, bittcf_config, choose_slab
from sparsetile.systems.shared.tile_runner import TileLaunch, TileRunner

__all__ = ["AccRunner"]

WARPS = THREADS // 32


class AccRunner(TileRunner):
    """A warp an item, several slabs' widths."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._stack = int(meta["stack"])
        self._spread = float(meta["spread"])
        self._policy = Policy(bool(meta["pipelined"]), bool(meta["cached"]))

    def _load(
        self,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        n: int,
        vector: int,
        weighted: bool,
        device: int,
    ) -> TileLaunch:
        properties = torch.cuda.get_device_properties(device)
        slab = choose_slab(
            dtype, n, vector, items=self._items,
            processors=properties.multi_processor_count, cols=self.cols,
            l2=properties.L2_cache_size, spread=self._spread, stack=self._stack,
        )  # fmt: skip
        config = bittcf_config(
            dtype, slab, vector, weighted, out_dtype=out_dtype, policy=self._policy
        )
        return TileLaunch(
            SPMM_BITTCF.load(config, device), THREADS, -(-self._items // WARPS), slab.count(n),
            slot_bytes=32 * slab.sums * 4,
        )  # fmt: skip
