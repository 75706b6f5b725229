"""``rsh``: RSH-SpMM, tiles for rows that share columns and CUDA cores for the others.

Parts: RS-Tile (formats/rstile.py) with windows of sixteen rows that begin at any row; the split of
rows (formats/window_split.py), by cost or by the paper's thresholds; one kernel with two kinds of
thread blocks (kernels/cuda/windows/spmm_rstile.cu), which write disjoint rows of C. The warps of a
block share a long window; one of very many tiles is cut (balance/windows.py). If no window pays,
the product is that of ``csr``. Deterministic. docs/explanation/notes/rsh.md explains the decisions.

``ablation``: ``threshold`` is the paper's rule (Algorithm 1), ``tiles`` gives all rows to windows,
``rows`` all to the CUDA-core part of the same kernel, ``mixed`` takes the cheapest mixture even if
one part alone is predicted faster.
"""

from __future__ import annotations

import torch

from sparsetile.balance import SegmentSchedule, WindowSchedule
from sparsetile.engines.request import BuildTimer, BuiltSystem, Request, order_tensor
from sparsetile.engines.rows.lengths import schedule_sizes, segment_length
from sparsetile.engines.tiles.hybrid_cost import (
    cheapest_split,
    counted,
    long_windows,
    predict_hybrid,
    row_costs,
    run_steps,
)
from sparsetile.formats.fragments import entry_cells
from sparsetile.formats.rstile import RSTile
from sparsetile.formats.units import row_units
from sparsetile.formats.window_split import Partition, split_by_cost, split_by_threshold
from sparsetile.kernels.rstile import ELEMENTS
from sparsetile.systems.hybrid import HybridSystem
from sparsetile.systems.rsh.runner import RSHRunner

__all__ = ["SYSTEM", "RSHSystem"]

TILES, ROWS, MIXED, THRESHOLD = "tiles", "rows", "mixed", "threshold"


def thresholds(request: Request) -> tuple[int, int]:
    """The paper's tau_nnz and tau_inc for a matrix: its useful range of tau_nnz is 0 to 6.

    Half of the mean row, at most six entries; rows that add fewer than three columns.
    """
    rows = max(request.csr.shape[0], 1)
    return min(6, round(request.csr.nnz / rows / 2)), 3


def _longest_row(request: Request) -> int:
    """Entries of the longest row."""
    return int(request.csr.row_lengths().max()) if request.csr.shape[0] else 0


class RSHSystem(HybridSystem[Partition]):
    """Tensor Cores on the rows that share columns, CUDA cores on the others."""

    name = "rsh"
    summary = "RSH-SpMM: Tensor-Core windows and CUDA-core rows in one launch, TF32 or 16-bit"
    dtypes = tuple(ELEMENTS)
    kernels = ("spmm_rstile", "spmm_csr")
    ablations = (TILES, ROWS, MIXED, THRESHOLD)
    runner = RSHRunner
    contract_ablations = (TILES, MIXED, THRESHOLD)  # small matrices would only use rows

    def predict(self, request: Request) -> float:
        return predict_hybrid(request)

    def split(self, request: Request) -> Partition | None:
        kind = request.ablation
        if kind == TILES:
            return split_by_threshold(counted(request), 0, 0)
        if kind == ROWS:
            return split_by_threshold(counted(request), _longest_row(request), 2**62)
        if kind == THRESHOLD:
            return split_by_threshold(counted(request), *thresholds(request))
        if kind == MIXED:
            return split_by_cost(counted(request), row_costs(request))
        return cheapest_split(request).partition

    def build_split(self, request: Request, split: Partition) -> BuiltSystem:
        csr, order, timer = request.csr, request.permutation.perm, BuildTimer(request)
        packed = RSTile.pack(csr, order, split)
        tiles = packed.tiles
        cells = entry_cells(tiles)
        timer("format")
        shared, limit = long_windows(request)
        windows = WindowSchedule.make(
            tiles.units().near(), step=2, limit=limit, shared=shared, run=run_steps(request)
        ).to(request.csr.indptr.device)
        rest = packed.residual_rows
        units = row_units(csr, rest).near()
        rows = SegmentSchedule.make(units, max_length=segment_length(units, request.row_bytes))
        rows = rows.to(request.csr.indptr.device)
        tensors = {
            "row_window_offset": tiles.row_window_offset, "tile_columns": tiles.sparse_a_to_b,
            "bitmaps": tiles.tc_local_bit, "entries": tiles.entries.to(torch.int32), "cells": cells,
            "order": order_tensor(packed.tile_rows, csr), "indptr": csr.indptr,
            "columns": csr.indices,
            **{f"window_{name}": tensor for name, tensor in windows.tensors().items()},
            **rows.tensors(),
        }  # fmt: skip
        choices = {
            "format": f"RS-Tile, {split.windows.numel()} windows of {split.height} rows, "
            f"{tiles.tile_count} tiles of {tiles.mean_tile_entries:.1f} entries",
            "split": f"{100 * packed.tile_share:.1f} % of the entries and "
            f"{packed.tile_rows.numel()} of {csr.shape[0]} rows in windows",
            "schedule": f"{windows.item_count} items of windows, {windows.shared_count} of them "
            f"shared by the warps of a block, at most {windows.longest} tiles, "
            f"{windows.slot_count} partial sums; {rows.item_count} items of rows, "
            f"{rows.slot_count} partial sums",
        }
        timer("schedule")
        return self.built(
            request, tensors, choices, timer.seconds, positions=packed.tile_rows.numel(),
            tiles=tiles.tile_count, items=windows.item_count, shared=windows.shared_count,
            slots=windows.slot_count, nodes=windows.node_count, residual=schedule_sizes(rows),
        )  # fmt: skip


SYSTEM = RSHSystem()
