"""Launches of ``spmm_bmat``: persistent thread blocks, slabs of the schedule's width; its redo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.tiles.tile_runner import (
    AlignedTileRunner,
    LaterLaunch,
    TileLaunch,
    redo_blocks,
)
from sparsetile.formats.bmat import CELLS, fragment_cells
from sparsetile.formats.values import round_tf32
from sparsetile.kernels.bmat import (
    REDO_BMAT,
    SPMM_BMAT,
    Pipe,
    bmat_config,
    choose_pipe,
    redo_bmat_config,
    redo_units,
    row_pieces,
    widest_slab,
)
from sparsetile.kernels.repair import REDO_THREADS
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors

__all__ = ["VoltrixRunner"]

_FORMAT = (
    "items", "window_tile_ptr", "pair_values", "columns", "bitmaps", "parent_of_slot", "nodes",
)  # fmt: skip


class VoltrixRunner(AlignedTileRunner):
    """Tensors of BMat and of its schedule, by their names there.

    ``meta`` beside that of :class:`TileRunner`: ``width`` (pieces of 128 bytes in a slab),
    ``workers`` (thread blocks of a slab), ``pipe`` (a step of the kernel's ladder, or None),
    ``stack`` (parts of sixteen rows of a window), ``redo`` (whether a second launch recomputes
    non-finite results; otherwise the product does).
    """

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._width = int(meta["width"])
        self._workers = int(meta["workers"])
        self._variant: str | None = meta["pipe"]
        self._stack = int(meta["stack"])
        self._redo = bool(meta.get("redo", False))  # missing in older plan files
        self._dense = self._pipe(torch.float32).dense

    def _slab_width(self, dtype: torch.dtype) -> int:
        """Return the pieces of a slab: the plan's, or fewer if autocast asks for a type whose sums
        would not fit the registers."""
        return min(self._width, widest_slab(dtype, self._stack))

    def _pipe(self, dtype: torch.dtype) -> Pipe:
        return choose_pipe(dtype, self._slab_width(dtype), self._variant, self._stack)

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        if not self._dense:
            return super().pack(tensors, values, dtype)
        bitmaps, entries = tensors["bitmaps"], tensors["entries"]
        operands = torch.zeros(bitmaps.shape[0] * CELLS, dtype=dtype, device=bitmaps.device)
        cells = fragment_cells(bitmaps, dtype.itemsize, self._stack)
        if values is None:
            operands[cells] = 1.0
        else:
            picked = values.to(dtype)[entries]
            operands[cells] = round_tf32(picked) if dtype is torch.float32 else picked
        return {"values": operands}

    def _format_params(self, tensors: Tensors) -> dict[str, int]:
        pointers = {name: tensors[name].data_ptr() for name in _FORMAT}
        return {
            **pointers, "first_items": tensors["first_of_worker"].data_ptr(),
            "node_count": self._nodes, "arrivals": 0, "redo": 0,
        }  # fmt: skip

    def _load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, n: int, vector: int, weighted: bool,
        device: int,
    ) -> TileLaunch:  # fmt: skip
        pipe = self._pipe(dtype)
        config = bmat_config(dtype, pipe, weighted, out_dtype=out_dtype)
        kernel = SPMM_BMAT.load(config, device, pipe.shared_bytes(dtype, weighted))
        width = self._slab_width(dtype)
        slabs = -(-row_pieces(dtype, n) // width)
        launch = TileLaunch(
            kernel, pipe.threads, self._workers, slabs, slot_bytes=width * pipe.sum_bytes(dtype),
            counters=self._nodes * width, params={"slab_pieces": width},
        )  # fmt: skip
        if not self._redo:
            return launch
        redo = REDO_BMAT.load(redo_bmat_config(dtype, pipe, weighted, out_dtype=out_dtype), device)
        units = redo_units(self._positions, width, self._stack)
        later = LaterLaunch(redo, REDO_THREADS, redo_blocks(units, slabs, device))
        return replace(launch, flags=units, later=(later,))

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        if self._dense and packed is None:  # also for a pattern
            packed = self.pack(tensors, values, B.dtype)
        super().spmm(tensors, values, packed, B, out, epilogue)

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        if self._dense and packed is None:
            return None
        return super().prepare_launches(tensors, values, packed, B, epilogue)
