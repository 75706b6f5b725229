"""``acc``: Acc-SpMM, condensed 8x8 tiles with bitmaps on tensor cores.

Parts: BitTCF (formats/bittcf.py), windows balanced by IBD and Equation 4 (balance/windows.py), the
pipelined kernel with swapped operands (kernels/cuda/spmm_bittcf.cu), and, when asked for, the
data-affinity row order (``reorder="affinity"``). Deterministic: cut windows are added in a fixed
order. What is decided and why is in docs/acc.md.

``ablation`` names the last part of the paper's ladder that is on: ``bittcf`` (the format alone),
``reorder`` (the same kernel; the order is the plan's ``reorder``), ``cache``, ``pipeline``;
everything, balance included, when None. ``no-balance``, ``no-stack`` and ``no-pipeline`` turn off
one part of the whole instead; ``stacked`` takes windows of sixteen rows whatever they save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsetile.balance import WindowSchedule, l2_reload_factor
from sparsetile.balance.windows import RUN_TILES
from sparsetile.core.device import processors
from sparsetile.formats import BitTCF
from sparsetile.intake.csr import CSR
from sparsetile.kernels.bittcf import BUSY_WARPS, ELEMENTS
from sparsetile.kernels.csr import WIDE_SLAB_BYTES
from sparsetile.systems.acc.cost import predict_acc
from sparsetile.systems.acc.runner import AccRunner
from sparsetile.systems.base import BuildTimer, BuiltSystem, Request, System, order_tensor
from sparsetile.systems.shared.requirements import ampere_reasons, tile_reasons

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
# The ablation that stacks tiles wherever it is asked for, which small matrices would not lead to.
STACKED = "stacked"


def _workers(request: Request) -> float:
    """Warps at work on each slab of B."""
    slabs = max(1, -(-request.row_bytes // WIDE_SLAB_BYTES))
    return processors(request.device) * BUSY_WARPS / slabs


def _pack(request: Request, csr: CSR, order: torch.Tensor | None, may_stack: bool) -> BitTCF:
    """Return tiles of windows of sixteen rows where they save enough reads of B, else of eight."""
    row_bytes = request.row_bytes
    if request.ablation == STACKED:
        return BitTCF.pack(csr, order, stack=2)
    if may_stack and request.dtype is torch.float32 and row_bytes >= WIDE_SLAB_BYTES:
        stacked = BitTCF.pack(csr, order, stack=2)
        fewer = FEWER_WIDE if row_bytes >= WIDE_BYTES else FEWER
        saves = stacked.tiles_of_eight() >= fewer * max(stacked.tile_count, 1)
        if saves and stacked.tile_count >= RUN_TILES * _workers(request):
            return stacked
    return BitTCF.pack(csr, order)


class AccSystem(System):
    """Tensor Cores on BitTCF tiles."""

    name = "acc"
    summary = "Acc-SpMM: 8x8 bitmap tiles on Tensor Cores, TF32 or 16-bit, sums in a fixed order"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True
    rounds_to_tf32 = True
    counts_pairs = True
    kernels = ("spmm_bittcf",)
    ablations = (*ABLATIONS, STACKED)
    contract_ablations = (None, STACKED)

    def further_reasons(self, request: Request) -> list[str]:
        return [*tile_reasons(request), *ampere_reasons(request)]

    def predict(self, request: Request) -> float:
        return predict_acc(request)

    def build(self, request: Request) -> BuiltSystem:
        return self.build_rows(request, request.permutation.perm)

    def build_rows(self, request: Request, order: torch.Tensor | None) -> BuiltSystem:
        """Build products of the rows in ``order``, which may be some of A's: others are not
        written."""
        csr, timer = request.csr, BuildTimer(request)
        on = ABLATIONS.get(request.ablation or "", EVERYTHING)
        owned, entries, within = csr, None, order
        if order is not None and order.numel() < csr.shape[0]:
            owned, entries = csr.select_rows(order)
            within = None
        tiles = _pack(request, owned, within, on.stacked)
        if entries is not None:
            tiles = replace(tiles, entries=entries[tiles.entries.to(torch.int64)].to(torch.int32))
        timer("format")
        reloads = l2_reload_factor(owned, within, min(request.row_bytes, WIDE_SLAB_BYTES))
        return self.build_tiles(request, tiles, order, reloads, timer)

    def build_tiles(
        self,
        request: Request,
        tiles: BitTCF,
        order: torch.Tensor | None,
        reloads: float,
        timer: BuildTimer,
    ) -> BuiltSystem:
        """Build products of packed tiles: entries are A's own, ``order`` is the row of each
        position, ``reloads`` how often a slab's part of a row of B comes into L2."""
        csr, on = request.csr, ABLATIONS.get(request.ablation or "", EVERYTHING)
        schedule = WindowSchedule.make(
            tiles.units(), workers=_workers(request), balance=on.balanced
        )
        tensors = {
            "row_window_offset": tiles.row_window_offset,
            "tc_offset": tiles.tc_offset,
            "sparse_a_to_b": tiles.sparse_a_to_b,
            "tc_local_bit": tiles.tc_local_bit,
            "entries": tiles.entries,
            "order": order_tensor(order, csr),
            "indptr": csr.indptr,
            **schedule.tensors(),
        }
        choices = {
            "format": f"BitTCF, windows of {8 * tiles.stack} rows, {tiles.tile_count} tiles of "
            f"{tiles.mean_tile_entries:.1f} entries, {tiles.bytes} bytes",
            "schedule": f"{schedule.item_count} items of at most {schedule.longest} tiles, "
            f"IBD {schedule.imbalance:.2f}, {schedule.slot_count} partial sums",
        }
        timer("schedule")
        return self.built(
            request,
            tensors,
            choices,
            timer.seconds,
            positions=tiles.shape[0],
            items=schedule.item_count,
            slots=schedule.slot_count,
            nodes=schedule.node_count,
            stack=tiles.stack,
            reloads=reloads,
            cached=on.cached,
            pipelined=on.pipelined,
        )

    def make_runner(self, meta: Mapping[str, Any]) -> AccRunner:
        return AccRunner(meta)
