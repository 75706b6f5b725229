"""``acc``: Acc-SpMM, condensed 8x8 tiles with bitmaps on tensor cores.

Parts: BitTCF (formats/bittcf.py), windows balanced by IBD and Equation 4 (balance/windows.py), the
pipelined kernel with swapped operands (kernels/cuda/spmm_bittcf.cu), and, when asked for, the
data-affinity row order (``reorder="affinity"``). Deterministic: cut windows are added in a fixed
order. What is decided and why is in docs/acc.md.

``ablation`` names the last part of the paper's ladder that is on: ``bittcf`` (the format alone),
``reorder`` (the same kernel; the order is the plan's ``reorder``), ``cache``, ``pipeline``;
everything, balance included, when None. ``no-balance``, ``no-stack`` and ``no-pipeline`` turn off
one part of the whole instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsetile.balance import schedule_windows, spread
from sparsetile.balance.windows import RUN_TILES
from sparsetile.core.device import processors
from sparsetile.formats import BitTCF, pack_bittcf
from sparsetile.kernels.bittcf import BUSY_WARPS, ELEMENTS
from sparsetile.kernels.csr import WIDE_SLAB_BYTES
from sparsetile.systems.acc.runner import AccRunner
from sparsetile.systems.base import Laps, Request, Stage, System, make_recipe
from sparsetile.systems.shared.requirements import tile_reasons

__all__ = ["AccSystem"]


@dataclass(frozen=True)
class Parts:
    """What is on."""

    cached: bool = True
    pipelined: bool = True
    balanced: bool = True
    stacked: bool = True  # windows of sixteen rows where they pay


EVERYTHING = Parts()
_FORMAT = Parts(cached=False, pipelined=False, balanced=False, stacked=False)
# The steps of the ladder, each with all before it. The paper has windows of eight rows.
LADDER = {
    "bittcf": _FORMAT,
    "reorder": _FORMAT,
    "cache": Parts(pipelined=False, balanced=False, stacked=False),
    "pipeline": Parts(balanced=False, stacked=False),
}
# Everything but one part. Kernels without the pipeline exist for windows of eight rows alone, so
# that ``no-stack`` is what ``no-pipeline`` is held against. None has the pipeline without the cache
# policy: what that policy is worth is a step of the ladder only.
ALONE = {
    "no-balance": Parts(balanced=False),
    "no-stack": Parts(stacked=False),
    "no-pipeline": Parts(pipelined=False, stacked=False),
}
ABLATIONS = {**LADDER, **ALONE}
# How many fewer tiles windows of sixteen rows must have than those of eight before they pay: in
# wide products (bytes of a row of B), and in others.
WIDE_BYTES, FEWER_WIDE, FEWER = 1024, 1.22, 1.45
MIN_CAPABILITY = (8, 0)


def _pack(request: Request, row_bytes: int, workers: float, may_stack: bool) -> BitTCF:
    """Return tiles of windows of sixteen rows where they save enough reads of B, else of eight."""
    csr, order = request.csr, request.permutation.perm
    if may_stack and request.dtype is torch.float32 and row_bytes >= WIDE_SLAB_BYTES:
        stacked = pack_bittcf(csr, order, 2)
        fewer = FEWER_WIDE if row_bytes >= WIDE_BYTES else FEWER
        saves = stacked.tiles_of_eight() >= fewer * max(stacked.tile_count, 1)
        if saves and stacked.tile_count >= RUN_TILES * workers:
            return stacked
    return pack_bittcf(csr, order)


class AccSystem(System):
    """Tensor cores on BitTCF tiles."""

    name = "acc"
    summary = "Acc-SpMM: 8x8 bitmap tiles on Tensor Cores, TF32 or 16-bit, sums in a fixed order"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True
    ablations = tuple(ABLATIONS)

    def further_reasons(self, request: Request) -> list[str]:
        found = tile_reasons(request)
        if request.device.type != "cuda":
            return found
        capability = torch.cuda.get_device_capability(request.device)
        if capability < MIN_CAPABILITY:
            found.append(f"needs sm_80 or newer, this GPU is sm_{capability[0]}{capability[1]}")
        return found

    def build(self, request: Request) -> Stage:
        csr = request.csr
        on = EVERYTHING if request.ablation is None else ABLATIONS[request.ablation]
        row_bytes = request.n * request.dtype.itemsize
        slabs = max(1, -(-row_bytes // WIDE_SLAB_BYTES))
        workers = processors(request.device) * BUSY_WARPS / slabs
        laps = Laps(request)
        tiles = _pack(request, row_bytes, workers, on.stacked)
        laps("format")
        schedule = schedule_windows(
            tiles.row_window_offset,
            workers=workers,
            balance=on.balanced,
        )
        recipe = make_recipe(
            self.name,
            csr,
            items=schedule.item_count,
            slots=schedule.slot_count,
            nodes=schedule.node_count,
            stack=tiles.stack,
            spread=spread(csr, request.permutation.perm, min(row_bytes, WIDE_SLAB_BYTES)),
            cached=on.cached,
            pipelined=on.pipelined,
        )
        order = tiles.order
        if order is None:
            order = torch.empty(0, dtype=torch.int32, device=csr.device)
        parts = (
            tiles.row_window_offset, tiles.tc_offset, tiles.sparse_a_to_b, tiles.tc_local_bit,
            tiles.entries, order, csr.indptr,
            schedule.items, schedule.parent_of_slot, schedule.nodes,
        )  # fmt: skip
        choices = {
            "format": f"BitTCF, windows of {8 * tiles.stack} rows, {tiles.tile_count} tiles of "
            f"{tiles.mean_tile_entries:.1f} entries, {tiles.format_bytes} bytes",
            "schedule": f"{schedule.item_count} items of at most {schedule.longest} tiles, "
            f"IBD {schedule.imbalance:.2f}, {schedule.slot_count} partial sums",
        }
        if request.ablation is not None:
            choices["ablation"] = request.ablation
        laps("schedule")
        return Stage(self.name, parts, recipe, choices, laps.seconds)

    def make_runner(self, meta: Mapping[str, Any]) -> AccRunner:
        return AccRunner(meta)
