"""Launches of ``spmm_bittcf``: one warp per item, slabs of several widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.core.device import machine
from sparsetile.engines.tiles.tile_runner import TileLaunch, TileRunner
from sparsetile.kernels.bittcf import SPMM_BITTCF, THREADS, Policy, bittcf_config, choose_slab
from sparsetile.launch.interface import Tensors

__all__ = ["ShortWindowRunner"]

WARPS = THREADS // 32
_FORMAT = (
    "row_window_offset", "tc_offset", "sparse_a_to_b", "tc_local_bit",
    "items", "parent_of_slot", "nodes",
)  # fmt: skip


class ShortWindowRunner(TileRunner):
    """Tensors of BitTCF and of its schedule, by their names there."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._stack = int(meta["stack"])
        self._reloads = float(meta["reloads"])
        self._policy = Policy(
            bool(meta["pipelined"]), bool(meta["cached"]), bool(meta.get("ahead", False))
        )

    def _format_params(self, tensors: Tensors) -> dict[str, int]:
        pointers = {name: tensors[name].data_ptr() for name in _FORMAT}
        counts = {"item_count": self._items, "node_count": self._nodes}
        return {**pointers, **counts, "arrivals": 0}

    def _load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, n: int, vector: int, weighted: bool,
        device: int,
    ) -> TileLaunch:  # fmt: skip
        facts = machine(torch.device("cuda", device))
        slab = choose_slab(
            dtype, n, vector, items=self._items, processors=facts.processors, cols=self.cols,
            l2=facts.l2_bytes, reloads=self._reloads, stack=self._stack,
        )  # fmt: skip
        config = bittcf_config(
            dtype, slab, vector, weighted, out_dtype=out_dtype, policy=self._policy
        )
        return TileLaunch(
            SPMM_BITTCF.load(config, device), THREADS, -(-self._items // WARPS), slab.count(n),
            slot_bytes=32 * slab.sums * 4, counters=self._nodes,
        )  # fmt: skip
