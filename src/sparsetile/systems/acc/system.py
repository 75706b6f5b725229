"""``acc``: Acc-SpMM, condensed 8x8 tiles with bitmaps on tensor cores.

Parts: BitTCF (formats/bittcf.py), windows balanced by IBD and Equation 4 (balance/windows.py), the
pipelined kernel with swapped operands (kernels/cuda/spmm_bittcf.cu), and, when asked for, the
data-affinity row order (``reorder="affinity"``). Deterministic: cut windows are added in a fixed
order. What is decided and why is in docs/explanation/notes/acc.md.

``ablation`` names the last part of the paper's ladder that is on: ``bittcf`` (the format alone),
``reorder`` (the same kernel; the order is the plan's ``reorder``), ``cache``, ``dtc-pipeline``
(DTC-SpMM's, which ours is held against), ``pipeline``; everything, balance included, when None.
``no-balance``, ``no-stack`` and ``no-pipeline`` turn off one part of the whole instead;
``ibd-gate`` balances only where the paper does; ``stacked`` takes windows of sixteen rows whatever
they save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsetile.balance import WindowSchedule, l2_reload_factor
from sparsetile.balance.windows import RUN_TILES, imbalance
from sparsetile.core.device import processors
from sparsetile.formats import BitTCF
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
    ahead: bool = False  # DTC-SpMM's pipeline in place of ours
    gated: bool = False  # balanced only where IBD is over the paper's limit


EVERYTHING = Parts()
_FORMAT = Parts(cached=False, pipelined=False, balanced=False, stacked=False)
# The steps of the ladder, each with all before it. The paper has windows of eight rows.
LADDER = {
    "bittcf": _FORMAT,
    "reorder": _FORMAT,
    "cache": Parts(pipelined=False, balanced=False, stacked=False),
    "dtc-pipeline": Parts(pipelined=False, balanced=False, stacked=False, ahead=True),
    "pipeline": Parts(balanced=False, stacked=False),
}
# Everything but one part. Kernels without the pipeline exist for windows of eight rows alone, so
# that ``no-stack`` is what ``no-pipeline`` is held against. None has the pipeline without the cache
# policy: what that policy is worth is a step of the ladder only.
ALONE = {
    "no-balance": Parts(balanced=False),
    "no-stack": Parts(stacked=False),
    "no-pipeline": Parts(pipelined=False, stacked=False),
    "ibd-gate": Parts(gated=True),
}
ABLATIONS = {**LADDER, **ALONE}
# How many fewer tiles windows of sixteen rows must have than those of eight before they pay: in
# wide products (bytes of a row of B), and in others.
WIDE_BYTES, FEWER_WIDE, FEWER = 1024, 1.22, 1.45
# The paper balances windows from this IBD on.
IBD_GATE = 8.0
# The ablation that stacks tiles wherever it is asked for, which small matrices would not lead to.
STACKED = "stacked"


def _workers(request: Request) -> float:
    """Warps at work on each slab of B."""
    slabs = max(1, -(-request.row_bytes // WIDE_SLAB_BYTES))
    return processors(request.device) * BUSY_WARPS / slabs


def _pack(request: Request, may_stack: bool) -> BitTCF:
    """Return tiles of windows of sixteen rows where they save enough reads of B, else of eight."""
    csr, order, row_bytes = request.csr, request.permutation.perm, request.row_bytes
    if request.ablation == STACKED:
        return BitTCF.pack(csr, order, stack=2)
    # As many tiles as windows of sixteen rows could have at most.
    most = (csr.nnz + 7 * -(-csr.shape[0] // 16)) // 8
    may_stack = may_stack and most >= RUN_TILES * _workers(request)
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
        csr, order, timer = request.csr, request.permutation.perm, BuildTimer(request)
        on = ABLATIONS.get(request.ablation or "", EVERYTHING)
        tiles = _pack(request, on.stacked)
        timer("format")
        reloads = l2_reload_factor(csr, order, min(request.row_bytes, WIDE_SLAB_BYTES))
        units = tiles.units().near()
        balance = on.balanced and (not on.gated or imbalance(units.length) > IBD_GATE)
        schedule = WindowSchedule.make(units, workers=_workers(request), balance=balance)
        schedule = schedule.to(request.csr.indptr.device)
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
            ahead=on.ahead,
        )

    def make_runner(self, meta: Mapping[str, Any]) -> AccRunner:
        return AccRunner(meta)
