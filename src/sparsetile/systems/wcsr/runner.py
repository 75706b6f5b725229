"""Launches of ``spmm_wcsr`` and ``join_wcsr``; column ids are in the kernel's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsetile.kernels.wcsr import (
    JOIN_WCSR,
    SPMM_WCSR,
    choose_join_tile,
    choose_window_tile,
    join_config,
    wcsr_config,
)
from sparsetile.systems.base import PLAIN, Epilogue, Tensors
from sparsetile.systems.shared.bound import Prepared
from sparsetile.systems.shared.geometry import ACCESS_BYTES, aligned, padded_like
from sparsetile.systems.shared.tile_runner import TileLaunch, TileRunner

__all__ = ["WCSRRunner"]

_FORMAT = (
    "window_row_ptr", "strip_value_ptr", "columns", "bitmaps", "items", "first_items", "cuts",
)  # fmt: skip


class WCSRRunner(TileRunner):
    """As many thread blocks as share the items; a second launch where windows were cut.

    B and C that are not aligned to 16 bytes, or not whole accesses wide, go through copies.
    """

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._height = int(meta["height"])
        self._workers = int(meta["workers"])

    def _format_params(self, tensors: Tensors) -> dict[str, int]:
        return {name: tensors[name].data_ptr() for name in _FORMAT}

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
        joined = choose_join_tile(tile, self._nodes, self._slots)
        join = None
        if self._slots:
            config = join_config(dtype, joined, weighted, out_dtype=out_dtype)
            join = JOIN_WCSR.load(config, device)
        return TileLaunch(
            kernel, tile.threads, self._workers, tile.slabs(n),
            slot_bytes=tile.warps * 32 * tile.sums * 4, join=join,
            join_threads=joined.threads, join_blocks=joined.blocks,
        )  # fmt: skip

    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        n, columns = B.shape[-1], ACCESS_BYTES // B.element_size()
        whole = n % columns == 0
        if not whole or not aligned(B):  # zeros behind the last column: they are multiplied, too
            B = pad(B, (0, -n % columns))[..., :n]
        if not whole and epilogue.bias is not None:  # stores are whole, too, and add it whole
            epilogue = replace(epilogue, bias=pad(epilogue.bias, (0, -n % columns)))
        target = out
        if not whole or not aligned(out):
            target = padded_like(out, columns)
            if epilogue.beta != 0.0:
                target.copy_(out)
        super().spmm(tensors, values, packed, B, target, epilogue)
        if target is not out:
            out.copy_(target)

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor
    ) -> Sequence[Prepared] | None:
        """Return the launch of B -> C; None where windows were cut or copies are needed."""
        if B.shape[1] * B.element_size() % ACCESS_BYTES or not aligned(B):
            return None
        return super().prepare_launches(tensors, values, packed, B)
