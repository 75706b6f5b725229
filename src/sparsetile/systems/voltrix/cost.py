"""The predicted time of a product of ``voltrix``, and the coefficients of its schedule.

A row of B for each distinct (window, column) pair, by bulk copies as wide as a slab, plus B and C
once. Wide copies are faster: ``COPY_SHARE`` is the share of L2's gather rate that six producers per
SM reach, measured on an H200 without a product. The other constants were fitted to 61 products of
17 matrices at N = 512 and 1024 (docs/explanation/notes/voltrix.md), and then moved towards longer
times: wrongly choosing another system loses at most 7 % there, wrongly choosing this one 40 %.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

import torch

from sparsetile.balance import CostModel
from sparsetile.core.device import H200
from sparsetile.core.fitted import read_fitted
from sparsetile.engines.cost import rows_once
from sparsetile.engines.request import Request
from sparsetile.formats.bmat import WINDOW_ROWS
from sparsetile.jit.source import device_tree_digest
from sparsetile.kernels.bmat import PIECE_BYTES, slab_width

__all__ = ["COPY_SHARE", "SCHEDULE_COSTS", "predict_voltrix", "schedule_costs", "stack_share"]

# Bytes of a copy -> share of L2's gather rate.
COPY_SHARE = {128: 0.26, 256: 0.49, 512: 0.73, 1024: 0.87, 2048: 0.93}
# Share of the copies' rate, share of B's and C's own time that copies do not hide, and seconds of
# start-up and end.
PRODUCT_SHARE, ONCE_SHARE, START = 0.65, 1.05, 12e-6
# Windows have 32 rows if they read less than this share of what windows of 16 read of B: in
# float32, where MMAs are dearer, by the bytes of a row of B (14 matrices on an H200).
STACK_SHARE, NARROW_STACK_SHARE, WIDE_ROW = 0.91, 0.75, 2048
# Equation 1 by GPU, with D in columns of float32 (results/<gpu>/voltrix_study.json).
SCHEDULE_COSTS: Mapping[str, CostModel] = {
    H200.name: CostModel(tile=4.516e-12, window=13.85e-12, fixed=16.69e-6),
}
# Sixteen rows of C are written at DRAM's rate while eight rows of B are read at L2's.
ESTIMATE = CostModel(tile=1.0, window=4.0)


def schedule_costs(name: str) -> CostModel:
    """Return the coefficients of Equation 1 for the GPU of that name.

    Coefficients of ``sparsetile tune --fit`` with today's kernels come first, then the shipped
    ones, then the estimate.
    """
    kept = read_fitted(name)
    if kept is not None and kept.kernels == device_tree_digest():
        tile, window = (kept.coefficients.get(part, 0.0) for part in ("tile", "window"))
        if tile > 0:
            return CostModel(tile, window, kept.coefficients.get("fixed", 0.0))
    return SCHEDULE_COSTS.get(name, ESTIMATE)


def stack_share(dtype: torch.dtype, row_bytes: int) -> float:
    """Return the share of the reads of B below which windows have 32 rows."""
    narrow = dtype is torch.float32 and row_bytes < WIDE_ROW
    return NARROW_STACK_SHARE if narrow else STACK_SHARE


def _copy_share(row_bytes: int) -> float:
    """Share of L2's gather rate for copies of this many bytes: that of the next smaller size."""
    sizes = sorted(COPY_SHARE)
    at = bisect.bisect_right(sizes, row_bytes) - 1
    if at < 0:
        return COPY_SHARE[sizes[0]] * row_bytes / sizes[0]
    if at + 1 == len(sizes):
        return COPY_SHARE[sizes[-1]]
    low, high = sizes[at], sizes[at + 1]
    part = (row_bytes - low) / (high - low)
    return COPY_SHARE[low] + part * (COPY_SHARE[high] - COPY_SHARE[low])


def predict_voltrix(request: Request) -> float:
    """Return the seconds of one product."""
    ceilings, row = request.machine, request.row_bytes
    copied = min(row, slab_width(request.dtype, request.n) * PIECE_BYTES)
    share = _copy_share(max(copied, 1)) * PRODUCT_SHARE
    short, tall = request.pairs(WINDOW_ROWS), request.pairs(4 * WINDOW_ROWS)
    between = math.sqrt(short * tall)  # close to windows of 32, which no other system counts
    pairs = between if between < stack_share(request.dtype, row) * short else short
    gathered = row * pairs / (ceilings.l2_gather * share)
    once = row * rows_once(request.csr) / ceilings.dram
    return START + gathered + ONCE_SHARE * once
