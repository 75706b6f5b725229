"""Windows of eight or sixteen rows: BitTCF (formats/bittcf.py), balanced by IBD and Equation 4 of
Acc-SpMM (balance/windows.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetile.balance import WindowSchedule, l2_reload_factor
from sparsetile.balance.windows import RUN_TILES, imbalance
from sparsetile.core.device import processors
from sparsetile.engines.request import BuildTimer, EngineBuild, Request, order_tensor
from sparsetile.formats import BitTCF
from sparsetile.kernels.bittcf import BUSY_WARPS
from sparsetile.kernels.csr import WIDE_SLAB_BYTES

__all__ = ["EVERYTHING", "Parts", "build_short_windows"]


@dataclass(frozen=True)
class Parts:
    """Enabled parts."""

    cached: bool = True
    pipelined: bool = True
    balanced: bool = True
    stacked: bool | None = None  # windows of sixteen rows; None: if they pay
    ahead: bool = False  # DTC-SpMM's pipeline in place of ours
    gated: bool = False  # balanced only if IBD is over the paper's limit


EVERYTHING = Parts()
# Ratio of tiles in windows of eight rows to those of sixteen from which sixteen pay: in wide
# products (bytes of a row of B), and in others.
WIDE_BYTES, FEWER_WIDE, FEWER = 1024, 1.22, 1.45
# The paper balances windows from this IBD.
IBD_GATE = 8.0


def _workers(request: Request) -> float:
    """Warps at work on each slab of B."""
    slabs = max(1, -(-request.row_bytes // WIDE_SLAB_BYTES))
    return processors(request.device) * BUSY_WARPS / slabs


def _pack(request: Request, on: Parts) -> BitTCF:
    """Return tiles of windows of sixteen rows if they save enough reads of B, else of eight."""
    csr, order, row_bytes = request.csr, request.permutation.perm, request.row_bytes
    if on.stacked is True:
        return BitTCF.pack(csr, order, stack=2)
    # Upper bound of the tiles of windows of sixteen rows.
    most = (csr.nnz + 7 * -(-csr.shape[0] // 16)) // 8
    may_stack = on.stacked is None and most >= RUN_TILES * _workers(request)
    if may_stack and request.dtype is torch.float32 and row_bytes >= WIDE_SLAB_BYTES:
        stacked = BitTCF.pack(csr, order, stack=2)
        fewer = FEWER_WIDE if row_bytes >= WIDE_BYTES else FEWER
        saves = stacked.tiles_of_eight() >= fewer * max(stacked.tile_count, 1)
        if saves and stacked.tile_count >= RUN_TILES * _workers(request):
            return stacked
    return BitTCF.pack(csr, order)


def build_short_windows(request: Request, on: Parts = EVERYTHING) -> EngineBuild:
    """Build the tensors of :class:`ShortWindowRunner`."""
    csr, order, timer = request.csr, request.permutation.perm, BuildTimer(request)
    tiles = _pack(request, on)
    timer("format")
    reloads = l2_reload_factor(csr, order, min(request.row_bytes, WIDE_SLAB_BYTES))
    units = tiles.units().near()
    balance = on.balanced and (not on.gated or imbalance(units.length) > IBD_GATE)
    schedule = WindowSchedule.make(units, workers=_workers(request), balance=balance)
    schedule = schedule.to(request.csr.indptr.device)
    tensors = {
        "row_window_offset": tiles.row_window_offset, "tc_offset": tiles.tc_offset,
        "sparse_a_to_b": tiles.sparse_a_to_b, "tc_local_bit": tiles.tc_local_bit,
        "entries": tiles.entries, "order": order_tensor(order, csr), "indptr": csr.indptr,
        **schedule.tensors(),
    }  # fmt: skip
    choices = {
        "format": f"BitTCF, windows of {8 * tiles.stack} rows, {tiles.tile_count} tiles of "
        f"{tiles.mean_tile_entries:.1f} entries, {tiles.bytes} bytes",
        "schedule": f"{schedule.item_count} items of at most {schedule.longest} tiles, "
        f"IBD {schedule.imbalance:.2f}, {schedule.slot_count} partial sums",
    }
    timer("schedule")
    return EngineBuild(
        tensors,
        choices,
        timer.seconds,
        dict(
            positions=tiles.shape[0], items=schedule.item_count, slots=schedule.slot_count,
            nodes=schedule.node_count, stack=tiles.stack, reloads=reloads, cached=on.cached,
            pipelined=on.pipelined, ahead=on.ahead,
        ),
    )  # fmt: skip
